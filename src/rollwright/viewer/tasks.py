"""Tasks over a run: held-out tasks and what became of them from the first to the last evaluation, and the answers to one task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rollwright.tracking.readable import clipped
from rollwright.viewer.evaluations import Evaluation
from rollwright.viewer.pictures import bounds
from rollwright.viewer.run import Run
from rollwright.viewer.samples import NOT_UNDONE, select

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
    tasks are solved if the reward is above 0. Rewards that differ by less than a thousandth are equal.
    """
    low, high = bounds(reward for each in evaluations for reward in each.rewards.values())
    middle = (low + high) / 2
    if _is_equal(low, high):
        middle = 0.0 if low > 0 else high
    tasks = dict.fromkeys(task for each in evaluations for task in each.rewards)
    rows = [_row(task, [each.rewards.get(task) for each in evaluations], middle) for task in tasks]
    places = {kind: place for place, kind in enumerate(KINDS)}
    rows.sort(key=lambda row: (places[row.kind], -abs(row.change), -row.crossings, _mean(row)))
    return rows


def differing_rows(first: Evaluation, second: Evaluation) -> list[TaskRow]:
    """Return rows of the tasks of which two evaluations have different rewards, in the order of ``task_rows``."""
    return [row for row in task_rows([first, second]) if row.change]


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
    change = 0.0 if _is_equal(known[0], known[-1]) else known[-1] - known[0]
    return TaskRow(task, rewards, change, crossings, kind)


def _is_equal(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-3)


def _mean(row: TaskRow) -> float:
    return statistics.fmean(reward for reward in row.rewards if reward is not None)


def plain_rows(rows: Sequence[TaskRow], evaluations: Sequence[Evaluation], words: Mapping[str, str]) -> list[dict[str, Any]]:
    """Convert rows to lines of a table with a column for each evaluation."""
    titles = [each.title for each in evaluations]
    return [
        {"task": row.task, "words": words.get(row.task, ""), "kind": row.kind, **dict(zip(titles, row.rewards, strict=True))}
        for row in rows
    ]


# -- one task ------------------------------------------------------------------------------------------------------------

_LONGEST_ANSWER = 4_000  # characters
_MOST_SAMPLES = 5_000


def history_of(run: Run, task: str) -> list[dict[str, Any]]:
    """Return the groups of a task in the order in which they ended.

    Args:
        run: the run.
        task: identity of the task, see ``collector.identity_of_task``.

    Returns:
        For each group its key ``group``, ``is_eval``, the ``version`` of the weights that were evaluated, the ``step`` that trained on it,
        its mean ``reward`` and its ``samples``, each with the text that the model ``said``.
    """
    said = f"substr(texts.said, 1, {_LONGEST_ANSWER}) AS said"
    query = (
        f"{select('samples.version AS evaluated', said)} WHERE samples.task = ? AND {NOT_UNDONE} ORDER BY samples.id LIMIT ?"
    )
    groups: dict[str, dict[str, Any]] = {}
    samples = run.samples
    for row in run.index.rows(query, task, _MOST_SAMPLES):
        sample = {**samples.plain(row), "said": clipped(row["said"] or "", _LONGEST_ANSWER)}
        version = row["evaluated"] if row["is_eval"] else None
        nothing = {
            "group": sample["group"],
            "is_eval": sample["is_eval"],
            "version": version,
            "step": sample["step"],
            "samples": [],
        }
        groups.setdefault(sample["group"], nothing)["samples"].append(sample)
    for group in groups.values():
        group["samples"].sort(key=lambda sample: (sample["index"], sample["attempt"]))
        rewards = [sample["reward"] for sample in group["samples"] if sample["reward"] is not None]
        group["reward"] = statistics.fmean(rewards) if rewards else None
    return list(groups.values())
