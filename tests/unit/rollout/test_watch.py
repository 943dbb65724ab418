"""A workflow that blocks the loop is named, with the line."""

import time

from echo import EchoEngine

from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor


class Blocks:
    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        time.sleep(0.9)  # noqa: ASYNC251 - the line that the report names
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_a_blocking_call_is_reported_with_workflow_and_line(caplog):
    import logging

    root = logging.getLogger("rollwright")
    root.propagate, before = True, root.propagate
    executor = RolloutExecutor(EchoEngine())
    try:
        executor.rollout_batch([{}], Blocks())
        assert executor.counters()["slow_loop_reports"] == 1
        report = next(record.getMessage() for record in caplog.records if "stood still" in record.getMessage())
        assert "Blocks at " in report
        assert "test_watch.py:14 in arun_episode: time.sleep(0.9)" in report
    finally:
        root.propagate = before
        executor.destroy()


def test_an_idle_or_busy_loop_is_not_reported():
    executor = RolloutExecutor(EchoEngine(latency=0.01))

    class Fine:
        async def arun_episode(self, engine, data):
            response = await engine.agenerate(ModelRequest(input_ids=[1]))
            return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}

    executor.rollout_batch([{}] * 200, Fine())
    assert executor.counters()["slow_loop_reports"] == 0
    executor.destroy()
