"""Which files of journals hold what was recorded of a task, for a process that asks again and again while others write.

A file of its own: a run that goes on reads its journal once and needs no such index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollwright.experience.journal.files import file_numbers, journal_files
from rollwright.experience.journal.frames import frames
from rollwright.experience.journal.records import Begin

_BEGIN = b"\xa5begin"  # its tag, packed
_decode = msgspec.msgpack.Decoder(Begin).decode


class TaskFiles:
    """Finds the files of some tasks. Each file is looked through once, and what it has grown by when it is asked for again."""

    def __init__(self) -> None:
        self._seen: dict[
            Path, tuple[int, set[int]]
        ] = {}  # the byte up to which each was looked through, and ordinals that begin in it

    def of(self, directory: str | Path, is_open: Callable[[int], bool]) -> list[Path]:
        """The files of a journal with records of tasks: of each process that began an episode of one, that file and those after it.

        Args:
            directory: of the journal.
            is_open: says of an ordinal whether it is asked for; of training tasks.

        Raises:
            JournalError: a file is no journal, or of a later version.
        """
        of_writer: dict[int, list[Path]] = defaultdict(list)
        for path in journal_files(directory):
            found = of_writer[file_numbers(path)[0]]
            if found or any(map(is_open, self._ordinals(path))):
                found.append(path)
        return [path for paths in of_writer.values() for path in paths]

    def _ordinals(self, path: Path) -> set[int]:
        seen, ordinals = self._seen.get(path, (0, set()))
        for _, end, body in frames(path, seen):
            seen = end
            if _BEGIN in bytes(body[:9]) and not (begin := _decode(body)).is_eval:
                ordinals.add(begin.ordinal)
        self._seen[path] = seen, ordinals
        return ordinals
