"""The second way to write a workflow: a class with ``run()`` that is given a task and a model, and returns experiences."""

from __future__ import annotations

from typing import Any

from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.task import Task


class Workflow:
    """How a task is run; subclasses define ``run`` or, where they await things, ``run_async``.

    Three traits may each be a class attribute, a property or a method:

    * ``resettable``: the instance can be given its next task with ``reset`` (for workflows that are heavy to build);
    * ``repeatable``: run once for each sample of the group with ``n`` = 1; otherwise run once, to make the group itself
      from ``task.rollout_args.n``;
    * ``asynchronous``: ``run_async`` is awaited on the event loop; otherwise ``run`` runs in a thread.
    """

    resettable: Any = False
    repeatable: Any = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models or []

    @property
    def asynchronous(self) -> Any:
        """True where the class defines ``run_async``."""
        return type(self).run_async is not Workflow.run_async

    def reset(self, task: Task) -> None:
        """Take the next task; needed only where the workflow says that it is resettable."""
        raise WorkflowError(f"{type(self).__name__} says that it is resettable but defines no reset(task).")

    def run(self) -> list[Experience]:
        """Run the workflow and return its experiences."""
        raise WorkflowError(f"{type(self).__name__} defines neither run() nor run_async().")

    async def run_async(self) -> list[Experience]:
        """As ``run``, awaited on the event loop."""
        raise WorkflowError(f"{type(self).__name__} is asynchronous but defines no run_async().")


def trait(workflow: Any, name: str) -> bool:
    """A yes-or-no trait of a workflow, whether it is written as attribute, property or method."""
    value = getattr(workflow, name, False)
    return bool(value() if callable(value) else value)


def class_trait(workflow_class: type, name: str, task: Task) -> bool:
    """A trait asked of the class, before there is an instance (properties and methods that need one are built without init)."""
    value = getattr(workflow_class, name, False)
    if isinstance(value, property) or callable(value):
        return trait(object.__new__(workflow_class), name)
    return bool(value)


def renew(workflow: Any, task: Task, model: ModelWrapper) -> None:
    """Give a resettable workflow its next task: model and arguments are the new task's also where ``reset`` keeps the old."""
    workflow.task, workflow.model = task, model
    workflow.rollout_args = task.rollout_args
    workflow.reset(task)
