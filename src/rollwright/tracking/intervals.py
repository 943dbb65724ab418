"""Confidence intervals of means, over tasks or over seeds: the formulas that evaluations, sweeps and the viewer share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_Z = 1.959964  # 97.5 % quantile of the normal distribution
#: 97.5 % quantiles of Student's t distribution with 1, 2, … 30 degrees of freedom.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of rewards or scores, or None with fewer than two.

    It is Wilson's interval of a share (JASA 22, 1927) if all values are 0 or 1, else that of ``half_width``.
    """
    count = len(values)
    if count < 2:
        return None
    mean, square = statistics.fmean(values), _Z**2
    if set(values) <= {0.0, 1.0}:
        middle = (mean + square / (2 * count)) / (1 + square / count)
        half = _Z / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
        return max(0.0, middle - half), min(1.0, middle + half)  # rounding may exceed them
    half = half_width(values)
    return mean - half, mean + half


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of two or more values, by Student's t distribution."""
    return quantile_of_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def quantile_of_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution (above 30 degrees by its Cornish-Fisher expansion, error below 1e-4)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)
