"""Conversion of a journal's records, in order, to the rows of its index."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import xxhash

from rollwright.experience.journal.reading import step_of
from rollwright.experience.journal.records import (
    AnyRecord,
    Arguments,
    Begin,
    Checkpoint,
    Closed,
    DurableResult,
    End,
    Files,
    GroupEnd,
    ModelCall,
    Phase,
    Published,
    Resumed,
    Trained,
    unpack_task,
)
from rollwright.viewer.words import expected_of_task, words_of_task

#: Prefix of the names of durable calls that score a completion; not imported from ``rewards.wrapper``, which loads torch.
REWARD_CALLS = "reward "

#: The row of a sample that has just begun. Its other columns come from its ``Begin``.
_BEGUN: dict[str, Any] = {
    "status": "running",
    "reason": "",
    "reward": None,
    "rewards": None,
    "prompt_tokens": 0,
    "tokens": 0,
    "length": 0,
    "rows": 0,
    "calls": 0,
    "tools": 0,
    "tool_names": [],
    "first_version": 1 << 62,
    "last_version": -1,
    "model_seconds": 0.0,
    "tool_seconds": 0.0,
    "ended": None,
    "truncated": False,
    "is_undone": False,
    "is_damaged": False,
    "step": None,
    "step_writer": None,
    "trained": None,
    "advantage": None,
    "advantages": None,
    "figures": None,
}
_COLUMNS = [
    *_BEGUN,
    "writer",
    "ordinal",
    "idx",
    "attempt",
    "is_eval",
    "version",
    "task",
    "words",
    "expected",
    "workflow",
    "began",
    "places",
]
_INSERT = f"INSERT INTO samples ({', '.join(_COLUMNS)}) VALUES (:{', :'.join(_COLUMNS)})"
_TRAINED = """
UPDATE samples SET step = ?, step_writer = ?, trained = ?, advantage = ?, advantages = ?, trained_places = ?, is_undone = ? WHERE id = ?
"""
#: Samples of the steps and evaluations that a resume undid.
_UNDONE_BY_RESUME = """
UPDATE samples SET is_undone = 1
WHERE (step > :step AND step_writer < :writer) OR (is_eval AND version > :version AND writer < :writer)
"""
#: Samples that a process repeats, because it began the same sample from the same or an earlier attempt.
_UNDONE_BY_SAMPLE = """
UPDATE samples SET is_undone = 1
WHERE ordinal = :ordinal AND is_eval = :is_eval AND idx = :idx AND attempt >= :attempt AND writer < :resumed
    AND (NOT is_eval OR version = :version)
"""
_FIGURE = """
INSERT INTO figures VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET numbers = numbers + excluded.numbers, texts = texts + excluded.texts
"""
_STEP = """
INSERT OR REPLACE INTO steps (step, writer, version, time, way, seconds, bytes, engines, audit)
VALUES (:step, :writer, :version, :time, :way, :seconds, :bytes, :engines, :audit)
"""
_OF_STEP = "FROM samples WHERE step = :step AND step_writer = :writer"
_GROUPS = "FROM groups WHERE step = :step AND writer = :writer AND NOT is_eval AND state"
_COUNT = f"""
UPDATE steps SET
    (samples, reward, reward_min, reward_max, tokens) = (SELECT count(*), avg(reward), min(reward), max(reward), sum(tokens) {_OF_STEP}),
    (groups, without_variance) = (SELECT count(*), count(*) - sum(has_variance) {_GROUPS} = 'trained'),
    dropped = (SELECT count(*) {_GROUPS} <> 'trained')
WHERE step = :step AND writer = :writer
"""


PLACE_BITS = 44  # a place is: number of the file << PLACE_BITS | offset of the record
_WAITING_KEPT = 1_000  # newest groups whose missing samples are looked up again


def as_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a sample that the collector has gathered to a row of the table ``samples``."""
    versions = {} if sample["last_version"] >= 0 else {"first_version": None, "last_version": None}
    return {**sample, **versions, "tool_names": json.dumps(sample["tool_names"]) if sample["tool_names"] else None}


class Collector:
    """Receives the records of a journal and writes rows in the open transaction.

    Args:
        connection: connection to an index. The collector continues from the state that an earlier one saved there.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._open: dict[tuple[int, int], dict[str, Any]] = {}  # rows of samples that have not ended
        self._ended: list[dict[str, Any]] = []  # rows of finished samples that are not written yet
        self._trained: list[tuple[int, int, Trained]] = []  # writer, place and record: the rows of one group
        self._behind_gap: int | None = None  # the writer whose last record follows damaged bytes
        self._is_cut = False  # True if rows of the group may be lost
        self._figures: Counter[tuple[str, bool]] = Counter()  # (name, is a text) -> samples with it that are not written yet
        for row in connection.execute("SELECT * FROM running"):
            self._open[row["writer"], row["episode"]] = msgspec.msgpack.decode(row["state"])
        self._first_steps = first_steps(connection)
        self._resumes = [row[0] for row in connection.execute("SELECT writer FROM resumes ORDER BY writer")]
        self._left = self._left_open()
        found = connection.execute("SELECT DISTINCT writer FROM gaps WHERE last IS NULL")
        self._has_gaps = connection.execute("SELECT count(*) FROM gaps").fetchone()[0] > 0
        self._gaps_open = {row[0]: True for row in found}  # writers without a step since their damaged bytes
        self._steps = dict(connection.execute("SELECT writer, max(step) FROM steps GROUP BY writer").fetchall())
        self._checkpoint = connection.execute("SELECT max(step) FROM checkpoints").fetchone()[0] or 0
        self._take: dict[type, Callable[[int, int, Any], None]] = {
            Begin: self._begin,
            ModelCall: self._call,
            DurableResult: self._result,
            End: self._end,
            Arguments: self._arguments,
            GroupEnd: self._group_end,
            Phase: self._phase,
            Published: self._published,
            Checkpoint: self._checkpointed,
            Resumed: self._resumed,
            Files: self._files,
            Closed: self._closed,
        }

    def take(self, writer: int, place: int, record: AnyRecord) -> None:
        """Process the next record, which ``writer`` wrote at ``place``."""
        if self._gaps_open.get(writer) and (step := step_of(record)) is not None:
            self._connection.execute("UPDATE gaps SET last = ? WHERE writer = ? AND last IS NULL", (step, writer))
            self._gaps_open[writer] = False
        if isinstance(record, Trained):
            self._trained_row(writer, place, record)
            return
        if self._trained:
            self._assign()
        self._behind_gap = None
        if (take := self._take.get(type(record))) is not None:
            take(writer, place, record)

    def gap(self, writer: int, file: int, begin: int, end: int, note: str = "") -> None:
        """Record damaged bytes of a file, or its unreadable rest (``note``). The writer's unfinished samples may lack records."""
        self._is_cut = bool(self._trained)
        if self._trained:
            self._assign()
        self._behind_gap = writer
        for (its, _), sample in self._open.items():
            sample["is_damaged"] |= its == writer
        first = self._connection.execute("SELECT max(step) FROM steps WHERE writer = ?", (writer,)).fetchone()[0]
        self._connection.execute(
            "INSERT OR REPLACE INTO gaps VALUES (?, ?, ?, ?, ?, NULL, ?)", (file, begin, end, writer, first, note)
        )
        self._gaps_open[writer] = self._has_gaps = True

    def _files(self, writer: int, place: int, record: Files) -> None:
        before = self._connection.execute("SELECT value FROM state WHERE name = 'files'").fetchone()
        if before is None or json.loads(before[0])["time"] <= record.time:
            listed = json.dumps({"time": record.time, "sizes": record.sizes})
            self._connection.execute("INSERT OR REPLACE INTO state VALUES ('files', ?)", (listed,))

    def _closed(self, writer: int, place: int, record: Closed) -> None:
        self._connection.execute("UPDATE files SET is_closed = 1 WHERE id = ?", (place >> PLACE_BITS,))

    def place_to_go_on(self, end: int) -> int:
        """Return the place to continue from: ``end``, or the first row of a group that may be incomplete."""
        if self._trained and self._is_cut:
            self._assign()
        elif self._trained:
            end, self._trained = self._trained[0][1], []
        return end

    def save(self) -> None:
        """Write all pending rows to the index."""
        self._flush()
        counts = [(name, 0 if is_text else count, count if is_text else 0) for (name, is_text), count in self._figures.items()]
        self._connection.executemany(_FIGURE, counts)
        self._figures.clear()
        self._find_waiting()
        self._connection.execute("DELETE FROM running")
        rows = [(*key, msgspec.msgpack.encode(sample)) for key, sample in self._open.items()]
        self._connection.executemany("INSERT INTO running VALUES (?, ?, ?)", rows)

    def _flush(self) -> None:
        if self._ended:
            self._connection.executemany(_INSERT, self._ended)
            self._ended = []

    # -- samples -------------------------------------------------------------------------------------------------------------

    def _begin(self, writer: int, place: int, record: Begin) -> None:
        sample = {
            **_BEGUN,
            "writer": writer,
            "ordinal": record.ordinal,
            "idx": record.index,
            "attempt": record.attempt,
            "is_eval": record.is_eval,
            "version": record.version,
            **_of_task(record.task),
            "workflow": record.workflow,
            "began": record.time,
            "places": _packed(place),
        }
        self._open[writer, record.episode] = sample
        if resumed := max((each for each in self._resumes if each <= writer), default=0):
            self._begun_again(sample, resumed)

    def _begun_again(self, begun: Mapping[str, Any], resumed: int) -> None:
        """Mark earlier processes' records of a sample as undone, because the resumed process, or one that it started, begins it again."""
        self._flush()
        self._connection.execute(_UNDONE_BY_SAMPLE, {**begun, "resumed": resumed})
        for sample in self._left.get(_name_of(begun), ()):
            if sample["attempt"] >= begun["attempt"] and (not begun["is_eval"] or sample["version"] == begun["version"]):
                sample["is_undone"] = True

    def _left_open(self) -> dict[tuple[bool, int, int], list[dict[str, Any]]]:
        """Return the samples that were unfinished when the last process resumed."""
        left: dict[tuple[bool, int, int], list[dict[str, Any]]] = {}
        for (writer, _), sample in self._open.items():
            if self._resumes and writer < max(self._resumes):
                left.setdefault(_name_of(sample), []).append(sample)
        return left

    def _call(self, writer: int, place: int, record: ModelCall) -> None:
        sample = self._open.get((writer, record.episode))
        if sample is None:
            return  # the file with the sample's beginning was removed
        sample["places"] += _packed(place)
        if not sample["calls"]:
            sample["prompt_tokens"] = record.kept + len(record.added) // 4
        sample["calls"] += 1
        sample["tokens"] += len(record.output) // 4
        sample["model_seconds"] += record.finished - record.started
        if record.output:
            versions = record.versions
            if isinstance(versions, bytes):
                each = np.frombuffer(versions, dtype="<i4")
                first, last = int(each.min()), int(each.max())
            else:
                first = last = versions
            sample["first_version"] = min(sample["first_version"], first)
            sample["last_version"] = max(sample["last_version"], last)

    def _result(self, writer: int, place: int, record: DurableResult) -> None:
        sample = self._open.get((writer, record.episode))
        if sample is None:
            return
        sample["places"] += _packed(place)
        if not record.name.startswith(REWARD_CALLS):
            sample["tools"] += 1
            sample["tool_seconds"] += record.seconds
            sample["tool_names"] = sorted({*sample["tool_names"], record.name})

    def _end(self, writer: int, place: int, record: End) -> None:
        sample = self._open.pop((writer, record.episode), None)
        if sample is None:
            return
        row = as_row(sample)
        row |= {"status": record.outcome, "reason": record.reason, "ended": record.time}
        row["places"] += _packed(place)
        if rows := record.rows:
            rewards = [each.reward for each in rows]
            row |= {
                "reward": sum(rewards) / len(rewards),
                "rewards": json.dumps(rewards) if len(rows) > 1 else None,
                "rows": len(rows),
                "length": max(each.kept + len(each.added) // 4 for each in rows),
                "truncated": any(each.truncated for each in rows),
                "prompt_tokens": rows[0].mask[0] if rows[0].mask else row["prompt_tokens"],
            }
        if figures := figures_of(record):
            row["figures"] = json.dumps(figures)
            self._figures.update((name, isinstance(value, str)) for name, value in figures.items())
        self._ended.append(row)

    def _arguments(self, writer: int, place: int, record: Arguments) -> None:
        self._connection.execute("INSERT OR REPLACE INTO arguments VALUES (?, ?, ?)", (writer, record.number, place))

    # -- groups and steps ------------------------------------------------------------------------------------------------------

    def _group_end(self, writer: int, place: int, record: GroupEnd) -> None:
        state, _, policy = record.state.partition("/")
        version = None
        if record.is_eval:  # its samples record the version
            self._flush()
            newest = "SELECT version FROM samples WHERE ordinal = ? AND is_eval = 1 AND writer = ? ORDER BY id DESC LIMIT 1"
            found = self._connection.execute(newest, (record.ordinal, writer)).fetchone()
            version = found[0] if found else record.version  # they may be from other processes and not read yet
        step = None if state == "delivered" else self._step(writer) + 1
        self._connection.execute(
            "INSERT INTO groups (writer, ordinal, is_eval, version, number, state, policy, reason, samples, time, step, has_variance) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
            (
                writer,
                record.ordinal,
                record.is_eval,
                version,
                record.group,
                "dropped" if state == "rejected" else state,
                policy or state,
                record.reason,
                record.samples,
                record.time,
                step,
            ),
        )

    def _step(self, writer: int) -> int:
        """Return the last step of a process; if it has made none, that of the last checkpoint."""
        return self._steps.get(writer, self._checkpoint)

    def _trained_row(self, writer: int, place: int, record: Trained) -> None:
        if self._trained:
            last = self._trained[-1][2]
            if (last.step, last.group) != (record.step, record.group):
                self._assign()
        if self._behind_gap == writer:
            self._is_cut, self._behind_gap = True, None
        self._trained.append((writer, place, record))

    def _assign(self) -> None:
        """Assign the complete rows of a group to its samples."""
        trained, self._trained = self._trained, []
        is_cut, self._is_cut = self._is_cut, False
        writer, _, first = trained[0]
        self._first_steps.setdefault(writer, first.step)
        rows = [(place, record.reward, _mean_advantage(record)) for _, place, record in trained]
        self._flush()
        if is_cut:  # it is unknown which rows belong to which sample
            self._mark_damaged(writer, first.group)
        elif not self._find(writer, first.step, first.group, rows):
            values = (first.group, writer, first.step, msgspec.msgpack.encode(rows))
            self._connection.execute("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?, ?)", values)

    def _mark_damaged(self, writer: int, number: int) -> None:
        of = "SELECT ordinal FROM groups WHERE number = ? AND writer = ? AND NOT is_eval"
        change = f"UPDATE samples SET is_damaged = 1 WHERE ordinal IN ({of}) AND NOT is_eval AND NOT is_undone"
        self._connection.execute(change, (number, writer))

    def _find(
        self, writer: int, step: int, number: int, trained: list[tuple[int, float, float]], *, has_read_all: bool = False
    ) -> bool:
        """Assign trained rows to their samples: a batch has the rows of a group in the order of its samples.

        Args:
            writer, step, number: process, step and group of the rows.
            trained: place, reward and advantage of each row.
            has_read_all: True if the journals of all processes have been read. Until then, samples from before a resume are not
                assigned: workers of the resumed process may have repeated them, and the workers' journals are read last.

        Returns:
            False if samples are missing, such as those of processes that have not been read yet.
        """
        find = "SELECT id, ordinal FROM groups WHERE number = ? AND writer = ? AND NOT is_eval ORDER BY id DESC LIMIT 1"
        group = self._connection.execute(find, (number, writer)).fetchone()
        if group is None:
            return True  # the group is from a store, or its file was removed
        # Samples of processes from the next resume on belong to later steps.
        resumed = min((each for each in self._resumes if each > writer), default=1 << 31)
        own = self._connection.execute(
            "SELECT max(id) AS id, writer, rows, step, step_writer, trained FROM samples WHERE ordinal = ? AND is_eval = 0 "
            "AND status = 'accepted' AND writer < ? GROUP BY idx ORDER BY idx",  # the newest of each sample
            (group["ordinal"], resumed),
        ).fetchall()
        if self._has_gaps and sum(sample["rows"] for sample in own) != len(trained):
            self._mark_damaged(writer, number)  # a sample is lost, so it is unknown which rows belong to which
            return False
        resumed_here = max((each for each in self._resumes if each <= writer), default=0)
        if not has_read_all and any(sample["writer"] < resumed_here for sample in own):
            return False
        is_undone = any(other > writer and first <= step for other, first in self._first_steps.items())
        left, updates = iter(trained), []
        for sample in own:
            rows = list(islice(left, sample["rows"]))
            if not rows:
                break
            advantages = [advantage for _, _, advantage in rows]
            places = b"".join(_packed(place) for place, _, _ in rows)
            times = (sample["trained"] or 0) + self._counts(sample, writer, step)
            several = json.dumps(advantages) if len(rows) > 1 else None
            if (sample["step_writer"] or 0) <= writer:
                updates.append(
                    (step, writer, times, sum(advantages) / len(advantages), several, places, is_undone, sample["id"])
                )
        self._connection.executemany(_TRAINED, updates)
        change = "UPDATE groups SET state = 'trained', step = ?, has_variance = ? WHERE id = ?"
        self._connection.execute(change, (step, len({reward for _, reward, _ in trained}) > 1, group["id"]))
        return next(left, None) is None

    def _find_waiting(self) -> None:
        """Look up missing samples again, for the newest groups only, because a file may be gone for good."""
        for row in self._connection.execute("SELECT * FROM waiting ORDER BY step DESC LIMIT ?", (_WAITING_KEPT,)).fetchall():
            trained = [tuple(each) for each in msgspec.msgpack.decode(row["trained"])]
            if self._find(row["writer"], row["step"], row["number"], trained, has_read_all=True):
                self._connection.execute("DELETE FROM waiting WHERE number = ? AND writer = ?", (row["number"], row["writer"]))
            self._connection.execute(_COUNT, {"step": row["step"], "writer": row["writer"]})

    def _counts(self, sample: sqlite3.Row, writer: int, step: int) -> bool:
        """Return True if this training of a sample is an additional one, not a repetition, nor the replacement of an undone one."""
        before = sample["step_writer"]
        is_undone = before is not None and before < writer and self._first_steps[writer] <= sample["step"]
        return not is_undone and (before, sample["step"]) != (writer, step)

    def _phase(self, writer: int, place: int, record: Phase) -> None:
        values = (record.step, writer, record.name, record.seconds, record.began or None, place)
        self._connection.execute("INSERT OR REPLACE INTO phases VALUES (?, ?, ?, ?, ?, ?)", values)

    def _published(self, writer: int, place: int, record: Published) -> None:
        self._flush()
        self._steps[writer] = record.step
        self._first_steps.setdefault(writer, record.step)
        values = msgspec.structs.asdict(record)
        values |= {"writer": writer, "engines": json.dumps(record.engines), "audit": json.dumps(record.audit)}
        self._connection.execute(_STEP, values)
        self._connection.execute(_COUNT, values)

    def _checkpointed(self, writer: int, place: int, record: Checkpoint) -> None:
        self._checkpoint = record.step
        beyond = "SELECT count(*) FROM groups WHERE ordinal >= ? AND NOT is_eval AND state = 'delivered'"
        (finished,) = self._connection.execute(beyond, (record.frontier,)).fetchone()
        unfinished = sum(not sample["is_eval"] for sample in self._open.values())
        values = (record.step, writer, record.frontier, record.time, finished, unfinished)
        self._connection.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)", values)

    def _resumed(self, writer: int, place: int, record: Resumed) -> None:
        self._checkpoint = record.step
        self._first_steps[writer] = record.step + 1
        if writer not in self._resumes:
            self._resumes.append(writer)
        self._left = self._left_open()
        self._flush()
        undone = {"step": record.step, "version": record.version, "writer": writer}
        self._connection.execute(_UNDONE_BY_RESUME, undone)
        values = (writer, record.step, record.version, record.frontier, record.episodes, record.tokens, record.time)
        self._connection.execute("INSERT OR REPLACE INTO resumes VALUES (?, ?, ?, ?, ?, ?, ?)", values)


_MOST_FIGURES = 200  # of one sample


def figures_of(end: End) -> dict[str, float | str]:
    """Return what an episode reported, by name: its own figures, and the means of its rows' metrics. Numbers that are not finite are left out."""
    of_rows: dict[str, list[float]] = {}
    for row in end.rows:
        for name, number in row.figures.items():
            of_rows.setdefault(name, []).append(number)
    found = {**{name: sum(numbers) / len(numbers) for name, numbers in of_rows.items()}, **end.figures}
    return {
        name: value for name, value in islice(found.items(), _MOST_FIGURES) if isinstance(value, str) or math.isfinite(value)
    }


def first_steps(connection: sqlite3.Connection) -> dict[int, int]:
    """Return the first step of each process; a resume undoes the steps that earlier processes made from there on."""
    made = connection.execute("SELECT writer, min(step) FROM steps GROUP BY writer").fetchall()
    return {**dict(made), **dict(connection.execute("SELECT writer, step + 1 FROM resumes").fetchall())}


#: Keys that say when or for whom a task was drawn, not which task it is.
_DRAWN = ("ordinal", "taskset")


def identity_of_task(task: Mapping[str, Any]) -> str:
    """Return what identifies a task in every run: its ``query_id``, or a digest of its content if that is missing or a mere number."""
    name = task.get("query_id")
    if isinstance(name, str) and name and not name.isdecimal():
        return name
    content = sorted((key, value) for key, value in task.items() if key not in _DRAWN)
    return f"#{xxhash.xxh3_64_hexdigest(repr(content).encode('utf-8', 'replace'))}"


@lru_cache(1024)  # the samples of a group share one task
def _of_task(packed: bytes | None) -> Mapping[str, str | None]:
    """Return identity, words and expected answer of a packed task; None if they are unknown."""
    if packed is None:
        return {"task": None, "words": None, "expected": None}
    task = unpack_task(packed)
    return {"task": identity_of_task(task), "words": words_of_task(task) or None, "expected": expected_of_task(task) or None}


def _packed(place: int) -> bytes:
    return place.to_bytes(8, "little")


def _name_of(sample: Mapping[str, Any]) -> tuple[bool, int, int]:
    return sample["is_eval"], sample["ordinal"], sample["idx"]


def _mean_advantage(record: Trained) -> float:
    if isinstance(record.advantage, bytes):
        return float(np.frombuffer(record.advantage, dtype="<f4").mean())
    return record.advantage
