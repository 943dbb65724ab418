"""Tables of the keys in Trinity-RFT's files: the keys that they map to, or the values that match the behaviour here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollwright.config.source import KeyPath, dotted
from rollwright.errors import ConfigError
from rollwright.registry import suggestion

Pairs = list[tuple[str, Any]]

#: Foreign key -> own key.
RENAMED: dict[str, str] = {
    "project": "experiment_name",
    "mode": "mode",
    "plugins": "plugins",
    "checkpoint_root_dir": "cluster.fileroot",
    "model.model_path": "actor.path",
    "model.critic_model_path": "critic.path",
    "model.max_model_len": "rollout.context_length",
    "model.trust_remote_code": "actor.trust_remote_code",
    "algorithm.repeat_times": "gconfig.n_samples",
    "algorithm.algorithm_type": "actor.recipe",
    "algorithm.optimizer.lr": "actor.optimizer.lr",
    "algorithm.optimizer.weight_decay": "actor.optimizer.weight_decay",
    "algorithm.optimizer.lr_warmup_steps_ratio": "actor.optimizer.warmup_steps_proportion",
    "algorithm.optimizer.lr_scheduler_type": "actor.optimizer.lr_scheduler_type",
    "algorithm.optimizer.warmup_style": "actor.optimizer.lr_scheduler_type",
    "algorithm.policy_loss_fn_args.clip_range": "actor.eps_clip",
    "algorithm.policy_loss_fn_args.clip_range_low": "actor.eps_clip",
    "algorithm.policy_loss_fn_args.clip_range_high": "actor.eps_clip_higher",
    "algorithm.advantage_fn_args.gamma": "actor.adv_estimator_kwargs.gamma",
    "algorithm.advantage_fn_args.lam": "actor.adv_estimator_kwargs.lam",
    "buffer.batch_size": "train_dataset.batch_size",
    "buffer.total_epochs": "total_train_epochs",
    "buffer.total_steps": "total_train_steps",
    "buffer.trainer_input.experience_buffer.path": "store.url",
    "explorer.max_timeout": "rollout.sample_timeout",
    "explorer.max_retry_times": "rollout.max_sample_retries",
    "explorer.eval_interval": "evaluator.every_steps",
    "explorer.eval_on_startup": "evaluator.at_start",
    "explorer.rollout_model.max_model_len": "rollout.context_length",
    "explorer.rollout_model.dtype": "rollout.dtype",
    "explorer.rollout_model.gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "explorer.rollout_model.engine_num": "rollout.servers",
    "explorer.rollout_model.tensor_parallel_size": "rollout.tensor_parallel",
    "explorer.rollout_model.enable_prefix_caching": "rollout.prefix_cache",
    "explorer.rollout_model.seed": "seed",
    "explorer.rollout_model.enable_openai_api": "rollout.openai_front",
    "trainer.save_interval": "saver.every_steps",
    "trainer.total_steps": "total_train_steps",
    "trainer.grad_clip": "actor.optimizer.gradient_clipping",
    "trainer.actor_grad_clip": "actor.optimizer.gradient_clipping",
    "trainer.critic_grad_clip": "critic.optimizer.gradient_clipping",
    "trainer.max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_mb",
    "synchronizer.sync_timeout": "rollout.setup_timeout",
}


def _advantage(mean: str, deviation: str, leave_one_out: bool = False) -> Pairs:
    return [
        ("actor.adv_estimator", "normalised"),
        ("actor.adv_norm.mean_level", mean),
        ("actor.adv_norm.std_level", deviation),
        ("actor.adv_norm.leave_one_out", leave_one_out),
    ]


def _policy_loss(name: str, importance_level: str = "token") -> Pairs:
    return [("actor.policy_loss", name), ("actor.importance_level", importance_level)]


#: Own keys that each ``advantage_fn`` and ``policy_loss_fn`` sets. They override ``algorithm_type``.
ADVANTAGES: dict[str, Pairs] = {
    "grpo": _advantage("group", "group"),
    "grpo_advantage": _advantage("group", "group"),
    "rloo": _advantage("group", "none", leave_one_out=True),
    "opmd": _advantage("group", "none"),
    "reinforceplusplus": _advantage("batch", "batch"),
    "ppo": [("actor.adv_estimator", "gae")],
}
POLICY_LOSSES: dict[str, Pairs] = {
    "ppo": _policy_loss("clip"),
    "ppo_policy_loss": _policy_loss("clip"),
    "gspo": _policy_loss("clip", "sequence"),
    "cispo": _policy_loss("cispo"),
    "sapo": _policy_loss("sapo"),
    "opmd": _policy_loss("opmd"),
    "topr": _policy_loss("topr"),
}

#: Weights of the tokens in a step's loss; own names are accepted, too.
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "row", "token": "token", "row": "row", "constant": "constant"}

#: Foreign key -> function from its value to pairs of own key and value.
CONVERTED: dict[str, Callable[[Any], Pairs]] = {
    "continue_from_checkpoint": lambda on: [("recover.mode", "auto" if on else "off")],
    "model.max_response_tokens": lambda n: [("gconfig.max_new_tokens", n)],
    "algorithm.advantage_fn": lambda name: ADVANTAGES[choice(name, *ADVANTAGES)],
    "algorithm.policy_loss_fn": lambda name: POLICY_LOSSES[choice(name, *POLICY_LOSSES)],
    "monitor.monitor_type": lambda name: [("stats_logger.sinks", [choice(name, "tensorboard", "wandb", "mlflow")])],
    "buffer.trainer_input.experience_buffer.storage_type": lambda name: [("store.type", choice(name, "sql", "queue", "file"))],
    "algorithm.loss_agg_mode": lambda name: [("actor.loss_aggregation", AGGREGATIONS[choice(name, *AGGREGATIONS)])],
    "explorer.rollout_model.engine_type": lambda name: [
        ("rollout.backend", choice(name, "vllm", "vllm_async", "sglang").removesuffix("_async"))
    ],
    "data_processor.operators": lambda operators: [("store.operators", _operators(operators))],
    "data_processor.experience_pipeline.operators": lambda operators: [("store.operators", _operators(operators))],
    "explorer.auxiliary_models": lambda models: [("auxiliary_models", _auxiliary_models(models))],
}

#: Foreign key -> values that match what is always done here.
ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "algorithm.kl_penalty_fn": ("none",),
    "algorithm.kl_loss_fn_args.adaptive": (False,),
    "buffer.trainer_input.experience_buffer.name": (Any,),
    "explorer.runner_per_model": (Any,),
    "explorer.rollout_model.enable_history": (True, False),
    "explorer.rollout_model.enforce_eager": (True, False),
    "explorer.rollout_model.enable_auto_tool_choice": (True,),
    "explorer.rollout_model.tool_call_parser": ("hermes",),
    "explorer.name": (Any,),
    "explorer.bench_on_latest_checkpoint": (False,),
    "algorithm.sample_strategy": ("default",),
    "trainer.trainer_type": (Any,),
    "trainer.use_dynamic_bsz": (True,),
    "synchronizer.sync_method": ("memory", "nccl", "checkpoint"),
    "trainer.ulysses_sequence_parallel_size": (1,),
    "synchronizer.sync_style": (
        "fixed",
        "dynamic_by_explorer",
        "dynamic_by_trainer",
        "explorer_driven",
        "trainer_driven",
        "fully_async",
    ),
    "cluster.node_num": (1,),
    "cluster.gpu_per_node": (Any,),
    "monitor.enable_ray_timeline": (False,),
    "log.level": ("INFO",),
}

#: Keys that are translated together with others.
TOGETHER = (
    "name",
    "group",
    "explorer.over_rollout.ratio",
    "explorer.over_rollout.wait_after_min",
    "explorer.dynamic_timeout.enable",
    "explorer.dynamic_timeout.ratio",
    "synchronizer.sync_interval",
    "synchronizer.sync_offset",
    "model.max_prompt_tokens",
    "buffer.train_batch_size",
    "algorithm.kl_loss_fn",
    "algorithm.kl_loss_fn_args.kl_coef",
    "algorithm.entropy_loss_fn",
    "algorithm.entropy_loss_fn_args.entropy_coef",
    "buffer.trainer_input.experience_buffer.replay_buffer.enable",
    "buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time",
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn",
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args.decay",
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args.use_count_limit",
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args.sigma",
)

TASKSET_RENAMED: dict[str, str] = {
    "name": "name",
    "path": "path",
    "split": "split",
    "subset_name": "subset",
    "workflow_args": "workflow_args",
    "reward_fn_args": "reward_fn_args",
    "default_workflow_type": "workflow",
    "default_workflow": "workflow",
    "default_reward_fn_type": "reward_fn",
    "default_reward_fn": "reward_fn",
    "repeat_times": "group_size",
    "ratio": "ratio",
}
#: Defaults for tasksets, or for evaluation tasksets only.
TASKSET_DEFAULTS = {
    "buffer.explorer_input.default_workflow_type": ("", "workflow"),
    "buffer.explorer_input.default_reward_fn_type": ("", "reward_fn"),
    "buffer.explorer_input.default_eval_workflow_type": ("evaluation ", "workflow"),
}
#: Sections that are rejected as a whole, and why.
REFUSED: dict[str, str] = {
    "trainer.trainer_config": "holds the keys of another trainer (veRL), which does not train here; use algorithm and trainer, or "
    "the actor section of this project's own form",
    "data_processor.task_pipeline": "changes the dataset before the run; prepare the dataset first, and name the result as path",
    "service": "starts services of another system; remove it",
    "stages": "are written in this project's own form (docs/configuration.md)",
}
#: Keys of a taskset's format that must be left out or false, and why.
FORMAT_REFUSED = {
    "video_key": "names films, which no model here sees; remove it",
    "enable_concatenated_multi_turn": "is of supervised rows: a stage of kind sft trains on whole conversations (docs/supervised.md)",
}
SELECTORS = {"sequential": "sequential", "shuffle": "shuffle", "random": "random", "difficulty_based": "difficulty"}

#: Every known key outside of tasksets.
KNOWN = (
    *RENAMED,
    *CONVERTED,
    *ALREADY_SO,
    *TOGETHER,
    *TASKSET_DEFAULTS,
    "buffer.explorer_input.taskset",
)


def choice(value: Any, *choices: str) -> str:
    """Return the value if it is one of the choices."""
    if value not in choices:
        raise ConfigError(f"is {value!r}; here there are {', '.join(choices)}")
    return value


def hint(path: KeyPath, known: Sequence[KeyPath]) -> str:
    """Return advice about a rejected key: the known key that differs in one misspelt word, or to remove the key."""
    for at, word in enumerate(path):
        alike = {
            str(other[at]): dotted(other)
            for other in known
            if len(other) == len(path) and (*other[:at], *other[at + 1 :]) == (*path[:at], *path[at + 1 :])
        }
        if found := suggestion(word, alike, cutoff=0.75):
            return found
    return "; remove it"


def _operators(listed: Any) -> list[dict[str, Any]]:
    """Convert operators to the form of ``store.operators``."""
    known = {"name": str, "args": dict | None}
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) and all(isinstance(value, known.get(key, ())) for key, value in each.items()) for each in listed
    ):
        raise ConfigError("is a list of operators, each with a name and args")
    return [{"name": each.get("name", ""), "args": dict(each.get("args") or {})} for each in listed]


#: Foreign key of an auxiliary model -> own key.
AUXILIARY_RENAMED = {
    "model_path": "model_path",
    "dtype": "dtype",
    "max_model_len": "context_length",
    "base_url": "base_url",
    "api_key": "api_key",
}
#: Keys of an auxiliary model without effect for a single local server.
AUXILIARY_ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "engine_num": (1,),
    "tensor_parallel_size": (1,),
    "enable_openai_api": (True,),
}


def _auxiliary_models(models: Any) -> list[dict[str, Any]]:
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ConfigError("is a list of models, each a section of keys that begins with a dash")
    for key, value in [item for model in models for item in model.items()]:
        if key not in AUXILIARY_RENAMED and value not in AUXILIARY_ALREADY_SO.get(key, ()):
            known = ", ".join([*AUXILIARY_RENAMED, *AUXILIARY_ALREADY_SO])
            raise ConfigError(f"has {key}: {value!r}, which cannot be honoured here; an auxiliary model has {known}")
    return [{AUXILIARY_RENAMED[key]: value for key, value in model.items() if key in AUXILIARY_RENAMED} for model in models]
