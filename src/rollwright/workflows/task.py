"""Task-style workflows: classes with ``run()``, built with a task and a model, that return experiences."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, TasksetConfig
from rollwright.data.formats import answer_of, messages_of
from rollwright.errors import TrajectoryError, WorkflowError
from rollwright.experience.experience import Experience
from rollwright.rewards.registry import REWARD_FUNCTIONS, RewardFn, in_parts
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.logging import get_logger
from rollwright.workflows.model_wrapper import ModelWrapper
from rollwright.workflows.registry import WORKFLOWS


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
        """Make the task of one row of ``taskset``; a row's own workflow and reward columns override the defaults."""
        layout = taskset.columns
        return cls(
            workflow=(layout.workflow_key and row.get(layout.workflow_key)) or taskset.workflow,
            reward_fn=_class_in_parts((layout.reward_fn_key and row.get(layout.reward_fn_key)) or taskset.reward_fn),
            raw_task={key: value for key, value in row.items() if key not in ("ordinal", "taskset")},
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
        """The reference answer, from the format's ``response_key`` or else from a column recognised by its name."""
        key = self.format_args.response_key
        return self.raw_task[key] if key in self.raw_task else answer_of(self.raw_task, f"task {self.task_id!r}").get("answer")

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation that the task begins with, read as its format specifies (see ``data.formats``).

        Raises:
            DataError: the row lacks the column that the format names.
        """
        return messages_of(self.raw_task, self.format_args, f"task {self.task_id!r}")

    def arguments(self, **defaults: Any) -> dict[str, Any]:
        """Merge ``workflow_args`` over a workflow's ``defaults``, which must name all of its arguments.

        Raises:
            WorkflowError: the taskset sets an argument that the workflow does not have.
        """
        if unknown := sorted(self.workflow_args.keys() - defaults):
            name = self.workflow if isinstance(self.workflow, str) else getattr(self.workflow, "__name__", "the workflow")
            known = f"may hold {', '.join(defaults)}" if defaults else "are not read by it"
            raise WorkflowError(f"task {self.task_id!r}: {name} has no argument {', '.join(unknown)}; workflow_args {known}.")
        return {**defaults, **self.workflow_args}

    def workflow_class(self) -> type[Workflow]:
        """Return the workflow class that this task is run with."""
        if self.workflow is None:
            raise WorkflowError(f"task {self.task_id!r} names no workflow; set the taskset's workflow.")
        return WORKFLOWS.get(self.workflow) if isinstance(self.workflow, str) else self.workflow

    def reward_function(self) -> Any:
        """Return the reward function, or None if the task names none (the workflow may compute the reward itself)."""
        return REWARD_FUNCTIONS.get(self.reward_fn) if isinstance(self.reward_fn, str) else self.reward_fn

    def to_workflow(self, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> Workflow:
        """Build the workflow of this task."""
        return self.workflow_class()(task=self, model=model, auxiliary_models=auxiliary_models or None)


class Workflow:
    """Runs a task; subclasses define ``run`` or, for asynchronous code, ``run_async``.

    Three traits may each be a class attribute, a property or a method:

    * ``resettable``: ``reset`` gives the instance its next task (for workflows that are expensive to build);
    * ``repeatable``: the first runs of a group start together, and each should return one sample; otherwise, the first run should
      return the whole group (``task.rollout_args.n`` samples). In both cases, runs are repeated until the group is full;
    * ``asynchronous``: ``run_async`` is awaited on the event loop; otherwise ``run`` runs in a thread.

    ``set_repeat_times`` is called with the number of samples that the run should return.

    Attributes:
        auxiliary_models: OpenAI clients for models that are not trained, in the config's order; None if there are none.
        rollout_args: the task's generation arguments, unless a subclass overrides or assigns them.
        logger: logger named after the class's module.
    """

    resettable: Any = False
    repeatable: Any = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject a class that defines nothing to run. Such a class may be registered, but not instantiated.

        Raises:
            WorkflowError: the class defines neither ``run`` nor ``run_async``.
        """
        if _definer(cls) is Workflow and ("task" in kwargs or not hasattr(cls, "arun_episode")):
            raise WorkflowError(f"{cls.__name__} defines neither run() nor run_async(): define the one that runs its tasks.")
        return super().__new__(cls)

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models or None
        self.run_id_base = 0
        self.logger = get_logger(type(self).__module__)
        if "rollout_args" not in vars(self):  # a subclass may have called reset before
            _give_rollout_args(self, task)

    @property
    def auxiliary_model_wrappers(self) -> None:
        """Not supported: None without auxiliary models, and an error otherwise.

        Raises:
            WorkflowError: there are auxiliary models. They are OpenAI clients, which return no token log-probabilities.
        """
        if self.auxiliary_models:
            raise WorkflowError(
                f"{type(self).__name__} uses auxiliary_model_wrappers; auxiliary models are OpenAI clients, in self.auxiliary_models. "
                "Teachers that score tokens are not supported."
            )

    @property
    def asynchronous(self) -> Any:
        """True if the nearest class that defines ``run`` or ``run_async`` defines ``run_async``."""
        return "run_async" in vars(_definer(type(self)))

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Store the number of samples that the run should return, and the number of the first one."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def reset(self, task: Task) -> None:
        """Take the next task; resettable workflows define this."""
        raise WorkflowError(f"{type(self).__name__} says that it is resettable but defines no reset(task).")

    def run(self) -> list[Experience]:
        """Run the workflow and return its experiences."""
        raise WorkflowError(f"{type(self).__name__} is not asynchronous but defines no run().")

    async def run_async(self) -> list[Experience]:
        """Run the workflow on the event loop and return its experiences."""
        raise WorkflowError(f"{type(self).__name__} is asynchronous but defines no run_async().")


def with_reward(experiences: list[Experience], reward: float, **metrics: float) -> list[Experience]:
    """Set the reward of all experiences of a run, and add ``metrics`` to each."""
    for experience in experiences:
        experience.reward = reward
        experience.metrics.update(metrics)
    return experiences


def _class_in_parts(reward_fn: Any) -> Any:
    """If ``reward_fn`` names a ``RewardFn`` class, return the class, which workflows instantiate; otherwise, return it unchanged."""
    if not isinstance(reward_fn, str):
        return reward_fn
    found = REWARD_FUNCTIONS.get(reward_fn)
    return found if isinstance(found, type) and issubclass(found, RewardFn) else reward_fn


class ResettableWorkflow(Workflow):
    """A workflow that receives every task, including the first, through ``reset``, and runs once for each sample of the group."""

    resettable = True
    repeatable = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)


def _definer(kind: type) -> type:
    """Return the nearest class, ``kind`` or one of its bases, that defines ``run`` or ``run_async``."""
    return next((base for base in kind.__mro__ if {"run", "run_async"} & vars(base).keys()), Workflow)


def _give_rollout_args(workflow: Any, task: Task) -> None:
    with contextlib.suppress(AttributeError):  # a property of the subclass
        workflow.rollout_args = task.rollout_args


#: Other names of traits, which ported workflows may use.
_SECOND_NAMES = {"resettable": "can_reset", "asynchronous": "is_async"}


def trait(workflow: Any, name: str) -> bool:
    """Read a boolean trait of a workflow, which may be an attribute, property or method."""
    kind = workflow if isinstance(workflow, type) else type(workflow)
    known = [each for each in (name, _SECOND_NAMES.get(name)) if each and (hasattr(kind, each) or each in vars(workflow))]
    values = [getattr(workflow, each) for each in known]  # an error in a property must not count as False
    return any(bool(value() if callable(value) else value) for value in values)


def class_trait(workflow_class: type, name: str, task: Task) -> bool:
    """Read a trait of a class before there is an instance.

    Properties and methods are called on an uninitialised instance that has only its ``task``.

    Raises:
        WorkflowError: the trait needs more than the task.
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


class WorkflowPool:
    """Builds the workflow of each task, or reuses a resettable one that has finished."""

    def __init__(self) -> None:
        self._idle: dict[tuple[type, str], list[Any]] = defaultdict(list)

    @contextlib.contextmanager
    def workflow(
        self, task: Task, model: ModelWrapper, auxiliary_models: Callable[[], list[Any]], taskset: str = ""
    ) -> Iterator[Workflow]:
        """Yield the workflow for a task. A resettable workflow that does not raise is kept for a later task.

        If the workflow defines ``set_repeat_times``, it is called with the number of samples to return. A reused workflow gets the
        new task's model, arguments and OpenAI clients even if its ``reset`` keeps the old ones.

        Args:
            auxiliary_models: returns the clients for models that are not trained; called when a workflow is built.
            taskset: name of the taskset. Workflows are reused only within a taskset, because they keep its arguments.
        """
        idle = self._idle[task.workflow_class(), taskset]
        workflow: Any = idle.pop() if idle else None
        if workflow is None:
            workflow = task.to_workflow(model, auxiliary_models())
        else:
            if isinstance(before := getattr(workflow, "model", None), ModelWrapper):
                model.take_over_clients(before)
            workflow.task, workflow.model = task, model
            _give_rollout_args(workflow, task)
            workflow.reset(task)
        if callable(set_repeat_times := getattr(workflow, "set_repeat_times", None)):
            set_repeat_times(task.rollout_args.n_samples, 0)
        yield workflow
        if trait(workflow, "resettable"):
            idle.append(workflow)


def returned_experiences(name: str, result: Any, is_eval: bool = False) -> list[Experience] | None:
    """Convert the result of ``run`` or ``run_async`` to a list; None if the sample is rejected.

    Args:
        name: name of the workflow and its task, for messages.
        result: an experience; a list, tuple or generator of experiences; or None.
        is_eval: True in an evaluation. An experience without a reward then gets its metric ``accuracy`` as the reward, because
            ported evaluation workflows report nothing else.

    Raises:
        WorkflowError: the result is or contains something else, or an experience has no reward or is invalid.
    """
    if result is None:
        return None
    if isinstance(result, Experience):
        result = [result]
    remedy = "run() returns a list of Experience, or None to reject the sample"
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
        if experience.reward is None and is_eval:
            experience.reward = experience.metrics.get("accuracy")
        if experience.reward is None:
            raise WorkflowError(f"{name}, item {index}: the experience has no reward; set it before run() returns.")
    return experiences or None


class TaskReward:
    """Scores a reply with the task's reward function, under a time limit.

    The function gets the reference answer as ``answer`` (whatever its column is called), the row's other columns, and
    ``reward_fn_args``.

    Attributes:
        in_parts: the reward function in the form ``self.reward_fn(response=…, truth=…)``, which returns named parts.

    Args:
        task: the task, with its row and the name of the function.
        workflow: name of the workflow, for messages.
        default: function for tasks that name none.

    Raises:
        WorkflowError: the task names no function and there is no default.
    """

    def __init__(self, task: Task, workflow: str, default: Any = None) -> None:
        function = task.reward_function() or default
        if function is None:
            raise WorkflowError(
                f"{workflow} scores with the task's reward function, but task {task.task_id!r} names none; set the taskset's "
                "reward_fn."
            )
        self.task = task
        self.in_parts = in_parts(REWARD_FUNCTIONS.get(function) if isinstance(function, str) else function, task.reward_fn_args)
        self.function = AsyncRewardWrapper(self.in_parts if isinstance(self.in_parts, RewardFn) else function)

    async def __call__(
        self,
        experience: Experience,
        *,
        response: str | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> float:
        """Score one reply.

        Args:
            experience: the reply; the function gets its tokens.
            response: text to score. Default: the experience's response.
            columns: further columns for the function; the row's own columns override them.
        """
        return await self.function(
            experience.prompt_text,
            experience.response_text if response is None else response,
            experience.prompt_tokens.tolist(),
            experience.response_tokens.tolist(),
            **{**(columns or {}), **self.task.raw_task, "answer": self.task.truth, **self.task.reward_fn_args},
        )
