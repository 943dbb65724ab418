"""Checks that look at several keys together: a combination that cannot do what it says is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rollwright.config.experiment import BaseExperimentConfig, DPOConfig, EvalConfig, NewModelConfig, PPOConfig, SFTConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import IntervalConfig, NormConfig
from rollwright.config.source import KeyPath, dotted
from rollwright.config.tasksets import DatasetConfig, FormatConfig, unread_keys
from rollwright.errors import ConfigError

Fault = tuple[KeyPath, str]


def faults_of(config: Any) -> Iterator[Fault]:
    """The key and the message of every combination of settings in ``config`` that is refused."""
    for path, section in _sections(config, ()):
        if isinstance(section, GenerationHyperparameters):
            yield from _generation(section, path)
        if isinstance(section, NormConfig) and section.leave_one_out and section.mean_level == "none":
            yield (*path, "leave_one_out"), "says what the mean leaves out, but mean_level is none, so there is no mean"
    if isinstance(config, NewModelConfig):
        yield from _new_model(config)
    if isinstance(config, EvalConfig) and not config.greedy and not config.samples:
        yield ("samples",), "is 0 and greedy is false, so nothing would be evaluated; set one of them"
    if isinstance(config, BaseExperimentConfig):
        yield from _experiment(config)
    if isinstance(config, SFTConfig):
        yield from _supervised(config)
    if isinstance(config, PPOConfig):
        yield from _policy(config)
        yield from _store(config)
        if config.mode == "bench":
            yield from _bench(config)
        if config.deterministic:
            yield from _deterministic(config)


def validate(config: Any) -> None:
    """Refuse combinations of settings that cannot do what they say.

    Raises:
        ConfigError: with every fault, each with its key.
    """
    if faults := [f"{dotted(path)}: {message}" for path, message in faults_of(config)]:
        raise ConfigError.of(faults)


def _sections(config: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if is_dataclass(config):
        yield path, config
        for field in fields(config):
            yield from _sections(getattr(config, field.name), (*path, field.name))


def _new_model(config: NewModelConfig) -> Iterator[Fault]:
    sees = config.architecture == "qwen2_vl"
    if config.vision is not None and not sees:
        yield ("vision",), f"is set, but a {config.architecture} model sees nothing; choose architecture qwen2_vl"
    if config.head_dim is not None and sees:
        yield ("head_dim",), "is hidden_size / heads in architecture qwen2_vl; leave it out"


def _generation(gconfig: GenerationHyperparameters, path: KeyPath) -> Iterator[Fault]:
    if gconfig.min_new_tokens > gconfig.max_new_tokens:
        yield (*path, "min_new_tokens"), f"is {gconfig.min_new_tokens}, more than max_new_tokens ({gconfig.max_new_tokens})"
    if gconfig.top_k < -1:
        yield (*path, "top_k"), f"is {gconfig.top_k}; 0 and -1 mean all tokens"


def _experiment(config: BaseExperimentConfig) -> Iterator[Fault]:
    evaluates = config.valid_dataset is not None or getattr(config, "eval_tasksets", None)
    if not evaluates and _has_interval(config.evaluator):
        yield ("evaluator",), "evaluates every so often, but there is no valid_dataset; give one"
    if config.recover.mode == "off" and _has_interval(config.recover):
        yield ("recover",), "mode is off, so nothing is saved every so often; take the interval or the mode out"
    if config.deterministic:
        for name in ("saver", "recover", "evaluator"):
            if getattr(config, name).every_seconds is not None:
                yield (name, "every_seconds"), "goes by the clock, which a deterministic run does not; use every_steps"
    for name in ("train_dataset", "valid_dataset"):
        dataset: DatasetConfig | None = getattr(config, name)
        if dataset:
            yield from (((name, key), message) for key, message in unread_keys(dataset, "datasets"))
        if (
            dataset
            and dataset.limit is not None
            and dataset.drop_last
            and name == "train_dataset"
            and dataset.limit < dataset.batch_size
        ):
            yield (
                (name, "limit"),
                f"is {dataset.limit}, less than one batch of {dataset.batch_size}; no batch would ever be full",
            )


def _supervised(config: SFTConfig) -> Iterator[Fault]:
    wanted = "preference" if isinstance(config, DPOConfig) else "sft"
    if config.train_dataset.type != wanted:
        yield ("train_dataset", "type"), f"is {config.train_dataset.type}, but this stage trains on rows of type {wanted}"
    if config.model.optimizer is None:
        yield ("model", "optimizer"), "is null, but the model is trained; give it at least lr"
    if config.stop_accuracy is not None:
        yield from _stops_by_accuracy(config)


def _stops_by_accuracy(config: SFTConfig) -> Iterator[Fault]:
    needed = {
        "valid_dataset": config.valid_dataset,
        "workflow": config.workflow,
        "an interval in evaluator (such as every_steps)": _has_interval(config.evaluator),
    }
    if missing := [name for name, value in needed.items() if not value]:
        yield ("stop_accuracy",), f"needs {' and '.join(missing)}, by which accuracy is measured"


def _has_interval(section: IntervalConfig) -> bool:
    return any(value is not None for value in (section.every_steps, section.every_epochs, section.every_seconds))


#: Keys of a format that say nothing to a task-style workflow, and what to do.
_UNREAD_BY_TASKS = {
    "chosen_key": "pairs of replies are trained on by a stage of kind dpo",
    "rejected_key": "pairs of replies are trained on by a stage of kind dpo",
    "image_key": "a workflow finds its images in task.raw_task; or use train_dataset and vision_rlvr",
}


def _policy(config: PPOConfig) -> Iterator[Fault]:
    actor, rollout = config.actor, config.rollout
    if config.store is None and config.mode in ("explore", "train", "serve"):
        yield (
            ("mode",),
            f"{config.mode} needs a store that its processes share; give a store section (store: {{}} is enough)",
        )
    if config.tasksets and config.train_dataset.path:
        yield ("train_dataset", "path"), "is given beside tasksets, which take its place; keep one"
    if config.tasksets and config.workflow:
        yield ("workflow",), "is given beside tasksets, which name their workflows; keep one"
    yield from _two_ways_to_give_tasks(config)
    for name in ("tasksets", "eval_tasksets"):
        for index, taskset in enumerate(getattr(config, name)):
            yield from (((name, index, key), message) for key, message in unread_keys(taskset, "tasksets"))
            for key, remedy in _UNREAD_BY_TASKS.items():
                if getattr(taskset.columns, key) != getattr(FormatConfig(), key):
                    yield (name, index, "format", key), f"is not read by task-style workflows: {remedy}"
    yield from _generation_of_tasks(config)
    for index, auxiliary in enumerate(config.auxiliary_models):
        if bool(auxiliary.model_path) == bool(auxiliary.base_url):
            which = "both" if auxiliary.model_path else "neither"
            yield (
                ("auxiliary_models", index),
                f"has {which} of model_path (a model to serve) and base_url (a server that runs); give one",
            )
    if config.critic is not None:
        yield ("critic",), "a value model is not built yet; take the section out (GRPO compares the samples of a group)"
    if actor.optimizer is None:
        yield ("actor", "optimizer"), "is null, but the actor is trained; give it at least lr"
    if config.ref is not None and actor.kl_ctl == 0:
        yield ("ref",), "is given, but actor.kl_ctl is 0, so no KL to it is taken; set actor.kl_ctl above 0 or take ref out"
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    if actor.ppo_n_minibatches > samples:
        yield (
            ("actor", "ppo_n_minibatches"),
            f"is {actor.ppo_n_minibatches}, but a batch has {samples} samples (train_dataset.batch_size × gconfig.n_samples)",
        )
    if rollout.weight_update_every_steps > rollout.max_head_offpolicyness + 1:
        every = rollout.weight_update_every_steps
        yield (
            ("rollout", "weight_update_every_steps"),
            f"is {every}, so the last batch before a publication is {every - 1} versions old when it is trained, but "
            f"rollout.max_head_offpolicyness allows {rollout.max_head_offpolicyness}; set that to {every - 1} or more",
        )
    if rollout.backend.startswith("builtin"):
        for name in ("addresses", "api_key"):
            if getattr(rollout, name):
                yield ("rollout", name), f"names a server, but rollout.backend is {rollout.backend}; set it to sglang or vllm"
    for name, default in (("servers", 1), ("tensor_parallel", 1), ("first_gpu", None)):
        value, of_servers = getattr(rollout, name), rollout.backend not in ("builtin", "builtin_process")
        if value != default and not of_servers and (name, rollout.backend) != ("servers", "builtin_process"):
            yield (
                ("rollout", name),
                f"is {value}, which the {rollout.backend} engine does not have; set rollout.backend to sglang or vllm",
            )
        elif value != default and rollout.addresses:
            yield (
                ("rollout", name),
                "is about servers that are started here, but rollout.addresses names some that run; keep one",
            )
    recomputes = actor.recompute_logprob or (actor.use_decoupled_loss and actor.prox_logp_method == "recompute")
    if rollout.accept_shifted_logprobs and not recomputes:
        yield (
            ("rollout", "accept_shifted_logprobs"),
            "gives rows whose log-probabilities are not the policy's, and nothing puts the trainer's in their place; set "
            "actor.recompute_logprob",
        )
    if rollout.context_length is not None and rollout.context_length <= config.gconfig.max_new_tokens:
        yield (
            ("rollout", "context_length"),
            f"is {rollout.context_length} for prompt and completion together, which leaves no room for a prompt beside "
            f"gconfig.max_new_tokens ({config.gconfig.max_new_tokens})",
        )
    if config.eval_workflow_kwargs is not None and config.eval_workflow is None and config.workflow is None:
        yield ("eval_workflow_kwargs",), "are given for no workflow; name eval_workflow or workflow"


def _bench(config: PPOConfig) -> Iterator[Fault]:
    """Something to evaluate, and samples of a task that can differ."""
    if not config.eval_tasksets and config.valid_dataset is None:
        yield ("mode",), "bench has nothing to evaluate on; give valid_dataset, or eval_tasksets"
    if not config.eval_tasksets and not (config.eval_workflow or config.workflow):
        yield ("workflow",), "is not set, and mode bench evaluates with it"
    own = [each.gconfig or config.evaluator.gconfig for each in config.eval_tasksets] or [config.evaluator.gconfig]
    if config.bench.samples > 1 and any(each.is_greedy for each in own):
        yield (
            ("bench", "samples"),
            f"is {config.bench.samples}, but tasks are sampled greedily, so all samples of a task would be the same; set "
            "evaluator.gconfig.greedy to false (and a temperature), or this to 1",
        )


#: Keys of runs without tasksets, and what a taskset has in their place.
_IN_A_TASKSET = {
    "reward_fn": "its own reward_fn",
    "workflow_kwargs": "its own workflow_args",
    "eval_workflow": "eval_tasksets with a workflow",
    "eval_workflow_kwargs": "eval_tasksets with workflow_args",
}


def _two_ways_to_give_tasks(config: PPOConfig) -> Iterator[Fault]:
    """Keys of the one way that the other does not read."""
    if config.mode not in ("both", "explore"):
        return
    if config.eval_tasksets and not config.tasksets:
        yield ("eval_tasksets",), "are evaluated where tasksets are trained on; give valid_dataset (and eval_workflow) here"
    if not config.tasksets:
        return
    if config.valid_dataset is not None:
        yield ("valid_dataset",), "is not evaluated beside tasksets; give eval_tasksets"
    for key, instead in _IN_A_TASKSET.items():
        if getattr(config, key):
            yield (key,), f"is not read beside tasksets; a taskset has {instead}"


def _generation_of_tasks(config: PPOConfig) -> Iterator[Fault]:
    """Generation arguments of the run that no task is sampled with, since all tasksets have their own."""
    plain = GenerationHyperparameters()
    own = [taskset.gconfig for taskset in config.tasksets if taskset.gconfig is not None]
    if not own or len(own) < len(config.tasksets):
        return
    for field in fields(plain):
        value = getattr(config.gconfig, field.name)
        unused = value != getattr(plain, field.name) and all(getattr(each, field.name) != value for each in own)
        if unused and field.name != "n_samples":
            yield (
                ("gconfig", field.name),
                f"is {value}, but every taskset has a gconfig of its own, which takes its place; set it there",
            )


def _store(config: PPOConfig) -> Iterator[Fault]:
    store = config.store
    if store is None:
        return
    if config.mode == "both":
        for name, default in (("type", "sql"), ("url", ""), ("order", "fifo"), ("uses", 1), ("cooldown_seconds", 0.0)):
            if getattr(store, name) != default:
                yield (
                    ("store", name),
                    "is not used in mode both, which trains on each group once, in order, from memory; take it out, or run mode "
                    "explore beside mode train",
                )
        if store.train_batch_size is not None:
            yield (
                ("store", "train_batch_size"),
                "is not used in mode both, whose steps train on what they explored; take it out",
            )
    places = (config.rollout.max_head_offpolicyness + 1) * config.train_dataset.batch_size * config.gconfig.n_samples
    needed = (store.train_batch_size or 0) * config.rollout.weight_update_every_steps
    if config.mode == "explore" and needed > places:
        yield (
            ("store", "train_batch_size"),
            f"is {store.train_batch_size}: the steps up to a publication need {needed} experiences, but explorers are at most "
            f"{places} ahead (train_dataset.batch_size × gconfig.n_samples × (rollout.max_head_offpolicyness + 1)); raise "
            "rollout.max_head_offpolicyness or train_dataset.batch_size",
        )
    if config.mode in ("explore", "serve") and store.type == "file":
        yield ("store", "type"), f"is file, which mode {config.mode} cannot claim tasks from; set it to sql or queue"
    if store.type == "file" and not store.keep_used:
        yield ("store", "keep_used"), "is false, but a file keeps what was read from it; set store.type to sql or queue"
    if config.mode in ("explore", "train") and config.deterministic:
        yield ("deterministic",), f"cannot be promised in mode {config.mode}: batches go by when groups come; use mode both"


def _deterministic(config: PPOConfig) -> Iterator[Fault]:
    rollout = config.rollout
    if rollout.backend != "builtin":
        yield (
            ("rollout", "backend"),
            f"a deterministic run needs the built-in engine in its own process (builtin): {rollout.backend} batches by arrival",
        )
    if rollout.max_head_offpolicyness > 0:
        yield (
            ("rollout", "max_head_offpolicyness"),
            "is above 0: which version samples a token would go by the clock, which a deterministic run does not",
        )
    if rollout.over_sampling > 0:
        yield ("rollout", "over_sampling"), "cuts the slowest samples by the clock, which a deterministic run does not"
