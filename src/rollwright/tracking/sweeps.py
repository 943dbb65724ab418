"""The results of a sweep: its file, and the table of means and intervals over seeds.

A sweep named ``trial`` has the file ``<experiment>/trial.sweep.json`` beside the directories of its runs. It lists the runs, and holds
what each one reached, as far as it has finished.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from rollwright.atomic import read_json, write_json
from rollwright.tracking.intervals import half_width
from rollwright.tracking.summary import measures_of

#: End of the name of a sweep's file.
SUFFIX = ".sweep.json"


@dataclass
class SweepRun:
    """One run of a sweep.

    Attributes:
        trial: its trial name, which names its directory.
        setting: the swept values except the seed.
        seed: its seed, if seeds are swept.
        state: ``waiting``, ``running``, ``finished``, ``failed`` or ``stopped``.
        measures: what it reached, by name; empty unless it has finished.
    """

    trial: str
    setting: str
    seed: str | None
    state: str = "waiting"
    measures: dict[str, float] | None = None


@dataclass(frozen=True)
class Spread:
    """A measure of one setting over its seeds.

    Attributes:
        values: value of each finished run, in the order of the runs.
        mean: their mean.
        half: half of the 95 % confidence interval of the mean, by Student's t distribution; None with fewer than two values.
    """

    measure: str
    setting: str
    values: tuple[float, ...]
    mean: float
    half: float | None


def spread(measure: str, setting: str, values: Sequence[float]) -> Spread:
    """Compute mean and interval of a measure over the seeds of a setting."""
    half = half_width(values) if len(values) > 1 else None
    return Spread(measure, setting, tuple(values), statistics.fmean(values), half)


def spreads(runs: Iterable[SweepRun]) -> list[Spread]:
    """Return each measure of each setting, measure by measure."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, value in (run.measures or {}).items():
            values.setdefault(name, {}).setdefault(run.setting, []).append(value)
    return [spread(name, setting, each) for name, settings in values.items() for setting, each in settings.items()]


def measures_of_summary(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's ``summary.json`` that runs are compared by.

    These are the accuracies of its eval stages, and for each training stage its last held-out reward and the reward (or loss) of its last
    step.
    """
    found: dict[str, Any] = {}
    stages = summary.get("stages") or {}
    trained = [name for name, result in stages.items() if result.get("kind") in ("sft", "dpo", "rl")]
    for name, result in stages.items():
        before = f"{name} " if len(stages) > 1 else ""
        if result.get("kind") == "eval":
            found |= {f"{result.get('label') or name} {measure}": value for measure, value in measures_of(result).items()}
        elif name in trained:
            evaluations = result.get("eval") or {}
            if evaluations:
                found[f"{before}held out"] = evaluations[max(evaluations, key=int)]
            found |= {f"{before}{key}": result[key] for key in ("reward", "loss") if key in result}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)}


def sweep_table(runs: Sequence[SweepRun]) -> Table:
    """Build the table of a sweep: a row for each measure of each setting, with mean, 95 % interval and the value of each run."""
    rows = spreads(runs)
    has_settings = any(run.setting for run in runs)
    number = {"justify": "right", "no_wrap": True}
    columns = [Column("measure", overflow="fold"), *([Column("setting", overflow="fold")] if has_settings else [])]
    columns += [Column("mean", **number), Column("95 % interval", **number), Column("each run", style="dim", overflow="fold")]  # type: ignore[arg-type]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
    before = None
    for row in rows:
        if before not in (None, row.measure) and has_settings:
            table.add_row()
        cells = [Text(row.measure if row.measure != before else "")]
        cells += [Text(row.setting)] if has_settings else []
        before = row.measure
        table.add_row(
            *cells, Text(f"{row.mean:.3f}", style="bold"), interval(row), " ".join(f"{value:.3f}" for value in row.values)
        )
    return table


def interval(row: Spread) -> str:
    """Format the interval of a mean; a dash if there is none."""
    return "–" if row.half is None else f"{row.mean - row.half:.3f} … {row.mean + row.half:.3f}"


def write_sweep(path: Path, runs: Sequence[SweepRun]) -> None:
    """Write the file of a sweep."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"runs": [vars(run) for run in runs]})


def read_sweep(path: Path) -> list[SweepRun]:
    """Read the file of a sweep.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return [SweepRun(**run) for run in read_json(path)["runs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the file of a sweep: {error}") from None


def name_of_sweep(path: Path) -> str:
    """Return the name of a sweep: its experiment and trial."""
    return f"{path.parent.name}/{path.name.removesuffix(SUFFIX)}"
