"""A reward that fell from its best: how far, since which step, and which other metrics changed there."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

#: Returns the points ``[(step, value), …]`` of a metric; empty if there are none.
Points = Callable[[str], list[tuple[int, float]]]

_FEWEST = 4  # points of a curve below which nothing is said
_LEAST = 0.2  # smallest fall that is reported, as a share of the best value above the lowest one
_AROUND = 5  # steps before and after the beginning in which metrics are compared


@dataclass(frozen=True)
class Decline:
    """A fall from the best value of a smoothed curve.

    Attributes:
        best, last: the best and the last value of the smoothed curve.
        best_step, last_step: their steps.
        began: the first step after the curve was last near its best.
        share: how much of the best value above the curve's lowest possible one was lost, from 0 to 1.
    """

    best: float
    last: float
    best_step: int
    last_step: int
    began: int
    share: float


def decline_of(curve: list[tuple[int, float]]) -> Decline | None:
    """Find out whether a curve ends well below its best, by more than its own noise; None if it does not."""
    if len(curve) < _FEWEST:
        return None
    steps, values = zip(*curve, strict=True)
    width = max(1, min(10, len(curve) // 6))
    means = [statistics.fmean(values[max(0, at - width + 1) : at + 1]) for at in range(len(values))]
    begin = width - 1  # the means before have fewer values
    best_at = max(range(begin, len(means)), key=means.__getitem__)
    best, last, floor = means[best_at], means[-1], min(0.0, *values)
    fallen, room = best - last, best - floor
    if best_at == len(means) - 1 or room <= 0 or fallen <= 0:
        return None
    changes = [abs(after - before) for before, after in pairwise(values)]
    noise = statistics.median(changes) / width**0.5
    if fallen < _LEAST * room or fallen < 2.0 * noise:
        return None
    near = max(at for at in range(best_at, len(means)) if means[at] >= best - 0.2 * fallen)
    began = steps[min(len(steps) - 1, near + 1 - width // 5)]  # a mean over ``width`` points falls by a fifth that much later
    return Decline(best, last, steps[best_at], steps[-1], began, fallen / room)


def in_words(decline: Decline) -> str:
    """Describe a decline: ``from 0.41 (step 4) to 0, beginning with step 5``."""
    return f"from {decline.best:.3g} (step {decline.best_step}) to {decline.last:.3g}, beginning with step {decline.began}"


@dataclass(frozen=True)
class Change:
    """A metric that changed where a decline began.

    Attributes:
        said: the change in words.
        remedy: what to do about it.
        order: order of the viewer's search that shows it best; empty if samples do not show it.
    """

    said: str
    remedy: str
    order: str = ""


def what_changed(points: Points, decline: Decline) -> list[Change]:
    """Compare metrics before and after the beginning of a decline, and return those that may explain it."""

    def sides(name: str) -> tuple[float, float] | None:
        before = [value for step, value in points(name) if step < decline.began][-_AROUND:]
        after = [value for step, value in points(name) if step >= decline.began]
        return (statistics.fmean(before), _furthest(after, statistics.fmean(before))) if before and after else None

    found = []
    for name, text, is_cause, remedy, order in _CAUSES:
        pair = sides(name)
        if pair is not None and is_cause(*pair):
            found.append(Change(f"{text} {pair[0]:.3g} → {pair[1]:.3g}", remedy, order))
    return found


def _furthest(values: list[float], origin: float) -> float:
    """Return the mean of a few neighbouring values that is furthest from ``origin``."""
    width = min(3, len(values))
    means = [statistics.fmean(values[at : at + width]) for at in range(len(values) - width + 1)]
    return max(means, key=lambda mean: abs(mean - origin))


def _rose(least: float, factor: float = 2.0) -> Callable[[float, float], bool]:
    return lambda before, after: after > least and after > factor * before


def _fell(before: float, after: float) -> bool:
    return before > 0 and after < 0.6 * before


#: Metric, its name in words, whether its values before and after make it a cause, the remedy, and the order of samples that shows it.
_CAUSES: tuple[tuple[str, str, Callable[[float, float], bool], str, str], ...] = (
    ("actor/kl", "KL to the reference", _rose(0.05), "raise actor.kl_ctl", ""),
    ("actor/clip_share", "clipped tokens", _rose(0.05), "lower actor.ppo_n_minibatches, because updates go too far", ""),
    ("actor/grad_norm", "gradient norm", _rose(1.0, 3.0), "lower actor.optimizer.gradient_clipping", ""),
    ("actor/staleness/mean", "staleness", _rose(0.5, 1.5), "lower rollout.max_head_offpolicyness", ""),
    ("actor/logprob_difference/mean", "engine to trainer", _rose(0.01), "set rollout.dtype and actor.dtype alike", ""),
    ("actor/entropy", "entropy", _fell, "raise actor.entropy_coef", ""),
    ("actor/entropy", "entropy", _rose(0.1), "raise actor.kl_ctl", ""),
    ("response_tokens", "tokens a sample", _fell, "look at the shortest answers", "tokens"),
    ("response_tokens", "tokens a sample", _rose(1.0, 1.6), "look at the longest answers", "-tokens"),
    ("truncated", "truncated", _rose(0.1), "raise gconfig.max_new_tokens", "-tokens"),
)
