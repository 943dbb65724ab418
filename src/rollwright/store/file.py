"""File storage: experiences in a JSONL file that people can read, one group a line.

For one explorer and one trainer, or for experiences that were written elsewhere (worked examples, preferences). Groups are
read in the order of the lines. There are no claims, priorities or announcements: those need a database.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rollwright.atomic import write_json
from rollwright.errors import StoreError
from rollwright.experience.experience import Experience
from rollwright.store.documents import document_experience, experience_document
from rollwright.store.records import Batch, StoredGroup, oldest_version, own_name

_POLL = 0.05


class FileStore:
    """A JSONL file of groups: ``{"group": name, "ordinal": …, "attempt": …, "experiences": […]}`` a line.

    A line may also be a single experience. The reader's place is kept in ``<file>.cursor.json``, one place for each
    checkpoint.

    Args:
        path: the file; made by the first append.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._cursor_path = self.path.with_name(f"{self.path.name}.cursor.json")
        self._lock = threading.RLock()
        self._writer: IO[bytes] | None = None
        self._names: set[str] = set()
        self._offset, self._line, self._batches = 0, 0, 0
        self._recovered = not self._cursor_path.exists()

    def append(
        self,
        group: Sequence[Experience | Sequence[Experience]],
        *,
        ordinal: int | None = None,
        name: str | None = None,
        attempt: int = 0,
    ) -> int:
        """Appends a group in one write and flushes it; a group whose name is there already is left alone.

        Returns:
            How many experiences were written.

        Raises:
            StoreError: another process writes the file.
        """
        rows = [each for item in group for each in ([item] if isinstance(item, Experience) else item)]
        if not rows:
            raise StoreError(f"{self.path}: append was given a group without experiences: leave it out.")
        with self._lock:
            writer = self._open_writer()
            name = name or (f"task/{ordinal}" if ordinal is not None else own_name(rows))
            if name in self._names:
                return 0
            documents = [experience_document(each) for each in rows]
            line = {"group": name, "ordinal": ordinal, "attempt": attempt, "experiences": documents}
            writer.write(json.dumps(line).encode() + b"\n")
            writer.flush()
            self._names.add(name)
        return len(rows)

    def sample(
        self,
        *,
        groups: int | None = None,
        experiences: int | None = None,
        timeout: float | None = 0.0,
        partial_batch: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Batch | None:
        """The next groups; see ``ExperienceStore.sample``. A batch that is not full is not taken."""
        if (groups is None) == (experiences is None):
            raise StoreError("sample wants either groups or experiences: give one of the two.")
        if not self._recovered:
            raise StoreError(
                f"{self.path} was read by an earlier trainer: call recover(checkpoint), or recover(None) to begin anew."
            )
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                found, offset, line = self._read(groups, experiences)
                wanted = groups if groups is not None else experiences
                reached = len(found) if groups is not None else sum(len(group.experiences) for group in found)
                over = cancelled() or (limit is not None and time.monotonic() >= limit)
                if reached >= (wanted or 0) or (over and partial_batch and found):
                    self._offset, self._line, self._batches = offset, line, self._batches + 1
                    return Batch(self._batches - 1, found)
            if over:
                return None
            time.sleep(_POLL)

    def groups(self) -> Iterator[StoredGroup]:
        """All groups from the beginning, without using them."""
        for _, _, group in self._lines(0, 0, uses=0):
            yield group

    def commit(self, checkpoint: str, *, version: int | None = None) -> None:
        """Ties the reader's place to a checkpoint; see ``ExperienceStore.commit``."""
        places = self._places()
        if checkpoint in places:
            raise StoreError(
                f"{self._cursor_path} has a checkpoint {checkpoint!r} already: give each checkpoint a name of its own."
            )
        places[checkpoint] = [self._offset, self._line, self._batches]
        self._write_places(places)

    def recover(self, checkpoint: str | None) -> None:
        """Goes back to the place of a checkpoint, or to the beginning; places of later checkpoints are forgotten.

        Raises:
            StoreError: the checkpoint is not known.
        """
        places = self._places()
        if checkpoint is not None and checkpoint not in places:
            raise StoreError(
                f"{self._cursor_path} knows no checkpoint {checkpoint!r} (it knows {', '.join(places) or 'none'})."
            )
        names = list(places)
        kept = names[: names.index(checkpoint) + 1] if checkpoint is not None else []
        self._write_places({name: places[name] for name in kept})
        self._offset, self._line, self._batches = places[checkpoint] if checkpoint is not None else (0, 0, 0)
        self._recovered = True

    def close(self) -> None:
        """Closes the file and lets another process write it."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> FileStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_writer(self) -> IO[bytes]:
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writer = self.path.open("ab")
            try:
                fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                writer.close()
                raise StoreError(
                    f"{self.path} is being written by another process: several explorers need store.type=sql."
                ) from None
            end = 0
            for position, _, group in self._lines(0, 0, uses=0):
                end = position
                self._names.add(group.name)
            writer.truncate(end)  # what a killed writer left of its last line
            self._writer = writer
        return self._writer

    def _read(self, groups: int | None, experiences: int | None) -> tuple[list[StoredGroup], int, int]:
        found: list[StoredGroup] = []
        offset, line, rows = self._offset, self._line, 0
        for position, number, group in self._lines(offset, line, uses=1):
            offset, line = position, number
            found.append(group)
            rows += len(group.experiences)
            if (groups is not None and len(found) >= groups) or (experiences is not None and rows >= experiences):
                break
        return found, offset, line

    def _lines(self, offset: int, line: int, uses: int) -> Iterator[tuple[int, int, StoredGroup]]:
        """Offset and number after each complete line, and its group; a last line without its end is not there yet."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                offset, line = offset + len(raw), line + 1
                if raw.strip():
                    yield offset, line, self._group(raw, line, uses)

    def _group(self, raw: bytes, line: int, uses: int) -> StoredGroup:
        where = f"line {line} of {self.path}"
        try:
            content: Any = json.loads(raw)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise StoreError(f"{where} cannot be read ({error}): mend or delete it.") from None
        documents = content.get("experiences", [content])
        experiences = [document_experience(document, where) for document in documents]
        version = min((oldest_version(each) for each in experiences), default=-1)
        grouped = content if "experiences" in content else {}
        name, attempt = grouped.get("group", f"line/{line}"), grouped.get("attempt", 0)
        return StoredGroup(line, name, grouped.get("ordinal"), attempt, version, uses, True, experiences)

    def _places(self) -> dict[str, list[int]]:
        return json.loads(self._cursor_path.read_text()) if self._cursor_path.exists() else {}

    def _write_places(self, places: dict[str, list[int]]) -> None:
        write_json(self._cursor_path, places, indent=None, durable=True)
