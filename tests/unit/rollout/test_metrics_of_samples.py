"""What samples report: evaluation's numbers stand apart from those of training."""

import asyncio

from echo import EchoEngine

from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor
from rollwright.tracking.metrics import get_tracker


class Reports:
    async def arun_episode(self, engine, data):
        async def part():
            get_tracker("reported").scalar(in_a_part=data["value"])

        await asyncio.gather(part())
        await asyncio.to_thread(lambda: get_tracker("reported").scalar(in_a_thread=data["value"]))
        get_tracker("reported").scalar(value=data["value"])
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_evaluation_does_not_change_the_metrics_of_training():
    get_tracker().export(reset=True)
    executor = RolloutExecutor(EchoEngine())
    try:
        executor.rollout_batch([{"value": 1.0}] * 3, Reports())
        executor.rollout_batch([{"value": 5.0}] * 4, Reports(), is_eval=True)
        executor.rollout_batch([{"value": 1.0}], Reports())
    finally:
        executor.destroy()
    names = ("in_a_part", "in_a_thread", "value")
    metrics = get_tracker().export(reset=True)
    reported = {name: value for name, value in metrics.items() if "reported/" in name}
    assert reported == {f"reported/{name}": 1.0 for name in names} | {f"eval/reported/{name}": 5.0 for name in names}
