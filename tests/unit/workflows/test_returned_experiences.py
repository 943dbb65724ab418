"""What ``run()`` may return, and what its author is told of anything else."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rollwright import Experience, ModelWrapper
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import TrajectoryError, WorkflowError
from rollwright.experience.normaliser import normalise
from rollwright.experience.recorder import Recorder
from rollwright.workflows.task import returned_experiences


def experience(**changes):
    return Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0, **changes)


def test_one_several_or_none():
    one = experience()
    assert returned_experiences("Echo of task 3", one) == [one]
    assert returned_experiences("Echo of task 3", (one, one)) == [one, one]
    assert returned_experiences("Echo of task 3", (each for each in [one])) == [one]
    assert returned_experiences("Echo of task 3", None) is None
    assert returned_experiences("Echo of task 3", []) is None


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ({"reward": 1.0}, "returned dict"),
        ("text", "returned str"),
        (1.0, "returned float"),
        ((experience(), 1.0), "returned float among its experiences"),
    ],
)
def test_anything_else_is_named(result, what):
    with pytest.raises(WorkflowError, match=f"Echo of task 3 {what}.*a list of Experience"):
        returned_experiences("Echo of task 3", result)


def test_a_run_that_is_async_has_another_name():
    async def run():
        return [experience()]

    with pytest.raises(WorkflowError, match="name it run_async"):
        returned_experiences("Echo of task 3", run())


def test_what_was_assigned_later_is_checked_as_what_was_given():
    changed = experience()
    changed.action_mask = torch.tensor([0, 1, 0])  # for all tokens, as on construction
    assert changed.to_trajectory()["loss_mask"].tolist() == [[0, 1, 0]]
    changed.action_mask = torch.ones(5)
    with pytest.raises(TrajectoryError, match=r"field 'action_mask': 5 entries for 2 response tokens"):
        changed.to_trajectory()
    changed = experience()
    changed.reward = "good"
    with pytest.raises(TrajectoryError, match="field 'reward': 'good' is no number"):
        changed.to_trajectory()


def test_a_fault_of_an_experience_names_workflow_and_task():
    without = Experience(tokens=[1, 2, 3], prompt_length=1)
    with pytest.raises(
        TrajectoryError, match=r"^workflow Echo, task 3, sample 0, item 1: an experience, field 'reward': there is none"
    ):
        normalise([experience(), without], Recorder(), workflow="Echo", task="task 3, sample 0")


def test_an_experience_that_does_not_fit_is_told_by_the_workflow_s_own_name():
    changed = experience()
    changed.action_mask = torch.ones(7)
    with pytest.raises(WorkflowError, match=r"Echo of task 3, item 0: .*'action_mask': 7 entries"):
        returned_experiences("Echo of task 3", changed)
    changed = experience()
    changed.reward = None
    with pytest.raises(WorkflowError, match="Echo of task 3, item 1: the experience has no reward"):
        returned_experiences("Echo of task 3", [experience(), changed])


def test_ids_that_are_no_integers_are_told():
    floats = {"input_ids": torch.tensor([1.0]), "output_ids": torch.tensor([2.0]), "reward": 1.0}
    with pytest.raises(TrajectoryError, match=r"input_ids.*float32; .* as integers"):
        normalise(floats, Recorder())


def test_chat_takes_messages():
    model = ModelWrapper(None, build_character_tokenizer())  # type: ignore[arg-type]
    with pytest.raises(WorkflowError, match=r"chat takes messages.*generate"):
        asyncio.run(model.chat_async("hello"))  # type: ignore[arg-type]
    with pytest.raises(WorkflowError, match="chat takes messages"):
        asyncio.run(model.chat_async(["hello"]))  # type: ignore[list-item]
