"""Rules about teachers and the loss that they are used with: combinations that cannot work, and keys that would not be read."""

from __future__ import annotations

from rollwright.config.experiment import DPOConfig, PPOConfig, SFTConfig
from rollwright.config.faults import refuse, refuse_set, unread
from rollwright.config.sections import PPOActorConfig
from rollwright.config.teachers import TeacherConfig

_OF_A_MODEL = ["device", "dtype", "max_running_requests", "context_length"]
_OF_SERVERS = ["backend", "api_key", "request_timeout", "setup_timeout"]
_OF_REWARDS = ["adv_norm", "adv_estimator", "adv_estimator_kwargs", "reward_scaling", "reward_bias", "reward_clip"]
_OF_RATIOS = [
    "policy_loss",
    "policy_loss_kwargs",
    "eps_clip",
    "eps_clip_higher",
    "c_clip",
    "importance_level",
    "use_decoupled_loss",
]

#: Built-in losses that do not read the teacher's most likely tokens.
_WITHOUT_TOP = ("none", "advantage", "k1", "k2", "k3")
_WITH_TOP = ("forward_kl", "jsd")


def _sources(teacher: TeacherConfig) -> list[str]:
    given = {"path": teacher.path, "addresses": teacher.addresses, "policy": teacher.policy}
    return [name for name, value in given.items() if value]


def _learns_from_teacher_alone(actor: PPOActorConfig) -> bool:
    return actor.distillation.loss != "none" and actor.distillation.reward_weight == 0


def _temperatures(config: PPOConfig) -> list[float]:
    return [each.effective_temperature for each in [config.gconfig, *(own.gconfig for own in config.tasksets if own.gconfig)]]


def _vllm_at_other_temperatures(config: PPOConfig) -> list[str]:
    scaled = [value for value in _temperatures(config) if value != 1.0]
    return [each.name for each in config.teachers if each.addresses and each.backend == "vllm" and scaled]


def _names_of_several(config: PPOConfig | SFTConfig) -> list[str]:
    names = [each.name for each in config.teachers]
    return sorted({name for name in names if names.count(name) > 1})


_POLICY = (
    refuse(
        TeacherConfig,
        "",
        lambda teacher: len(_sources(teacher)) != 1,
        lambda teacher: (
            f"has {' and '.join(_sources(teacher)) or 'none of path, addresses and policy'}; a teacher is one of them: a model to load "
            "(path), servers (addresses), or the policy with more context (policy)"
        ),
    ),
    refuse(
        TeacherConfig,
        "policy",
        lambda teacher: teacher.policy and not teacher.context,
        "is true and context is empty, so the teacher would say what the policy says and teach nothing; set context, such as the answer",
    ),
    refuse(
        TeacherConfig,
        "tokenizer_path",
        lambda teacher: teacher.addresses and not teacher.tokenizer_path,
        "is not set, but the servers of addresses do not show their tokenizer, and scores by another one would be of other tokens; set it "
        "to the model's directory or name",
    ),
    unread(TeacherConfig, _OF_A_MODEL, lambda teacher: not teacher.path, "there is no path, so no model is loaded here"),
    unread(TeacherConfig, _OF_SERVERS, lambda teacher: not teacher.addresses, "there are no addresses"),
    unread(
        TeacherConfig,
        ["tokenizer_path", "trust_remote_code"],
        lambda teacher: teacher.policy,
        "the policy is the teacher",
    ),
    refuse(
        PPOConfig,
        "actor.distillation.loss",
        lambda config: config.actor.distillation.loss != "none" and not config.teachers,
        "is {value}, but there are no teachers; name one in teachers, or set it to none",
    ),
    refuse(
        PPOConfig,
        "teachers",
        lambda config: config.teachers and config.actor.distillation.loss == "none",
        "are given, but actor.distillation.loss is none, so nothing is learned from them; set it, or actor.recipe: distill",
    ),
    refuse(
        PPOConfig,
        "teachers",
        lambda config: config.teachers and config.mode != "both",
        "score samples in the process that trains on them, and mode is {config.mode}; use mode both",
    ),
    refuse(
        PPOConfig,
        "teachers",
        lambda config: (
            config.actor.distillation.loss in _WITH_TOP and len([each for each in config.teachers if not each.tasks]) > 1
        ),
        "has several that teach all tasks, and actor.distillation.loss {config.actor.distillation.loss} cannot mix their most likely "
        "tokens; divide the tasks between them (tasks), or use the loss advantage",
    ),
    refuse(
        PPOConfig,
        "teachers",
        _vllm_at_other_temperatures,
        lambda config: (
            f"({', '.join(_vllm_at_other_temperatures(config))}) has servers of vLLM, which scores prompts at temperature 1, and samples "
            f"have gconfig.temperature {next(value for value in _temperatures(config) if value != 1.0):g}; set that to 1, or serve the "
            "teacher with rollwright serve-model"
        ),
    ),
    refuse(
        PPOConfig,
        "rollout.accept_shifted_logprobs",
        lambda config: config.rollout.accept_shifted_logprobs and config.actor.distillation.loss == "advantage",
        "gives log-probabilities that are not the policy's, and actor.distillation.loss advantage compares the teacher with them; use the "
        "loss k1",
    ),
    refuse(
        PPOConfig,
        "rollout.dynamic_filter",
        lambda config: config.rollout.dynamic_filter is not None and _learns_from_teacher_alone(config.actor),
        "drops groups by their rewards, but actor.distillation.reward_weight is 0, so rewards do not train; take it out",
    ),
    unread(
        PPOActorConfig,
        [f"distillation.{name}" for name in ("weight", "reward_weight", "skip_tokens")],
        lambda actor: actor.distillation.loss == "none",
        "distillation.loss is none",
    ),
    unread(
        PPOActorConfig,
        ["distillation.top_k"],
        lambda actor: actor.distillation.loss in _WITHOUT_TOP,
        "distillation.loss is {config.distillation.loss}",
    ),
    unread(
        PPOActorConfig,
        ["distillation.jsd_alpha"],
        lambda actor: actor.distillation.loss in (*_WITHOUT_TOP, "forward_kl"),
        "distillation.loss is {config.distillation.loss}",
    ),
    unread(PPOActorConfig, _OF_REWARDS, _learns_from_teacher_alone, "distillation.reward_weight is 0, so rewards do not train"),
    unread(
        PPOActorConfig,
        _OF_RATIOS,
        lambda actor: _learns_from_teacher_alone(actor) and actor.distillation.loss != "advantage",
        "distillation.reward_weight is 0 and the loss {config.distillation.loss} needs no advantages",
    ),
)

_SUPERVISED = (
    refuse_set(
        DPOConfig,
        ["teachers", "distillation"],
        lambda config: True,
        "is not read by preferences (kind: dpo); distil in a stage of kind sft or rl",
    ),
    refuse(
        SFTConfig,
        "distillation.loss",
        lambda config: config.distillation.loss != "none" and not config.teachers,
        "is {value}, but there are no teachers; name one in teachers, or set it to none",
    ),
    refuse(
        SFTConfig,
        "teachers",
        lambda config: config.teachers and config.distillation.loss == "none" and not isinstance(config, DPOConfig),
        "are given, but distillation.loss is none, so nothing is learned from them; set it to forward_kl or jsd",
    ),
    refuse(
        SFTConfig,
        "distillation.loss",
        lambda config: config.distillation.loss in ("advantage", "k1", "k2", "k3"),
        "is {value}, an estimate from tokens that the policy sampled, and the rows' tokens are not; use forward_kl or jsd",
    ),
    refuse(
        SFTConfig,
        "teachers",
        lambda config: any(each.policy for each in config.teachers),
        "has the policy as a teacher, and no engine samples with it here; use a stage of kind rl",
    ),
    refuse(
        SFTConfig,
        "teachers",
        lambda config: config.distillation.loss in _WITH_TOP and len([each for each in config.teachers if not each.tasks]) > 1,
        "has several that teach all rows, and distillation.loss {config.distillation.loss} cannot mix their most likely tokens; divide the "
        "rows between them (tasks)",
    ),
    unread(
        SFTConfig,
        [f"distillation.{name}" for name in ("weight", "reward_weight", "skip_tokens", "top_k", "jsd_alpha")],
        lambda config: config.distillation.loss == "none",
        "distillation.loss is none",
    ),
    unread(
        SFTConfig,
        ["distillation.jsd_alpha"],
        lambda config: config.distillation.loss == "forward_kl",
        "distillation.loss is forward_kl",
    ),
)

_BOTH = (
    refuse(
        PPOConfig | SFTConfig,
        "teachers",
        _names_of_several,
        lambda config: f"has several of the name {', '.join(_names_of_several(config))}; give each teacher its own name",
    ),
    refuse(
        PPOConfig | SFTConfig,
        "teachers",
        lambda config: config.cluster.kind != "local" and any(each.path for each in config.teachers),
        "has a path, and with cluster.kind {config.cluster.kind} each worker would load the model; serve it (rollwright serve-model) and "
        "give its addresses",
    ),
    unread(
        PPOConfig | SFTConfig,
        ["teachers.*.weight"],
        lambda config: len(config.teachers) == 1,
        "it mixes several teachers, and there is one; distillation.weight weights the loss",
    ),
)

TEACHER_RULES = (*_POLICY, *_SUPERVISED, *_BOTH)
