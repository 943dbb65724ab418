"""Checks of the names in a config that stand for code: workflows, rewards, operators, selectors, priorities.

They are looked up before anything runs. Otherwise an unknown name would fail only when it is first needed, which may be minutes into
the run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rollwright.algorithms.advantages import find_estimator
from rollwright.algorithms.gae import find_value_estimator
from rollwright.algorithms.losses import find_policy_loss, unread_keys
from rollwright.config.experiment import EvalConfig, PPOConfig, RunConfig, SFTConfig
from rollwright.config.faults import Fault, Look, Rule, found_or_fault, must_be_found, refuse, refuse_faults
from rollwright.config.loading import Stage
from rollwright.config.recipes import uses_critic
from rollwright.config.sections import PPOActorConfig
from rollwright.config.tasksets import TasksetConfig
from rollwright.data.datasets import DATASET_REGISTRY, has_subsets
from rollwright.data.formats import FORMATS
from rollwright.data.selectors import SELECTORS, make_selector
from rollwright.errors import ConfigError, RollwrightError
from rollwright.experience.operators import OPERATORS
from rollwright.processes.boxes import check_box
from rollwright.processes.sandbox import check_sandbox, make_sandbox
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.tracking.sinks import SINKS
from rollwright.trainers.drawn_tasks import with_defaults
from rollwright.workflows.registry import WORKFLOWS

#: Arguments that trainers pass to a workflow's constructor if it takes them (``with_defaults``).
_GIVEN = ("reward_fn", "gconfig", "tokenizer")
#: Modes whose process runs workflows. Mode ``train`` only reads their samples.
_SAMPLING_MODES = ("both", "explore", "bench")


def refuse_unknown_names(stages: Sequence[Stage]) -> None:
    """Look up every name in the stages' configs. Plugins must already be loaded.

    Raises:
        ConfigError: lists every unusable name, with its key, file and line.
    """
    refuse_faults(stages, NAMES)


def _uses_sandbox(config: Any) -> bool:
    """Return True if a workflow, a tool or a reward function of the config runs Python code that the model writes."""
    rewards = [config.reward_fn, *(each.reward_fn for each in _tasksets(config))]
    with contextlib.suppress(RollwrightError):  # unknown names are reported separately
        if any(isinstance(each, str) and getattr(REWARD_FUNCTIONS.get(each), "uses_sandbox", False) for each in rewards):
            return True
        return any(uses(arguments) for uses, arguments in _declared(config, "uses_sandbox"))
    return False


def _box_images(config: Any) -> list[str | None]:
    """Return the images of the workflows that run programs in boxes, as ``check_box`` takes them."""
    with contextlib.suppress(RollwrightError):  # unknown names are reported separately
        return [image(arguments) for image, arguments in _declared(config, "box_image")]
    return []


def _declared(config: Any, attribute: str) -> Iterator[tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]]:
    """Yield what the workflows of a config declare under an attribute, with their arguments."""
    workflows = [(name, kwargs) for _, name, kwargs, _ in _workflows(config)]
    workflows += [(each.workflow, each.workflow_args) for each in _tasksets(config)]
    for name, arguments in workflows:
        declared = getattr(WORKFLOWS.get(name), attribute, None) if isinstance(name, str) else None
        if declared is not None:
            yield declared, arguments


def _tasksets(config: Any) -> list[TasksetConfig]:
    return [*config.tasksets, *config.eval_tasksets] if isinstance(config, PPOConfig) else []


def _loss(look: Look) -> Iterator[Fault]:
    """Report a policy loss that cannot be computed, or keys that are set but that the policy loss does not read."""
    config: PPOConfig = look.section
    if (yield from found_or_fault(look.path, lambda: _try_loss(config.actor))):
        for key, message in unread_keys(config.actor, shifted=config.rollout.accept_shifted_logprobs):
            yield ("actor", key), message


def _try_loss(config: PPOActorConfig) -> bool:
    """Compute the loss of two tokens, because a loss may check its arguments only when it is called."""
    loss, ones = find_policy_loss(config), torch.ones(1, 2)
    try:
        loss(-ones, -1.1 * ones, torch.tensor([[1.0, -1.0]]), ones, -0.9 * ones)
    except Exception as error:  # a user's function can fail in any way
        kind = "" if isinstance(error, RollwrightError) else f"{type(error).__name__}: "
        raise ConfigError(f"the loss {config.policy_loss!r} cannot be computed: {kind}{error}") from error
    return True


def _workflows(config: Any) -> Iterator[tuple[str, Any, Mapping[str, Any], bool]]:
    """Yield the key, name and arguments of each workflow outside tasksets, and whether evaluation uses it."""
    if not isinstance(config, PPOConfig):
        yield "workflow", config.workflow, config.workflow_kwargs, True
        return
    evaluates = config.valid_dataset is not None
    has_own = config.eval_workflow is not None or config.eval_workflow_kwargs is not None
    if config.workflow is not None:
        yield "workflow", config.workflow, config.workflow_kwargs, evaluates and not has_own
    if evaluates and has_own:
        kwargs = config.workflow_kwargs if config.eval_workflow_kwargs is None else config.eval_workflow_kwargs
        key = "workflow" if config.eval_workflow is None else "eval_workflow"
        yield key, config.eval_workflow or config.workflow, kwargs, True


def _workflow_faults(look: Look) -> Iterator[Fault]:
    """Check the workflows outside tasksets, and the reward function that is passed to them."""
    for key, name, kwargs, evaluates in _workflows(look.section):
        yield from _workflow(look.section, key, name, kwargs, evaluates=evaluates)


def _workflow(config: Any, key: str, name: Any, kwargs: Mapping[str, Any], *, evaluates: bool) -> Iterator[Fault]:
    """Check a workflow class (one that defines ``arun_episode``), its constructor arguments, and the config's reward function."""
    if isinstance(config.reward_fn, str):
        yield from found_or_fault(("reward_fn",), lambda: REWARD_FUNCTIONS.get(config.reward_fn))
    if not isinstance(name, str):
        return
    found = yield from found_or_fault((key,), lambda: WORKFLOWS.get(name))
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
    arguments = {**arguments, "gconfig": None} if evaluates else arguments  # evaluation has its own generation arguments
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        kind = "evaluated" if evaluates else "built"
        yield (
            (f"{key}_kwargs",),
            f"{name} cannot be {kind} with {', '.join(arguments) or 'no arguments'}: {error}. Its signature is "
            f"{found.__name__}{inspect.signature(found)}",
        )


def _taskset(look: Look) -> Iterator[Fault]:
    """Check the workflow, reward function, format and selector of a taskset."""
    for path, message in _taskset_faults(look.value):
        yield (*look.path, *path), message


def _taskset_faults(taskset: TasksetConfig) -> Iterator[Fault]:
    name = taskset.workflow
    if name is None and not taskset.columns.workflow_key:
        yield ("workflow",), "is not set, and format.workflow_key names no column with a row's own workflow"
    if name is not None:
        found = yield from found_or_fault(("workflow",), lambda: WORKFLOWS.get(name))
        if found is not None and not (hasattr(found, "run") or hasattr(found, "run_async")):
            more = "; it has arun_episode: set it as workflow, with train_dataset" if hasattr(found, "arun_episode") else ""
            yield ("workflow",), f"{name!r} is no task-style workflow: it has neither run() nor run_async(){more}"
    if taskset.reward_fn is not None:
        function = yield from found_or_fault(("reward_fn",), lambda: REWARD_FUNCTIONS.get(taskset.reward_fn or ""))
        if function is not None:
            yield from _reward_arguments(taskset, function)
    if isinstance(taskset.format, str):
        yield from found_or_fault(("format",), lambda: FORMATS.get(str(taskset.format)))
    yield from found_or_fault(
        ("selector_args" if taskset.selector in SELECTORS else "selector",), lambda: make_selector(taskset, 1, 1)
    )


def _reward_arguments(taskset: TasksetConfig, function: Any) -> Iterator[Fault]:
    """Report arguments that the reward function does not declare. ``**_`` does not count as declaring them, because it ignores them."""
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


def _known_format(section: Any, format: Any) -> None:
    if isinstance(format, str):
        FORMATS.get(format)


def _known_priority(config: PPOConfig, _: str) -> None:
    from rollwright.store import Sampling

    Sampling.from_config(config.store)  # type: ignore[arg-type]


def _usable_sandbox(config: Any, sandbox: str) -> None:
    """Start what the run will start: a jail for Python code, boxes for programs."""
    if isinstance(config, PPOConfig) and config.mode not in _SAMPLING_MODES:
        make_sandbox(sandbox)
        return
    images = dict.fromkeys(_box_images(config))
    if _uses_sandbox(config):
        check_sandbox(sandbox)
    elif not images:
        make_sandbox(sandbox)
    for image in images:
        check_box(sandbox, image)


#: Keys whose values stand for code, and how each is looked up.
NAMES: tuple[Rule, ...] = (
    must_be_found(RunConfig, ["stats_logger.sinks.*"], lambda _, name: SINKS.get(name)),
    must_be_found(RunConfig, [f"{name}.format" for name in ("train_dataset", "valid_dataset", "dataset")], _known_format),
    must_be_found(TasksetConfig, ["kind"], lambda _, kind: DATASET_REGISTRY.get(kind)),
    refuse(
        TasksetConfig,
        "subset",
        lambda dataset: dataset.subset is not None and not has_subsets(dataset),
        "is set, but not read: {config.path} is not a Hugging Face dataset; take it out",
    ),
    Rule(PPOConfig, ("actor.policy_loss",), _loss),
    must_be_found(
        PPOConfig,
        ["actor.adv_estimator"],
        lambda config, _: (find_value_estimator if uses_critic(config.actor) else find_estimator)(config.actor),
    ),
    Rule(PPOConfig, ("tasksets.*", "eval_tasksets.*"), _taskset, lambda config: config.mode in _SAMPLING_MODES),
    Rule(PPOConfig, ("",), _workflow_faults, lambda config: config.mode in _SAMPLING_MODES and not config.tasksets),
    must_be_found(PPOConfig, ["store.operators.*"], lambda _, each: OPERATORS.build(each.name, **each.args)),
    must_be_found(PPOConfig, ["store.priority_fn"], _known_priority, lambda config: config.store.order == "priority"),
    Rule(EvalConfig, ("",), _workflow_faults),
    Rule(
        SFTConfig,
        ("",),
        _workflow_faults,
        lambda config: config.workflow is not None and config.valid_dataset is not None,
    ),
    must_be_found(RunConfig, ["rollout.sandbox"], _usable_sandbox),
)
