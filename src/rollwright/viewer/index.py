"""The index of a journal: a database beside it, derived from it and built while it grows; it can be deleted at any time.

For each sample it has the values that lists and filters need, and the *places* of its records in the journal (file number and offset), from
which tokens are read. Several processes may build and read it: the holder of the write transaction continues where the last one stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import sqlite3
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rollwright.errors import JournalError
from rollwright.experience.journal import reading as journal_reading
from rollwright.experience.journal.reading import Gap, decoded, frames, journal_files, record_at
from rollwright.experience.journal.records import AnyRecord, ModelCall
from rollwright.tracking.logging import getLogger
from rollwright.viewer.collector import PLACE_BITS, Collector
from rollwright.viewer.tokens import Vocabulary
from rollwright.viewer.words import answer_of_text

logger = getLogger("viewer")

_READERS = 4  # connections for reading; each keeps some MiB
_HEAD = 4096  # first bytes of a file, which identify it
_AT_ONCE = 20_000  # records between two looks at the clock
_TEXTS_AT_ONCE = 500  # samples per transaction
_PROMPTS_KEPT = 256  # decoded prompts in the cache; the samples of a group share one
_GAP = "\n"  # separates the parts of a text

_SCHEMA = """
CREATE TABLE state (name TEXT PRIMARY KEY, value);
CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, writer INT, position INT, head INT, head_digest TEXT, is_closed INT DEFAULT 0);
CREATE TABLE gaps (file INT, begin INT, end INT, writer INT, first INT, last INT, note TEXT, PRIMARY KEY (file, begin)) WITHOUT ROWID;
CREATE TABLE arguments (writer INT, number INT, place INT, PRIMARY KEY (writer, number)) WITHOUT ROWID;
CREATE TABLE running (writer INT, episode INT, state BLOB, PRIMARY KEY (writer, episode)) WITHOUT ROWID;
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, writer INT, ordinal INT, idx INT, attempt INT, is_eval INT, version INT, task TEXT, words TEXT, expected TEXT,
    workflow TEXT, status TEXT, reason TEXT, reward REAL, rewards TEXT, prompt_tokens INT, tokens INT, length INT, rows INT, calls INT, tools INT, tool_names TEXT,
    first_version INT, last_version INT, model_seconds REAL, tool_seconds REAL, began REAL, ended REAL, truncated INT, places BLOB,
    step INT, step_writer INT, trained INT, advantage REAL, advantages TEXT, trained_places BLOB, is_undone INT DEFAULT 0, is_damaged INT DEFAULT 0,
    figures TEXT
);
CREATE TABLE figures (name TEXT PRIMARY KEY, numbers INT, texts INT) WITHOUT ROWID;
CREATE INDEX samples_of_group ON samples (ordinal, is_eval);
CREATE INDEX samples_of_step ON samples (step) WHERE step IS NOT NULL;
CREATE INDEX samples_of_evaluation ON samples (version, task) WHERE is_eval;
CREATE INDEX samples_of_task ON samples (task);
CREATE INDEX samples_began ON samples (began);
CREATE INDEX samples_undone ON samples (id) WHERE is_undone;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, writer INT, ordinal INT, is_eval INT, version INT, number INT, state TEXT, policy TEXT, reason TEXT,
    samples INT, time REAL, step INT, has_variance INT
);
CREATE INDEX groups_of_step ON groups (step);
CREATE INDEX groups_of_ordinal ON groups (ordinal, is_eval);
CREATE INDEX groups_of_number ON groups (number, writer);
CREATE TABLE steps (
    step INT, writer INT, version INT, time REAL, way TEXT, seconds REAL, bytes INT, engines TEXT, audit TEXT,
    samples INT, groups INT, reward REAL, reward_min REAL, reward_max REAL, tokens INT, dropped INT, without_variance INT,
    PRIMARY KEY (step, writer)
) WITHOUT ROWID;
CREATE TABLE phases (step INT, writer INT, name TEXT, seconds REAL, began REAL, place INT, PRIMARY KEY (step, writer, name)) WITHOUT ROWID;
CREATE TABLE resumes (writer INT PRIMARY KEY, step INT, version INT, frontier INT, episodes INT, tokens INT, time REAL);
CREATE TABLE waiting (number INT, writer INT, step INT, trained BLOB, PRIMARY KEY (number, writer)) WITHOUT ROWID;
CREATE TABLE checkpoints (step INT, writer INT, frontier INT, time REAL, beyond INT, unfinished INT, PRIMARY KEY (step, writer)) WITHOUT ROWID;
CREATE TABLE texts (id INTEGER PRIMARY KEY, given TEXT, said TEXT, answer TEXT);
CREATE VIRTUAL TABLE found USING fts5 (given, said, content = 'texts', content_rowid = 'id', detail = full);
"""
_CONTENT = 4  # version of the content; raise it if the content changes but the tables do not
#: Version of tables and content; an index of another version is rebuilt.
VERSION = (zlib.crc32(_SCHEMA.encode()) + _CONTENT) & 0x7FFF_FFFF


class Index:
    """The index of one journal.

    Args:
        journal: directory of the journal.
        vocabulary: decodes tokens for the text search. If None, text cannot be searched.
    """

    def __init__(self, journal: Path, vocabulary: Vocabulary | None = None) -> None:
        self.journal = journal
        self.path = index_path(journal)
        self._texts = TextIndex(vocabulary, self.records) if vocabulary else None
        self._owner = uuid.uuid4().hex
        self._writing = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._collector: Collector | None = None
        self._readers: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        self._made = threading.Semaphore(_READERS)
        self._opened: dict[int, tuple[int, Path]] = {}  # number of a file -> open file
        self._lock = threading.RLock()
        self._inode = 0
        self._is_complete = False
        self._is_damaged = False
        self._seen: dict[str, tuple[int, int]] = {}  # file name -> inode and time of the last check

    # -- reading -----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for queries; each is used by one thread at a time."""
        self._open()
        with self._made:
            try:
                connection = self._readers.get_nowait()
            except queue.Empty:
                connection = self._connect()
                connection.execute("PRAGMA query_only = 1")
            inode = self._inode
            try:
                yield connection
            except sqlite3.DatabaseError as error:
                self._is_damaged |= type(error) is sqlite3.DatabaseError  # its subclasses are errors of a query, or locks
                raise
            finally:
                if inode == self._inode:
                    self._readers.put(connection)
                else:
                    connection.close()

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Run a query and return its rows."""
        with self.reading() as connection:
            return connection.execute(query, values).fetchall()

    def records(self, places: bytes | None) -> list[AnyRecord]:
        """Return the records at packed places.

        Raises:
            JournalError: a file was removed (``journal.keep``) or changed.
        """
        return [self.record(place) for place in unpack_places(places)]

    def record(self, place: int) -> AnyRecord:
        """Return the record at a place; see ``records``."""
        file, path = self._file(place >> PLACE_BITS)
        return record_at(file, place & ((1 << PLACE_BITS) - 1), path)

    def _file(self, number: int) -> tuple[int, Path]:
        found = self._opened.get(number)
        if found is None:
            (row,) = self.rows("SELECT name FROM files WHERE id = ?", number)
            path = self.journal / row["name"]
            with self._lock:
                if number not in self._opened:
                    self._opened[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), path
                found = self._opened[number]
        return found

    # -- building ------------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float | None = None) -> bool:
        """Index the unread part of the journal, first records, then texts, for at most about ``seconds`` if given.

        Returns:
            True if everything was read.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._writing:
            try:
                self._open()
                if self._is_damaged:
                    raise sqlite3.DatabaseError("a page of it cannot be read")
                assert self._writer is not None
                is_complete = self._advance_records(self._writer, deadline)
                return is_complete and (self._texts is None or self._texts.advance(self._writer, deadline))
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                    return False  # another process builds it
                logger.warning("the index %s cannot be used (%s) and is built anew", self.path, error)
                self._remove()
                self._open()
                return False

    def _advance_records(self, writer: sqlite3.Connection, deadline: float | None) -> bool:
        while True:
            try:
                with writer:
                    writer.execute("BEGIN IMMEDIATE")  # from here on, no other process changes the positions
                    grown = self._grown_files(writer)
                    if grown:
                        collector = self._own_collector(writer)
                        read = [self._read_file(writer, collector, deadline, *each) for each in grown]
                        collector.save()
            except BaseException:
                self._collector = None
                raise
            if not grown or not any(read):  # the rest is not a complete record
                self._is_complete = True
                return True
            if deadline is not None and time.monotonic() > deadline:
                self._is_complete = False
                return False

    def _grown_files(self, connection: sqlite3.Connection) -> list[tuple[int, Path, int, int]]:
        """Return number, path, writer and position of each file with unread content.

        Raises:
            DatabaseError: the journal is not the one that was indexed.
        """
        known = {row["name"]: row for row in connection.execute("SELECT * FROM files")}
        grown = []
        for path in journal_files(self.journal):
            row, size = known.get(path.name), path.stat().st_size
            if row is None:
                head, digest = _head(path, _HEAD)
                writer = int(path.name.partition("-")[0])
                insert = "INSERT INTO files (name, writer, position, head, head_digest) VALUES (?, ?, 0, ?, ?)"
                number = connection.execute(insert, (path.name, writer, head, digest)).lastrowid
                grown.append((int(number or 0), path, writer, 0))
            elif size < row["position"] or self._is_another(path, row):
                raise sqlite3.DatabaseError(f"{path.name} is not the file that was indexed")
            elif size > row["position"]:
                grown.append((row["id"], path, row["writer"], row["position"]))
        return grown

    def _is_another(self, path: Path, row: sqlite3.Row) -> bool:
        """Return True if a file's beginning differs from the indexed one; checked again after each write to the file."""
        found = path.stat()
        seen = (found.st_ino, found.st_mtime_ns)
        if self._seen.get(path.name) == seen:
            return False
        self._seen[path.name] = seen
        return _head(path, row["head"])[1] != row["head_digest"]

    def _read_file(
        self,
        connection: sqlite3.Connection,
        collector: Collector,
        deadline: float | None,
        number: int,
        path: Path,
        writer: int,
        begin: int,
    ) -> int:
        """Read the records of a file. Returns the number of bytes read, or 1 if there was no time."""
        if deadline is not None and time.monotonic() > deadline:
            return 1  # there is more to read next time
        high, read_to, take = number << PLACE_BITS, begin or len(journal_reading.VERSION), collector.take
        try:
            for count, (at, end, body) in enumerate(frames(path, begin), 1):
                if at > read_to:
                    collector.gap(writer, number, read_to, at)
                take(writer, high | at, decoded(body, path, at))
                read_to = end
                if deadline is not None and count % _AT_ONCE == 0 and time.monotonic() > deadline:
                    break
        except JournalError as error:  # other files may be readable
            collector.gap(writer, number, read_to, path.stat().st_size, str(error))
        if read_to == len(journal_reading.VERSION) and not begin:
            return 0
        safe = collector.place_to_go_on(high | read_to) & ((1 << PLACE_BITS) - 1)
        connection.execute("UPDATE files SET position = ? WHERE id = ?", (safe, number))
        return safe - begin

    def _own_collector(self, connection: sqlite3.Connection) -> Collector:
        """Return the collector of records, restored from the index if another process wrote there last."""
        last = connection.execute("SELECT value FROM state WHERE name = 'owner'").fetchone()
        if self._collector is None or last is None or last[0] != self._owner:
            self._collector = Collector(connection)
            connection.execute("INSERT OR REPLACE INTO state VALUES ('owner', ?)", (self._owner,))
        return self._collector

    def progress(self) -> dict[str, Any]:
        """Return the progress of the index: samples (without those that a resume undid), bytes, and the share of texts."""
        sizes = {path.name: path.stat().st_size for path in journal_files(self.journal)}
        read = {row["name"]: row["position"] for row in self.rows("SELECT name, position FROM files")}
        highest = (
            "SELECT (SELECT max(id) FROM samples), (SELECT max(id) FROM texts), (SELECT count(*) FROM samples WHERE is_undone)"
        )
        (counted,) = self.rows(highest)
        samples, texts = counted[0] or 0, counted[1] or 0
        done, of = sum(min(read.get(name, 0), size) for name, size in sizes.items()), sum(sizes.values())
        text = 1.0 if not samples or self._texts is None else texts / samples
        return {
            "samples": samples - counted[2],
            "bytes": done,
            "of_bytes": of,
            "text": text,
            "is_complete": (self._is_complete or done == of) and text == 1.0,
        }

    def missing(self, *, is_running: bool, is_finished: bool) -> list[Gap]:
        """List damaged bytes, truncated ends and missing files of the journal. Ends are known once all of it was read.

        Args:
            is_running: True if a process is writing; its last file may then end inside a record.
            is_finished: True if the run has finished; its files must then be complete.
        """
        known = {row["id"]: row for row in self.rows("SELECT * FROM files")}
        found = [
            Gap(
                self.journal / known[row["file"]]["name"],
                row["begin"],
                row["end"],
                (row["first"], row["last"]),
                note=row["note"] or "",
            )
            for row in self.rows("SELECT * FROM gaps ORDER BY file, begin")
            if row["file"] in known
        ]
        noted = {gap.path for gap in found if gap.note}
        sizes = {path.name: path.stat().st_size for path in journal_files(self.journal)}
        newest = {
            row["writer"]: row["name"] for row in self.rows("SELECT writer, max(name) AS name FROM files GROUP BY writer")
        }
        made = self.rows("SELECT writer, max(step) AS step FROM steps GROUP BY writer")
        steps: dict[int, int] = {row["writer"]: row["step"] for row in made}
        (listed,) = self.rows("SELECT (SELECT value FROM state WHERE name = 'files')")
        expected = json.loads(listed[0])["sizes"] if listed[0] else {}
        for row in known.values():
            path, size = self.journal / row["name"], sizes.get(row["name"], 0)
            is_last = newest[row["writer"]] == row["name"]
            after = (steps.get(row["writer"]), None)
            lost = expected.get(row["name"], 0) - size
            if path in noted or (is_running and is_last) or row["name"] not in sizes:
                continue
            if lost > 0:
                found.append(
                    Gap(path, row["position"], size + lost, after, note=f"at least its last {lost:,} bytes are missing")
                )
            elif not size:
                found.append(Gap(path, 0, 0, after, note="it is empty"))
            elif size > row["position"] and not self._is_complete:
                continue
            elif size > row["position"] and size > len(journal_reading.VERSION):
                found.append(Gap(path, row["position"], size, after, is_tail=True))
            elif not row["is_closed"] and (not is_last or is_finished) and self._says_where_it_ends(path):
                found.append(Gap(path, size, size, after, note="its end is missing"))
        gone = sorted(expected.keys() - sizes.keys())
        return found + [Gap(self.journal / name, 0, expected[name], note="this file is missing") for name in gone]

    def _says_where_it_ends(self, path: Path) -> bool:
        """Return True if a file should end with a closing record. Older versions, and files just begun by a killed process, have none."""
        with path.open("rb") as file:
            return file.read(len(journal_reading.VERSION) + 1)[:-1] == journal_reading.VERSION

    # -- the database --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._lock:
            inode = self.path.stat().st_ino if self.path.exists() else 0
            if self._writer is not None and inode == self._inode:
                return
            self._close()  # it was deleted, or moved away with its run
            try:
                is_made = self._make()
            except sqlite3.OperationalError:
                raise  # locked, or no space left
            except sqlite3.DatabaseError:
                is_made = False  # the file is not a database
            if not is_made:
                self._remove()
                self._make()

    def _make(self) -> bool:
        """Open the database and create its tables. Returns False if it has tables of another version."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        inode = self.path.stat().st_ino
        connection = self._connect()
        try:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if not found:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    found = connection.execute("PRAGMA user_version").fetchone()[0]
                    if not found:  # another process may have created them meanwhile
                        for statement in filter(str.strip, _SCHEMA.split(";")):
                            connection.execute(statement)
                        connection.execute(f"PRAGMA user_version = {VERSION}")
                        found = VERSION
        except BaseException:
            connection.close()
            raise
        self._writer, self._inode = connection, inode
        return found == VERSION

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        for setting in ("journal_mode = WAL", "synchronous = OFF", "cache_size = -8000", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {setting}")
        return connection

    def _remove(self) -> None:
        """Close and delete the database."""
        with self._lock:
            self._close()
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._collector = None
        self._inode = 0
        self._is_complete = self._is_damaged = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._readers.get_nowait().close()
        for file, _ in self._opened.values():
            os.close(file)
        self._opened.clear()
        self._seen.clear()

    def close(self) -> None:
        """Close the database and the journal's files."""
        with self._writing, self._lock:
            self._close()


class TextIndex:
    """Decodes the input and output of the finished samples of an index, in order, for the full-text search.

    Args:
        vocabulary: decodes tokens.
        records: reads records at packed places.
    """

    def __init__(self, vocabulary: Vocabulary, records: Callable[[bytes | None], list[AnyRecord]]) -> None:
        self._vocabulary = vocabulary
        self._records = records
        self._prompt = lru_cache(_PROMPTS_KEPT)(self._decoded)
        self._special = vocabulary.special_texts

    def advance(self, connection: sqlite3.Connection, deadline: float | None) -> bool:
        """Add the texts of samples until all are indexed or the time is over. Returns True if all are indexed."""
        while True:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                count = self._add_some(connection)
            if count < _TEXTS_AT_ONCE:
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False

    def _add_some(self, connection: sqlite3.Connection) -> int:
        waiting = connection.execute(
            "SELECT id, places FROM samples WHERE id > (SELECT coalesce(max(id), 0) FROM texts) ORDER BY id LIMIT ?",
            (_TEXTS_AT_ONCE,),
        ).fetchall()
        rows = [(sample, *self._texts(places)) for sample, places in waiting]
        connection.executemany("INSERT INTO texts VALUES (?, ?, ?, ?)", rows)
        connection.executemany("INSERT INTO found (rowid, given, said) VALUES (?, ?, ?)", [row[:3] for row in rows])
        return len(rows)

    def _texts(self, places: bytes) -> tuple[str, str, str]:
        """Return the input and output text of a sample, with each token once, and its last answer on one line."""
        try:
            calls = [record for record in self._records(places) if isinstance(record, ModelCall)]
        except (JournalError, OSError):
            return "", "", ""  # its file was removed
        given = [self._prompt(call.added) for call in calls if call.added]
        said = [self._decoded(call.output) for call in calls if call.output]
        return _GAP.join(given), _GAP.join(said), answer_of_text(said[-1], self._special) if said else ""

    def _decoded(self, packed: bytes) -> str:
        return self._vocabulary.text(np.frombuffer(packed, dtype="<i4").tolist())


def index_path(journal: Path) -> Path:
    """Return the path of a journal's index: beside its files, or in the user's cache if that directory is not writable."""
    if os.access(journal, os.W_OK):
        return journal / "index.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rollwright" / "indexes" / f"{hashlib.sha256(str(journal.resolve()).encode()).hexdigest()[:24]}.sqlite"


def unpack_places(packed: bytes | None) -> list[int]:
    """Unpack the places of records that the index stores as bytes."""
    return memoryview(packed).cast("q").tolist() if packed else []


def _head(path: Path, length: int) -> tuple[int, str]:
    with path.open("rb") as file:
        head = file.read(length)
    return len(head), xxhash.xxh3_64_hexdigest(head)
