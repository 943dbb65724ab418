"""Algorithms by name: policy losses, advantage estimators, KL estimators, and the recipes made of them.

A recipe is a table of defaults for config keys; whatever the user sets takes precedence. ``docs/algorithms.md`` says how each
recipe differs from its paper.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from rollwright.errors import ConfigError
from rollwright.registry import Registry, suggestion

#: ``actor.policy_loss``: called with ``logp_BL, old_logp_BL, advantages_BL, mask_BL``; see ``rollwright.algorithms.losses``.
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "policy loss",
    variable="POLICY_LOSSES",
    built_in={
        name: f"rollwright.algorithms.losses:{name}_loss" for name in ("clip", "cispo", "sapo", "reinforce", "opmd", "topr")
    },
)

#: ``actor.adv_estimator``: called with ``rewards_B, group_ids_B, sample_ids_B``; see ``rollwright.algorithms.advantages``.
ADVANTAGE_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "advantage estimator",
    variable="ADVANTAGE_ESTIMATORS",
    built_in={
        "normalised": "rollwright.algorithms.advantages:baseline_and_scale",
        "gae": "rollwright.algorithms.gae:gae_advantages",
        "role_average": "rollwright.algorithms.advantages:role_average",
    },
)

#: ``actor.kl_estimator``: called with ``logp_BL, ref_logp_BL``; see ``k1`` in ``rollwright.algorithms.losses``.
KL_ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "KL estimator",
    variable="KL_ESTIMATORS",
    built_in={name: f"rollwright.algorithms.losses:{name}" for name in ("k1", "k2", "k3")},
)

_TOP_K_REVERSE_KL = (
    "a reverse KL over the teacher's top tokens falls when the policy puts less probability on all of them, so it drives the policy away "
    "from the teacher. Use advantage or k1, the reverse KL of sampled tokens; or forward_kl or jsd, which count "
    "all other tokens as one bin"
)

#: ``distillation.loss``: rows of ``rollwright.algorithms.teachers``, or functions like ``forward_kl`` there.
TEACHER_LOSSES: Registry[Callable[..., Any]] = Registry(
    "teacher loss",
    variable="TEACHER_LOSSES",
    built_in={
        name: f"rollwright.algorithms.teachers:{name.upper()}"
        for name in ("none", "advantage", "k1", "k2", "k3", "forward_kl", "jsd")
    },
    refused=dict.fromkeys(("reverse_kl", "reverse_kl_topk", "reverse_kl_top_k", "topk_reverse_kl"), _TOP_K_REVERSE_KL),
)

#: ``optimizer.kind``: called with parameter groups, ``lr`` and ``optimizer.kwargs``; built-in ones also with ``betas`` and ``eps``.
OPTIMIZERS: Registry[Callable[..., Any]] = Registry(
    "optimizer",
    variable="OPTIMIZERS",
    built_in={
        "adamw": "torch.optim:AdamW",
        **{name: f"rollwright.training.optimizer_and_schedule:{name}" for name in ("adamw_8bit", "adamw_4bit")},
    },
)


@dataclass(frozen=True)
class Recipe:
    """Defaults that an algorithm sets: keys of ``actor``, and of ``rollout`` if the config has that section."""

    source: str
    actor: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)


#: ``actor.recipe``; a user adds one with ``RECIPES["name"] = Recipe(…)``.
RECIPES: Registry[Recipe] = Registry("recipe", variable="RECIPES", accepts=lambda entry: isinstance(entry, Recipe))

_APPLIED = "_recipe_applied"


def _norm(mean: str, std: str, *, leave_one_out: bool = False) -> dict[str, Any]:
    return {"adv_norm.mean_level": mean, "adv_norm.std_level": std, "adv_norm.leave_one_out": leave_one_out}


for _name, _recipe in {
    "grpo": Recipe("GRPO, arXiv 2402.03300; tokens weigh alike (DAPO's aggregation)", {}),
    "dr_grpo": Recipe("Dr. GRPO, arXiv 2503.20783", {**_norm("group", "none"), "loss_aggregation": "constant"}),
    "dapo": Recipe(
        "DAPO, arXiv 2503.14476",
        {"eps_clip": 0.2, "eps_clip_higher": 0.28, "loss_aggregation": "token", "mask_truncated": True, "kl_ctl": 0.0},
        {"dynamic_filter": "no_variance"},
    ),
    "rloo": Recipe("RLOO, arXiv 2402.14740; with ratio and clip", _norm("group", "none", leave_one_out=True)),
    "reinforceplusplus": Recipe("REINFORCE++, arXiv 2501.03262", {**_norm("batch", "batch"), "kl_estimator": "k1"}),
    "reinforceplusplus_baseline": Recipe(
        "REINFORCE++ with a group baseline, arXiv 2501.03262",
        {**_norm("group", "batch"), "adv_norm.std_after_mean": True, "kl_estimator": "k2"},
    ),
    "lite_ppo": Recipe("Lite PPO, arXiv 2508.08221", {**_norm("group", "batch"), "loss_aggregation": "token"}),
    "gspo": Recipe(
        "GSPO, arXiv 2507.18071",
        {"importance_level": "sequence", "eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_aggregation": "row"},
    ),
    "cispo": Recipe("CISPO, MiniMax-M1, arXiv 2506.13585", {"policy_loss": "cispo", "loss_aggregation": "token"}),
    "sapo": Recipe("SAPO, arXiv 2511.20347", {"policy_loss": "sapo", "loss_aggregation": "row"}),
    "opmd": Recipe("OPMD, arXiv 2505.17826", {**_norm("group", "none"), "policy_loss": "opmd"}),
    "topr": Recipe("TOPR, arXiv 2503.14286", {**_norm("group", "none"), "policy_loss": "topr"}),
    "distill": Recipe(
        "On-policy distillation, Thinking Machines Lab, 2025",
        {"distillation.loss": "advantage", "distillation.reward_weight": 0.0, "loss_aggregation": "token"},
    ),
    "rae": Recipe("RAE, SPIRAL, arXiv 2506.24119; for self-play", {"adv_estimator": "role_average"}),
    "decoupled_ppo": Recipe("Decoupled PPO, arXiv 2505.24298", {"use_decoupled_loss": True}),
    "ppo": Recipe("PPO, arXiv 1707.06347; advantages by GAE, arXiv 1506.02438", {"adv_estimator": "gae"}),
    "vapo": Recipe(
        "VAPO, arXiv 2504.05118",
        {
            "adv_estimator": "gae",
            "adv_estimator_kwargs": {"lam_critic": 1.0, "length_alpha": 0.05},
            "eps_clip": 0.2,
            "eps_clip_higher": 0.28,
            "positive_nll_coef": 0.1,
            "loss_aggregation": "token",
        },
    ),
}.items():
    RECIPES[_name] = _recipe

#: Other names of recipes.
ALIASES = {
    "gae": "ppo",
    "drgrpo": "dr_grpo",
    "reinforce++": "reinforceplusplus",
    "reinforce_plus_plus": "reinforceplusplus",
    "reinforceplusplus++": "reinforceplusplus_baseline",
    "reinforce++-baseline": "reinforceplusplus_baseline",
    "litppo": "lite_ppo",
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe with a name.

    Raises:
        ConfigError: the name is unknown, or the algorithm is a stage of its own.
    """
    key = ALIASES.get(name, name.strip().lower().replace("-", "_"))
    key = name if name in RECIPES else ALIASES.get(key, key)
    if key in RECIPES:
        return RECIPES.get(key)
    if key in ("sft", "dpo"):
        raise ConfigError(
            f"actor.recipe is {name!r}, which samples nothing: it is a stage of its own, `kind: {key}` (docs/supervised.md)."
        )
    if "." in name or ":" in name:
        return RECIPES.get(name)
    hint = suggestion(key, RECIPES, as_sentence=True)
    raise ConfigError(f"actor.recipe is {name!r}, which is no recipe.{hint} There are: {', '.join(RECIPES)}.")


def uses_critic(actor: Any) -> bool:
    """Return True if the advantages of an ``actor`` section are computed from a critic's values."""
    return actor.adv_estimator == "gae"


def apply_recipe(config: Any, explicitly_set_keys: Collection[str] | None = None) -> Any:
    """Set the keys of the config's recipe that the user did not set, in place.

    Evaluation gets the run's token limit (``gconfig.max_new_tokens``) unless its own limit is set. Applying a recipe twice has no
    effect, because the config remembers it.

    Args:
        config: an experiment config with an ``actor`` section, or a ``PPOActorConfig`` alone.
        explicitly_set_keys: dotted names of the keys that came from the user (file, overrides), as seen from ``config``,
            e.g. ``actor.eps_clip`` or ``actor.adv_norm.mean_level``; the name of a section stands for all its keys. If None
            (for a config made in Python), keys whose value is not the default count as set.

    Returns:
        ``config``.

    Raises:
        ConfigError: the recipe is unknown.
    """
    actor = getattr(config, "actor", config)
    if getattr(actor, _APPLIED, None) == actor.recipe:
        return config
    values = defaults_of(config)
    given = {key for key in values if was_changed(config, key)} if explicitly_set_keys is None else {*explicitly_set_keys}
    for key, value in values.items():
        if not given.intersection(itertools.accumulate(key.split("."), "{}.{}".format)):
            above, _, name = key.rpartition(".")
            setattr(operator.attrgetter(above)(config) if above else config, name, copy.deepcopy(value))
    setattr(actor, _APPLIED, actor.recipe)
    return config


def defaults_of(config: Any) -> dict[str, Any]:
    """Return the dotted keys that a config takes from its recipe or from another key, with their values, unless the user sets them.

    Args:
        config: an experiment config, an ``actor`` section, or any other section, for which there are none.
    """
    if hasattr(config, "recipe"):
        return find_recipe(config.recipe).actor
    if not hasattr(config, "actor"):
        return {}
    recipe = find_recipe(config.actor.recipe)
    values = {f"actor.{key}": value for key, value in recipe.actor.items()}
    if hasattr(config, "rollout"):
        values |= {f"rollout.{key}": value for key, value in recipe.rollout.items()}
    if hasattr(config, "evaluator") and hasattr(config, "gconfig"):
        values["evaluator.gconfig.max_new_tokens"] = config.gconfig.max_new_tokens
    if (critic := getattr(config, "critic", None)) is not None and not critic.shared:
        values |= {f"critic.{name}": value for name, value in as_the_actor(config.actor, critic.path).items()}
    return values


#: Keys that say how a model is computed, which a critic of its own takes from the actor.
_COMPUTED = ("dtype", "device", "attn_implementation", "shard", "shard_size", "cpu_offload")


def as_the_actor(actor: Any, path: str = "") -> dict[str, Any]:
    """Return the keys of a critic that are those of the actor unless the user sets them.

    Args:
        actor: the ``actor`` section.
        path: the critic's model; empty for the actor's. Only code of the actor's own model is trusted as the actor's is.
    """
    names = (*_COMPUTED, "trust_remote_code") if path in ("", actor.path) else _COMPUTED
    return {name: getattr(actor, name) for name in names}


def was_set(config: Any, key: str) -> bool:
    """Return True if the value of a dotted key is neither its default nor that of :func:`defaults_of`."""
    values = defaults_of(config)
    return was_changed(config, key) and (key not in values or _value(config, key) != values[key])


def was_changed(config: Any, key: str) -> bool:
    """Return True if the value of a dotted key is not that of a config, or of an optional section, made without arguments."""
    above, _, name = key.rpartition(".")
    section, default = (_value(each, above) if above else each for each in (config, type(config)()))
    if default is None and section is not None:
        default = type(section)()
    return getattr(section, name, None) != getattr(default, name, None)


def _value(section: Any, key: str) -> Any:
    """Return the value of a dotted key, or None if a section above it is None."""
    return functools.reduce(lambda holder, name: getattr(holder, name, None), key.split("."), section)
