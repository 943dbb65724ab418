"""Durable calls: kept in an episode, answered from its past, made again where they may be."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time

import pytest
from parts import JournalledEpisodes

from rollwright import durable
from rollwright.errors import ReplayError, WorkflowError
from rollwright.experience.journal.writing import EpisodeWriter
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.workflows.tools import Tools


@pytest.fixture
def episodes(tmp_path) -> JournalledEpisodes:
    return JournalledEpisodes(tmp_path)


async def test_clocks_and_random_numbers_are_what_they_were(episodes):
    async def run():
        with durable("dice") as ask:
            dice = [ask(random.random), ask(random.random)]
        return durable(time.time)(), dice

    first = await episodes.first(run)
    assert await episodes.again(run) == first
    assert await episodes._as(None, run) != first


@pytest.mark.parametrize("kind", ["recorded", "restart", "pure"])
async def test_a_kind_says_whether_a_call_is_made_again(episodes, kind):
    calls = itertools.count()

    @durable(kind=kind)
    async def look_up(name: str) -> list[str]:
        return [name, str(next(calls))]

    async def run():
        return [await look_up("a"), await look_up("b"), await look_up("a")]

    assert await episodes.first(run) == [["a", "0"], ["b", "1"], ["a", "2"]]
    again = await episodes.again(run)
    assert again == ([["a", "3"], ["b", "4"], ["a", "5"]] if kind == "pure" else [["a", "0"], ["b", "1"], ["a", "2"]])


async def test_parallel_calls_are_told_apart_by_their_arguments(episodes):
    @durable
    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return random.random() + seconds

    async def run():
        return await asyncio.gather(wait(0.02), wait(0.0), wait(0.01))

    first = await episodes.first(run)
    assert await episodes.again(run) == first


async def test_what_a_call_raised_is_raised_again(episodes):
    class OwnError(Exception):
        pass

    kinds = iter([KeyError, WorkflowError, OwnError])

    @durable
    def fail(number: int) -> None:
        raise next(kinds)(f"no {number}")

    async def run():
        raised = []
        for number in range(3):
            try:
                fail(number)
            except Exception as error:
                raised.append((type(error), error.args[0]))
        return raised

    assert [kind for kind, _ in await episodes.first(run)] == [KeyError, WorkflowError, OwnError]
    again = await episodes.again(run)
    assert [kind for kind, _ in again] == [KeyError, WorkflowError, ReplayError]
    assert "OwnError when it was recorded: no 2" in again[2][1]


async def test_an_environment_is_restored_before_the_first_new_call(episodes):
    world = {"place": 0}
    move = durable("move", kind="restorable", export=lambda: world["place"], restore=lambda place: world.update(place=place))

    @move
    def step(by: int) -> int:
        world["place"] += by
        return world["place"]

    async def two():
        return [step(1), step(2)]

    async def three():
        return [step(1), step(2), step(10)]

    assert await episodes.first(two) == [1, 3]
    world["place"] = 99
    assert await episodes.again(three) == [1, 3, 13]


async def test_a_result_that_cannot_be_kept_is_refused(episodes):
    async def run():
        return durable(object)()

    with pytest.raises(WorkflowError, match=r"builtins.object: its result cannot be kept"):
        await episodes.first(run)
    with pytest.raises(WorkflowError, match="choose from pure, recorded"):
        durable(kind="often")
    with pytest.raises(WorkflowError, match="needs export and restore"):
        durable(kind="restorable")


async def test_rewards_and_tools_are_answered_from_the_journal(episodes):
    count = itertools.count(1)

    async def judge(prompt, completion, prompt_ids, completion_ids, **data):
        return next(count)

    def search(words: str) -> str:
        """Search.

        Args:
            words: what for
        """
        if words == "nothing":
            raise ValueError("nothing there")
        return f"{words} {next(count)}"

    async def run():
        reward, tools = AsyncRewardWrapper(judge), Tools([search])
        return [
            await reward("p", "c", [1], [2], answer=3),
            await tools.call("search", '{"words": "towns"}'),
            await tools.call("search", '{"words": "nothing"}'),
        ]

    first = await episodes.first(run)
    assert (first[0], first[1].text, first[2].text) == (1.0, "towns 2", "ValueError: nothing there")
    assert await episodes.again(run) == first
    assert next(count) == 3


async def test_a_pure_tool_is_called_again(episodes):
    count = itertools.count()

    @durable(kind="pure")
    def tick() -> str:
        """Tick."""
        return str(next(count))

    async def run():
        return (await Tools([tick]).call("tick", "{}")).text

    assert (await episodes.first(run), await episodes.again(run)) == ("0", "1")


async def test_arguments_that_a_journal_cannot_hold_are_told_apart(episodes):
    """A model may write any integer, and a half of a surrogate pair; a row may have both."""
    calls = itertools.count()

    @durable
    async def look_up(value) -> int:
        return next(calls)

    async def run():
        return [await look_up(value) for value in (1 << 64, {"n": [-(1 << 70)]}, "\ud83d", ("\ud83d", 1), 1 << 64)]

    assert await episodes.first(run) == [0, 1, 2, 3, 4]
    assert await episodes.again(run) == [0, 1, 2, 3, 4]
    tools = Tools([shown_number])
    assert (await episodes._as(EpisodeWriter(None), lambda: tools.call("shown_number", f'{{"number": {1 << 64}}}'))).ok


@pytest.mark.parametrize(
    "value", ['{"a", "b", "c", "d"}', '{"a", 1, None, ("b", "c")}', '[{2: frozenset({"x", "y", "z"})}, 1 << 70]']
)
def test_the_key_of_a_set_does_not_depend_on_the_order_of_hashes(value):
    script = f"from rollwright.experience.durable import call_key; print(call_key(({value},), {{}}))"
    outputs = {
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True).stdout
        for seed in "123"
    }
    assert len(outputs) == 1
    assert outputs != {b""}


def shown_number(number: int) -> str:
    """Shows a number.

    Args:
        number: shown.
    """
    return str(number)
