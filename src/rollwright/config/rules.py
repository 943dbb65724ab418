"""Rules between several keys: a combination that cannot do what it says is refused.

A rule is a line of a table: whether it is broken, the key that is told, and the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rollwright.config import cluster_rules, task_rules, unread_keys
from rollwright.config.experiment import (
    BaseExperimentConfig,
    DPOConfig,
    EvalConfig,
    NewModelConfig,
    PPOConfig,
    RunConfig,
    SFTConfig,
)
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.recipes import was_set
from rollwright.config.sections import (
    ClusterConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    SlurmConfig,
    TrainEngineConfig,
)
from rollwright.config.servers import SGLangConfig
from rollwright.config.source import KeyPath, dotted, undotted
from rollwright.config.task_rules import Rule
from rollwright.config.tasksets import TasksetConfig, keys_read_elsewhere
from rollwright.config.unread_keys import has_interval
from rollwright.config.validation import annotations_of, choices_of, is_section
from rollwright.errors import ConfigError

Fault = tuple[KeyPath, str]


def faults_of(config: Any) -> Iterator[Fault]:
    """The key and the message of every combination of settings in ``config`` that is refused, sections first."""
    for path, section in _sections(config, ()):
        for rules in [rules for cls, tables in _RULES.items() if isinstance(section, cls) for rules in tables]:
            yield from ((path + undotted(key), message) for broken, key, message in rules(section) if broken)


def validate(config: Any) -> None:
    """Refuse combinations of settings that cannot do what they say.

    Raises:
        ConfigError: with every fault, each with its key.
    """
    if faults := [f"{dotted(path)}: {message}" for path, message in faults_of(config)]:
        raise ConfigError.of(faults)


def refuse_dicts(config: Any) -> None:
    """Refuse dicts in place of dataclasses in a config built in Python, because their keys would be ignored.

    Raises:
        ConfigError: lists every such section, and what to write.
    """
    faults = [
        f"{dotted((*path, name))} is a dict; give {kind.__name__}({', '.join(f'{key}={each!r}' for key, each in value.items())})"
        for path, section in _sections(config, ())
        for name, annotation in annotations_of(type(section)).items()
        if isinstance(value := getattr(section, name, None), dict)
        for kind in [next((each for each in choices_of(annotation) if is_section(each)), None)]
        if kind is not None
    ]
    if faults:
        raise ConfigError.of([f"{fault}." for fault in faults])


def _sections(config: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if is_dataclass(config):
        for field in fields(config):
            yield from _sections(getattr(config, field.name), (*path, field.name))
        yield path, config
    elif isinstance(config, list):
        for index, each in enumerate(config):
            yield from _sections(each, (*path, index))


def _generation(section: GenerationHyperparameters) -> list[Rule]:
    least, most = section.min_new_tokens, section.max_new_tokens
    return [
        (least > most, "min_new_tokens", f"is {least}, more than max_new_tokens ({most})"),
        (section.top_k < -1, "top_k", f"is {section.top_k}; 0 and -1 mean all tokens"),
    ]


def _norm(section: NormConfig) -> list[Rule]:
    pointless = section.leave_one_out and section.mean_level == "none"
    return [(pointless, "leave_one_out", "says what the mean leaves out, but mean_level is none, so there is no mean")]


def _actor(actor: PPOActorConfig) -> list[Rule]:
    """Keys of the algorithm that were set and that nothing reads; those of a loss are its parameters (``algorithms.losses``)."""
    estimator, cap, norm = actor.adv_estimator, actor.behav_imp_weight_cap, actor.adv_norm or NormConfig()
    normalised, coupled = estimator == "normalised", not actor.use_decoupled_loss
    levels, unnormed = (norm.mean_level, norm.std_level), (None, "none")
    of_norm = (not normalised, f"the estimator {estimator!r} does not read adv_norm")
    unread: dict[str, tuple[bool, str]] = {
        "kl_estimator": (actor.kl_ctl == 0, "kl_ctl is 0, so no KL is taken"),
        "loss_constant": (actor.loss_aggregation != "constant", f"loss_aggregation is {actor.loss_aggregation}"),
        "adv_estimator_kwargs": (normalised, "adv_estimator is normalised, whose keys are in adv_norm"),
        **{f"adv_norm.{each.name}": of_norm for each in fields(NormConfig) if not normalised},
        "adv_norm.std_after_mean": (
            not (
                levels == ("group", "batch") or (norm.leave_one_out and levels[0] not in unnormed and levels[1] not in unnormed)
            ),
            "with these levels the deviation is the same",
        ),
        "adv_norm.eps": (not normalised or levels[1] in unnormed, "nothing is divided by a deviation"),
        "behav_imp_weight_cap": (coupled, "use_decoupled_loss is false, so nothing is weighted by the behaviour policy"),
        "behav_imp_weight_mode": (coupled or cap is None, "no weight is capped"),
        "behav_imp_weight_level": (coupled, "use_decoupled_loss is false, so nothing is weighted by the behaviour policy"),
        "prox_logp_method": (
            coupled or actor.recompute_logprob or actor.ppo_n_minibatches == 1,
            "use_decoupled_loss is false, recompute_logprob recomputes, or ppo_n_minibatches is 1, so that before the only step the "
            "current log-probabilities are taken",
        ),
    }
    return [
        (broken and was_set(actor, key), key, f"is set, but not read: {why}; take it out, or change that")
        for key, (broken, why) in unread.items()
        if actor.adv_norm or not key.startswith("adv_norm.")
    ]


def _new_model(config: NewModelConfig) -> list[Rule]:
    sees = config.architecture == "qwen2_vl"
    blind = f"is set, but a {config.architecture} model sees nothing; choose architecture qwen2_vl"
    return [
        (config.vision is not None and not sees, "vision", blind),
        (config.head_dim is not None and sees, "head_dim", "is hidden_size / heads in architecture qwen2_vl; leave it out"),
    ]


def _evaluation(config: EvalConfig) -> list[Rule]:
    nothing = not config.greedy and not config.samples
    return [(nothing, "samples", "is 0 and greedy is false, so nothing would be evaluated; set one of them")]


def _experiment(config: BaseExperimentConfig) -> list[Rule]:
    evaluates = config.valid_dataset is not None or getattr(config, "eval_tasksets", None)
    data = config.train_dataset
    datasets = [("train_dataset", data), *([("valid_dataset", config.valid_dataset)] if config.valid_dataset else [])]
    return [
        (
            not evaluates and has_interval(config.evaluator),
            "evaluator",
            "evaluates every so often, but there is no valid_dataset; give one",
        ),
        (
            config.recover.mode == "off" and has_interval(config.recover),
            "recover",
            "mode is off, so nothing is saved every so often; take the interval or the mode out",
        ),
        *(
            (
                config.deterministic and getattr(config, name).every_seconds is not None,
                f"{name}.every_seconds",
                "goes by the clock, which a deterministic run does not; use every_steps",
            )
            for name in ("saver", "recover", "evaluator")
        ),
        *(
            (True, f"{name}.{key}", message)
            for name, each in datasets
            for key, message in keys_read_elsewhere(each, "datasets")
        ),
        (
            data.limit is not None and data.drop_last and data.limit < data.batch_size,
            "train_dataset.limit",
            f"is {data.limit}, less than one batch of {data.batch_size}; no batch would ever be full",
        ),
    ]


def _supervised(config: SFTConfig) -> list[Rule]:
    wanted = "preference" if isinstance(config, DPOConfig) else "sft"
    measures = {
        "valid_dataset": config.valid_dataset,
        "workflow": config.workflow,
        "an interval in evaluator (such as every_steps)": has_interval(config.evaluator),
    }
    missing = " and ".join(name for name, value in measures.items() if not value)
    return [
        (
            config.train_dataset.type != wanted,
            "train_dataset.type",
            f"is {config.train_dataset.type}, but this stage trains on rows of type {wanted}",
        ),
        (config.model.optimizer is None, "model.optimizer", "is null, but the model is trained; give it at least lr"),
        (config.stop_accuracy is not None and missing, "stop_accuracy", f"needs {missing}, by which accuracy is measured"),
    ]


def _training(config: PPOConfig) -> list[Rule]:
    actor, rollout = config.actor, config.rollout
    tasks, size = config.train_dataset.batch_size, config.store.train_batch_size if config.store else None
    groups, size_key = tasks, "train_dataset.batch_size"
    if size is not None and config.mode == "train":
        groups, size_key = -(-size // config.gconfig.n_samples), "store.train_batch_size"
    every = rollout.weight_update_every_steps
    recomputes = actor.recompute_logprob or (actor.use_decoupled_loss and actor.prox_logp_method == "recompute")
    return [
        (
            config.critic is not None,
            "critic",
            "a value model is not built yet; take the section out (GRPO compares the samples of a group)",
        ),
        (actor.optimizer is None, "actor.optimizer", "is null, but the actor is trained; give it at least lr"),
        (
            config.ref is not None and actor.kl_ctl == 0,
            "ref",
            "is given, but actor.kl_ctl is 0, so no KL to it is taken; set actor.kl_ctl above 0 or take ref out",
        ),
        (
            actor.ppo_n_minibatches > groups,
            "actor.ppo_n_minibatches",
            f"is {actor.ppo_n_minibatches}, but a batch has {groups} groups of samples, which are not divided; lower it, or raise "
            f"{size_key}",
        ),
        (
            every > rollout.max_head_offpolicyness + 1,
            "rollout.weight_update_every_steps",
            f"is {every}, so the last batch before a publication is {every - 1} versions old when it is trained, but "
            f"rollout.max_head_offpolicyness allows {rollout.max_head_offpolicyness}; set that to {every - 1} or more",
        ),
        (
            rollout.accept_shifted_logprobs and not recomputes,
            "rollout.accept_shifted_logprobs",
            "gives rows whose log-probabilities are not the policy's, and nothing puts the trainer's in their place; set "
            "actor.recompute_logprob",
        ),
    ]


#: Keys of ``rollout`` that only servers read, and that only the built-in engine reads.
_OF_SERVERS = ("weight_update", "weight_update_path", "weight_dtype", "request_retries")
_OF_THE_BUILTIN_ENGINE = ("device", "max_running_requests", "kv_cache_bytes")


def _rollout(config: PPOConfig) -> list[Rule]:
    rollout, backend = config.rollout, config.rollout.backend
    here, of_servers = backend.startswith("builtin"), backend not in ("builtin", "builtin_process")
    changed = {
        name: value
        for name, default in (("servers", 1), ("tensor_parallel", 1), ("first_gpu", None))
        if (value := getattr(rollout, name)) != default
    }
    lacking = [name for name in changed if not of_servers and (name, backend) != ("servers", "builtin_process")]
    unread = [(name, "is of servers") for name in _OF_SERVERS if backend == "builtin"]
    unread += [(name, "is of the built-in engine") for name in _OF_THE_BUILTIN_ENGINE if backend in ("sglang", "vllm")]
    unread += [("weight_update_path", "is where weight_update: disk writes")] if rollout.weight_update != "disk" else []
    return [
        *(
            (
                getattr(rollout, name) != getattr(type(rollout)(), name),
                f"rollout.{name}",
                f"{whose}, but rollout.backend is {backend} and rollout.weight_update {rollout.weight_update}; take it out",
            )
            for name, whose in dict(unread).items()
        ),
        *(
            (
                here and getattr(rollout, name),
                f"rollout.{name}",
                f"names a server, but rollout.backend is {backend}; set it to sglang or vllm",
            )
            for name in ("addresses", "api_key")
        ),
        *(
            (
                name in lacking,
                f"rollout.{name}",
                f"is {value}, which the {backend} engine does not have; set rollout.backend to sglang or vllm",
            )
            for name, value in changed.items()
        ),
        *(
            (
                rollout.addresses and name not in lacking,
                f"rollout.{name}",
                "is about servers that are started here, but rollout.addresses names some that run; keep one",
            )
            for name in changed
        ),
        (
            rollout.context_length is not None and rollout.context_length <= config.gconfig.max_new_tokens,
            "rollout.context_length",
            f"is {rollout.context_length} for prompt and completion together, which leaves no room for a prompt beside "
            f"gconfig.max_new_tokens ({config.gconfig.max_new_tokens})",
        ),
    ]


def _mode(config: PPOConfig) -> list[Rule]:
    missing = config.store is None and config.mode in ("explore", "train", "serve")
    needed = f"{config.mode} needs a store that its processes share; give a store section (store: {{}} is enough)"
    return [(missing, "mode", needed)]


def _journal(config: PPOConfig) -> list[Rule]:
    writes_none = f"mode {config.mode}" if config.mode != "both" else "recover.mode off" if config.recover.mode == "off" else ""
    message = (
        f"is {config.journal.keep} recover checkpoints, but with {writes_none} none is written beside a journal; take it out"
    )
    return [(bool(writes_none) and config.journal.keep is not None, "journal.keep", message)]


def _bench(config: PPOConfig) -> list[Rule]:
    """Something to evaluate, and samples of a task that can differ."""
    if config.mode != "bench":
        return []
    own = [each.gconfig or config.evaluator.gconfig for each in config.eval_tasksets] or [config.evaluator.gconfig]
    return [
        (
            not config.eval_tasksets and config.valid_dataset is None,
            "mode",
            "bench has nothing to evaluate on; give valid_dataset, or eval_tasksets",
        ),
        (
            not config.eval_tasksets and not (config.eval_workflow or config.workflow),
            "workflow",
            "is not set, and mode bench evaluates with it",
        ),
        (
            config.bench.samples > 1 and any(each.is_greedy for each in own),
            "bench.samples",
            f"is {config.bench.samples}, but tasks are sampled greedily, so all samples of a task would be the same; set "
            "evaluator.gconfig.greedy to false (and a temperature), or this to 1",
        ),
    ]


def _store(config: PPOConfig) -> list[Rule]:
    store, mode = config.store, config.mode
    if store is None:
        return []
    places = (config.rollout.max_head_offpolicyness + 1) * config.train_dataset.batch_size * config.gconfig.n_samples
    needed = (store.train_batch_size or 0) * config.rollout.weight_update_every_steps
    return [
        *(
            (
                mode == "both" and getattr(store, name) != default,
                f"store.{name}",
                "is not used in mode both, which trains on each group once, in order, from memory; take it out, or run mode "
                "explore beside mode train",
            )
            for name, default in (("type", "sql"), ("url", ""), ("order", "fifo"), ("uses", 1), ("cooldown_seconds", 0.0))
        ),
        (
            mode == "both" and store.train_batch_size is not None,
            "store.train_batch_size",
            "is not used in mode both, whose steps train on what they explored; take it out",
        ),
        (
            mode == "explore" and needed > places,
            "store.train_batch_size",
            f"is {store.train_batch_size}: the steps up to a publication need {needed} experiences, but explorers are at most "
            f"{places} ahead (train_dataset.batch_size × gconfig.n_samples × (rollout.max_head_offpolicyness + 1)); raise "
            "rollout.max_head_offpolicyness or train_dataset.batch_size",
        ),
        (
            mode in ("explore", "serve") and store.type == "file",
            "store.type",
            f"is file, which mode {mode} cannot claim tasks from; set it to sql or queue",
        ),
        (
            store.type == "file" and not store.keep_used,
            "store.keep_used",
            "is false, but a file keeps what was read from it; set store.type to sql or queue",
        ),
        (
            mode in ("explore", "train") and config.deterministic,
            "deterministic",
            f"cannot be promised in mode {mode}: batches go by when groups come; use mode both",
        ),
    ]


def _deterministic(config: PPOConfig) -> list[Rule]:
    rollout = config.rollout
    if not config.deterministic:
        return []
    return [
        (
            rollout.backend == "vllm" and config.vllm.device == "cpu",
            "vllm.device",
            "is cpu, where vLLM has no batch-invariant mode; use a GPU, or rollout.backend builtin",
        ),
        (
            rollout.over_sampling > 0,
            "rollout.over_sampling",
            "cuts the slowest samples by the clock, which a deterministic run does not",
        ),
    ]


#: The rules of each section, wherever it is, and of each kind of config.
_RULES: dict[type, tuple[Callable[[Any], list[Rule]], ...]] = {
    ClusterConfig: (cluster_rules.placement,),
    GenerationHyperparameters: (_generation, unread_keys.of_generation),
    TrainEngineConfig: (unread_keys.of_model,),
    OptimizerConfig: (unread_keys.of_optimizer,),
    TasksetConfig: (unread_keys.of_taskset,),
    SGLangConfig: (unread_keys.of_sglang,),
    SlurmConfig: (unread_keys.of_slurm,),
    NormConfig: (_norm,),
    PPOActorConfig: (_actor,),
    NewModelConfig: (_new_model,),
    RunConfig: (unread_keys.of_run,),
    EvalConfig: (_evaluation, unread_keys.of_evaluation),
    BaseExperimentConfig: (_experiment, unread_keys.of_training, cluster_rules.trained_on_ray),
    SFTConfig: (_supervised, unread_keys.of_supervised),
    DPOConfig: (unread_keys.of_reference,),
    PPOConfig: (
        task_rules.tasks,
        task_rules.taskset_columns,
        task_rules.auxiliary_models,
        task_rules.generation_of_tasks,
        unread_keys.of_policy,
        unread_keys.of_reference,
        _training,
        _rollout,
        cluster_rules.processes,
        cluster_rules.ray,
        _mode,
        _journal,
        _store,
        _bench,
        _deterministic,
    ),
}
