"""Evaluations of runs, task by task: those of one run in order, the last one, and comparisons on the tasks that two share."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollwright.tracking import intervals
from rollwright.tracking.readable import number, share, signed
from rollwright.viewer.index import Index

#: Mean reward of each task at each version. Of several evaluations of a task by one model, the one with the most samples counts.
_EACH = """
WITH each AS (
    SELECT task, ordinal, version, max(words) AS words, avg(reward) AS reward, count(*) AS samples, min(id) AS first FROM samples
    WHERE is_eval AND NOT is_undone AND status = 'accepted' AND reward IS NOT NULL AND task IS NOT NULL{only}
    GROUP BY version, task, ordinal
)
SELECT task, ordinal, version, words, reward, samples, first, max(samples * 1000000 + ordinal)
FROM each GROUP BY version, task ORDER BY version
"""
_ONLY_LAST = " AND version = (SELECT max(version) FROM samples WHERE is_eval AND NOT is_undone AND status = 'accepted')"


@dataclass
class Evaluation:
    """One evaluation: the mean reward of each task under the weights of one version.

    Args:
        stage: name of the stage that evaluated; empty if a run has no others.
        version: version of the weights.
        is_one: True if the stage evaluates one model, so that its name is enough.
        rewards: mean reward by the task's identity, see ``collector.identity_of_task``.
        groups: key of each task's group.
        firsts: number in the index of each task's first sample.
    """

    stage: str
    version: int
    is_one: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    firsts: dict[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The mean reward over the tasks."""
        return statistics.fmean(self.rewards.values())

    @property
    def title(self) -> str:
        """The name of the stage and the version of the weights, as far as they are needed."""
        return self.stage if self.is_one and self.stage else f"{self.stage} v{self.version}".strip()


def evaluations_of(index: Index, stage: str = "", *, is_one: bool = False) -> list[Evaluation]:
    """Return the evaluations of a run, the first version first; the arguments are those of ``Evaluation``."""
    return _evaluations(index, "", stage, is_one)


def last_evaluation(index: Index) -> Evaluation | None:
    """Return the last evaluation of a run; None if it has none."""
    return next(iter(_evaluations(index, _ONLY_LAST)), None)


def _evaluations(index: Index, only: str, stage: str = "", is_one: bool = False) -> list[Evaluation]:
    found: dict[int, Evaluation] = {}
    for row in index.rows(_EACH.format(only=only)):
        evaluation = found.setdefault(row["version"], Evaluation(stage, row["version"], is_one))
        evaluation.rewards[row["task"]] = row["reward"]
        evaluation.groups[row["task"]] = f"eval:{row['ordinal']}@v{row['version']}"
        evaluation.firsts[row["task"]] = row["first"]
    return list(found.values())


def names_of_tasks(index: Index) -> dict[str, str]:
    """Return what people call each task that was evaluated, by its identity."""
    query = "SELECT task, max(words) AS words, min(ordinal) AS ordinal FROM samples WHERE is_eval AND task IS NOT NULL GROUP BY task"
    return {row["task"]: row["words"] or _named(row["task"], row["ordinal"]) for row in index.rows(query)}


def _named(task: str, ordinal: int) -> str:
    return task if not task.startswith("#") else f"task {ordinal}"


def of_shared_tasks(evaluations: Iterable[Evaluation]) -> list[list[Evaluation]]:
    """Group evaluations so that those which share a task are in one group, in their order."""
    groups: list[tuple[set[str], list[Evaluation]]] = []
    for each in evaluations:
        tasks = set(each.rewards)
        alike = [group for group in groups if not group[0].isdisjoint(tasks)]
        groups = [group for group in groups if group not in alike]
        groups.append((tasks.union(*(own for own, _ in alike)), [*(one for _, own in alike for one in own), each]))
    return [own for _, own in groups]


def held_out_tasks(index: Index, limit: int) -> dict[str, Any]:
    """List the tasks of a run's last evaluation, those with the lowest reward first; see ``Run.held_out``."""
    rows = sorted(index.rows(_EACH.format(only=_ONLY_LAST)), key=lambda row: (row["reward"], row["ordinal"]))
    answers = answers_of(index, [row["first"] for row in rows[:limit]])
    shown = [
        {
            "task": row["words"] or _named(row["task"], row["ordinal"]),
            "reward": row["reward"],
            "samples": row["samples"],
            "group": f"eval:{row['ordinal']}@v{row['version']}",
            "answer": answers.get(row["first"], ""),
        }
        for row in rows[:limit]
    ]
    mean = statistics.fmean(row["reward"] for row in rows) if rows else None
    return {"tasks": shown, "total": len(rows), "version": rows[0]["version"] if rows else None, "mean": mean}


def answers_of(index: Index, samples: Collection[int]) -> dict[int, str]:
    """Return the last answer of each sample on one line, by the sample's number in the index; of at most 120 characters."""
    query = (
        "SELECT id, substr(coalesce(answer, said), 1, 120) AS answer FROM texts WHERE id IN (SELECT value FROM json_each(?))"
    )
    return {row["id"]: row["answer"] for row in index.rows(query, json.dumps(list(samples)))}


# -- comparisons ---------------------------------------------------------------------------------------------------------


def progress(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Compare the first evaluation of some tasks with the last one of each stage.

    Returns:
        For each comparison ``first`` and ``last`` (title, number of ``tasks``, ``mean`` and its 95 % ``interval``), and the paired ``common``,
        ``difference``, ``interval``, ``better`` and ``worse`` of ``compare``. If there is only one evaluation, ``last`` and these are None.
    """
    first, last_of_stage = evaluations[0], {each.stage: each for each in evaluations}
    others = [each for each in last_of_stage.values() if each is not first]
    if not others:
        return [{"first": _summary(first), **dict.fromkeys(("last", *_OF_A_PAIR))}]
    nothing = dict.fromkeys(_OF_A_PAIR)
    return [
        {"first": _summary(first), "last": _summary(each), **nothing, **_paired(first.rewards, each.rewards)} for each in others
    ]


#: What ``_paired`` says of two evaluations that share tasks.
_OF_A_PAIR = ("common", "first_mean", "own_mean", "difference", "interval", "better", "worse")


def _summary(evaluation: Evaluation) -> dict[str, Any]:
    rewards = list(evaluation.rewards.values())
    return {
        "title": evaluation.title,
        "stage": evaluation.stage,
        "version": evaluation.version,
        "tasks": len(rewards),
        "mean": evaluation.mean,
        "interval": interval_of_mean(rewards),
    }


def interval_of_mean(rewards: Sequence[float]) -> str:
    """Return the 95 % interval of a mean over tasks: see ``tracking.intervals``."""
    limits = intervals.interval_of_mean(rewards)
    return "" if limits is None else f"{number(limits[0])} to {number(limits[1])}"


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
        row |= dict.fromkeys(_OF_A_PAIR)
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
    """Return the 95 % interval of a mean of paired differences; empty with fewer than two."""
    if len(differences) < 2:
        return ""
    middle, half = statistics.fmean(differences), intervals.half_width(differences)
    return f"{signed(middle - half)} to {signed(middle + half)}"
