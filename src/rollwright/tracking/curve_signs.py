"""Problems in the curves of a run, such as a reward that fell, each with its likely causes and the setting that changes it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rollwright.tracking.decline import Points, decline_of, in_words, what_changed
from rollwright.tracking.readable import NO_ADVANTAGE

#: Consecutive steps without learning before the warning.
STEPS_WITHOUT_LEARNING = 5


@dataclasses.dataclass(frozen=True)
class Sign:
    """A problem that a rule found in the curves of a run.

    Attributes:
        rule: name of the rule; ``docs/run-data.md`` gives the reason for each.
        level: bad (the run learns nothing or breaks), warn (it learns less than it could), or info.
        setting: config key that changes it.
        step: the last step with the problem.
        began: the step with which it began; None if it is not known.
        samples: filters of the viewer's search for the samples that show it; empty if there are none.
    """

    rule: str
    level: str
    message: str
    setting: str
    step: int
    began: int | None = None
    samples: str = ""


_LAST = 10  # number of recent steps that a rule considers
_FEWEST = 3  # with fewer steps, a rule reports nothing
_LONG_STEP = 10.0  # seconds of a step from which waiting is worth a note


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
    all_rewards = [value for name in ("reward", "eval/reward") for _, value in points(name)]
    low, high = min([0.0, *all_rewards]), max([1.0, *all_rewards])
    place, best = ((value - low) / (high - low) for value in (rewards[1], max(all_rewards)))
    why, setting = "its samples do not differ: raise gconfig.temperature or gconfig.n_samples", "gconfig.n_samples"
    if place < 0.15 and best >= 0.15:
        why, setting = "the policy no longer solves what it solved before", "actor.optimizer.lr"
    elif place < 0.15:
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
    if len(last) == STEPS_WITHOUT_LEARNING and all(value < NO_ADVANTAGE for _, value in last):
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
    fallen = best[1] - curve[-1][1]
    if fallen > 0.05 * max(1e-6, abs(best[1])) and curve[-1][0] > best[0] and _train_rises(points, best[0]):
        message = f"The held-out reward fell from {best[1]:.3g} (step {best[0]}) to {curve[-1][1]:.3g} while that of training rose: take the checkpoint of step {best[0]}, more tasks, or look for what the reward pays by mistake."
        yield Sign("worse_held_out", "warn", message, "train_dataset", curve[-1][0])


def _declined(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    """Report a reward that fell from its best, with the step where that began and what else changed there."""
    train, held_out = (decline_of(points(name)) for name in ("reward", "eval/reward"))
    if train is None and (held_out is None or _train_rises(points, held_out.best_step)):
        return  # ``worse_held_out`` reports the second case
    found = train or held_out
    assert found is not None
    parts = [f"The reward fell {in_words(train)}"] if train else []
    parts += [f"{'; the' if train else 'The'} held-out reward fell {in_words(held_out)}"] if held_out else []
    changes = what_changed(points, found)
    causes = "; ".join(change.said for change in changes) or "no other metric stands out"
    rate = config.get("actor.optimizer.lr")
    remedy = f"Lower actor.optimizer.lr{f' ({rate:g})' if isinstance(rate, int | float) else ''}"
    others = list(dict.fromkeys(change.remedy for change in changes))
    remedy = f"{remedy}; {'; '.join(others)}" if others else remedy
    message = f"{''.join(parts)}. Since then: {causes}. {remedy}; the checkpoint of step {found.best_step} or before is better."
    level = "bad" if found.share >= 0.5 else "warn"
    order = next((change.order for change in changes if change.order), "reward")
    samples = f"step={found.began}-{found.last_step}&eval=0&order={order}"
    yield Sign("decline", level, message, "actor.optimizer.lr", found.last_step, found.began, samples)


def _train_rises(points: Points, since: int) -> bool:
    rewards = [value for step, value in points("reward") if step >= since]
    return len(rewards) > 1 and rewards[-1] > rewards[0]


def _recent_counts(points: Points, name: str) -> tuple[int, float]:
    """Return the last step of a count and its sum over recent steps; (0, 0) if it was not recorded."""
    last = points(name)[-_LAST:]
    return (last[-1][0], sum(value for _, value in last)) if last else (0, 0.0)


def _samples_lost(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    counts = {end: _recent_counts(points, f"samples/{end}") for end in ("accepted", "rejected", "failed", "retried")}
    total = sum(count for _, count in counts.values())
    if not total:
        return
    step = max(step for step, _ in counts.values())
    failed, retried, rejected = (counts[end][1] for end in ("failed", "retried", "rejected"))
    if (failed + retried) / total > 0.05:
        again = f", {retried:.0f} of which ran again" if retried else ""
        message = f"{(failed + retried) / total:.0%} of samples failed in the last steps ({failed + retried:.0f}{again}): see why, and fix the workflow, its tools or the reward."
        level = "bad" if failed / total > 0.05 else "warn"
        yield Sign("samples_failed", level, message, "rollout.max_sample_retries", step, None, "status=failed&order=-began")
    if rejected / total > 0.3:
        message = f"The workflow rejected {rejected / total:.0%} of samples in the last steps (it returned None), and their groups with them."
        yield Sign("samples_rejected", "warn", message, "workflow", step, None, "status=rejected&order=-began")


#: Reasons for which groups are dropped, and the setting that changes each.
_DROPS = {
    "no_variance": ("all their samples have one reward", "rollout.dynamic_filter"),
    "stale": ("they were too old", "rollout.max_head_offpolicyness"),
    "over_sampling": ("their batch was complete without them, as over-sampling intends", "rollout.over_sampling"),
    "should_accept_fn": ("your function refused them", "should_accept_fn"),
}


def _groups_dropped(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    dropped = {policy: _recent_counts(points, f"groups/dropped/{policy}") for policy in _DROPS}
    total = _recent_counts(points, "groups/accepted")[1] + sum(count for _, count in dropped.values())
    for policy, (step, count) in dropped.items():
        limit = 0.5 if policy != "over_sampling" else 0.8
        if total and count / total > limit:
            why, setting = _DROPS[policy]
            message = f"{count / total:.0%} of complete groups were dropped in the last steps, because {why}: sampling them was wasted."
            yield Sign("groups_dropped", "warn", message, setting, step)


def _waits(points: Points, config: Mapping[str, Any]) -> Iterator[Sign]:
    """Report waiting if engines have machines of their own. The built-in engine computes where the trainer does."""
    generate, train = _recent(points, "seconds/generate"), _recent(points, "seconds/train")
    if generate is None or train is None or config.get("rollout.max_head_offpolicyness") != 0:
        return
    if not config.get("rollout.addresses") or generate[1] + train[1] < _LONG_STEP:
        return
    share = generate[1] / max(1e-9, generate[1] + train[1])
    if 0.3 < share < 0.8:
        message = f"{share:.0%} of a step is sampling while nothing trains: rollout.max_head_offpolicyness: 1 lets both go on at once, because the servers have machines of their own."
        yield Sign("waits_for_samples", "info", message, "rollout.max_head_offpolicyness", generate[0])


_RULES: tuple[Callable[[Points, Mapping[str, Any]], Iterator[Sign]], ...] = (
    _declined,
    _samples_lost,
    _groups_dropped,
    _one_reward_only,
    _nothing_learned,
    _skipped,
    _above(
        "truncated", 0.3, "truncated", "warn", "gconfig.max_new_tokens",
        "{value:.0%} of samples are truncated by a length limit: raise gconfig.max_new_tokens, or make answers shorter.",
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
