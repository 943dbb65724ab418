"""Samples, groups and steps of a run, from its index."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rollwright.errors import DataError
from rollwright.viewer.collector import as_row, first_steps
from rollwright.viewer.index import Index

_KEY = re.compile(r"(eval:)?(\d+)(?:/(\d+))?(?:@v(\d+))?(?:@(\d+))?(?:#(\d+))?")
_UNFINISHED = ("failed", "cut", "diverged")  # outcomes after which another attempt may have the same name
_LISTED = """
samples.id, writer, ordinal, idx, attempt, is_eval, version, workflow, status, reason, reward, rewards, prompt_tokens, tokens, length, rows,
calls, tools, tool_names, first_version, last_version, model_seconds, tool_seconds, began, ended, truncated, step, step_writer, trained,
advantage, advantages, is_undone, is_damaged, task, words, expected, figures, substr(texts.said, 1, 120) AS preview, texts.answer AS answer
"""
_READ_AT_ONCE = 500  # samples
#: SQL order of attempts with the same name that puts the one to show first.
_BEST_FIRST = "is_undone, status IN ('accepted', 'rejected') DESC, samples.id DESC"
#: SQL condition that excludes samples that a resume undid.
NOT_UNDONE = "NOT is_undone"


def select(*more: str) -> str:
    """Return the beginning of a query for samples, with ``more`` columns; conditions follow it."""
    return f"SELECT {', '.join((_LISTED, *more))} FROM samples LEFT JOIN texts ON texts.id = samples.id"


class Key(NamedTuple):
    """The parts of a group's or sample's key, named like the columns of the index. A part that is None matches all values."""

    is_eval: bool
    ordinal: int
    idx: int | None = None
    version: int | None = None
    writer: int | None = None
    attempt: int | None = None

    def condition(self) -> tuple[str, list[int]]:
        """Return an SQL condition that selects what the key names, and its values."""
        known = {name: value for name, value in self._asdict().items() if value is not None}
        return " AND ".join(f"{name} = ?" for name in known), list(known.values())

    def names(self, sample: Mapping[str, Any]) -> bool:
        """Return True if the key names this unfinished sample."""
        return all(value is None or value == sample[name] for name, value in self._asdict().items())


def parse_key(key: str) -> Key:
    """Parse ``12/3``, ``12``, ``eval:12/3@v4``, ``12/3@0`` (of the first process) or ``12/3#1`` (the second attempt).

    Raises:
        DataError: the key has none of these forms.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise DataError(f"{key!r} names no sample: write ORDINAL/SAMPLE or eval:ORDINAL/SAMPLE@vVERSION, such as 12/3.")
    return Key(bool(match[1]), *(None if part is None else int(part) for part in match.groups()[1:]))  # type: ignore[arg-type]


class Samples:
    """The samples of an index.

    Args:
        index: index of the journal.
        is_running: True if the run's last process is still running.
    """

    def __init__(self, index: Index, is_running: bool) -> None:
        self._index = index
        self._status = "running" if is_running else "interrupted"
        with index.reading() as connection:
            self._first_steps = first_steps(connection)
            numbers = "SELECT (SELECT count(DISTINCT writer) FROM files) > 1, (SELECT coalesce(max(writer), 0) FROM resumes)"
            self._has_several, self._resumed = connection.execute(numbers).fetchone()

    # -- samples -----------------------------------------------------------------------------------------------------------------

    def listed(self, where: str, *values: Any) -> list[dict[str, Any]]:
        """List samples that have ended; ``where`` completes the query ``select()``."""
        return [self.plain(row) for row in self._index.rows(f"{select()} {where}", *values)]

    def numbered(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return samples by their numbers in the index, without those that no longer exist."""
        rows = self._index.rows(f"{select()} WHERE samples.id IN (SELECT value FROM json_each(?))", json.dumps(numbers))
        return {row["id"]: self.plain(row) for row in rows}

    def running(self, key: Key | None = None, *, undone: bool = False) -> list[dict[str, Any]]:
        """List the unfinished samples that a key names, or all; ``undone`` includes those that began again after a resume."""
        return [self.plain(row) for row in self._unfinished(key) if undone or not row["is_undone"]]

    def _unfinished(self, key: Key | None = None) -> Iterator[dict[str, Any]]:
        for row in self._index.rows("SELECT state FROM running"):
            sample = as_row(msgspec.msgpack.decode(row["state"]))
            status = self._status if sample["writer"] >= self._resumed else "interrupted"
            if key is None or key.names(sample):
                yield {**sample, "status": status, "preview": None, "answer": None}

    def everything(
        self, is_eval: bool | None = None, version: int | None = None
    ) -> Iterator[tuple[dict[str, Any], bytes, bytes | None]]:
        """Yield all samples like ``find``: failed attempts, undone ones and, at the end, unfinished ones are among them.

        Args:
            is_eval: True for those of evaluations, False for those of training; None for all.
            version: version of the weights that were evaluated; None for all.
        """
        wanted = {name: value for name, value in (("is_eval", is_eval), ("version", version)) if value is not None}
        rest = "".join(f" AND {name} = ?" for name in wanted)
        query, last = f"{select('places', 'trained_places')} WHERE samples.id > ?{rest} ORDER BY samples.id LIMIT ?", 0
        while found := self._index.rows(query, last, *wanted.values(), _READ_AT_ONCE):
            last = found[-1]["id"]
            yield from ((self.plain(row), row["places"], row["trained_places"]) for row in found)
        for row in self._unfinished():
            if all(row[name] == value for name, value in wanted.items()):
                yield self.plain(row), row["places"], None

    def find(self, key: str) -> tuple[dict[str, Any], bytes, bytes | None]:
        """Return the sample with a key, and the places of its records and of its training records.

        Raises:
            DataError: there is no such sample, or it is not in the index yet.
        """
        parts = parse_key(key)
        condition, values = parts._replace(idx=parts.idx or 0).condition()
        query = f"{select('places', 'trained_places')} WHERE {condition} ORDER BY {_BEST_FIRST} LIMIT 1"
        for row in self._index.rows(query, *values):
            return self.plain(row), row["places"], row["trained_places"]
        for row in self._unfinished(parts._replace(version=None)):
            return self.plain(row), row["places"], None
        raise DataError(f"there is no sample {key} in what is indexed of this run: see its steps for those that there are.")

    def plain(self, row: sqlite3.Row | Mapping[str, Any]) -> dict[str, Any]:
        """Convert a sample to plain values."""
        first, last = row["first_version"], row["last_version"]
        same = (
            "ordinal attempt workflow status reason reward step advantage prompt_tokens tokens length rows calls tools model_seconds "
            "tool_seconds began ended preview expected answer"
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
            "words": row["words"],
            "figures": json.loads(row["figures"]) if row["figures"] else {},
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
        """Return a group with its samples of all attempts.

        Args:
            key: key of the group or of one of its samples.
            undone: include samples that a resume undid.

        Raises:
            DataError: there is no such group.
        """
        parts = parse_key(key)
        where, values = Key(parts.is_eval, parts.ordinal, version=parts.version).condition()
        wanted = where if undone else f"{where} AND {NOT_UNDONE}"
        samples = self.listed(f"WHERE {wanted} ORDER BY idx, attempt, samples.id", *values)
        samples += self.running(Key(parts.is_eval, parts.ordinal), undone=undone)
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
            return {**facts, "version": None, **nothing, **_task_of(samples), "samples": list(samples)}
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
            **_task_of(samples),
            "samples": list(samples),
        }

    def _groups(self, condition: str, *values: Any, shown: str, of_eval: bool = False) -> list[dict[str, Any]]:
        """List finished groups, each with the samples that match ``shown``; evaluation groups must all have one version."""
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
        """Return the newest entry of each step; ``undone`` includes steps that a resume undid and that were not repeated."""
        same = "step samples groups reward reward_min reward_max tokens dropped without_variance time version"
        return [
            {**{name: row[name] for name in same.split()}, "is_undone": is_undone}
            for row, is_undone in self._newest_steps(undone)
        ]

    def publications(self, *, undone: bool = False) -> list[dict[str, Any]]:
        """Return the newest publication of each step; ``undone`` includes steps that a resume undid and that were not repeated."""
        return [plain_publication(row) for row, _ in self._newest_steps(undone)]

    def _newest_steps(self, undone: bool) -> Iterator[tuple[sqlite3.Row, bool]]:
        """Yield the newest row of each step, and whether a resume undid it; undone steps only with ``undone``."""
        for row in self._index.rows("SELECT *, max(writer) FROM steps GROUP BY step ORDER BY step"):
            is_undone = self._is_undone(row["writer"], row["step"])
            if undone or not is_undone:
                yield row, is_undone

    def step(self, step: int, bins: int) -> dict[str, Any]:
        """Return a step with its groups, including those dropped while it was sampled. An undone step keeps its original samples.

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
    """Return the key of a group, or of a sample's group."""
    return f"eval:{row['ordinal']}@v{row['version']}" if row["is_eval"] else str(row["ordinal"])


def _task_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: samples[0][name] if samples else None for name in ("words", "expected")}


def plain_publication(row: sqlite3.Row) -> dict[str, Any]:
    """Convert the publication after a step to plain values."""
    same = ("step", "version", "way", "seconds", "bytes", "time")
    return {
        **{name: row[name] for name in same},
        "engines": json.loads(row["engines"] or "[]"),
        "audit": json.loads(row["audit"] or "{}"),
    }


def reward_bins(samples: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Build a histogram of rewards: a bin for each value if there are few values, otherwise bins of equal width."""
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
