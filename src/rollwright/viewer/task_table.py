"""Held-out tasks over evaluations: a row for each task with its rewards in order, and what became of it between the first and the last."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rollwright.viewer.evaluations import Evaluation

#: What became of a task between the first and the last evaluation, in the order of the rows, and its mark and words.
KINDS = {
    "lost": "✗ lost",
    "gained": "✓ gained",
    "unsteady": "~ unsteady",  # the same at both ends, but not between them
    "never": "never solved",
    "always": "always solved",
}


@dataclass
class TaskRow:
    """A task with its mean reward in each evaluation.

    Args:
        task: identity of the task, see ``collector.identity_of_task``.
        rewards: mean reward in each evaluation; None where the task was not evaluated.
        change: last reward minus first; 0 if there is only one.
        crossings: how often the task went from solved to unsolved or back.
        kind: one of ``KINDS``.
    """

    task: str
    rewards: list[float | None]
    change: float
    crossings: int
    kind: str


def task_rows(evaluations: Sequence[Evaluation]) -> list[TaskRow]:
    """Return a row for each task of some evaluations: flips first (the lost before the gained), then those that went back and forth.

    A task is solved if its reward is above the middle between the lowest and the highest reward of all evaluations. If these are equal, all
    tasks are solved if the reward is above 0.
    """
    low, high = bounds(evaluations)
    middle = (low + high) / 2 if low < high else low - float(low > 0)
    tasks = dict.fromkeys(task for each in evaluations for task in each.rewards)
    rows = [_row(task, [each.rewards.get(task) for each in evaluations], middle) for task in tasks]
    places = {kind: place for place, kind in enumerate(KINDS)}
    rows.sort(key=lambda row: (places[row.kind], -abs(row.change), -row.crossings, _mean(row)))
    return rows


def bounds(evaluations: Sequence[Evaluation]) -> tuple[float, float]:
    """Return the lowest and the highest reward; 0 and 0 if there is none."""
    every = [reward for each in evaluations for reward in each.rewards.values()]
    return min(every, default=0.0), max(every, default=0.0)


def _row(task: str, rewards: list[float | None], middle: float) -> TaskRow:
    known = [reward for reward in rewards if reward is not None]
    solved = [reward > middle for reward in known]
    crossings = sum(before != after for before, after in pairwise(solved))
    if solved[0] != solved[-1]:
        kind = "lost" if solved[0] else "gained"
    elif crossings:
        kind = "unsteady"
    else:
        kind = "always" if solved[0] else "never"
    return TaskRow(task, rewards, known[-1] - known[0], crossings, kind)


def _mean(row: TaskRow) -> float:
    return statistics.fmean(reward for reward in row.rewards if reward is not None)


def plain_rows(rows: Sequence[TaskRow], evaluations: Sequence[Evaluation], words: Mapping[str, str]) -> list[dict[str, Any]]:
    """Convert rows to lines of a table with a column for each evaluation."""
    titles = [each.title for each in evaluations]
    return [
        {"task": row.task, "words": words.get(row.task, ""), "kind": row.kind, **dict(zip(titles, row.rewards, strict=True))}
        for row in rows
    ]
