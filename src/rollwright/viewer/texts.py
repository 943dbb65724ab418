"""Full-text search: the input and output of each sample, decoded and indexed in the background."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from typing import Any

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
_MARKS = ("\x02", "\x03")  # around what was found, for SQLite's snippets


class TextIndex:
    """Decodes the finished samples of an index, in order.

    Args:
        vocabulary: None disables decoding.
        records: reads records at packed places.
    """

    def __init__(self, vocabulary: Vocabulary | None, records: Callable[[bytes | None], list[AnyRecord]]) -> None:
        self._vocabulary = vocabulary
        self._records = records
        self._prompts: dict[bytes, str] = {}

    @property
    def is_possible(self) -> bool:
        """True if there is a tokenizer."""
        return self._vocabulary is not None

    def advance(self, connection: sqlite3.Connection, deadline: float | None) -> bool:
        """Add the texts of samples until all are indexed or the time is over; returns True if all are."""
        if self._vocabulary is None:
            return True
        while True:
            connection.execute("BEGIN IMMEDIATE")
            try:
                count = self._add_some(connection)
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
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
        given, said = [], []
        for call in calls:
            if call.added:
                given.append(self._prompt(call.added))
            if call.output:
                said.append(self._decoded(call.output))
        return _GAP.join(given), _GAP.join(said)

    def _prompt(self, packed: bytes) -> str:
        text = self._prompts.get(packed)
        if text is None:
            if len(self._prompts) >= _PROMPTS_KEPT:
                self._prompts.clear()
            text = self._prompts[packed] = self._decoded(packed)
        return text

    def _decoded(self, packed: bytes) -> str:
        assert self._vocabulary is not None
        return self._vocabulary.text(np.frombuffer(packed, dtype="<i4").tolist())


def match_query(text: str, where: str) -> str | None:
    """A full-text query for words and quoted phrases; None if it has no word to search for.

    Args:
        text: as typed by a user.
        where: any, given or said.
    """
    terms = re.findall(r'"([^"]*)"|(\S+)', text.replace("\0", " "))
    words = [phrase or word for phrase, word in terms]
    kept = ['"{}"'.format(word.replace('"', " ")) for word in words if re.search(r"\w", word)]
    if not kept:
        return None
    joined = " AND ".join(kept)
    return joined if where == "any" else f"{{{where}}} : ({joined})"


def marked_snippet(text: str) -> list[list[Any]]:
    """Split a snippet into parts, each with whether it is a match."""
    parts: list[list[Any]] = []
    for number, piece in enumerate(re.split(f"[{''.join(_MARKS)}]", text)):
        if piece:
            parts.append([piece, number % 2 == 1])
    return parts


SNIPPET = f"snippet(found, -1, '{_MARKS[0]}', '{_MARKS[1]}', '…', 24)"
