"""Refuse keys that are set but would not be read, each with the reason.

A key counts as set if its value is not the default. ``tests/unit/config/test_every_key.py`` finds such keys: it runs small configs and
records every key that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rollwright.config.experiment import BaseExperimentConfig, DPOConfig, EvalConfig, PPOConfig, RunConfig, SFTConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import IntervalConfig, OptimizerConfig, SlurmConfig, TrainEngineConfig
from rollwright.config.servers import LocalServerConfig, SGLangConfig
from rollwright.config.source import Unread, dotted
from rollwright.config.task_rules import Rule
from rollwright.config.tasksets import TasksetConfig, keys_read_elsewhere

#: Condition, the keys or sections that are not read if it holds, and why.
Line = tuple[Any, Sequence[str], str]


def of_run(config: RunConfig) -> list[Rule]:
    """Keys that no kind of run reads under some condition."""
    return _rules(config, [(not config.stats_logger.sinks, ["stats_logger.project"], "stats_logger.sinks is empty")])


def of_training(config: BaseExperimentConfig) -> list[Rule]:
    supervised = isinstance(config, SFTConfig)
    evaluates = bool(config.valid_dataset is not None and (config.workflow if supervised else True))
    evaluates = evaluates or bool(getattr(config, "eval_tasksets", None))
    without = "nothing is evaluated without valid_dataset" + (" and workflow" if supervised else "")
    evaluations = [f"evaluator.{each.name}" for each in fields(config.evaluator) if each.name not in _INTERVAL]
    evaluations += [] if supervised else ["eval_workflow", "eval_workflow_kwargs"]
    return _rules(
        config,
        [
            (not evaluates, evaluations, without),
            (
                not has_interval(config.saver),
                ["saver.keep"],
                "only the last checkpoint is written, because saver has no interval",
            ),
            (
                config.recover.mode == "off",
                ["recover.keep", "recover.if_damaged", "recover.in_background"],
                "recover.mode is off",
            ),
        ],
    )


def of_policy(config: PPOConfig) -> list[Rule]:
    rollout, journal = config.rollout, config.journal
    has_tasksets = bool(config.tasksets or config.eval_tasksets)
    drawn = [f"train_dataset.{each.name}" for each in fields(config.train_dataset) if each.name not in ("path", "batch_size")]
    by_services = ["rollout.openai_front", "auxiliary_models"]
    by_time = ["evaluator.every_epochs", "evaluator.every_seconds"]
    lines: list[Line] = [
        (config.tasksets, drawn, "tasks come from tasksets"),
        (config.mode in ("explore", "train"), by_time, "explorers evaluate by weight version; set evaluator.every_steps"),
        (
            not has_tasksets or config.mode == "serve",
            by_services,
            "only task-style workflows (tasksets) get such clients",
        ),
        (rollout.backend in ("builtin", "sglang", "vllm"), ["rollout.path"], "runs sample from actor.path"),
        (rollout.backend == "builtin", _OF_REMOTE_ENGINES, "the built-in engine of this process gets no HTTP requests"),
        (rollout.addresses, ["rollout.context_length", "rollout.prefix_cache"], "the servers of rollout.addresses run already"),
        (config.store is None or config.store.order != "priority", _OF_PRIORITY, "store.order is not priority"),
        (not journal.enabled, [f"journal.{each.name}" for each in fields(journal)][1:], "journal.enabled is false"),
    ]
    evaluated = [
        (
            getattr(each, name) != getattr(TasksetConfig(), name),
            f"eval_tasksets.{index}.{name}",
            _message("each task is evaluated"),
        )
        for index, each in enumerate(config.eval_tasksets)
        for name in ("ratio", "selector", "selector_args")
    ]
    return [*_rules(config, lines), *evaluated]


def of_supervised(config: SFTConfig) -> list[Rule]:
    evaluates = bool(config.workflow and config.valid_dataset is not None)
    episodes = ["workflow", "workflow_kwargs", "reward_fn", "rollout"]
    lines: list[Line] = [
        (not config.workflow, ["valid_dataset"], "it is evaluated by a workflow, and none is set"),
        (not evaluates, episodes, "episodes run only with workflow and valid_dataset"),
        (
            evaluates,
            [*_OF_REMOTE_ENGINES, *_OF_SERVERS, *_OF_TRAINING],
            "held-out tasks are sampled by the engine of this process",
        ),
    ]
    return _rules(config, lines)


def of_evaluation(config: EvalConfig) -> list[Rule]:
    drawn = [f"gconfig.{name}" for name in ("greedy", *_OF_DRAWING)]
    only_greedy = config.greedy and not config.samples
    lines: list[Line] = [
        (
            True,
            [*_OF_REMOTE_ENGINES, *_OF_SERVERS, *_OF_TRAINING, "rollout.logprob_tolerance"],
            "an evaluation samples in its own process",
        ),
        (
            True,
            ["stats_logger.sinks", "stats_logger.show", "stats_logger.project"],
            "an evaluation's scores go to summary.json",
        ),
        (True, ["gconfig.n_samples"], "`samples` sets how often a task is sampled"),
        (only_greedy, drawn, "completions are greedy unless `samples` is set"),
    ]
    elsewhere = [(True, f"dataset.{key}", message) for key, message in keys_read_elsewhere(config.dataset, "datasets")]
    return [*_rules(config, lines), *elsewhere]


def of_generation(section: GenerationHyperparameters) -> list[Rule]:
    """Keys that greedy sampling does not read."""
    how = "greedy is true" if section.greedy else "temperature is 0"
    plain = GenerationHyperparameters()
    changed = [
        name
        for name in _OF_DRAWING
        if getattr(section, name) not in (getattr(plain, name), *((0.0,) if name == "temperature" else ()))
    ]
    changed = [name for name in changed if name != "top_k" or section.top_k != -1]
    return [(section.is_greedy, name, _message(f"{how}, which takes the most likely token")) for name in changed]


def of_model(section: TrainEngineConfig) -> list[Rule]:
    every = (section.gradient_checkpointing_every != 1 and not section.gradient_checkpointing, "gradient_checkpointing_every")
    return [(*every, _message("gradient_checkpointing is false"))]


def of_optimizer(section: OptimizerConfig) -> list[Rule]:
    constant = section.lr_scheduler_type == "constant" and section.min_lr_ratio != OptimizerConfig().min_lr_ratio
    return [(constant, "min_lr_ratio", _message("lr_scheduler_type is constant"))]


def of_taskset(section: TasksetConfig) -> list[Rule]:
    lone = section.isolated_processes is not None and section.isolation != "process"
    return [(lone, "isolated_processes", _message(f"isolation is {section.isolation}"))]


def of_sglang(section: SGLangConfig) -> list[Rule]:
    """Keys that ``rollwright serve-model`` does not have."""
    if section.implementation != "builtin":
        return []
    plain, own = SGLangConfig(), {each.name for each in fields(LocalServerConfig)} | {"implementation"}
    others = [each.name for each in fields(section) if each.name not in own]
    return [(getattr(section, name) != getattr(plain, name), name, _message("implementation is builtin")) for name in others]


def of_slurm(section: SlurmConfig) -> list[Rule]:
    changed = section.end_early != SlurmConfig().end_early and section.time is None
    return [(changed, "end_early", _message("time is not set, so the end of the job is unknown"))]


def of_reference(config: PPOConfig | DPOConfig) -> list[Rule]:
    """Keys of the reference policy that are not read, because it is never trained."""
    if config.ref is None:
        return []
    return [
        (
            getattr(config.ref, name) not in (None, getattr(TrainEngineConfig(), name)),
            f"ref.{name}",
            _message("the reference is not trained"),
        )
        for name in _OF_TRAINED_MODELS
    ]


_INTERVAL = tuple(each.name for each in fields(IntervalConfig))
_OF_DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed")
_OF_REMOTE_ENGINES = ["rollout.request_timeout", "rollout.setup_timeout", "rollout.accept_shifted_logprobs"]
_OF_PRIORITY = ["store.priority_fn", "store.priority_fn_args"]
_OF_SERVERS = [
    f"rollout.{name}"
    for name in (
        *("addresses", "servers", "tensor_parallel", "first_gpu", "api_key", "path", "openai_front"),
        *("request_retries", "weight_update", "weight_update_path", "weight_dtype"),
    )
]
_OF_TRAINING = ["rollout.weight_update_every_steps"]
_OF_TRAINED_MODELS = ("optimizer", "max_bad_steps")


def has_interval(section: IntervalConfig) -> bool:
    """True if any interval is set."""
    return any(getattr(section, name) is not None for name in _INTERVAL)


def _rules(config: Any, lines: Sequence[Line]) -> list[Rule]:
    plain = type(config)()
    found = [(key, why) for broken, keys, why in lines if broken for name in keys for key in _changed(config, plain, name)]
    return [(True, key, _message(why)) for key, why in dict(reversed(found)).items()]


def _message(why: str) -> Unread:
    return Unread(f"is set, but not read: {why}; take it out, or change that")


def _changed(config: Any, plain: Any, key: str) -> Iterator[str]:
    """The keys at or below a dotted key that differ from the defaults."""
    path = tuple(key.split("."))
    value, default = config, plain
    for name in path:
        if value is None:
            return
        default = getattr(type(value)() if default is None else default, name)
        value = getattr(value, name)
    yield from (dotted(each) for each in _leaves(value, default, path) if not _follows(config, each))


def _leaves(value: Any, default: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if is_dataclass(value) and isinstance(value, type(default)):
        for each in fields(value):
            yield from _leaves(getattr(value, each.name), getattr(default, each.name), (*path, each.name))
    elif value != default:
        yield path


def _follows(config: Any, path: tuple[str, ...]) -> bool:
    """True for evaluation's ``max_new_tokens`` if it was not set but copied from the run's; see ``apply_recipe``."""
    return path == ("evaluator", "gconfig", "max_new_tokens") and (
        isinstance(config, PPOConfig) and config.evaluator.gconfig.max_new_tokens == config.gconfig.max_new_tokens
    )
