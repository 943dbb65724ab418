"""Tables of the keys in Trinity-RFT's files: the keys that they map to, or the values that match the behaviour here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    "algorithm.advantage_fn_args.kl_coef": "actor.distillation.weight",
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
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_mb",
    "trainer.ppo_max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_mb",
    "trainer.trainer_config.trainer.critic_warmup": "critic.warmup_steps",
    "trainer.trainer_config.critic.optim.lr": "critic.optimizer.lr",
    "trainer.trainer_config.critic.optim.weight_decay": "critic.optimizer.weight_decay",
    "trainer.trainer_config.critic.optim.lr_warmup_steps_ratio": "critic.optimizer.warmup_steps_proportion",
    "trainer.trainer_config.critic.optim.warmup_style": "critic.optimizer.lr_scheduler_type",
    "trainer.trainer_config.critic.optim.lr_scheduler_type": "critic.optimizer.lr_scheduler_type",
    "trainer.trainer_config.critic.grad_clip": "critic.optimizer.gradient_clipping",
    "trainer.trainer_config.critic.cliprange_value": "critic.eps_clip",
    "trainer.trainer_config.critic.ppo_max_token_len_per_gpu": "critic.mb_spec.max_tokens_per_mb",
    "trainer.trainer_config.critic.model.path": "critic.path",
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
    "on_policy_distill": [("actor.distillation.loss", "advantage"), ("actor.distillation.reward_weight", 0.0)],
}
POLICY_LOSSES: dict[str, Pairs] = {
    "ppo": _policy_loss("clip"),
    "ppo_policy_loss": _policy_loss("clip"),
    "gspo": _policy_loss("clip", "sequence"),
    "cispo": _policy_loss("cispo"),
    "sapo": _policy_loss("sapo"),
    "opmd": _policy_loss("opmd"),
    "topr": _policy_loss("topr"),
    # -A·π/μ has the gradient of -sg(π/μ)·A·log π; Trinity-RFT limits log(π/μ) to 20.
    "importance_sampling": [*_policy_loss("reinforce"), ("actor.policy_loss_kwargs.weight_high", math.exp(20.0))],
}


def _recipe(name: Any) -> Pairs:
    if name == "jsd":
        raise ConfigError(
            "is 'jsd', which takes a divergence of the sampled tokens as their advantage; write this project's own form, with actor.recipe: "
            "distill and actor.distillation.loss: jsd, or set on_policy_distill"
        )
    return [("actor.recipe", "distill" if name == DISTILLATION else name)]


#: Name of the algorithm, and of the advantages, that learn from a teacher.
DISTILLATION = "on_policy_distill"


#: Weights of the tokens in a step's loss; own names are accepted, too.
AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "row", "token": "token", "row": "row", "constant": "constant"}

#: Foreign key -> function from its value to pairs of own key and value.
CONVERTED: dict[str, Callable[[Any], Pairs]] = {
    "continue_from_checkpoint": lambda on: [("recover.mode", "auto" if on else "off")],
    "model.max_response_tokens": lambda n: [("gconfig.max_new_tokens", n)],
    "algorithm.algorithm_type": _recipe,
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
}

#: Foreign key -> values that match what is always done here.
ALREADY_SO: dict[str, tuple[Any, ...]] = {
    "algorithm.kl_penalty_fn_args.adaptive": (False,),
    "algorithm.kl_loss_fn_args.adaptive": (False,),
    "trainer.trainer_config.critic.ppo_epochs": (1,),
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
    "algorithm.kl_penalty_fn",
    "algorithm.kl_penalty_fn_args.kl_coef",
    "explorer.auxiliary_models",
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
    "trainer.trainer_config": "holds the keys of another trainer (veRL), which does not train here; beside some keys of its critic, use "
    "algorithm and trainer, or the actor section of this project's own form",
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
#: Foreign key of an auxiliary model that is the teacher -> own key.
TEACHER_RENAMED = {
    "name": "name",
    "model_path": "path",
    "dtype": "dtype",
    "max_model_len": "context_length",
    "trust_remote_code": "trust_remote_code",
}
#: Keys of a teacher without effect for the built-in engine, which computes it in the process of the run.
TEACHER_ALREADY_SO: dict[str, tuple[Any, ...]] = {
    **AUXILIARY_ALREADY_SO,
    **dict.fromkeys(("engine_type", "enforce_eager", "enable_prefix_caching", "gpu_memory_utilization", "seed"), (Any,)),
    **dict.fromkeys(("max_prompt_tokens", "max_response_tokens"), (Any,)),
}


def auxiliary_models(models: Any, *, first_is_teacher: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Convert auxiliary models.

    Args:
        models: the list of the file.
        first_is_teacher: the first one scores the samples of the policy.

    Returns:
        The own ``teachers`` and ``auxiliary_models``.

    Raises:
        ConfigError: a model has a key that cannot be honoured.
    """
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ConfigError("is a list of models, each a section of keys that begins with a dash")
    teachers, others = (models[:1], models[1:]) if first_is_teacher else ([], models)
    instead = (
        "a teacher is computed by the built-in engine in this process; to score on servers, write this project's own form, with teachers "
        "and their addresses; here a teacher has"
    )
    made = [_renamed(model, TEACHER_RENAMED, TEACHER_ALREADY_SO, instead) for model in teachers]
    return made, [_renamed(model, AUXILIARY_RENAMED, AUXILIARY_ALREADY_SO, "an auxiliary model has") for model in others]


def _renamed(
    model: Mapping[str, Any], renamed: Mapping[str, str], already_so: Mapping[str, tuple[Any, ...]], what: str
) -> dict[str, Any]:
    for key, value in model.items():
        if key not in renamed and not (Any in already_so.get(key, ()) or value in already_so.get(key, ())):
            known = ", ".join([*renamed, *already_so])
            raise ConfigError(f"has {key}: {value!r}, which cannot be honoured here; {what} {known}")
    return {renamed[key]: value for key, value in model.items() if key in renamed}
