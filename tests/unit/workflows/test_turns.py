"""Turns: what is asked, when the iteration ends, and what the row then holds."""

import asyncio

import pytest

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import PromptTooLongError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelResponse
from rollwright.workflows.turns import Turns

PROMPT = [1, 2, 3]
GCONFIG = GenerationHyperparameters(max_new_tokens=4, n_samples=8, temperature=0.7)


class Engine(InferenceEngine):
    """Answers with the tokens, or raises the error, of each turn."""

    def __init__(self, *turns, reason="stop"):
        self.turns, self.reason, self.requests, self.recorder = list(turns), reason, [], Recorder()

    get_version = set_version = pause = resume = abort = None

    async def agenerate(self, request):
        self.requests.append(request)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        tokens = turn[: request.gconfig.max_new_tokens]
        reason = "length" if len(tokens) < len(turn) else self.reason
        numbers = ([-0.5] * len(tokens), [7] * len(tokens))
        response = ModelResponse(request.input_ids, tokens, *numbers, reason, temperature=request.gconfig.temperature)
        self.recorder.record(request, response)
        return response


def run(engine, said=(9,), **limits):
    async def episode():
        turns = Turns(engine, PROMPT, GCONFIG, None, **{"max_turns": 3, **limits})
        async for _ in turns:
            turns.append_context(said)
        return turns

    return asyncio.run(episode())


def test_each_turn_goes_on_from_all_before_it_in_one_conversation():
    engine = Engine([4, 5], [6], [7])
    turns = run(engine)
    assert [request.input_ids for request in engine.requests] == [PROMPT, [*PROMPT, 4, 5, 9], [*PROMPT, 4, 5, 9, 6, 9]]
    assert len({request.rid for request in engine.requests}) == 1
    assert {request.gconfig.n_samples for request in engine.requests} == {1}
    assert (turns.count, turns.is_last, turns.truncated, turns.is_aborted) == (3, True, False, False)
    row = normalise(turns.row(0.5), engine.recorder)
    check_trajectory(row)
    assert row["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 0, 1, 0, 1, 0]]
    assert row["versions"].tolist() == [[-1, -1, -1, 7, 7, -1, 7, -1, 7, -1]]
    assert row["temperature"].tolist() == pytest.approx([0.7])


def test_the_limit_of_the_sequence_cuts_the_last_turn_that_has_room():
    engine = Engine([4, 5], [6, 6, 6], [])
    turns = run(engine, max_tokens=8)
    assert [request.gconfig.max_new_tokens for request in engine.requests] == [4, 2]
    assert turns.input_ids[: turns.prompt_length + 5] == [*PROMPT, 4, 5, 9, 6, 6]
    assert turns.truncated
    assert turns.room == 0


def test_a_context_that_is_full_takes_back_what_nobody_read():
    turns = run(Engine([4, 5], PromptTooLongError("no room")), said=(9, 9, 9))
    assert turns.input_ids == [*PROMPT, 4, 5]
    assert turns.loss_mask == [0, 0, 0, 1, 1]
    assert turns.truncated
    with pytest.raises(PromptTooLongError):
        run(Engine(PromptTooLongError("no room")))


def test_an_aborted_request_ends_the_episode_without_its_tokens():
    turns = run(Engine([4], reason="abort"))
    assert turns.is_aborted
    assert turns.input_ids == PROMPT


def test_truncated_is_what_the_last_turn_was():
    assert not run(Engine([4, 4, 4, 4, 4], [5]), max_turns=2).truncated
    assert run(Engine([4, 4, 4, 4, 4]), max_turns=1).truncated
