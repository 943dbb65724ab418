"""How the columns of a task reach a reward function."""

from __future__ import annotations

import asyncio
import functools

import pytest

from rollwright.errors import RewardError
from rollwright.experience.durable import function_name
from rollwright.rewards.score import Score
from rollwright.rewards.wrapper import AsyncRewardWrapper, TaskColumns, is_async, task_name
from rollwright.tracking.metrics import FIGURES, EpisodeFigures


def plain(prompt, completion, prompt_ids, completion_ids, **data):
    return 0.0


def narrow(prompt, completion, input_ids, output_ids, answer, hint=None):
    return 0.0


def whole_row(prompt, completion, prompt_ids, completion_ids, data, **rest):
    return 0.0


async def waiting(prompt, completion, prompt_ids, completion_ids):
    return 0.0


class Callable:
    async def __call__(self, prompt, completion, prompt_ids, completion_ids):
        return 0.0


ROW = {"answer": "4", "prompt": "a column", "completion": "another", "input_ids": [1], "question": "?"}


def test_columns_named_like_the_first_four_parameters_stay_out():
    assert TaskColumns(plain).keywords(ROW) == {"answer": "4", "input_ids": [1], "question": "?"}
    assert TaskColumns(narrow).keywords(ROW) == {"answer": "4"}


def test_data_is_the_whole_row_where_the_function_asks_for_it():
    given = TaskColumns(whole_row).keywords(ROW)
    assert given["data"] == ROW
    assert "prompt" not in given


def test_a_missing_column_is_named_with_those_that_are_there():
    with pytest.raises(RewardError, match=r"needs answer, but the task has the columns question"):
        TaskColumns(narrow).keywords({"question": "?"})


def test_bound_arguments_and_builtins_work():
    assert TaskColumns(functools.partial(narrow, hint="h")).keywords(ROW) == {"answer": "4"}
    assert TaskColumns(lambda *args, **rest: 0).keywords({"prompt": 1}) == {"prompt": 1}
    assert TaskColumns(max).keywords({"a": 1}) == {"a": 1}


def test_a_function_of_another_shape_is_refused_with_the_right_one():
    with pytest.raises(RewardError, match=r"takes 2 positional arguments.*prompt, completion, prompt_ids, completion_ids"):
        TaskColumns(lambda response, truth: 0.0)


def test_async_functions_are_known_through_partials_and_objects():
    assert is_async(waiting)
    assert is_async(functools.partial(functools.partial(waiting, 1), 2))
    assert is_async(Callable())
    assert is_async(functools.partial(Callable(), 1))
    assert not is_async(plain)
    assert not is_async(Callable)


def test_the_promise_to_run_inline_is_seen_through_partials():
    def quick(prompt, completion, prompt_ids, completion_ids):
        return 0.0

    assert not AsyncRewardWrapper(quick)._inline
    quick.runs_inline = True
    assert AsyncRewardWrapper(functools.partial(functools.partial(quick)))._inline


def test_names_for_messages():
    assert function_name(functools.partial(plain, 1)).endswith("test_reward_calling.plain")
    assert function_name(Callable()).endswith("Callable")
    assert task_name("p", {"id": "x", "ordinal": 3}) == "ordinal 3"
    assert task_name("What is it?" * 20, {}).startswith("with prompt 'What is it?")


def judged(prompt, completion, prompt_ids, completion_ids, **columns):
    return {"right": 1.0, "short": 0.5, "verdict": f"{completion} is right"}


@pytest.mark.parametrize("runs_inline", [True, False])
def test_parts_and_texts_of_a_reward_are_kept_with_the_sample(runs_inline):
    figures = EpisodeFigures()

    async def scored():
        FIGURES.set(figures)
        return await AsyncRewardWrapper(inline(judged) if runs_inline else judged)("1+1=", "2", [1], [2])

    reward = asyncio.run(scored())
    assert (type(reward), reward) == (float, 1.5)
    assert figures.export() == {"reward/right": 1.0, "reward/short": 0.5, "reward/verdict": "2 is right"}


def inline(function):
    def called(prompt, completion, prompt_ids, completion_ids):
        return {**function(prompt, completion, prompt_ids, completion_ids)}

    called.runs_inline = True
    return called


def test_a_mapping_with_a_reward_is_not_summed():
    score = Score.of_mapping({"reward": 0.25, "grade": 4, "why": "late"})
    assert (float(score), score.parts, score.notes) == (0.25, {"grade": 4.0}, {"why": "late"})
    for wrong in ({}, {"why": "late"}, {"reward": [1]}):
        with pytest.raises(TypeError, match="a mapping has a number 'reward', or parts"):
            Score.of_mapping(wrong)
