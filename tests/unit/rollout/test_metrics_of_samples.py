"""What samples report: evaluation's numbers stand apart from those of training."""

import asyncio

import pytest
from echo import EchoEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor
from rollwright.tracking.metrics import get_tracker
from rollwright.trainers.loops.evaluation import evaluate


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


def test_each_of_several_tasksets_has_a_mean_of_its_own():
    class Waits:
        async def arun_episode(self, engine, data):
            await asyncio.sleep(data["seconds"])  # the first tasks end last
            response = await engine.agenerate(ModelRequest(input_ids=[1]))
            return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": data["reward"]}

    def tasks(taskset, count, reward):
        return [{"taskset": taskset, "seconds": 0.02 * (count - n), "reward": reward + n} for n in range(count)]

    executor = RolloutExecutor(EchoEngine(latency=0.0))
    try:
        both = [*tasks("hard", 3, 0.0), *tasks("easy", 2, 10.0)]
        result = evaluate(executor, both, Waits(), None, GenerationHyperparameters(n_samples=2))
        assert result.by_taskset == {"hard": 1.0, "easy": 10.5}
        assert result.reward == pytest.approx((3 * 1.0 + 2 * 10.5) / 5)
        assert evaluate(executor, both[:3], Waits(), None, GenerationHyperparameters()).by_taskset == {}
    finally:
        executor.destroy()
