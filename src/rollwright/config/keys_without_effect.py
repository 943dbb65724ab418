"""Rules about keys that are set but would not be read, each with the reason.

A key counts as set if its value is not the default. ``tests/unit/config/test_every_key.py`` finds keys that are missing here: it runs
small configs and records every key that is read.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rollwright.config.experiment import BaseExperimentConfig, DPOConfig, EvalConfig, PPOConfig, RunConfig, SFTConfig
from rollwright.config.faults import unread
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import (
    SHARED_CRITIC_KEYS,
    EvaluatorConfig,
    IntervalConfig,
    JournalConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    SlurmConfig,
    TrainEngineConfig,
)
from rollwright.config.servers import LocalServerConfig, SGLangConfig, is_endpoint
from rollwright.config.tasksets import DatasetConfig, TasksetConfig

_INTERVAL = tuple(each.name for each in fields(IntervalConfig))
_OF_REMOTE_ENGINES = [f"rollout.{name}" for name in ("request_timeout", "setup_timeout", "accept_shifted_logprobs")]
_OF_SERVERS_AND_TRAINING = [
    f"rollout.{name}"
    for name in (
        *("addresses", "servers", "tensor_parallel", "first_gpu", "colocate", "api_key", "path", "openai_front"),
        *("request_retries", "weight_update", "weight_update_path", "weight_update_timeout", "weight_dtype"),
        *("weight_update_every_steps", "canary", "routing_replay"),
    )
]
_OF_THE_ENGINE_HERE = (
    "device",
    "dtype",
    "max_running_requests",
    "context_length",
    "kv_cache_bytes",
    "prefix_cache",
    "prompt_lookup_tokens",
    "on_weight_update",
)
_OF_EVALUATION = [f"evaluator.{each.name}" for each in fields(EvaluatorConfig) if each.name not in _INTERVAL]
_OF_SUPERVISED_EPISODES = ["workflow", "workflow_kwargs", "reward_fn", "rollout"]


def has_interval(section: IntervalConfig) -> bool:
    """Return True if any interval is set."""
    return any(getattr(section, name) is not None for name in _INTERVAL)


def always(section: object) -> bool:
    """Return True: the rule applies to every section."""
    return True


def _why_greedy(section: GenerationHyperparameters) -> str:
    return f"{'greedy is true' if section.greedy else 'temperature is 0'}, which takes the most likely token"


def runs_episodes(config: SFTConfig) -> bool:
    """Return True if supervised training evaluates the model by episodes of held-out tasks."""
    return bool(config.workflow and config.valid_dataset is not None)


def _without_journal(kind: type[PPOConfig | EvalConfig]) -> Any:
    keys = [f"journal.{each.name}" for each in fields(JournalConfig) if each.name != "enabled"]
    return unread(kind, keys, lambda config: not config.journal.enabled, "journal.enabled is false")


_GENERATION = (
    unread(GenerationHyperparameters, ["top_p", "min_p", "seed"], lambda section: section.is_greedy, _why_greedy),
    unread(
        GenerationHyperparameters, ["temperature"], lambda section: section.greedy and section.temperature != 0, _why_greedy
    ),
    unread(GenerationHyperparameters, ["top_k"], lambda section: section.is_greedy and section.top_k != -1, _why_greedy),
)

_MODELS = (
    unread(
        TrainEngineConfig,
        ["gradient_checkpointing_every"],
        lambda model: not model.gradient_checkpointing,
        "gradient_checkpointing is false",
    ),
    unread(
        OptimizerConfig,
        ["min_lr_ratio"],
        lambda optimizer: optimizer.lr_scheduler_type == "constant",
        "lr_scheduler_type is constant",
    ),
    unread(
        PPOConfig | DPOConfig,
        ["ref.optimizer"],
        lambda config: config.ref.optimizer is not None,
        "the reference is not trained",
    ),
    unread(PPOConfig | DPOConfig, ["ref.max_bad_steps", "ref.lora"], always, "the reference is not trained"),
    unread(PPOConfig, ["critic.logits_chunk_mib"], always, "a critic has a value for each token and no logits"),
    unread(
        PPOConfig,
        [f"critic.{each.name}" for each in fields(TrainEngineConfig) if each.name not in SHARED_CRITIC_KEYS],
        lambda config: config.critic.shared,
        "critic.shared is true, so the critic computes with the actor's model; set it in actor",
    ),
)


def _normalises(actor: PPOActorConfig) -> bool:
    return actor.adv_estimator == "normalised"


def _deviation_is_the_same(actor: PPOActorConfig) -> bool:
    """Return whether taking the deviation before or after the mean makes no difference."""
    norm, none = actor.adv_norm or NormConfig(), (None, "none")
    mean, deviation = norm.mean_level, norm.std_level
    leaves_out = norm.leave_one_out and mean not in none and deviation not in none
    return (mean, deviation) != ("group", "batch") and not leaves_out


#: Keys of the algorithm, except those that a policy loss reads as its parameters (``algorithms.losses``).
_ALGORITHM = (
    unread(PPOActorConfig, ["kl_estimator", "kl_in"], lambda actor: actor.kl_ctl == 0, "kl_ctl is 0, so no KL is taken"),
    unread(
        PPOActorConfig,
        ["loss_constant"],
        lambda actor: actor.loss_aggregation != "constant",
        "loss_aggregation is {config.loss_aggregation}",
    ),
    unread(PPOActorConfig, ["adv_estimator_kwargs"], _normalises, "adv_estimator is normalised, whose keys are in adv_norm"),
    unread(
        PPOActorConfig,
        ["adv_norm"],
        lambda actor: not _normalises(actor),
        "the estimator {config.adv_estimator!r} does not read adv_norm",
    ),
    unread(PPOActorConfig, ["adv_norm.std_after_mean"], _deviation_is_the_same, "with these levels the deviation is the same"),
    unread(
        PPOActorConfig,
        ["adv_norm.eps"],
        lambda actor: actor.adv_norm.std_level in (None, "none"),
        "nothing is divided by a deviation",
    ),
    unread(
        PPOActorConfig,
        ["behav_imp_weight_cap", "behav_imp_weight_level"],
        lambda actor: not actor.use_decoupled_loss,
        "use_decoupled_loss is false, so nothing is weighted by the behaviour policy",
    ),
    unread(
        PPOActorConfig,
        ["behav_imp_weight_mode"],
        lambda actor: not actor.use_decoupled_loss or actor.behav_imp_weight_cap is None,
        "no weight is capped",
    ),
    unread(
        PPOActorConfig,
        ["prox_logp_method"],
        lambda actor: not actor.use_decoupled_loss or actor.recompute_logprob or actor.ppo_n_minibatches == 1,
        "use_decoupled_loss is false, recompute_logprob recomputes, or ppo_n_minibatches is 1, so that before the only step the "
        "current log-probabilities are taken",
    ),
)

_TASKS_AND_PROCESSES = (
    unread(
        TasksetConfig,
        ["isolated_processes"],
        lambda taskset: taskset.isolation != "process",
        "isolation is {config.isolation}",
    ),
    unread(
        SGLangConfig,
        [
            each.name
            for each in fields(SGLangConfig)
            if each.name not in ("implementation", *(own.name for own in fields(LocalServerConfig)))
        ],
        lambda section: section.implementation == "builtin",
        "implementation is builtin",
    ),
    unread(
        SlurmConfig,
        ["end_early"],
        lambda section: section.time is None,
        "time is not set, so the end of the job is unknown",
    ),
)

_RUNS = (
    unread(RunConfig, ["stats_logger.project"], lambda config: not config.stats_logger.sinks, "stats_logger.sinks is empty"),
    unread(
        SFTConfig,
        _OF_EVALUATION,
        lambda config: not runs_episodes(config),
        "nothing is evaluated without valid_dataset and workflow",
    ),
    unread(
        PPOConfig,
        [*_OF_EVALUATION, "eval_workflow", "eval_workflow_kwargs"],
        lambda config: config.valid_dataset is None and not config.eval_tasksets,
        "nothing is evaluated without valid_dataset",
    ),
    unread(
        BaseExperimentConfig,
        ["saver.keep"],
        lambda config: not has_interval(config.saver),
        "only the last checkpoint is written, because saver has no interval",
    ),
    unread(
        BaseExperimentConfig,
        ["recover.keep", "recover.if_damaged", "recover.in_background"],
        lambda config: config.recover.mode == "off",
        "recover.mode is off",
    ),
)

_POLICY = (
    unread(
        PPOConfig,
        [f"train_dataset.{each.name}" for each in fields(DatasetConfig) if each.name not in ("path", "batch_size")],
        lambda config: config.tasksets,
        "tasks come from tasksets",
    ),
    unread(
        PPOConfig,
        ["evaluator.every_epochs", "evaluator.every_seconds"],
        lambda config: config.mode in ("explore", "train"),
        "explorers evaluate by weight version; set evaluator.every_steps",
    ),
    unread(
        PPOConfig,
        ["rollout.openai_front", "auxiliary_models"],
        lambda config: not (config.tasksets or config.eval_tasksets) or config.mode == "serve",
        "only task-style workflows (tasksets) get such clients",
    ),
    unread(
        PPOConfig,
        ["rollout.canary"],
        lambda config: config.mode != "both",
        "mode is {config.mode}, and the canary is a test of a trainer that publishes to its own engine",
    ),
    unread(
        PPOConfig,
        ["rollout.path"],
        lambda config: config.rollout.backend in ("builtin", "sglang", "vllm"),
        "runs sample from actor.path",
    ),
    unread(
        PPOConfig,
        _OF_REMOTE_ENGINES,
        lambda config: config.rollout.backend == "builtin",
        "the built-in engine of this process gets no HTTP requests",
    ),
    unread(
        PPOConfig,
        ["rollout.context_length", "rollout.prefix_cache"],
        lambda config: config.rollout.addresses,
        "the servers of rollout.addresses run already",
    ),
    unread(
        PPOConfig,
        ["store.priority_fn", "store.priority_fn_args"],
        lambda config: config.store.order != "priority",
        "store.order is not priority",
    ),
    _without_journal(PPOConfig),
    unread(
        PPOConfig,
        [f"eval_tasksets.*.{name}" for name in ("ratio", "selector", "selector_args")],
        always,
        "each task is evaluated",
    ),
)

_SUPERVISED = (
    unread(SFTConfig, ["valid_dataset"], lambda config: not config.workflow, "it is evaluated by a workflow, and none is set"),
    unread(
        SFTConfig,
        _OF_SUPERVISED_EPISODES,
        lambda config: not runs_episodes(config),
        "episodes run only with workflow and valid_dataset",
    ),
    unread(
        SFTConfig,
        [*_OF_REMOTE_ENGINES, *_OF_SERVERS_AND_TRAINING],
        runs_episodes,
        "held-out tasks are sampled by the engine of this process",
    ),
)

_EVALUATIONS = (
    unread(
        EvalConfig,
        [*_OF_REMOTE_ENGINES, *_OF_SERVERS_AND_TRAINING, "rollout.logprob_tolerance"],
        always,
        "an evaluation samples in its own process",
    ),
    unread(
        EvalConfig,
        [f"stats_logger.{name}" for name in ("sinks", "show", "project")],
        always,
        "an evaluation's scores go to summary.json",
    ),
    unread(
        EvalConfig,
        ["journal.keep", "journal.on_divergence"],
        always,
        "an evaluation that was interrupted begins anew, and keeps all of its samples",
    ),
    _without_journal(EvalConfig),
    unread(EvalConfig, ["pass_at", "pass_reward"], lambda config: not config.samples, "pass@k needs `samples`"),
    unread(
        EvalConfig,
        ["served_model", "api_key"],
        lambda config: not is_endpoint(config.path),
        "path names a model that is loaded here, not the URL of an endpoint",
    ),
    unread(
        EvalConfig,
        [f"rollout.{name}" for name in ("backend", *_OF_THE_ENGINE_HERE)] + ["tokenizer_path", "trust_remote_code"],
        lambda config: is_endpoint(config.path),
        "path is the URL of an endpoint, which loads nothing here",
    ),
    unread(EvalConfig, ["gconfig.n_samples"], always, "`samples` sets how often a task is sampled"),
    unread(
        EvalConfig,
        [f"gconfig.{name}" for name in ("greedy", "temperature", "top_p", "top_k", "min_p", "seed")],
        lambda config: config.greedy and not config.samples,
        "completions are greedy unless `samples` is set",
    ),
)

RULES = (
    *_GENERATION,
    *_MODELS,
    *_ALGORITHM,
    *_TASKS_AND_PROCESSES,
    *_RUNS,
    *_POLICY,
    *_SUPERVISED,
    *_EVALUATIONS,
)
