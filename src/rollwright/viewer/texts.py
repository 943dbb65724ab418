"""The texts of the index: the input and output of each sample, decoded in the background for the full-text search."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from rollwright.errors import JournalError
from rollwright.experience.journal.records import AnyRecord, ModelCall
from rollwright.viewer.tokens import Vocabulary

#: Tables of the index. Each text is stored once, in ``texts``, which the search reads.
TEXTS = """
CREATE TABLE texts (id INTEGER PRIMARY KEY, given TEXT, said TEXT);
CREATE VIRTUAL TABLE found USING fts5 (given, said, content = 'texts', content_rowid = 'id', detail = full);
"""

_AT_ONCE = 500  # samples of a transaction
_PROMPTS_KEPT = 256  # decoded ones: the samples of a group share theirs
_GAP = "\n"  # between the parts of a text


class TextIndex:
    """Decodes the finished samples of an index, in order.

    Args:
        vocabulary: decodes tokens.
        records: reads records at packed places.
    """

    def __init__(self, vocabulary: Vocabulary, records: Callable[[bytes | None], list[AnyRecord]]) -> None:
        self._vocabulary = vocabulary
        self._records = records
        self._prompt = lru_cache(_PROMPTS_KEPT)(self._decoded)

    def advance(self, connection: sqlite3.Connection, deadline: float | None) -> bool:
        """Add the texts of samples until all are indexed or the time is over; returns True if all are."""
        while True:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                count = self._add_some(connection)
            if count < _AT_ONCE:
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False

    def _add_some(self, connection: sqlite3.Connection) -> int:
        waiting = connection.execute(
            "SELECT id, places FROM samples WHERE id > (SELECT coalesce(max(id), 0) FROM texts) ORDER BY id LIMIT ?",
            (_AT_ONCE,),
        ).fetchall()
        rows = [(sample, *self._texts(places)) for sample, places in waiting]
        connection.executemany("INSERT INTO texts VALUES (?, ?, ?)", rows)
        connection.executemany("INSERT INTO found (rowid, given, said) VALUES (?, ?, ?)", rows)
        return len(rows)

    def _texts(self, places: bytes) -> tuple[str, str]:
        """The input and output text of a sample, with each token once."""
        try:
            calls = [record for record in self._records(places) if isinstance(record, ModelCall)]
        except (JournalError, OSError):
            return "", ""  # its file was removed
        given = [self._prompt(call.added) for call in calls if call.added]
        said = [self._decoded(call.output) for call in calls if call.output]
        return _GAP.join(given), _GAP.join(said)

    def _decoded(self, packed: bytes) -> str:
        return self._vocabulary.text(np.frombuffer(packed, dtype="<i4").tolist())
