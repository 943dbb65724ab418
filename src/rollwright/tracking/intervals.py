"""Confidence intervals of means over tasks: one formula for evaluations, benchmarks and the viewer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_CERTAIN = 1.96  # standard deviations around the mean that have 95 % of a normal distribution


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over tasks, or None with fewer than two.

    It is Wilson's interval of a share (JASA 22, 1927) if all values are 0 or 1, else the normal approximation.
    """
    count = len(values)
    if count < 2:
        return None
    mean, square = statistics.fmean(values), _CERTAIN**2
    if set(values) <= {0.0, 1.0}:
        middle = (mean + square / (2 * count)) / (1 + square / count)
        half = _CERTAIN / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    else:
        middle, half = mean, _CERTAIN * statistics.stdev(values) / math.sqrt(count)
    return middle - half, middle + half
