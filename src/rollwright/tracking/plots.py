"""Plots of a run, drawn without a display (matplotlib's Agg). They need the extra ``plots``; without it, nothing is drawn."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollwright.tracking.logging import getLogger

logger = getLogger("plots")

#: Colours that readers with colour-blindness can tell apart (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _GRID = "#333333", "#E4E4E4"


def _axes(title: str, y_label: str):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, pad=10)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#AAAAAA")
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _can_draw(path: str | Path) -> bool:
    """Return True if matplotlib is installed; otherwise log that the plot is missing."""
    is_there = importlib.util.find_spec("matplotlib") is not None
    if not is_there:
        logger.warning("%s is not drawn, as matplotlib is not installed: pip install 'rollwright[plots]'.", path)
    return is_there


def _whole_numbers():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10])


def _save(figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Compute an exponential moving average with bias correction (Kingma and Ba, 2015, section 3)."""
    average, normaliser, averages = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        normaliser = weight * normaliser + (1 - weight)
        averages.append(average / normaliser)
    return averages


def plot_curves(
    path: str | Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    y_label: str = "",
) -> Path | None:
    """Plot named curves of ``(x, y)`` points; short curves have markers. Returns the picture's path, or None without matplotlib.

    Args:
        path: PNG file, or another type that matplotlib supports.
    """
    if not _can_draw(path):
        return None
    figure, axes = _axes(title, y_label)
    for (name, points), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linewidth=1.8,
            marker="o" if len(points) <= 12 else None,
            markersize=5,
            label=name,
        )
    if all(float(x).is_integer() for points in curves.values() for x, _ in points):
        axes.xaxis.set_major_locator(_whole_numbers())
    if curves:
        axes.legend(frameon=False, labelcolor=_INK)
    return _save(figure, path)


def plot_reward_curve(
    path: str | Path,
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, float]] = (),
    *,
    title: str = "Reward",
    smoothing: float = 0.4,
) -> Path | None:
    """Plot the reward in training and on held-out tasks. Returns the picture's path, or None without matplotlib.

    Args:
        rewards: ``(step, mean reward)`` of training.
        evaluations: ``(step, mean reward)`` on held-out tasks; step 0 is before training.
        smoothing: weight of the past in the moving average of the rewards, from 0 to below 1.
    """
    if not _can_draw(path):
        return None
    figure, axes = _axes(title, "reward")
    steps, values = [step for step, _ in rewards], [value for _, value in rewards]
    axes.plot(steps, values, color=COLOURS[0], alpha=0.30, linewidth=1.2)
    axes.plot(
        steps, smoothed(values, smoothing), color=COLOURS[0], linewidth=2.2, label="training reward (smoothed; faint: raw)"
    )
    if evaluations:
        axes.plot(
            [step for step, _ in evaluations],
            [value for _, value in evaluations],
            color=COLOURS[1],
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            marker="o",
            markersize=6,
            label="held-out reward",
        )
        for step, value in (evaluations[0], *evaluations[1:][-1:]):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                color=COLOURS[1],
                fontsize=9,
                fontweight="bold",
            )
    everything = [*values, *(value for _, value in evaluations)]
    if everything and min(everything) >= 0.0 and max(everything) <= 1.0:
        axes.set_ylim(0.0, 1.09)
        axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.xaxis.set_major_locator(_whole_numbers())
    if rewards:
        axes.legend(frameon=False, loc="lower right", labelcolor=_INK, fontsize=9)
    return _save(figure, path)
