"""Cross-key rules that reject combinations of settings that cannot work.

``RULES`` is the whole table, including the rules of ``keys_without_effect`` about keys that are set but not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from rollwright.config import keys_without_effect
from rollwright.config.adapter_rules import ADAPTER_RULES
from rollwright.config.cluster_rules import CLUSTER_RULES
from rollwright.config.colocation_rules import COLOCATION_RULES
from rollwright.config.engine_rules import ENGINE_RULES
from rollwright.config.experiment import (
    BaseExperimentConfig,
    DPOConfig,
    EvalConfig,
    NewModelConfig,
    PPOConfig,
    RunConfig,
    SFTConfig,
)
from rollwright.config.faults import Fault, Rule, faults_in, refuse, refuse_set, sections_of
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.keys_without_effect import has_interval
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.recipes import uses_critic
from rollwright.config.sections import NormConfig
from rollwright.config.source import dotted
from rollwright.config.tasksets import TasksetConfig
from rollwright.config.teacher_rules import TEACHER_RULES
from rollwright.config.validation import annotations_of, choices_of, is_section
from rollwright.errors import ConfigError


def faults_of(config: Any) -> Iterator[Fault]:
    """Yield the key and message of every rejected combination of settings in ``config``."""
    return faults_in(config, RULES)


def validate(config: Any) -> None:
    """Raise an error if settings contradict each other or cannot take effect.

    Raises:
        ConfigError: lists every fault with its key.
    """
    if faults := [f"{dotted(path)}: {message}" for path, message in faults_of(config)]:
        raise ConfigError.of(faults)


def refuse_dicts(config: Any) -> None:
    """Reject dicts in place of dataclasses in a config built in Python, because their keys would be ignored.

    Raises:
        ConfigError: lists every such section, and what to write instead.
    """
    faults = [
        f"{dotted((*path, name))} is a dict; give {kind.__name__}({', '.join(f'{key}={each!r}' for key, each in value.items())})"
        for path, section in sections_of(config)
        for name, annotation in annotations_of(type(section)).items()
        if isinstance(value := getattr(section, name, None), dict)
        for kind in [next((each for each in choices_of(annotation) if is_section(each)), None)]
        if kind is not None
    ]
    if faults:
        raise ConfigError.of([f"{fault}." for fault in faults])


_MODELS_AND_SAMPLING = (
    refuse(
        GenerationHyperparameters,
        "min_new_tokens",
        lambda section: section.min_new_tokens > section.max_new_tokens,
        "is {value}, more than max_new_tokens ({config.max_new_tokens})",
    ),
    refuse(GenerationHyperparameters, "top_k", lambda section: section.top_k < -1, "is {value}; 0 and -1 mean all tokens"),
    refuse(
        NormConfig,
        "leave_one_out",
        lambda norm: norm.leave_one_out and norm.mean_level == "none",
        "says what the mean leaves out, but mean_level is none, so there is no mean",
    ),
    refuse(
        NewModelConfig,
        "vision",
        lambda model: model.vision is not None and model.architecture != "qwen2_vl",
        "is set, but a {config.architecture} model has no vision tower; choose architecture qwen2_vl",
    ),
    refuse(
        NewModelConfig,
        "head_dim",
        lambda model: model.head_dim is not None and model.architecture == "qwen2_vl",
        "is hidden_size / heads in architecture qwen2_vl; leave it out",
    ),
    refuse(
        EvalConfig,
        "samples",
        lambda config: not config.greedy and not config.samples,
        "is 0 and greedy is false, so nothing would be evaluated; set one of them",
    ),
)


def _is_evaluated(config: BaseExperimentConfig) -> bool:
    return bool(config.valid_dataset is not None or getattr(config, "eval_tasksets", None))


_EVERY_EXPERIMENT = (
    refuse(
        BaseExperimentConfig,
        "evaluator",
        lambda config: has_interval(config.evaluator) and not _is_evaluated(config),
        "evaluates every so often, but there is no valid_dataset; give one",
    ),
    refuse(
        BaseExperimentConfig,
        "recover",
        lambda config: config.recover.mode == "off" and has_interval(config.recover),
        "mode is off, so nothing is saved every so often; take the interval or the mode out",
    ),
    refuse_set(
        BaseExperimentConfig,
        [f"{section}.every_seconds" for section in ("saver", "recover", "evaluator")],
        lambda config: config.deterministic,
        "goes by the clock, which a deterministic run does not; use every_steps",
    ),
    refuse(
        BaseExperimentConfig,
        "train_dataset.limit",
        lambda config: (
            config.train_dataset.drop_last
            and config.train_dataset.limit is not None
            and config.train_dataset.limit < config.train_dataset.batch_size
        ),
        "is {value}, less than one batch of {config.train_dataset.batch_size}; no batch would ever be full",
    ),
)


def _rows_wanted(config: SFTConfig) -> str:
    return "preference" if isinstance(config, DPOConfig) else "sft"


def _missing_for_accuracy(config: SFTConfig) -> str:
    """Name what ``stop_accuracy`` needs but the config lacks."""
    measures = {
        "valid_dataset": config.valid_dataset,
        "workflow": config.workflow,
        "an interval in evaluator (such as every_steps)": has_interval(config.evaluator),
    }
    return " and ".join(name for name, value in measures.items() if not value)


_SUPERVISED = (
    refuse(
        SFTConfig,
        "train_dataset.type",
        lambda config: config.train_dataset.type != _rows_wanted(config),
        lambda config: f"is {config.train_dataset.type}, but this stage trains on rows of type {_rows_wanted(config)}",
    ),
    refuse(
        SFTConfig,
        "model.optimizer",
        lambda config: config.model.optimizer is None,
        "is null, but the model is trained; give it at least lr",
    ),
    refuse(
        SFTConfig,
        "stop_accuracy",
        lambda config: config.stop_accuracy is not None and _missing_for_accuracy(config),
        lambda config: f"needs {_missing_for_accuracy(config)}, by which accuracy is measured",
    ),
)


# --- tasks: a dataset or tasksets, and the models beside them


def _draws_tasksets(config: PPOConfig) -> bool:
    return bool(config.tasksets) and config.mode in ("both", "explore")


#: Keys that are not read in runs with tasksets, and what a taskset has instead.
_IN_A_TASKSET = {
    "reward_fn": "its own reward_fn",
    "workflow_kwargs": "its own workflow_args",
    "eval_workflow": "eval_tasksets with a workflow",
    "eval_workflow_kwargs": "eval_tasksets with workflow_args",
}

_DATASET_OR_TASKSETS = (
    refuse_set(
        PPOConfig,
        ["train_dataset.path"],
        lambda config: config.tasksets,
        "is given beside tasksets, which take its place; keep one",
    ),
    refuse_set(
        PPOConfig,
        ["workflow"],
        lambda config: config.tasksets,
        "is given beside tasksets, which name their workflows; keep one",
    ),
    refuse(
        PPOConfig,
        "eval_tasksets",
        lambda config: config.eval_tasksets and not config.tasksets and config.mode in ("both", "explore"),
        "are evaluated where tasksets are trained on; give valid_dataset (and eval_workflow) here",
    ),
    refuse(
        PPOConfig,
        "valid_dataset",
        lambda config: config.valid_dataset is not None and _draws_tasksets(config),
        "is not evaluated beside tasksets; give eval_tasksets",
    ),
    *(
        refuse(
            PPOConfig,
            key,
            lambda config, key=key: getattr(config, key) and _draws_tasksets(config),
            f"is not read beside tasksets; a taskset has {instead}",
        )
        for key, instead in _IN_A_TASKSET.items()
    ),
    refuse(
        PPOConfig,
        "eval_workflow_kwargs",
        lambda config: config.eval_workflow_kwargs is not None and config.eval_workflow is None and config.workflow is None,
        "are given for no workflow; name eval_workflow or workflow",
    ),
)

#: Keys of ``TasksetConfig`` that are read only in datasets, or only in tasksets.
_ONLY_IN = {
    place: [each.name for each in fields(TasksetConfig) if each.metadata.get("read_in") == place]
    for place in ("datasets", "tasksets")
}
_DATASETS, _TASKSETS = ("train_dataset", "valid_dataset", "dataset"), ("tasksets.*", "eval_tasksets.*")

_READ_ELSEWHERE = (
    refuse_set(
        RunConfig,
        [f"{section}.{name}" for section in _DATASETS for name in _ONLY_IN["tasksets"] if name != "name"],
        keys_without_effect.always,
        "is read in tasksets, not in a dataset, which takes it from the run's own keys; take it out",
    ),
    refuse_set(
        RunConfig,
        [f"{section}.name" for section in _DATASETS],
        keys_without_effect.always,
        "is a taskset's name in metrics; the subset of a Hugging Face dataset is called subset",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.{name}" for section in _TASKSETS for name in _ONLY_IN["datasets"]],
        keys_without_effect.always,
        "is read in train_dataset and valid_dataset, not in a taskset; take it out",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.format.{key}" for section in _TASKSETS for key in ("chosen_key", "rejected_key")],
        keys_without_effect.always,
        "is not read by task-style workflows: pairs of replies are trained on by a stage of kind dpo",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.format.image_key" for section in _TASKSETS],
        keys_without_effect.always,
        "is not read by task-style workflows: a workflow finds its images in task.raw_task; or use train_dataset and vision_rlvr",
    ),
)


def _all_tasksets_set(config: PPOConfig, name: str) -> bool:
    """Return whether every taskset overrides this argument of the run's ``gconfig`` with another value, so no task uses it."""
    own, value = [taskset.gconfig for taskset in config.tasksets], getattr(config.gconfig, name)
    return bool(own) and all(each is not None and getattr(each, name) != value for each in own)


_TASKS = (
    *(
        refuse_set(
            PPOConfig,
            [f"gconfig.{each.name}"],
            partial(_all_tasksets_set, name=each.name),
            "is {value}, but every taskset has a gconfig of its own, which takes its place; set it there",
        )
        for each in fields(GenerationHyperparameters)
        if each.name != "n_samples"
    ),
    refuse(
        AuxiliaryModelConfig,
        "",
        lambda model: bool(model.model_path) == bool(model.base_url),
        lambda model: (
            f"has {'both' if model.model_path else 'neither'} of model_path (a model to serve) and base_url (a server that "
            "runs); give one"
        ),
    ),
)


def _groups_in_a_batch(config: PPOConfig) -> tuple[int, str]:
    """Return the number of sample groups in a batch, and the key that sets it."""
    if config.store and config.store.train_batch_size is not None and config.mode == "train":
        return -(-config.store.train_batch_size // config.group_size), "store.train_batch_size"
    return config.train_dataset.batch_size, "train_dataset.batch_size"


def _too_many_minibatches(config: PPOConfig, section: str = "actor") -> str:
    groups, key = _groups_in_a_batch(config)
    return (
        f"is {getattr(config, section).ppo_n_minibatches}, but a batch has {groups} groups of samples, which are not divided; lower it, or "
        f"raise {key}"
    )


def _recomputes(config: PPOConfig) -> bool:
    actor = config.actor
    return actor.recompute_logprob or (actor.use_decoupled_loss and actor.prox_logp_method == "recompute")


_POLICY = (
    refuse(
        PPOConfig,
        "critic",
        lambda config: config.critic is not None and not uses_critic(config.actor),
        "is given, but actor.adv_estimator is {config.actor.adv_estimator}, which has no critic; set actor.recipe to ppo, or take critic out",
    ),
    refuse(
        PPOConfig,
        "critic.optimizer",
        lambda config: config.critic is not None and config.critic.optimizer is None,
        "is null, but the critic is trained; give it at least lr",
    ),
    refuse(
        PPOConfig,
        "critic.lora",
        lambda config: config.critic is not None and config.critic.lora is not None,
        "is set, but a critic is trained whole; take it out, or set critic.shared, which trains only a value head",
    ),
    refuse(
        PPOConfig,
        "critic.ppo_n_minibatches",
        lambda config: config.critic is not None and config.critic.ppo_n_minibatches > _groups_in_a_batch(config)[0],
        partial(_too_many_minibatches, section="critic"),
    ),
    refuse(
        PPOConfig,
        "critic.ppo_n_minibatches",
        lambda config: (
            config.critic is not None
            and config.cluster.processes > 1
            and config.actor.ppo_n_minibatches % config.critic.ppo_n_minibatches != 0
        ),
        "is {value}, but cluster.processes is {config.cluster.processes}, which share a batch out by the actor's minibatches; set it to "
        "a divisor of actor.ppo_n_minibatches ({config.actor.ppo_n_minibatches})",
    ),
    refuse(
        PPOConfig,
        "actor.optimizer",
        lambda config: config.actor.optimizer is None,
        "is null, but the actor is trained; give it at least lr",
    ),
    refuse(
        PPOConfig,
        "ref",
        lambda config: config.ref is not None and config.actor.kl_ctl == 0,
        "is given, but actor.kl_ctl is 0, so no KL to it is taken; set actor.kl_ctl above 0 or take ref out",
    ),
    refuse(
        PPOConfig,
        "actor.ppo_n_minibatches",
        lambda config: config.actor.ppo_n_minibatches > _groups_in_a_batch(config)[0],
        _too_many_minibatches,
    ),
    refuse(
        PPOConfig,
        "rollout.weight_update_every_steps",
        lambda config: config.rollout.weight_update_every_steps > config.rollout.max_head_offpolicyness + 1,
        lambda config: (
            f"is {config.rollout.weight_update_every_steps}, so the last batch before a publication is "
            f"{config.rollout.weight_update_every_steps - 1} versions old when it is trained, but "
            f"rollout.max_head_offpolicyness allows {config.rollout.max_head_offpolicyness}; set that to "
            f"{config.rollout.weight_update_every_steps - 1} or more"
        ),
    ),
    refuse(
        PPOConfig,
        "rollout.accept_shifted_logprobs",
        lambda config: config.rollout.accept_shifted_logprobs and not _recomputes(config),
        "gives rows whose log-probabilities are not the policy's, and nothing puts the trainer's in their place; set "
        "actor.recompute_logprob",
    ),
    refuse(
        PPOConfig,
        "rollout.routing_replay",
        lambda config: config.rollout.routing_replay and config.actor.compile_layers,
        "replaces the choice of the routers, which compiled layers have built in; set actor.compile_layers to false",
    ),
    refuse(
        PPOConfig,
        "rollout.routing_replay",
        lambda config: config.rollout.routing_replay and config.rollout.backend == "vllm" and not config.rollout.prefix_cache,
        "needs rollout.prefix_cache with vLLM, which keeps the experts of a token with its cache; set that to true",
    ),
    refuse(
        PPOConfig,
        "journal.keep",
        lambda config: config.journal.keep is not None and _why_no_checkpoint(config),
        lambda config: (
            f"is {config.journal.keep} recovery checkpoints, but with {_why_no_checkpoint(config)} none is written beside a "
            "journal; take it out"
        ),
    ),
)


def _why_no_checkpoint(config: PPOConfig) -> str:
    """Return the setting that prevents recovery checkpoints, or an empty string if they are written."""
    if config.mode != "both":
        return f"mode {config.mode}"
    return "recover.mode off" if config.recover.mode == "off" else ""


def _samples_greedily(config: PPOConfig) -> bool:
    own = [each.gconfig or config.evaluator.gconfig for each in config.eval_tasksets] or [config.evaluator.gconfig]
    return any(each.is_greedy for each in own)


def _places(config: PPOConfig) -> int:
    """Return the maximum lead of explorers over the trainer, in samples."""
    return (config.rollout.max_head_offpolicyness + 1) * config.train_dataset.batch_size * config.group_size


def _needed(config: PPOConfig) -> int:
    """Return the number of experiences that the trainer takes from the store between two publications."""
    size = config.store.train_batch_size if config.store else None
    return (size or 0) * config.rollout.weight_update_every_steps


_MODES = (
    refuse(
        PPOConfig,
        "mode",
        lambda config: config.store is None and config.mode in ("explore", "train", "serve"),
        "{value} needs a store that its processes share; give a store section (store: {{}} is enough)",
    ),
    refuse_set(
        PPOConfig,
        [f"store.{name}" for name in ("type", "url", "order", "uses", "cooldown_seconds")],
        lambda config: config.mode == "both",
        "is not used in mode both, which trains on each group once, in order, from memory; take it out, or run mode explore "
        "beside mode train",
    ),
    refuse_set(
        PPOConfig,
        ["store.train_batch_size"],
        lambda config: config.mode == "both",
        "is not used in mode both, whose steps train on what they explored; take it out",
    ),
    refuse(
        PPOConfig,
        "store.train_batch_size",
        lambda config: config.mode == "explore" and _needed(config) > _places(config),
        lambda config: (
            f"is {config.store.train_batch_size}: the steps up to a publication need {_needed(config)} experiences, but "
            f"explorers are at most {_places(config)} ahead (train_dataset.batch_size × gconfig.n_samples × "
            "(rollout.max_head_offpolicyness + 1)); raise rollout.max_head_offpolicyness or train_dataset.batch_size"
        ),
    ),
    refuse(
        PPOConfig,
        "store.type",
        lambda config: config.store.type == "file" and config.mode in ("explore", "serve"),
        "is file, which mode {config.mode} cannot claim tasks from; set it to sql or queue",
    ),
    refuse(
        PPOConfig,
        "store.keep_used",
        lambda config: config.store.type == "file" and not config.store.keep_used,
        "is false, but a file keeps what was read from it; set store.type to sql or queue",
    ),
    refuse(
        PPOConfig,
        "deterministic",
        lambda config: config.deterministic and config.store is not None and config.mode in ("explore", "train"),
        "cannot be promised in mode {config.mode}: batches go by when groups come; use mode both",
    ),
    refuse(
        PPOConfig,
        "mode",
        lambda config: config.mode == "bench" and not config.eval_tasksets and config.valid_dataset is None,
        "bench has nothing to evaluate on; give valid_dataset, or eval_tasksets",
    ),
    refuse(
        PPOConfig,
        "workflow",
        lambda config: config.mode == "bench" and not (config.eval_tasksets or config.eval_workflow or config.workflow),
        "is not set, and mode bench evaluates with it",
    ),
    refuse(
        PPOConfig,
        "bench.samples",
        lambda config: config.mode == "bench" and config.bench.samples > 1 and _samples_greedily(config),
        "is {value}, but tasks are sampled greedily, so all samples of a task would be the same; set evaluator.gconfig.greedy to "
        "false (and a temperature), or this to 1",
    ),
)

#: Every rule that needs no torch, in the order in which faults of the same line are reported.
RULES: tuple[Rule, ...] = (
    *_MODELS_AND_SAMPLING,
    *ADAPTER_RULES,
    *_EVERY_EXPERIMENT,
    *_SUPERVISED,
    *_DATASET_OR_TASKSETS,
    *_READ_ELSEWHERE,
    *_TASKS,
    *keys_without_effect.RULES,
    *_POLICY,
    *TEACHER_RULES,
    *COLOCATION_RULES,
    *ENGINE_RULES,
    *CLUSTER_RULES,
    *_MODES,
)
