"""Which of a run's explorers evaluates a version: one alone, and no version twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollwright.store import Announcement


class EvaluationTurns:
    """A file that explorers lock while they evaluate, and in which stands what was evaluated last.

    Args:
        path: of the file, the same for all explorers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def last(self, newest: Announcement | None) -> int | None:
        """The last version that was evaluated, by whichever explorer; None where there was none.

        Args:
            newest: the announcement of the weights that are loaded. A version that a restarted trainer took back does not count.
        """
        try:
            epoch, version = map(int, self.path.read_text(encoding="ascii").split())
        except (FileNotFoundError, ValueError):  # nobody evaluated, or the first one is at it
            return None
        if newest is None or newest.epoch == epoch or version < newest.since:
            return version
        return newest.since - 1

    @contextmanager
    def taken(self, newest: Announcement | None) -> Iterator[bool]:
        """True where this explorer is to evaluate the weights, which then count as evaluated when the block ends without an error.

        False where another one is at it, or was.
        """
        epoch, version = (0, 0) if newest is None else (newest.epoch, newest.version)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            if self.last(newest) == version:
                yield False
                return
            yield True
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{epoch} {version}".encode(), 0)
        finally:
            os.close(handle)
