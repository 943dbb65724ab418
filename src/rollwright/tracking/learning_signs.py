"""Signs that a run does not learn: unsuitable settings, steps without an update, and problems in its curves."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollwright.tracking.logging import getLogger

logger = getLogger("trainer")

#: AdamW moves a weight by about this much a step; the weights of a language model are mostly below 0.1.
LARGEST_LEARNING_RATE = 1e-2

#: Consecutive steps without learning before the warning.
STEPS_WITHOUT_LEARNING = 5

#: Smaller advantages are rounding errors.
_NO_ADVANTAGE = 1e-6


def reasons_not_to_learn(config: Any) -> Iterator[str]:
    """Yield messages about settings that keep an experiment from learning, each with its key and a remedy.

    A process that only explores, or only trains from a store, is checked only for the settings it uses.
    """
    actor, mode = getattr(config, "actor", None), getattr(config, "mode", "both")
    if actor is not None and mode != "train":
        own = [(f"tasksets[{number}].gconfig", each.gconfig) for number, each in enumerate(config.tasksets) if each.gconfig]
        everywhere = len(own) < len(config.tasksets) or not config.tasksets
        for place, gconfig in [*own, *([("gconfig", config.gconfig)] if everywhere else [])]:
            if gconfig.is_greedy:
                yield (
                    f"{place} has {'greedy: true' if gconfig.greedy else 'temperature: 0'}: all samples of a task are the same, so "
                    "that none is better than another. Set greedy to false and a temperature such as 1.0; evaluation has its own "
                    "arguments in evaluator.gconfig."
                )
    if mode == "explore":
        return
    trained, section = (config.model, "model") if actor is None else (actor, "actor")
    if trained.optimizer is not None and trained.optimizer.lr > LARGEST_LEARNING_RATE:
        yield (
            f"{section}.optimizer.lr is {trained.optimizer.lr:g}: AdamW moves every weight by about that much a step, which destroys a "
            f"model. Set it to {LARGEST_LEARNING_RATE:g} or less; 1e-6 to 1e-4 is usual."
        )
    if actor is not None and actor.reward_scaling == 0:
        yield "actor.reward_scaling is 0: all rewards become the same. Set it to 1, or to what brings rewards near 1."


# -- what the curves say -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sign:
    """A problem that a rule found in the curves of a run.

    Attributes:
        rule: name of the rule; ``docs/run-data.md`` gives the reason for each.
        level: bad (the run learns nothing or breaks), warn (it learns less than it could), or info.
        setting: config key that fixes it.
        step: the last step with the problem.
    """

    rule: str
    level: str
    message: str
    setting: str
    step: int


#: Returns the points ``[(step, value), …]`` of a metric; empty if there are none.
Points = Callable[[str], list[tuple[int, float]]]

_LAST = 10  # number of recent steps that a rule considers
_FEWEST = 3  # with fewer steps, a rule reports nothing


def signs_of(points: Points, config: Mapping[str, Any]) -> list[Sign]:
    """Find problems in the last steps of a run, the worst first.

    Args:
        points: returns the points of a metric.
        config: the flattened config, such as ``{"actor.optimizer.lr": 1e-5}``.
    """
    found = [sign for rule in _RULES for sign in rule(points, config)]
    return sorted(found, key=lambda sign: ("bad", "warn", "info").index(sign.level))


def _recent(points: Points, name: str) -> tuple[int, float] | None:
    """Return the last step of a metric and its mean over recent steps, or None if there are too few steps."""
    last = points(name)[-_LAST:]
    return (last[-1][0], statistics.fmean(value for _, value in last)) if len(last) >= _FEWEST else None


def _learns_by_comparing(config: Mapping[str, Any]) -> bool:
    """Return True if samples are compared within their group: not with a critic, a baseline over the batch, or a teacher alone."""
    if config.get("actor.distillation.loss", "none") != "none" and not config.get("actor.distillation.reward_weight", 1.0):
        return False
    return config.get("actor.adv_estimator") != "gae" and config.get("actor.adv_norm.mean_level", "group") == "group"


def _one_reward_only(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    if not _learns_by_comparing(config):
        return
    found, rewards = _recent(points, "actor/groups_without_variance"), _recent(points, "reward")
    if found is None or rewards is None or found[1] < 0.7:
        return
    all_rewards = [value for _, value in points("reward")]
    low, high = min([0.0, *all_rewards]), max([1.0, *all_rewards])
    place = (rewards[1] - low) / (high - low)
    why, setting = "its samples do not differ: raise gconfig.temperature or gconfig.n_samples", "gconfig.n_samples"
    if place < 0.15:
        why = (
            "the tasks are too hard: take easier ones, warm up with sft, reward parts of an answer, or raise gconfig.n_samples"
        )
    elif place > 0.85:
        why, setting = "the tasks are too easy: take harder ones (train_dataset)", "train_dataset"
    level = "bad" if found[1] >= 0.9 else "warn"
    yield Sign(
        "one_reward_only", level, f"{found[1]:.0%} of groups have one reward only and teach nothing: {why}.", setting, found[0]
    )


def _nothing_learned(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    last = points("actor/advantage/abs_mean")[-STEPS_WITHOUT_LEARNING:]
    if points("actor/teacher/loss"):  # learns without advantages
        return
    if len(last) == STEPS_WITHOUT_LEARNING and all(value < _NO_ADVANTAGE for _, value in last):
        message = f"No step of the last {len(last)} had an advantage: the weights do not move."
        yield Sign("nothing_learned", "bad", message, "train_dataset", last[-1][0])


def _skipped(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    last = [point for point in points("actor/skipped_steps")[-_LAST:] if point[1]]
    if last:
        message = f"{len(last)} of the last steps skipped an update that was not finite: lower actor.optimizer.lr."
        yield Sign("skipped_steps", "bad", message, "actor.optimizer.lr", last[-1][0])


def _above(
    name: str, limit: float, rule: str, level: str, setting: str, message: str
) -> Callable[[Points, Mapping[str, Any]], Iterator[Sign]]:
    """Create a rule that reports a metric whose recent mean is above a limit. ``message`` is formatted with ``value``."""

    def look(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
        found = _recent(points, name)
        if found is not None and found[1] > limit:
            yield Sign(rule, level, message.format(value=found[1]), setting, found[0])

    return look


def _entropy(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    curve, found = points("actor/entropy"), _recent(points, "actor/entropy")
    if found is None or len(curve) < 2 * _FEWEST:
        return
    first = statistics.fmean(value for _, value in curve[:_FEWEST])
    if first > 0 and found[1] < 0.05 * first and found[1] < 0.02:
        message = f"The entropy fell from {first:.3g} to {found[1]:.3g} nats: samples of a task are nearly the same. Raise actor.entropy_coef or gconfig.temperature, or lower actor.optimizer.lr."
        yield Sign("entropy_collapse", "warn", message, "actor.entropy_coef", found[0])


def _worse_held_out(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    curve = points("eval/reward")
    if len(curve) < _FEWEST:
        return
    best = max(curve, key=lambda point: point[1])
    rewards = [value for step, value in points("reward") if step >= best[0]]
    fallen = best[1] - curve[-1][1]
    if fallen > 0.05 * max(1e-6, abs(best[1])) and curve[-1][0] > best[0] and len(rewards) > 1 and rewards[-1] > rewards[0]:
        message = f"The held-out reward fell from {best[1]:.3g} (step {best[0]}) to {curve[-1][1]:.3g} while that of training rose: take the checkpoint of step {best[0]}, more tasks, or look for what the reward pays by mistake."
        yield Sign("worse_held_out", "warn", message, "train_dataset", curve[-1][0])


def _waits(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    generate, train = _recent(points, "seconds/generate"), _recent(points, "seconds/train")
    if generate is None or train is None or config.get("rollout.max_head_offpolicyness") != 0:
        return
    share = generate[1] / max(1e-9, generate[1] + train[1])
    if 0.3 < share < 0.8 and generate[1] + train[1] > 1.0:
        message = f"{share:.0%} of a step is sampling while nothing trains: rollout.max_head_offpolicyness: 1 lets both go on at once, on machines with room for both."
        yield Sign("waits_for_samples", "info", message, "rollout.max_head_offpolicyness", generate[0])


_RULES: tuple[Callable[[Points, Mapping[str, Any]], Iterator[Sign]], ...] = (
    _one_reward_only,
    _nothing_learned,
    _skipped,
    _above(
        "truncated", 0.3, "truncated", "warn", "gconfig.max_new_tokens",
        "{value:.0%} of samples are cut by a length limit: raise gconfig.max_new_tokens, or make answers shorter.",
    ),
    _above(
        "actor/logprob_difference/mean", 0.02, "engine_mismatch", "warn", "rollout.dtype",
        "Engine and trainer differ by {value:.3f} nats a token: set rollout.dtype and actor.dtype alike, or actor.recompute_logprob.",
    ),
    _above(
        "actor/clip_share", 0.3, "clipped", "warn", "actor.ppo_n_minibatches",
        "{value:.0%} of tokens are clipped: an update goes too far. Lower actor.optimizer.lr or actor.ppo_n_minibatches.",
    ),
    _above(
        "actor/kl", 1.0, "far_from_reference", "warn", "actor.kl_ctl",
        "The policy is {value:.2g} nats a token from its reference: raise actor.kl_ctl, or lower actor.optimizer.lr.",
    ),
    _above(
        "actor/reward_clipped_share", 0.0, "reward_clipped", "warn", "actor.reward_clip",
        "actor.reward_clip cuts {value:.0%} of rewards, which makes them equal: raise it, or lower actor.reward_scaling.",
    ),
    _above(
        "actor/masked_share", 0.3, "masked", "warn", "actor.mask_truncated",
        "{value:.0%} of sampled tokens do not train (actor.mask_truncated): raise gconfig.max_new_tokens.",
    ),
    _entropy,
    _worse_held_out,
    _waits,
)  # fmt: skip


# -- while it trains -----------------------------------------------------------------------------------------------------


def warn_of_reasons(config: Any) -> None:
    """Log every reason why a run can hardly learn."""
    for reason in reasons_not_to_learn(config):
        logger.warning("this run can hardly learn: %s", reason)


class LearningWatch:
    """Warns once if several consecutive steps had nothing to learn from: no advantages, no teacher's loss, and no critic to warm up."""

    def __init__(self) -> None:
        self._idle = 0
        self._has_told = False

    def after_step(self, stats: Mapping[str, float], reward: float) -> None:
        """Record a step.

        Args:
            stats: result of ``ppo_update``.
            reward: mean reward of the step.
        """
        warms_up = "advantage/abs_mean" not in stats and stats.get("critic/optimizer_steps", 0.0) > 0
        learns = stats.get("advantage/abs_mean", 0.0) >= _NO_ADVANTAGE or "teacher/loss" in stats or warms_up
        self._idle = 0 if learns else self._idle + 1
        if self._idle >= STEPS_WITHOUT_LEARNING and not self._has_told:
            self._has_told = True
            why = "every sampled token is masked (actor.mask_truncated?)"
            if stats.get("optimizer_steps") or stats.get("skipped_steps"):
                why = f"no group has samples of different rewards (the mean reward is {reward:.3g})"
            logger.warning(
                "nothing was learned in %d steps in a row: %s. Tasks that always or never succeed teach nothing: choose easier or "
                "harder ones, look at the reward function and at rollouts/, or sample more (gconfig.n_samples, temperature).",
                STEPS_WITHOUT_LEARNING,
                why,
            )
