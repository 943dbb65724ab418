"""Charts of one or several runs: their groups, the axes they can have, and the mean of several seeds with its band."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rollwright.tracking.readable import number, visible
from rollwright.viewer.curves import groups_of, thinned
from rollwright.viewer.run import Run

#: What can be below a chart, and its title.
AXES = {"step": "steps", "time": "time", "tokens": "tokens", "samples": "samples"}
_POINTS = 600  # of a curve, about
_STEADY_FROM = 4  # fewest equal values of a steady curve
#: Keys of a config that tell the seeds of one setting apart, but not two settings.
_OF_A_SEED = frozenset(("seed", "trial_name"))


def charts_of(lines: Sequence[tuple[str, Sequence[Run]]], always: Collection[str] = ()) -> dict[str, Any]:
    """Return charts in groups; all lines share one chart for each metric.

    Args:
        lines: label and runs of each line. Several runs are drawn as their mean, with a band from the lowest to the highest.
        always: names of metrics that are drawn even if they never change.

    Returns:
        ``groups`` of charts with their titles; ``steady``, the metrics that never change, with their values; ``lines``, each with its
        ``label``, an empty ``url`` and the number of ``runs``; and ``axes``, for each line the positions of its steps along time, tokens and samples.
    """
    names = [sorted({name for run in runs for name in run.curves.names()}) for _, runs in lines]
    groups: dict[str, dict[str, None]] = {}
    for own in names:
        for title, members in groups_of(own).items():
            groups.setdefault(title, {}).update(dict.fromkeys(members))
    shown, steady = [], []
    for title, members in groups.items():
        charts = []
        for name in sorted(members, key=lambda name: (name.count("/"), name)):
            series = [{"label": label, "line": place, **_series(runs, name)} for place, (label, runs) in enumerate(lines)]
            series = [each for each in series if each["points"]]
            if not series:
                continue
            last = " · ".join(number(each["points"][-1][1]) for each in series)
            chart = {"name": name, "title": visible(name), "unit": _unit(name), "last": last, "series": series}
            if name not in always and all(map(_is_steady, series)):
                steady.append(
                    (chart["title"], f"{number(series[0]['points'][-1][1]) if _agree(series) else last} {chart['unit']}")
                )
            else:
                charts.append(chart)
        if charts:
            shown.append((title, charts))
    described = [{"label": label, "runs": len(runs), "url": ""} for label, runs in lines]
    return {"groups": shown, "steady": steady, "lines": described, "axes": [_axes(runs) for _, runs in lines]}


def _series(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Return the ``points`` of a line; of several runs, those of the mean, with the ``low`` and ``high`` edge of the band."""
    if len(runs) == 1:
        return {"points": runs[0].curves.series([name], _POINTS, 0.0)[name]}
    curves = [dict(points) for run in runs if (points := run.curves.points(name))]
    values = _together(curves)
    points = thinned([(step, sum(each) / len(each)) for step, each in values.items()], _POINTS)
    return {
        "points": points,
        "low": [[step, min(values[int(step)])] for step, _ in points],
        "high": [[step, max(values[int(step)])] for step, _ in points],
        "count": len(curves),
    }


def _together(curves: Sequence[Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the values of each step that all curves have which reach that far."""
    spans = [(min(curve), max(curve)) for curve in curves]
    found = {}
    for step in sorted({step for curve in curves for step in curve}):
        reaching = [curve for curve, (first, last) in zip(curves, spans, strict=True) if first <= step <= last]
        values = [curve[step] for curve in reaching if step in curve and math.isfinite(curve[step])]
        if len(values) == len(reaching):
            found[step] = values
    return found


def _is_steady(series: Mapping[str, Any]) -> bool:
    values = {value for edge in ("points", "low", "high") for _, value in series.get(edge, ())}
    return len(series["points"]) >= _STEADY_FROM and len(values) == 1


def _agree(series: Sequence[Mapping[str, Any]]) -> bool:
    return len({each["points"][-1][1] for each in series}) == 1


def _unit(name: str) -> str:
    if name.startswith("tokens_per_second/"):
        return "tokens/s"
    if name.startswith("seconds/"):
        return "s"
    return "nats" if "entropy" in name or "kl" in name.rpartition("/")[2] or "logprob_difference" in name else ""


# -- axes ------------------------------------------------------------------------------------------------------------------


def positions(run: Run) -> dict[str, dict[int, float]]:
    """Return the position of each step along the axes other than steps; an axis that the run did not record is left out.

    ``time`` is in seconds of training, without the time between an end and a resume; ``tokens`` and ``samples`` are sums up to the step.
    Tokens are sampled ones; in a stage that samples nothing, those that were trained on.
    """
    run.curves.update()
    found = {"time": dict(run.curves.elapsed)}
    samples = dict(run.curves.points("samples"))
    lengths = dict(run.curves.points("response_tokens"))
    tokens = {step: length * samples[step] for step, length in lengths.items() if step in samples}
    if not tokens:
        speeds, seconds = (dict(run.curves.points(name)) for name in ("tokens_per_second/train", "seconds/train"))
        tokens = {step: speed * seconds[step] for step, speed in speeds.items() if step in seconds}
    for name, counts in (("tokens", tokens), ("samples", samples)):
        steps = sorted(counts)
        found[name] = dict(zip(steps, accumulate(counts[step] for step in steps), strict=True))
    return {name: of_step for name, of_step in found.items() if of_step}


def _axes(runs: Sequence[Run]) -> dict[str, list[list[float]]]:
    """Return the positions of a line's steps along each axis, thinned; of several runs, the mean."""
    found = [positions(run) for run in runs]
    axes = {}
    for name in AXES:
        curves = [of_run[name] for of_run in found if name in of_run]
        if not curves or len(curves) < len(runs):
            continue
        points = [(step, sum(each) / len(each)) for step, each in _together(curves).items()]
        stride = max(1, -(-len(points) // _POINTS))
        axes[name] = [list(point) for point in [*points[:-1:stride], *points[-1:]]]
    return axes


def chart_rows(lines: Sequence[tuple[str, Sequence[Run]]], name: str) -> list[dict[str, Any]]:
    """Return all points of one metric, of every run, with their positions along each axis."""
    rows = []
    for label, runs in lines:
        for run in runs:
            along = positions(run)
            for step, value in run.curves.points(name):
                others = {axis: _at(of_step, step) for axis, of_step in along.items()}
                rows.append({"line": label, "run": run.name, "step": step, **others, name: value})
    return rows


def _at(of_step: Mapping[int, float], step: int) -> float | None:
    """Return the position of a step, or of the last one before it."""
    if step in of_step:
        return of_step[step]
    steps = sorted(of_step)
    place = bisect_right(steps, step)
    return of_step[steps[place - 1]] if place else None


# -- seeds -----------------------------------------------------------------------------------------------------------------


def by_setting(runs: Sequence[tuple[str, Run]]) -> list[tuple[str, list[Run]]]:
    """Group runs whose configs differ by their seeds only; a group's label names what sets it apart from the others."""
    configs = [_setting(run) for _, run in runs]
    varied = sorted(
        key for key in {key for config in configs for key in config} if len({config.get(key) for config in configs}) > 1
    )
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for (_, run), config in zip(runs, configs, strict=True):
        groups.setdefault((run.path.name if run.path != run.root else "", *(config.get(key) for key in varied)), []).append(run)
    stages = {stage for stage, *_ in groups}
    labels = []
    for stage, *values in groups:
        parts = [stage] if len(stages) > 1 else []
        parts += [f"{key.rpartition('.')[2]}={value}" for key, value in zip(varied, values, strict=True) if value is not None]
        labels.append(" ".join(parts) or "all seeds")
    return list(zip(labels, groups.values(), strict=True))


def _setting(run: Run) -> dict[str, str]:
    """Return the config without what belongs to the run alone: its seed, its name and its directory."""
    root, trial = str(run.root), run.root.name
    return {
        key: str(value).replace(root, "").replace(f"{run.root.parent.name}/{trial}", "")
        for key, value in run.config.items()
        if key.rpartition(".")[2] not in _OF_A_SEED
    }
