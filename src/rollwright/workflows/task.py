"""A task as the second way to write a workflow sees it: a row, and all that is needed to run and score it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.data.formats import messages_of
from rollwright.errors import WorkflowError

if TYPE_CHECKING:
    from rollwright.workflows.model_wrapper import ModelWrapper
    from rollwright.workflows.task_workflow import Workflow


@dataclass
class Task:
    """One item of work.

    ``workflow`` and ``reward_fn`` are registered names, import paths, or the class and function themselves.
    """

    workflow: Any = None
    reward_fn: Any = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    repeat_times: int | None = None
    batch_id: int | str = ""
    task_id: int | str = ""
    index: int | None = None  # the ordinal of the draw

    @classmethod
    def from_row(cls, row: Mapping[str, Any], taskset: TasksetConfig, *, is_eval: bool = False) -> Task:
        """Make the task of one row of ``taskset``; a row's own workflow and reward columns win over the defaults."""
        layout = taskset.columns
        own_workflow = row.get(layout.workflow_key) if layout.workflow_key else None
        own_reward = row.get(layout.reward_fn_key) if layout.reward_fn_key else None
        raw = {key: value for key, value in row.items() if key != "ordinal"}
        return cls(
            workflow=own_workflow or taskset.workflow,
            reward_fn=own_reward or taskset.reward_fn,
            raw_task=raw,
            format_args=layout,
            rollout_args=(taskset.gconfig or GenerationHyperparameters()).new(),
            workflow_args=dict(taskset.workflow_args),
            reward_fn_args=dict(taskset.reward_fn_args),
            is_eval=is_eval,
            repeat_times=taskset.group_size,
            task_id=row.get("query_id", row.get("id", row.get("ordinal", ""))),
            index=row.get("ordinal"),
        )

    @property
    def task_desc(self) -> str | None:
        """The user's text, from the format's ``prompt_key``."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The reference answer, from the format's ``response_key``, else from the column ``answer``."""
        return self.raw_task.get(self.format_args.response_key, self.raw_task.get("answer"))

    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the task begins with, read as its format says (``data.formats``).

        Raises:
            DataError: the row lacks the column that the format names.
        """
        return messages_of(self.raw_task, self.format_args, f"task {self.task_id!r}")

    def arguments(self, **defaults: Any) -> dict[str, Any]:
        """``workflow_args`` over the defaults of a workflow, which name all that it takes.

        Raises:
            WorkflowError: the taskset gives something else, which would be set in vain.
        """
        if unknown := sorted(self.workflow_args.keys() - defaults):
            name = self.workflow if isinstance(self.workflow, str) else getattr(self.workflow, "__name__", "the workflow")
            known = f"may hold {', '.join(defaults)}" if defaults else "are not read by it"
            raise WorkflowError(f"task {self.task_id!r}: {name} has no argument {', '.join(unknown)}; workflow_args {known}.")
        return {**defaults, **self.workflow_args}

    def workflow_class(self) -> type[Workflow]:
        """The workflow class that this task is run with."""
        from rollwright.workflows.registry import WORKFLOWS

        if self.workflow is None:
            raise WorkflowError(f"task {self.task_id!r} names no workflow; set the taskset's workflow.")
        return WORKFLOWS.get(self.workflow) if isinstance(self.workflow, str) else self.workflow

    def reward_function(self) -> Any:
        """The reward function, or None where the task names none (the workflow may score by itself)."""
        from rollwright.rewards.registry import REWARD_FUNCTIONS

        return REWARD_FUNCTIONS.get(self.reward_fn) if isinstance(self.reward_fn, str) else self.reward_fn

    def to_workflow(self, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> Workflow:
        """Build the workflow of this task."""
        return self.workflow_class()(task=self, model=model, auxiliary_models=auxiliary_models or [])
