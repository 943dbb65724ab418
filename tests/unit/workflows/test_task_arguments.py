"""``workflow_args`` over a workflow's defaults; what nobody reads is refused."""

from __future__ import annotations

import pytest

from rollwright import SimpleWorkflow, Task
from rollwright.errors import WorkflowError


def test_what_is_given_wins_over_the_defaults():
    task = Task(workflow_args={"max_steps": 3})
    assert task.arguments(max_steps=15, rich=False) == {"max_steps": 3, "rich": False}


def test_what_a_workflow_does_not_take_is_refused_with_what_it_takes():
    task = Task(workflow="webshop_workflow", workflow_args={"max_step": 3}, task_id=7)
    with pytest.raises(
        WorkflowError, match="task 7: webshop_workflow has no argument max_step; workflow_args may hold max_steps"
    ):
        task.arguments(max_steps=15)


def test_the_simple_workflows_take_none_but_their_subclasses_may():
    """``use_base`` and the like were read by nobody."""
    task = Task(workflow="math_workflow", reward_fn="math_reward", workflow_args={"use_base": True})
    with pytest.raises(WorkflowError, match="math_workflow has no argument use_base; workflow_args are not read by it"):
        task.to_workflow(None)  # type: ignore[arg-type]

    class Mine(SimpleWorkflow):
        def reset(self, task):
            super().reset(task)
            self.base = task.workflow_args["use_base"]

    assert Mine(task=task, model=None).base is True
