"""A workflow that blocks the loop is named, with the line."""

import subprocess
import sys
import time

import pytest
from echo import EchoEngine

from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.watch import LoopWatch


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
        assert "test_watch.py:18 in arun_episode: time.sleep(0.9)" in report
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


class Mixed:
    """Stands in one line for a moment, and in another for most of its time."""

    async def arun_episode(self, engine, data):
        time.sleep(0.15)  # noqa: ASYNC251
        for _ in range(30):
            time.sleep(0.03)  # noqa: ASYNC251 - the line that the report names
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_the_line_that_took_most_of_the_time_is_named():
    executor = RolloutExecutor(EchoEngine())
    try:
        executor.rollout_batch([{}], Mixed())
        assert executor.counters()["slow_loop_reports"] == 1
        assert "time.sleep(0.03)" in executor._thread.watch.latest
    finally:
        executor.destroy()


def test_a_thread_that_gets_no_processor_is_not_blamed(monkeypatch):
    began = time.monotonic()
    monkeypatch.setattr(LoopWatch, "_waited", lambda self: 0.9 * (time.monotonic() - began))  # as on a machine that is full
    executor = RolloutExecutor(EchoEngine())
    try:
        executor.rollout_batch([{}], Blocks())
        assert executor.counters()["slow_loop_reports"] == 0
    finally:
        executor.destroy()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time that a thread waits for a processor")
def test_time_without_a_processor_is_counted():
    source = """
import os, time, threading
from rollwright.rollout.watch import LoopWatch
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
children = [os.fork() for _ in range(2)]
if 0 in children:
    end = time.monotonic() + 5
    while time.monotonic() < end: pass
    os._exit(0)
class Loop:
    def call_soon(self, *_): ...
watch = LoopWatch(Loop())
watch.start()
before, begin, used = watch._waited(), time.monotonic(), time.thread_time()
while time.monotonic() < begin + 1: pass
waited, took, used = watch._waited() - before, time.monotonic() - begin, time.thread_time() - used
watch.stop()
for child in children: os.kill(child, 9)
print(waited, took - used)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    waited, without_processor = map(float, done.stdout.split())
    assert waited == pytest.approx(without_processor, abs=0.15)
    assert waited > 0.2
