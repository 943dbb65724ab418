"""The names in a config that stand for code: workflows, rewards, operators, selectors, priorities.

They are looked up before anything runs. A name that nothing has would otherwise be told when it is first needed, which is minutes
later in a run whose first stages make and warm up a model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from rollwright.algorithms.advantages import find_estimator
from rollwright.algorithms.losses import find_policy_loss, unread_keys
from rollwright.config.experiment import EvalConfig, NewModelConfig, PPOConfig, SFTConfig
from rollwright.config.loading import Stage
from rollwright.config.sections import PPOActorConfig
from rollwright.config.source import Faults, KeyPath
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.datasets import has_subsets
from rollwright.data.drawing import SELECTORS, make_selector
from rollwright.data.formats import FORMATS
from rollwright.errors import ConfigError, RollwrightError
from rollwright.experience.operators import OPERATORS
from rollwright.processes.sandbox import check_sandbox, make_sandbox
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.tracking.sinks import SINKS
from rollwright.trainers.tasks import with_defaults
from rollwright.workflows.registry import WORKFLOWS

Fault = tuple[KeyPath, str]

#: What trainers give a workflow's constructor where it takes them (``with_defaults``).
_GIVEN = ("reward_fn", "gconfig", "tokenizer")
#: Modes whose process runs workflows; a trainer of its own only reads what they made.
_SAMPLING_MODES = ("both", "explore", "bench")


def refuse_unknown_names(stages: Sequence[Stage]) -> None:
    """Look up every name of the stages' configs; plugins have been loaded.

    Raises:
        ConfigError: with every name that cannot be used, its key, file and line.
    """
    messages: list[str] = []
    for stage in stages:
        faults = Faults(stage.origins)
        for path, message in _faults_of(stage.config):
            faults.add(path, message)
        messages += faults.messages
    if messages:
        raise ConfigError.of(messages)


def _faults_of(config: Any) -> Iterator[Fault]:
    if not isinstance(config, NewModelConfig):
        for index, sink in enumerate(config.stats_logger.sinks):
            yield from _tried(("stats_logger", "sinks", index), lambda name=sink: SINKS.get(name))
        for name in ("train_dataset", "valid_dataset", "dataset"):
            if (dataset := getattr(config, name, None)) is not None and isinstance(dataset.format, str):
                yield from _tried((name, "format"), lambda dataset=dataset: FORMATS.get(dataset.format))
        yield from _subsets(config)
    if isinstance(config, PPOConfig):
        yield from _policy(config)
    elif isinstance(config, EvalConfig) or (
        isinstance(config, SFTConfig) and config.workflow is not None and config.valid_dataset is not None
    ):
        yield from _workflow(config, "workflow", config.workflow, config.workflow_kwargs, evaluates=True)
    if not isinstance(config, NewModelConfig):
        check = check_sandbox if _uses_sandbox(config) else make_sandbox
        yield from _tried(("rollout", "sandbox"), lambda: check(config.rollout.sandbox))


def _subsets(config: Any) -> Iterator[Fault]:
    """Subsets set for datasets that have none."""
    sections = [((name,), getattr(config, name, None)) for name in ("train_dataset", "valid_dataset", "dataset")]
    sections += [
        ((name, i), each) for name in ("tasksets", "eval_tasksets") for i, each in enumerate(getattr(config, name, []))
    ]
    for path, section in sections:
        if section is not None and section.subset is not None and not has_subsets(section):
            yield (*path, "subset"), f"is set, but not read: {section.path} is not a Hugging Face dataset; take it out"


def _uses_sandbox(config: Any) -> bool:
    """Whether a workflow, a tool or a reward function of the config says that it runs Python that the model writes."""
    if isinstance(config, PPOConfig) and config.mode not in _SAMPLING_MODES:
        return False
    tasksets = [*config.tasksets, *config.eval_tasksets] if isinstance(config, PPOConfig) else []
    workflows = [(config.workflow, config.workflow_kwargs)]
    if isinstance(config, PPOConfig):
        kwargs = config.workflow_kwargs if config.eval_workflow_kwargs is None else config.eval_workflow_kwargs
        workflows += [(config.eval_workflow, kwargs), *((each.workflow, each.workflow_args) for each in tasksets)]
    with contextlib.suppress(RollwrightError):  # a name that nothing has is a fault of its own
        for reward_fn in (config.reward_fn, *(each.reward_fn for each in tasksets)):
            if isinstance(reward_fn, str) and getattr(REWARD_FUNCTIONS.get(reward_fn), "uses_sandbox", False):
                return True
        for name, arguments in workflows:
            uses = getattr(WORKFLOWS.get(name), "uses_sandbox", None) if isinstance(name, str) else None
            if uses is not None and uses(arguments):
                return True
    return False


def _policy(config: PPOConfig) -> Iterator[Fault]:
    works = yield from _tried(("actor", "policy_loss"), lambda: _try_loss(config.actor))
    yield from _tried(("actor", "adv_estimator"), lambda: find_estimator(config.actor))
    if works:
        unread = unread_keys(config.actor, shifted=config.rollout.accept_shifted_logprobs)
        yield from ((("actor", key), message) for key, message in unread)
    if config.mode in _SAMPLING_MODES:
        for name in ("tasksets", "eval_tasksets"):
            for index, taskset in enumerate(getattr(config, name)):
                yield from (((name, index, *path), message) for path, message in _taskset(taskset))
        if not config.tasksets:
            yield from _episodes(config)
    if config.store is not None:
        for index, operator in enumerate(config.store.operators):
            yield from _tried(("store", "operators", index), lambda each=operator: OPERATORS.build(each.name, **each.args))
        if config.store.order == "priority":
            from rollwright.store import Sampling

            yield from _tried(("store", "priority_fn"), lambda: Sampling.from_config(config.store))  # type: ignore[arg-type]


def _try_loss(config: PPOActorConfig) -> bool:
    """Compute the loss of two tokens: a loss may check its arguments itself."""
    loss, ones = find_policy_loss(config), torch.ones(1, 2)
    try:
        loss(-ones, -1.1 * ones, torch.tensor([[1.0, -1.0]]), ones, -0.9 * ones)
    except Exception as error:  # a user's function can fail in any way
        kind = "" if isinstance(error, RollwrightError) else f"{type(error).__name__}: "
        raise ConfigError(f"the loss {config.policy_loss!r} cannot be computed: {kind}{error}") from error
    return True


def _episodes(config: PPOConfig) -> Iterator[Fault]:
    """The workflows of a run without tasksets."""
    evaluates = config.valid_dataset is not None
    has_own = config.eval_workflow is not None or config.eval_workflow_kwargs is not None
    if config.workflow is not None:
        yield from _workflow(config, "workflow", config.workflow, config.workflow_kwargs, evaluates=evaluates and not has_own)
    if evaluates and has_own:
        kwargs = config.workflow_kwargs if config.eval_workflow_kwargs is None else config.eval_workflow_kwargs
        key = "workflow" if config.eval_workflow is None else "eval_workflow"
        yield from _workflow(config, key, config.eval_workflow or config.workflow, kwargs, evaluates=True)


def _workflow(config: Any, key: str, name: Any, kwargs: Mapping[str, Any], *, evaluates: bool) -> Iterator[Fault]:
    """A class with ``arun_episode``, its arguments, and the reward function that it is given."""
    if isinstance(config.reward_fn, str):
        yield from _tried(("reward_fn",), lambda: REWARD_FUNCTIONS.get(config.reward_fn))
    if not isinstance(name, str):
        return
    found = yield from _tried((key,), lambda: WORKFLOWS.get(name))
    if not inspect.isclass(found):
        return
    if not hasattr(found, "arun_episode"):
        more = "; it has run(): name it in a taskset (tasksets)" if hasattr(found, "run") else ""
        yield (key,), f"{name!r} is no workflow: it has no method arun_episode(engine, data){more}"
        return
    function = inspect.unwrap(getattr(found, "arun_episode"))  # noqa: B009 - any class with the method will do
    if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
        yield (
            (key,),
            f"{name!r} has an arun_episode that is not async: write 'async def arun_episode' and await the engine in it",
        )
        return
    arguments = with_defaults(name, dict(kwargs), dict.fromkeys(_GIVEN, object()))
    arguments = {**arguments, "gconfig": None} if evaluates else arguments  # evaluation has generation arguments of its own
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        kind = "evaluated" if evaluates else "built"
        yield (
            (f"{key}_kwargs",),
            f"{name} cannot be {kind} with {', '.join(arguments) or 'no arguments'}: {error}. Its signature is "
            f"{found.__name__}{inspect.signature(found)}",
        )


def _taskset(taskset: TasksetConfig) -> Iterator[Fault]:
    name = taskset.workflow
    if name is None and not taskset.columns.workflow_key:
        yield ("workflow",), "is not set, and format.workflow_key names no column with a row's own workflow"
    if name is not None:
        found = yield from _tried(("workflow",), lambda: WORKFLOWS.get(name))
        if found is not None and not (hasattr(found, "run") or hasattr(found, "run_async")):
            more = "; it has arun_episode: set it as workflow, with train_dataset" if hasattr(found, "arun_episode") else ""
            yield ("workflow",), f"{name!r} is no task-style workflow: it has neither run() nor run_async(){more}"
    if taskset.reward_fn is not None:
        function = yield from _tried(("reward_fn",), lambda: REWARD_FUNCTIONS.get(taskset.reward_fn or ""))
        if function is not None:
            yield from _reward_arguments(taskset, function)
    if isinstance(taskset.format, str):
        yield from _tried(("format",), lambda: FORMATS.get(str(taskset.format)))
    yield from _tried(("selector_args" if taskset.selector in SELECTORS else "selector",), lambda: make_selector(taskset, 1, 1))


def _reward_arguments(taskset: TasksetConfig, function: Any) -> Iterator[Fault]:
    """Arguments that the reward function would never see: it takes columns by name, and ``**_`` says that others are nothing to it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD and not p.name.startswith("_") for p in parameters) or inspect.isclass(function):
        return
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name in taskset.reward_fn_args:
        if name not in known:
            yield (
                ("reward_fn_args", name),
                f"{taskset.reward_fn} has no parameter {name!r}; it has {', '.join(known)}",
            )


def _tried(path: KeyPath, look_up: Callable[[], Any]) -> Generator[Fault, None, Any]:
    """What is found under a name; where nothing is, None, and a fault."""
    try:
        return look_up()
    except RollwrightError as error:
        yield path, str(error)
