"""Evaluations of runs, task by task: the last one of a run, and comparisons of runs on the tasks that they share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.tracking.readable import share, signed
from rollwright.viewer.index import Index

#: Mean reward of each task at the newest version. Of several evaluations of a task by one model, the one with the most samples counts.
_LAST = """
WITH last AS (
    SELECT id, task, ordinal, version, reward FROM samples
    WHERE is_eval AND NOT is_undone AND status = 'accepted' AND reward IS NOT NULL AND task IS NOT NULL
        AND version = (SELECT max(version) FROM samples WHERE is_eval AND NOT is_undone AND status = 'accepted')
), each AS (
    SELECT task, ordinal, version, avg(reward) AS reward, count(*) AS samples, min(id) AS first FROM last GROUP BY task, ordinal
)
SELECT task, ordinal, version, reward, samples, first, max(samples * 1000000 + ordinal) FROM each GROUP BY task
"""


def last_evaluation(index: Index) -> dict[str, float]:
    """Return the mean reward of each task in a run's last evaluation, by the task's identity (see ``collector.identity_of_task``)."""
    return {row["task"]: row["reward"] for row in index.rows(_LAST)}


def held_out_tasks(index: Index, limit: int) -> dict[str, Any]:
    """List the tasks of a run's last evaluation, those with the lowest reward first; see ``Run.held_out``."""
    rows = sorted(index.rows(_LAST), key=lambda row: (row["reward"], row["ordinal"]))
    shown = [
        {
            "task": row["task"] if not row["task"].startswith("#") else f"task {row['ordinal']}",
            "reward": row["reward"],
            "samples": row["samples"],
            "group": f"eval:{row['ordinal']}@v{row['version']}",
            "answer": _answer(index, row["first"]),
        }
        for row in rows[:limit]
    ]
    mean = statistics.fmean(row["reward"] for row in rows) if rows else None
    return {"tasks": shown, "total": len(rows), "version": rows[0]["version"] if rows else None, "mean": mean}


def _answer(index: Index, sample: int) -> str:
    found = index.rows("SELECT substr(said, 1, 120) FROM texts WHERE id = ?", sample)
    return found[0][0] if found else ""


def compare(evaluations: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Compare evaluations with the first one on the tasks that both have.

    Args:
        evaluations: names, and the mean reward of each task. The first that is not empty is what the others are compared with.

    Returns:
        ``rows`` of values, and a ``note`` that says what they are. A row has ``tasks`` and ``mean`` of the whole evaluation and, except for
        the first, ``common`` tasks, and of these ``first_mean``, ``own_mean``, ``difference``, ``interval``, ``better`` and ``worse``.
    """
    known = [(place, name, found) for place, (name, found) in enumerate(evaluations, 1) if found]
    rows: list[dict[str, Any]] = []
    for place, name, found in known:
        row: dict[str, Any] = {"place": place, "run": name, "tasks": len(found), "mean": statistics.fmean(found.values())}
        row |= dict.fromkeys(("common", "first_mean", "own_mean", "difference", "interval", "better", "worse"))
        if rows:
            row |= _paired(known[0][2], found)
        rows.append(row)
    lacking = [name for name, found in evaluations if not found]
    notes = (
        [f"last evaluation of each; {share(0.95)} interval of the mean difference over the tasks in both"]
        if len(rows) > 1
        else []
    )
    notes += [f"without an evaluation: {', '.join(lacking)}"] if lacking and rows else []
    return {"rows": rows, "first": rows[0]["place"] if rows else None, "note": "; ".join(notes)}


def _paired(first: Mapping[str, float], other: Mapping[str, float]) -> dict[str, Any]:
    common = sorted(first.keys() & other.keys())
    if not common:
        return {"common": 0}
    differences = [other[task] - first[task] for task in common]
    return {
        "common": len(common),
        "first_mean": statistics.fmean(first[task] for task in common),
        "own_mean": statistics.fmean(other[task] for task in common),
        "difference": statistics.fmean(differences),
        "interval": _interval(differences),
        "better": sum(each > 0 for each in differences),
        "worse": sum(each < 0 for each in differences),
    }


def _interval(differences: Sequence[float]) -> str:
    """Return the 95 % confidence interval of a mean of paired differences (normal approximation)."""
    if len(differences) < 2:
        return ""
    half = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    middle = statistics.fmean(differences)
    return f"{signed(middle - half)} to {signed(middle + half)}"
