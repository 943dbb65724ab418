"""Tasks and workflows of a config: workflows and their arguments, tasksets, and tasks by ordinal (their number in drawing order)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import without_template
from rollwright.data.datasets import get_dataset
from rollwright.data.loader import TaskLoader, endless
from rollwright.data.selectors import TaskMixture, taskset_rows
from rollwright.errors import ConfigError
from rollwright.placement.task_services import TaskServices
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.workflows.episode import EpisodeWorkflow
from rollwright.workflows.registry import WORKFLOWS, resolve_workflow
from rollwright.workflows.task_runner import TaskRunner

Row = dict[str, Any]

#: Number of rows kept. To get an earlier row, such as one that another explorer lost, the draws are repeated from the start.
REMEMBERED = 65_536


# -- workflows -------------------------------------------------------------------------------------------------------


def with_defaults(workflow: Any, kwargs: dict[str, Any] | None, defaults: dict[str, Any]) -> dict[str, Any]:
    """Add the ``defaults`` that the workflow's constructor accepts to ``kwargs``, except those that are None. Given arguments win.

    If the workflow is an instance, ``kwargs`` is returned unchanged, because the instance is already built.
    """
    given = dict(kwargs or {})
    target = WORKFLOWS.get(workflow) if isinstance(workflow, str) else workflow
    if not inspect.isclass(target):
        return given
    parameters = inspect.signature(target).parameters
    fills = {name: value for name, value in defaults.items() if name in parameters and value is not None}
    return {**fills, **given}


def workflow_arguments(
    config: Any, workflow: Any, given: dict[str, Any] | None, tokenizer: Any, gconfig: Any = None
) -> dict[str, Any]:
    """Add ``reward_fn``, ``gconfig``, ``tokenizer`` and ``overflow_reward`` to the given arguments, as in :func:`with_defaults`."""
    gconfig = gconfig or config.gconfig.new(n_samples=1)
    defaults = {"reward_fn": config.reward_fn, "gconfig": gconfig, "tokenizer": tokenizer}
    return with_defaults(workflow, given, defaults | {"overflow_reward": config.rollout.overflow_reward})


def refuse_unusable_reward(config: Any, rows: Any) -> None:
    """Raise an error if a built-in workflow could not call the reward function with the tasks' columns.

    Args:
        config: config of the run.
        rows: tasks of the run; their columns are checked only if they are a list.

    Raises:
        RewardError: the function takes other arguments, or needs a column that the first task does not have.
    """
    workflow = WORKFLOWS.get(config.workflow) if isinstance(config.workflow, str) else config.workflow
    reward = config.workflow_kwargs.get("reward_fn", config.reward_fn)
    if reward is None or not (inspect.isclass(workflow) and issubclass(workflow, EpisodeWorkflow)):
        return  # custom workflows choose the arguments themselves
    columns = AsyncRewardWrapper(reward).columns
    if isinstance(rows, list) and rows:
        columns.keywords(rows[0])


def thinks(workflow_kwargs: dict[str, Any] | None) -> bool | None:
    """Return the workflow's ``enable_thinking``, which also affects the length of prompts, or None if it is not set."""
    return (workflow_kwargs or {}).get("enable_thinking")


def refuse_missing_chat_template(config: Any, tokenizer: Any) -> None:
    """Raise an error if a workflow renders messages with a chat template and the tokenizer has none.

    Raises:
        ConfigError: a workflow needs a chat template, and the tokenizer has none.
    """
    if tokenizer.chat_template is not None:
        return
    workflows = [("workflow", config.workflow, config.workflow_kwargs)]
    for name in ("tasksets", "eval_tasksets"):
        for index, taskset in enumerate(getattr(config, name, [])):
            if taskset.columns.chat_template is None:
                workflows.append((f"{name}.{index}.workflow", taskset.workflow, taskset.workflow_args))
    for key, name, arguments in workflows:
        uses = getattr(WORKFLOWS.get(name), "uses_chat_template", None) if isinstance(name, str) else None
        if uses is not None and uses(arguments):
            raise ConfigError(f"{key} is {name}, and {without_template(tokenizer)}")


def evaluation_rows(config: PPOConfig) -> list[Row]:
    """Return the held-out tasks: rows of all evaluation tasksets, each with its taskset's name, or rows of ``valid_dataset``."""
    if config.eval_tasksets or config.valid_dataset is None:
        return [{**row, "taskset": taskset.name} for taskset in config.eval_tasksets for row in taskset_rows(taskset)]
    given = config.workflow_kwargs if config.eval_workflow_kwargs is None else config.eval_workflow_kwargs
    return get_dataset(config.valid_dataset, config.tokenizer_path or config.actor.path, thinks(given))


def training_rows(config: PPOConfig) -> list[Row]:
    """Return all rows that training tasks are drawn from."""
    if config.tasksets:
        return [row for taskset in config.tasksets for row in taskset_rows(taskset)]
    return get_dataset(config.train_dataset, config.tokenizer_path or config.actor.path, thinks(config.workflow_kwargs))


def training_workflow(config: PPOConfig, tokenizer: Any, source: Any, services: TaskServices) -> Any:
    """Build the ``TaskRunner`` of the config's tasksets, or the config's workflow.

    The number of samples of a task is the taskset's ``group_size`` if set, else the run's ``gconfig.n_samples`` if above 1, else that of
    the taskset's ``gconfig``. Generation arguments come from the taskset if set, otherwise from the run. If ``source`` is the mixture
    of the tasksets, the runner reports rewards to the mixture's selectors.

    Raises:
        ConfigError: the config names neither a workflow nor tasksets.
    """
    if config.tasksets:
        group_size = config.group_size if config.group_size > 1 else None
        feedback = source.feedback if isinstance(source, TaskMixture) else None
        return _runner(config, tokenizer, services, config.tasksets, config.gconfig, group_size=group_size, feedback=feedback)
    if config.workflow is None:
        raise ConfigError(
            "no workflow: set `workflow:` in the config, give tasksets that name theirs, or pass one to PPOTrainer.train()."
        )
    return resolve_workflow(config.workflow, workflow_arguments(config, config.workflow, config.workflow_kwargs, tokenizer))


def evaluation_workflow(
    config: PPOConfig, tokenizer: Any, services: TaskServices, *, group_size: int | None = None
) -> tuple[Any, dict[str, Any] | None]:
    """Return what runs held-out tasks: a ``TaskRunner`` of the evaluation tasksets, or a workflow and its constructor arguments.

    A runner uses its taskset's ``gconfig``, or the evaluator's if the taskset sets none. The workflow is ``eval_workflow`` if set,
    otherwise that of training; it is None if the config names neither.

    Args:
        config: the experiment.
        tokenizer: tokenizer of the policy.
        services: services for the runner's workflows.
        group_size: number of samples per task of a taskset. If None, the taskset's own.
    """
    if config.eval_tasksets:
        tasksets = config.eval_tasksets
        if group_size is not None:
            tasksets = [dataclasses.replace(taskset, group_size=group_size) for taskset in tasksets]
        return _runner(config, tokenizer, services, tasksets, config.evaluator.gconfig, is_eval=True), None
    workflow = config.eval_workflow or config.workflow
    if workflow is None:
        return None, None
    given = config.workflow_kwargs if config.eval_workflow_kwargs is None else config.eval_workflow_kwargs
    return workflow, workflow_arguments(config, workflow, given, tokenizer)


def evaluating(
    workflow: Any, kwargs: dict[str, Any] | None, gconfig: GenerationHyperparameters
) -> tuple[Any, dict[str, Any] | None]:
    """Return a workflow and its constructor arguments for evaluation, so that each run uses ``gconfig`` and takes one sample."""
    if inspect.isclass(workflow) or isinstance(workflow, str):
        return workflow, {**(kwargs or {}), "gconfig": gconfig.new(n_samples=1)}
    if not isinstance(workflow, TaskRunner) and hasattr(workflow, "gconfig"):  # an instance: copy it with other arguments
        workflow = copy.copy(workflow)
        workflow.gconfig = _with_stops_of(workflow.gconfig, gconfig.new(n_samples=1))
    return workflow, None


def _with_stops_of(own: Any, gconfig: GenerationHyperparameters) -> GenerationHyperparameters:
    """Add the workflow's own stop strings and tokens to ``gconfig``, because they define where the workflow's turns end."""
    stops = list(dict.fromkeys([*(getattr(own, "stop", None) or []), *(gconfig.stop or [])]))
    stop_token_ids = dict.fromkeys([*(getattr(own, "stop_token_ids", None) or []), *gconfig.stop_token_ids])
    return gconfig.new(stop=stops or None, stop_token_ids=list(stop_token_ids))


def _runner(
    config: PPOConfig, tokenizer: Any, services: TaskServices, tasksets: Any, gconfig: Any, **settings: Any
) -> TaskRunner:
    return TaskRunner(
        tasksets,
        tokenizer,
        gconfig=gconfig,
        services=services,
        model_path=config.actor.path,
        overflow_reward=config.rollout.overflow_reward,
        **settings,
    )


def held_out_tasks(
    config: PPOConfig, tokenizer: Any, services: TaskServices, *, group_size: int | None = None
) -> tuple[list[Row], Any, dict[str, Any] | None]:
    """Return the held-out tasks and what runs them (:func:`evaluation_workflow`). Without a workflow in the config, there are no tasks."""
    workflow, kwargs = evaluation_workflow(config, tokenizer, services, group_size=group_size)
    return ([] if workflow is None else evaluation_rows(config)), workflow, kwargs


# -- tasks by ordinal -------------------------------------------------------------------------------------------------


class DrawnTasks:
    """The rows of an endlessly drawn dataset, by ``ordinal`` (their number in drawing order, from 0).

    Every explorer of a run makes the same draws, so an ordinal means the same task in all explorers. The exception is a selector that
    learns from rewards, because each explorer sees only its own rewards.

    Args:
        make_source: makes a source of batches; every source makes the same draws.
    """

    def __init__(self, make_source: Callable[[], Iterable[list[Row]]]) -> None:
        self._make_source = make_source
        self.source = make_source()
        self._batches = endless(self.source)
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._next = 0

    def row(self, ordinal: int) -> Row:
        """Return the row that has this ordinal."""
        if ordinal < self._next and ordinal not in self._rows:
            anew = (row for batch in endless(self._make_source()) for row in batch)
            return next(row for row in anew if row["ordinal"] == ordinal)
        while ordinal >= self._next:
            for row in next(self._batches):
                self._rows[row["ordinal"]] = row
                self._next = row["ordinal"] + 1
            while len(self._rows) > REMEMBERED:
                self._rows.popitem(last=False)
        return self._rows[ordinal]


def task_source(config: PPOConfig) -> TaskMixture | list[Row]:
    """Return the training tasks: the mixture of the tasksets, or the rows of ``train_dataset``."""
    if not config.tasksets:
        return training_rows(config)
    rows = [taskset_rows(taskset) for taskset in config.tasksets]
    return TaskMixture(config.tasksets, rows, config.train_dataset.batch_size, config.seed)


def task_loader(config: Any, rows: Any) -> TaskLoader:
    """Return a loader of the rows that uses the settings of the ``train_dataset`` section."""
    dataset = config.train_dataset
    return TaskLoader(rows, dataset.batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, seed=config.seed)


def training_tasks(config: PPOConfig) -> DrawnTasks:
    """Return the tasks of a config, from its tasksets or its ``train_dataset``."""
    if config.tasksets:
        return DrawnTasks(lambda: task_source(config))  # type: ignore[arg-type]
    rows = task_source(config)
    return DrawnTasks(lambda: task_loader(config, rows))


def count_tasks(source: Iterable[list[Row]]) -> int:
    """Return the number of tasks of one epoch."""
    assert isinstance(source, TaskLoader | TaskMixture)
    return len(source) * source.batch_size
