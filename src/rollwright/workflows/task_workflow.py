"""The second way to write a workflow: a class with ``run()`` that is given a task and a model, and returns experiences."""

from __future__ import annotations

import inspect
from typing import Any

from rollwright.errors import TrajectoryError, WorkflowError
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

    A workflow that makes its group itself and defines ``set_repeat_times(repeat_times, run_id_base)`` is told by it, too, how
    many samples the group has.
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


#: Second names of traits, which other systems' workflows may have.
_SECOND_NAMES = {"resettable": "can_reset", "asynchronous": "is_async"}


def trait(workflow: Any, name: str) -> bool:
    """A yes-or-no trait of a workflow, whether it is written as attribute, property or method."""
    kind = workflow if isinstance(workflow, type) else type(workflow)
    known = [each for each in (name, _SECOND_NAMES.get(name)) if each and (hasattr(kind, each) or each in vars(workflow))]
    values = [getattr(workflow, each) for each in known]  # a property that raises is not one that says no
    return any(bool(value() if callable(value) else value) for value in values)


def class_trait(workflow_class: type, name: str, task: Task) -> bool:
    """A trait asked of the class, before there is an instance.

    Properties and methods are asked of an instance that has its ``task`` and was not initialised.

    Raises:
        WorkflowError: it wants more than the task.
    """
    value = getattr(workflow_class, name, False)
    if not isinstance(value, property) and not callable(value):
        return trait(workflow_class, name)
    bare = object.__new__(workflow_class)
    bare.task = task
    try:
        return trait(bare, name)
    except AttributeError as error:
        raise WorkflowError(
            f"{workflow_class.__name__}.{name} is asked before there is an instance, with nothing set but self.task ({error}): "
            "make it a class attribute, or let it go by the task alone."
        ) from error


def renew(workflow: Any, task: Task, model: ModelWrapper) -> None:
    """Give a resettable workflow its next task: model, arguments and the OpenAI clients that it kept are the new task's also
    where ``reset`` keeps the old."""
    before = getattr(workflow, "model", None)
    if isinstance(before, ModelWrapper):
        model.take_over_clients(before)
    workflow.task, workflow.model = task, model
    workflow.rollout_args = task.rollout_args
    workflow.reset(task)


def tell_group_size(workflow: Any, task: Task) -> None:
    """Call ``set_repeat_times`` of a workflow that has one."""
    if callable(told := getattr(workflow, "set_repeat_times", None)):
        told(task.rollout_args.n_samples, 0)


def returned_experiences(name: str, result: Any) -> list[Experience] | None:
    """What ``run`` or ``run_async`` returned as a list; None where the sample is rejected.

    Args:
        name: of the workflow and its task, for messages.
        result: an experience, several of them, or None. A generator is run to its end here.

    Raises:
        WorkflowError: it is something else, or holds something else, or an experience that has no reward or does not fit.
    """
    remedy = "run() returns a list of Experience, or None to reject the sample"
    if result is None:
        return None
    if isinstance(result, Experience):
        result = [result]
    if inspect.iscoroutine(result):
        result.close()
        raise WorkflowError(f"{name}: its run() is async: name it run_async.")
    if not isinstance(result, list | tuple) and not inspect.isgenerator(result):
        raise WorkflowError(f"{name} returned {type(result).__name__}; {remedy}.")
    experiences: list[Any] = list(result)
    if wrong := [each for each in experiences if not isinstance(each, Experience)]:
        raise WorkflowError(f"{name} returned {type(wrong[0]).__name__} among its experiences; {remedy}.")
    for index, experience in enumerate(experiences):
        try:
            experience.check()
        except TrajectoryError as error:
            raise WorkflowError(f"{name}, item {index}: {error}") from None
        if experience.reward is None:
            raise WorkflowError(f"{name}, item {index}: the experience has no reward; set it before run() returns.")
    return experiences or None
