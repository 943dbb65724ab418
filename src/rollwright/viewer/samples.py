"""Samples, groups and steps of a run, from its index."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollwright.errors import DataError
from rollwright.viewer.collector import OpenSample, first_steps
from rollwright.viewer.index import Index

_KEY = re.compile(r"(eval:)?(\d+)(?:/(\d+))?(?:@v(\d+))?(?:@(\d+))?(?:#(\d+))?")
_UNFINISHED = ("failed", "cut", "diverged")  # outcomes of attempts behind which another may have the same name
_LISTED = """
samples.id, writer, ordinal, idx, attempt, is_eval, version, workflow, status, reason, reward, rewards, prompt_tokens, tokens, length, rows,
calls, tools, tool_names, first_version, last_version, model_seconds, tool_seconds, began, ended, truncated, step, step_writer, trained,
advantage, advantages, is_undone, is_damaged, substr(texts.said, 1, 120) AS preview
"""
#: Beginning of the query for samples; conditions follow.
SELECT = f"SELECT {_LISTED} FROM samples LEFT JOIN texts ON texts.id = samples.id"
#: Order that puts the meant one first among several attempts with the same name.
_BEST_FIRST = "is_undone, status IN ('accepted', 'rejected') DESC, samples.id DESC"
#: Condition of lists without samples that a resume undid.
NOT_UNDONE = "NOT is_undone"


class Key(NamedTuple):
    """The parts of a group's or sample's key."""

    is_eval: bool
    ordinal: int
    index: int | None
    version: int | None
    writer: int | None
    attempt: int | None


def parse_key(key: str) -> Key:
    """Parse ``12/3``, ``12``, ``eval:12/3@v4``, ``12/3@0`` (of the first process) or ``12/3#1`` (the second attempt).

    Raises:
        DataError: it has none of these forms.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise DataError(f"{key!r} names no sample: write ORDINAL/SAMPLE or eval:ORDINAL/SAMPLE@vVERSION, such as 12/3.")
    return Key(bool(match[1]), *(None if part is None else int(part) for part in match.groups()[1:]))  # type: ignore[arg-type]


class Samples:
    """The samples of an index.

    Args:
        index: of the journal.
        is_running: True if its last process is still running.
    """

    def __init__(self, index: Index, is_running: bool) -> None:
        self._index = index
        self._status = "running" if is_running else "interrupted"
        writers = index.rows("SELECT count(DISTINCT writer) FROM files")[0]
        self._has_several = writers[0] > 1
        with index.reading() as connection:
            self._first_steps = first_steps(connection)
            self._resumed = connection.execute("SELECT coalesce(max(writer), 0) FROM resumes").fetchone()[0]

    # -- samples -----------------------------------------------------------------------------------------------------------------

    def listed(self, where: str, *values: Any) -> list[dict[str, Any]]:
        """Samples that have ended; the argument completes the query ``SELECT``."""
        return [self.plain(row) for row in self._index.rows(f"{SELECT} {where}", *values)]

    def running(self, ordinal: int | None = None, is_eval: bool = False, *, undone: bool = False) -> list[dict[str, Any]]:
        """Unfinished samples of one task or all; ``undone`` includes those that began again after a resume."""
        found = []
        for row in self._index.rows("SELECT writer, state FROM running"):
            sample = OpenSample.of(row["state"])
            if sample.is_undone and not undone:
                continue
            if ordinal is None or (sample.begin[0] == ordinal and bool(sample.begin[3]) == is_eval):
                status = self._status if row["writer"] >= self._resumed else "interrupted"
                found.append(self.plain(sample.columns(row["writer"], status)))
        return found

    def find(self, key: str) -> tuple[dict[str, Any], bytes, bytes | None]:
        """The sample with a key, and the places of its records and of its training records.

        Raises:
            DataError: there is no such sample, or it is not in the index yet.
        """
        parts = parse_key(key)
        conditions, values = ["ordinal = ?", "is_eval = ?"], [parts.ordinal, parts.is_eval]
        for name, value in (
            ("idx", parts.index or 0),
            ("version", parts.version),
            ("writer", parts.writer),
            ("attempt", parts.attempt),
        ):
            if value is not None:
                conditions.append(f"{name} = ?")
                values.append(value)
        where = f"WHERE {' AND '.join(conditions)} ORDER BY {_BEST_FIRST} LIMIT 1"
        for row in self._index.rows(f"{SELECT} {where}", *values):
            (packed,) = self._index.rows("SELECT places, trained_places FROM samples WHERE id = ?", row["id"])
            return self.plain(row), packed["places"], packed["trained_places"]
        for row in self._index.rows("SELECT writer, state FROM running"):
            sample = OpenSample.of(row["state"])
            plain = self.plain(sample.columns(row["writer"], self._status))
            if _is_named(plain, row["writer"], parts):
                return plain, sample.places.tobytes(), None
        raise DataError(f"there is no sample {key} in what is indexed of this run: see its steps for those that there are.")

    def plain(self, row: sqlite3.Row | Mapping[str, Any]) -> dict[str, Any]:
        """A sample as plain values."""
        first, last = row["first_version"], row["last_version"]
        same = (
            "ordinal attempt workflow status reason reward step advantage prompt_tokens tokens length rows calls tools model_seconds "
            "tool_seconds began ended preview"
        )
        return {
            "key": self._key(row),
            "index": row["idx"],
            "process": row["writer"],
            "is_eval": bool(row["is_eval"]),
            "version": None if first is None else [first, last],
            "truncated": bool(row["truncated"]),
            "trained": row["trained"] or 0,
            "is_undone": bool(row["is_undone"]),
            "is_damaged": bool(row["is_damaged"]),
            "rewards": json.loads(row["rewards"]) if row["rewards"] else [] if row["reward"] is None else [row["reward"]],
            "advantages": json.loads(row["advantages"])
            if row["advantages"]
            else []
            if row["advantage"] is None
            else [row["advantage"]],
            "tool_names": json.loads(row["tool_names"]) if row["tool_names"] else [],
            "group": group_key(row),
            **{name: row[name] for name in same.split()},
        }

    def _key(self, row: sqlite3.Row | Mapping[str, Any]) -> str:
        version = f"@v{row['version']}" if row["is_eval"] else ""
        writer = f"@{row['writer']}" if self._has_several else ""
        attempt = f"#{row['attempt']}" if row["attempt"] or row["status"] in _UNFINISHED else ""
        return f"{'eval:' if row['is_eval'] else ''}{row['ordinal']}/{row['idx']}{version}{writer}{attempt}"

    def _is_undone(self, writer: int, step: int) -> bool:
        return any(other > writer and first <= step for other, first in self._first_steps.items())

    # -- groups ------------------------------------------------------------------------------------------------------------------

    def group(self, key: str, *, undone: bool = False) -> dict[str, Any]:
        """A group with its samples of all attempts.

        Args:
            key: key of the group or of one of its samples.
            undone: include samples that a resume undid.

        Raises:
            DataError: there is no such group.
        """
        parts = parse_key(key)
        conditions, values = ["ordinal = ?", "is_eval = ?"], [parts.ordinal, parts.is_eval]
        if parts.version is not None:
            conditions.append("version = ?")
            values.append(parts.version)
        where = " AND ".join(conditions)
        wanted = where if undone else f"{where} AND {NOT_UNDONE}"
        samples = self.listed(f"WHERE {wanted} ORDER BY idx, attempt, samples.id", *values)
        samples += self.running(parts.ordinal, parts.is_eval, undone=undone)
        if parts.is_eval and parts.version is None and samples:  # the last evaluation
            newest = samples[-1]["group"]
            samples = [sample for sample in samples if sample["group"] == newest]
        ended = self._index.rows(f"SELECT * FROM groups WHERE {where} ORDER BY id DESC LIMIT 1", *values)
        if not samples and not ended:
            raise DataError(f"there is no task {key} in what is indexed of this run.")
        return self._group(ended[0] if ended else None, samples)

    def _group(self, row: sqlite3.Row | None, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if row is None:
            first = samples[0]
            facts = {"key": first["group"], "ordinal": first["ordinal"], "is_eval": first["is_eval"], "state": self._status}
            nothing = {"reason": "", "policy": "", "step": None, "time": None, "has_variance": True, "is_undone": False}
            return {**facts, "version": None, **nothing, "samples": list(samples)}
        is_dropped = row["state"] not in ("delivered", "trained")
        return {
            "key": group_key(row),
            "ordinal": row["ordinal"],
            "is_eval": bool(row["is_eval"]),
            "version": row["version"],
            "state": row["state"],
            "policy": row["policy"] if is_dropped else "",
            "reason": row["reason"],
            "step": row["step"],
            "time": row["time"],
            "has_variance": bool(row["has_variance"]),
            "is_undone": row["step"] is not None and self._is_undone(row["writer"], row["step"]),
            "samples": list(samples),
        }

    def _groups(self, condition: str, *values: Any, shown: str, of_eval: bool = False) -> list[dict[str, Any]]:
        """Finished groups, each with the samples that match ``shown``; groups of evaluations must all have one version."""
        last = f"SELECT max(id) FROM groups WHERE {condition} GROUP BY ordinal"  # the newest, because a resume evaluates again
        groups = self._index.rows(f"SELECT * FROM groups WHERE id IN ({last}) ORDER BY ordinal", *values)
        of_group: dict[str, list[dict[str, Any]]] = {}
        tasks = f"SELECT ordinal FROM groups WHERE {condition}"
        own = "is_eval AND version = (SELECT max(version) FROM groups WHERE " + condition + ")" if of_eval else "NOT is_eval"
        twice = values * 2 if of_eval else values
        for sample in self.listed(f"WHERE ordinal IN ({tasks}) AND {own} AND {shown} ORDER BY idx, attempt", *twice):
            of_group.setdefault(sample["group"], []).append(sample)
        return [self._group(row, of_group.get(group_key(row), [])) for row in groups]

    # -- steps -------------------------------------------------------------------------------------------------------------------

    def steps(self, *, undone: bool = False) -> list[dict[str, Any]]:
        """The index's entry of each step, from its last run; ``undone`` includes steps that a resume undid and that were not repeated."""
        rows = self._index.rows("SELECT *, max(writer) FROM steps GROUP BY step ORDER BY step")
        same = "step samples groups reward reward_min reward_max tokens dropped without_variance time version"
        return [
            {**{name: row[name] for name in same.split()}, "is_undone": self._is_undone(row["writer"], row["step"])}
            for row in rows
            if undone or not self._is_undone(row["writer"], row["step"])
        ]

    def publications(self, *, undone: bool = False) -> list[dict[str, Any]]:
        """The publication after each step, from its last run; ``undone`` includes steps that a resume undid."""
        rows = self._index.rows("SELECT *, max(writer) FROM steps GROUP BY step ORDER BY step")
        return [plain_publication(row) for row in rows if undone or not self._is_undone(row["writer"], row["step"])]

    def step(self, step: int, bins: int) -> dict[str, Any]:
        """A step: its groups, and those dropped while it was sampled. A step that a resume undid keeps its original samples.

        Raises:
            DataError: there is no such step.
        """
        writers = self._index.rows("SELECT max(writer) FROM groups WHERE step = ? AND NOT is_eval", step)
        row = self._index.rows("SELECT * FROM steps WHERE step = ? ORDER BY writer DESC LIMIT 1", step)
        if writers[0][0] is None and not row:
            raise DataError(f"there is no step {step} in what is indexed of this run.")
        writer = row[0]["writer"] if row else writers[0][0]
        shown = "TRUE" if self._is_undone(writer, step) else NOT_UNDONE
        groups = self._groups("step = ? AND writer = ? AND NOT is_eval", step, writers[0][0], shown=shown)
        dropped = Counter(group["policy"] for group in groups if group["state"] != "trained")
        trained = sum(group["state"] == "trained" for group in groups)
        phases = "SELECT name, seconds, max(writer) FROM phases WHERE step = ? GROUP BY name"
        return {
            "step": step,
            "bins": reward_bins([sample for group in groups for sample in group["samples"]], bins),
            "groups": groups,
            "counts": {
                "drawn": len(groups),
                "trained": trained,
                "dropped": dict(dropped.most_common()),
                "without_variance": sum(group["state"] == "trained" and not group["has_variance"] for group in groups),
            },
            "publication": plain_publication(row[0]) if row else None,
            "phases": {name: seconds for name, seconds, _ in self._index.rows(phases, step)},
            "evaluations": self._groups("is_eval AND version = ?", row[0]["version"], shown=shown, of_eval=True) if row else [],
        }


def group_key(row: sqlite3.Row | Mapping[str, Any]) -> str:
    """The key of a group, or of the group of a sample."""
    return f"eval:{row['ordinal']}@v{row['version']}" if row["is_eval"] else str(row["ordinal"])


def _is_named(sample: Mapping[str, Any], writer: int, parts: Key) -> bool:
    asked = (parts.ordinal, parts.is_eval, parts.index, parts.attempt, parts.writer)
    own = (sample["ordinal"], sample["is_eval"], sample["index"], sample["attempt"], writer)
    return all(wanted is None or wanted == its for wanted, its in zip(asked, own, strict=True))


def plain_publication(row: sqlite3.Row) -> dict[str, Any]:
    """The publication after a step."""
    same = ("step", "version", "way", "seconds", "bytes", "time")
    return {
        **{name: row[name] for name in same},
        "engines": json.loads(row["engines"] or "[]"),
        "audit": json.loads(row["audit"] or "{}"),
    }


def reward_bins(samples: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """A histogram of rewards: a bin for each value if there are few, otherwise bins of equal width."""
    rewards = [(reward, sample["trained"] > 0) for sample in samples for reward in sample["rewards"] if math.isfinite(reward)]
    if not rewards:
        return []
    values = sorted({reward for reward, _ in rewards})
    if len(values) <= count:
        edges = [(value, value) for value in values]
        place = {value: number for number, value in enumerate(values)}
    else:
        width = (values[-1] - values[0]) / count
        edges = [(values[0] + number * width, values[0] + (number + 1) * width) for number in range(count)]
        place = {value: min(count - 1, int((value - values[0]) / width)) for value in values}
    bins = [{"low": low, "high": high, "count": 0, "trained": 0} for low, high in edges]
    for reward, is_trained in rewards:
        bins[place[reward]]["count"] += 1
        bins[place[reward]]["trained"] += is_trained
    return bins
