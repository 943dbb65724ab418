"""The reward of a task-style workflow: the task's own function, called with the task's row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.workflows.task import Task


class TaskReward:
    """Scores a reply with the reward function that the task names, under a time limit.

    The function gets the reference as ``answer``, whatever its column is called, the row's other columns and ``reward_fn_args``.

    Args:
        task: names the function, and has the row.
        workflow: name of the workflow, for messages.
        default: the function of tasks that name none; None: they are refused.

    Raises:
        WorkflowError: there is no function.
    """

    def __init__(self, task: Task, workflow: str, default: Any = None) -> None:
        function = task.reward_function() or default
        if function is None:
            raise WorkflowError(
                f"{workflow} scores with the task's reward function, but task {task.task_id!r} names none; set the taskset's "
                "reward_fn."
            )
        self.task = task
        self.function = AsyncRewardWrapper(function)

    async def __call__(
        self,
        experience: Experience,
        *,
        response: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> float:
        """The reward of one reply.

        Args:
            experience: whose tokens the function gets.
            response: the text, where it is not the experience's.
            columns: what the function may ask for besides the row's own columns, which win.
        """
        row = {key: value for key, value in self.task.raw_task.items() if key != "answer"}
        return await self.function(
            experience.prompt_text,
            experience.response_text if response is None else response,
            experience.prompt_tokens.tolist(),
            experience.response_tokens.tolist(),
            **{**(columns or {}), **row, "answer": self.task.truth, **self.task.reward_fn_args},
        )
