"""Keeps the teachers' scores of a dataset's rows in a file, so that a row that is drawn again, also after a resume, is not scored again."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rollwright.errors import CheckpointError

#: Arrays of a row's scores, as bytes: log-probabilities, most likely tokens, and their log-probabilities.
PackedScores = Sequence[bytes]

_TABLE = (
    "CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, logprobs BLOB, top_ids BLOB, top_logprobs BLOB) WITHOUT ROWID"
)


class ScoreFile:
    """Scores by what was asked: the teacher, the tokens, the temperature and the number of most likely tokens.

    Args:
        path: the file, an SQLite database; created if it is missing.

    Raises:
        CheckpointError: the file is damaged or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise self._fault(error) from error
        # Only this process uses the file, so that no memory has to be shared, which a network's file system cannot do.
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
            self._execute(f"PRAGMA {pragma}")
        self._execute(_TABLE)

    def get(self, asked: Any) -> PackedScores | None:
        """Return the scores that were kept for a question (a JSON value), or None."""
        return self._execute("SELECT logprobs, top_ids, top_logprobs FROM scores WHERE key = ?", _key(asked))

    def keep(self, asked: Any, scores: PackedScores) -> None:
        """Keep the scores of a question."""
        self._execute("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)", _key(asked), *scores)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _execute(self, statement: str, *values: Any) -> Any:
        try:
            with closing(self._connection.execute(statement, values)) as cursor:
                return cursor.fetchone()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _fault(self, error: sqlite3.Error) -> CheckpointError:
        return CheckpointError(
            f"{self._path}, which holds the scores of teachers, cannot be used ({error}): remove it, and rows are scored again."
        )


def _key(asked: Any) -> bytes:
    return hashlib.sha256(json.dumps(asked).encode()).digest()
