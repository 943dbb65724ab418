"""Deterministic mode: which tasks make a batch, and which version samples what, do not depend on the clock."""

import asyncio
import random
import threading
import time

import pytest
from echo import EchoEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError
from rollwright.inference.request import ModelRequest
from rollwright.rollout.engines import RolloutEngine

GCONFIG = GenerationHyperparameters(max_new_tokens=3)


async def ask(engine, prompt, rid):
    return await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=GCONFIG, rid=rid))


def row(response):
    return {
        "input_ids": response.input_tokens,
        "output_ids": response.output_tokens,
        "output_versions": response.output_versions,
        "reward": float(response.output_tokens[0]),
    }


class ToolUser:
    """Asks, awaits a tool for as long as the clock likes, asks again; some samples ask several at once, one task in four is dropped."""

    def __init__(self, clock):
        self.clock = clock

    async def tool(self):
        await asyncio.sleep(self.clock.random() * 0.004)

    async def arun_episode(self, engine, data):
        start = data["ordinal"]
        first = await ask(engine, [1, start], "main")
        await self.tool()

        async def branch(number):
            if number % 2:
                await self.tool()
            await ask(engine, [*first.output_tokens, number], f"branch {number}")

        await asyncio.gather(*(branch(number) for number in range(start % 3)))
        if start % 2:
            async with asyncio.timeout(60):
                await asyncio.to_thread(time.sleep, self.clock.random() * 0.003)
        if start % 4 == 0:
            return None
        return row(await ask(engine, [*first.input_tokens, *first.output_tokens, 5], "main"))


class Invariant(EchoEngine):
    is_batch_invariant = True


class Rows:
    def __init__(self, count, batch_size):
        self.count, self.batch_size = count, batch_size

    def __iter__(self):
        for start in range(0, self.count, self.batch_size):
            yield [{"ordinal": start + place} for place in range(self.batch_size)]


def a_run(clock, deterministic=True, **config):
    """Batches of a run whose tools, answers and training steps take as long as ``clock`` says."""
    engine = Invariant(latency=lambda request: clock.random() * 0.003)
    loader = Rows(60, 4)
    batches = []
    with RolloutEngine(RolloutConfig(**config), client=engine, deterministic=deterministic) as rollout:
        for version in range(1, 6):
            batch = rollout.prepare_batch(loader, ToolUser(clock), group_size=2)
            batches.append([batch[key].tolist() for key in ("input_ids", "rewards", "versions", "logprobs")])
            time.sleep(clock.random() * 0.02)
            rollout.pause()
            engine.set_version(version)
            rollout.executor.set_version(version)
            rollout.resume()
    return batches


@pytest.mark.parametrize(
    "config",
    [{}, {"max_head_offpolicyness": 1}, {"max_head_offpolicyness": 2}, {"max_concurrent_samples": 3}],
    ids=["synchronous", "ahead", "two ahead", "three at a time"],
)
def test_batches_are_the_same_whatever_tools_and_answers_take(config):
    runs = [a_run(random.Random(seed), **config) for seed in range(4)]
    assert all(run == runs[0] for run in runs[1:])
    ahead = config.get("max_head_offpolicyness", 0)
    for step, (_, _, versions, _) in enumerate(runs[0]):
        sampled = {version for row in versions for version in row if version >= 0}
        assert sampled == {max(0, step - ahead)}  # the schedule: a batch is sampled whole, so many versions before its step


def test_a_change_of_weights_waits_for_what_runs_and_names_no_other_time():
    hold, began = threading.Event(), threading.Event()

    class Held:
        async def arun_episode(self, engine, data):
            response = await ask(engine, [1, 2], "main")
            if data["ordinal"] >= 4:
                began.set()
                await asyncio.to_thread(hold.wait, 60)
            return row(response)

    with RolloutEngine(RolloutConfig(max_head_offpolicyness=1), client=Invariant(), deterministic=True) as rollout:
        rollout.prepare_batch(Rows(40, 4), Held())
        assert began.wait(60)
        pausing = threading.Thread(target=rollout.pause)
        pausing.start()
        pausing.join(0.1)
        assert pausing.is_alive()
        assert "pause" not in rollout.client.calls
        hold.set()
        pausing.join(60)
        assert rollout.client.calls == ["pause"]
        assert rollout.counters()["ready"] == 4


def test_a_sample_that_runs_out_of_its_time_draws_the_same_tokens_when_it_runs_again():
    slow = set()

    class SlowOnce:
        async def arun_episode(self, engine, data):
            response = await ask(engine, [1, 2], "main")
            if data["ordinal"] == 1 and not slow:
                slow.add(1)
                await asyncio.sleep(60)
            return row(response)

    batches = []
    for _ in range(2):
        with RolloutEngine(RolloutConfig(sample_timeout=0.2), client=Invariant(), deterministic=True) as rollout:
            batches.append(rollout.rollout_batch([{"ordinal": n} for n in range(3)], SlowOnce())["input_ids"].tolist())
    assert slow
    assert batches[0] == batches[1]


def test_an_engine_whose_answers_go_by_the_batch_is_refused():
    with pytest.raises(ConfigError, match=r"deterministic: what EchoEngine answers may depend on what else is computed"):
        RolloutEngine(RolloutConfig(), client=EchoEngine(), deterministic=True).initialize()
