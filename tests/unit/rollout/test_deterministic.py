"""Deterministic mode: what stands in a wave does not depend on the clock."""

import asyncio
import random
import time

import pytest
from echo import EchoBatchEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import PromptTooLongError
from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor

GCONFIG = GenerationHyperparameters(max_new_tokens=3)


async def ask(engine, prompt, rid):
    return await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=GCONFIG, rid=rid))


def row(response):
    return {
        "input_ids": response.input_tokens,
        "output_ids": response.output_tokens,
        "reward": float(response.output_tokens[0]),
    }


class ToolUser:
    """Asks, awaits a tool for as long as the clock likes, asks again; some samples ask several at once."""

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


def waves_of(seed, **config):
    engine = EchoBatchEngine()
    executor = RolloutExecutor(engine, RolloutConfig(**config), deterministic=True)
    loader = Rows(40, 4)
    try:
        rewards = []
        for version in range(1, 4):
            batch = executor.prepare_batch(loader, ToolUser(random.Random(seed)), group_size=2)
            rewards.append(batch["rewards"].tolist())
            engine.set_version(version)
            executor.set_version(version)
        return [[tuple(request.input_ids) for request in batch] for batch in engine.batches], rewards
    finally:
        executor.destroy()


class Rows:
    def __init__(self, count, batch_size):
        self.count, self.batch_size = count, batch_size

    def __iter__(self):
        for start in range(0, self.count, self.batch_size):
            yield [{"ordinal": start + place} for place in range(self.batch_size)]


@pytest.mark.parametrize(
    "config",
    [{}, {"max_head_offpolicyness": 2}, {"max_concurrent_samples": 3}],
    ids=["synchronous", "ahead", "three at a time"],
)
def test_waves_and_batches_are_the_same_whatever_tools_take(config):
    runs = [waves_of(seed, **config) for seed in range(4)]
    assert all(run == runs[0] for run in runs[1:])
    assert len(runs[0][0]) >= 5


def test_a_wave_holds_all_running_samples_in_order():
    waves, _ = waves_of(0)
    assert waves[0] == [(1, ordinal) for ordinal in range(4) for _ in range(2)]


def deterministic(workflow, tasks=4, group_size=2, **options):
    engine = EchoBatchEngine()
    executor = RolloutExecutor(engine, RolloutConfig(), deterministic=True)
    try:
        executor.rollout_batch([{"ordinal": n} for n in range(tasks)], workflow, group_size=group_size, **options)
        return [len(batch) for batch in engine.batches]
    finally:
        executor.destroy()


def test_samples_that_wait_for_each_others_locks_do_not_hold_waves_up():
    class Shared:
        def __init__(self):
            self.lock = asyncio.Semaphore(3)

        async def arun_episode(self, engine, data):
            async with self.lock:
                return row(await ask(engine, [1, 2], "main"))

    assert deterministic(Shared()) == [3, 3, 2]


def test_samples_in_threads_that_call_the_model_do_not_hold_waves_up():
    class Threaded:
        async def arun_episode(self, engine, data):
            def run():
                calls = [
                    asyncio.run_coroutine_threadsafe(ask(engine, [1, turn], "main"), engine.loop).result(60) for turn in (1, 2)
                ]
                return row(calls[-1])

            return await asyncio.to_thread(run)

    assert deterministic(Threaded(), tasks=2, group_size=1) == [2, 2]


def test_task_groups_queues_and_wait_are_seen_through():
    class Structured:
        async def arun_episode(self, engine, data):
            answers = asyncio.Queue()

            async def one(number):
                await answers.put(await ask(engine, [1, number + 1], f"{number}"))

            async with asyncio.TaskGroup() as group:
                group.create_task(one(0))
                group.create_task(one(1))
                await answers.get()
            await asyncio.wait([asyncio.create_task(one(2))])
            return row(await answers.get())

    assert deterministic(Structured(), tasks=2, group_size=1) == [4, 2]


def test_a_failed_wave_fails_its_samples_and_no_others():
    class Once(EchoBatchEngine):
        async def agenerate_batch(self, requests):
            if len(self.batches) == 0:
                self.batches.append([])
                raise RuntimeError("the engine broke once")
            return await super().agenerate_batch(requests)

    class Simple:
        async def arun_episode(self, engine, data):
            return row(await ask(engine, [1, 2], "main"))

    executor = RolloutExecutor(Once(), RolloutConfig(), deterministic=True)
    try:
        batch = executor.rollout_batch([{"ordinal": n} for n in range(3)], Simple())
        assert batch["input_ids"].shape[0] == 3
        assert executor.counters()["samples/retried"] == 3
    finally:
        executor.destroy()


@pytest.mark.parametrize("says_its_room", [True, False])
def test_a_refused_request_does_not_take_its_wave_with_it(says_its_room):
    class Narrow(EchoBatchEngine):
        async def agenerate_batch(self, requests):
            for request in requests:
                if len(request.input_ids) > 5:
                    raise PromptTooLongError("no room")
            return await super().agenerate_batch(requests)

    class Grows:
        async def arun_episode(self, engine, data):
            response = await ask(engine, [1] * (3 + data["ordinal"] % 4), "main")
            return row(response)

    engine = Narrow()
    if says_its_room:
        engine.context_length = 6
    executor = RolloutExecutor(engine, RolloutConfig(max_failed_share=1.0, max_sample_retries=0), deterministic=True)
    try:
        batch = executor.rollout_batch([{"ordinal": n} for n in range(8)], Grows())
        assert batch["input_ids"].shape[0] == 6
        assert all("no room" in failure.cause for failure in executor.failures)
        assert len(engine.batches) == (1 if says_its_room else 4)
    finally:
        executor.destroy()


def test_a_sample_that_holds_everybody_up_is_named(monkeypatch, caplog):
    import logging

    monkeypatch.setattr("rollwright.rollout.deterministic.HELD_UP_WARNING_SECONDS", 0.1)
    monkeypatch.setattr(logging.getLogger("rollwright"), "propagate", True)

    class Slow:
        async def arun_episode(self, engine, data):
            if data["ordinal"] == 1:
                await asyncio.sleep(0.4)  # this line
            return row(await ask(engine, [1, 2], "main"))

    assert deterministic(Slow(), tasks=2, group_size=1) == [2]
    report = next(record.getMessage() for record in caplog.records if "held up" in record.getMessage())
    assert "task 1, sample 0 has held up 1 model requests" in report
    assert "Slow" in report
    first = Slow.arun_episode.__code__.co_firstlineno
    assert f"test_deterministic.py:{first + 2}" in report  # the line that is marked
