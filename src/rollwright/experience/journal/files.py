"""Journal files: one writer process each, readable while they are written, after a crash, and around damage.

A record (``frames``) is one ``write``, so a killed process loses none; files are fsynced every ``fsync_seconds``, so a power failure loses
at most that much. Bytes that hold no complete record are skipped and reported (``Gap``).

``000003-0000.journal`` is the first file of the fourth process that wrote to this journal. A process starts its next file at the end of
an episode or a checkpoint once the current one is large. Each file begins with a list of the existing files, so that files removed or
truncated later are noticed. Old files are removed only if ``keep`` is set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollwright.atomic import remedy_of
from rollwright.config.sections import JournalConfig
from rollwright.errors import JournalError
from rollwright.experience.journal.frames import VERSION, decoded, frame, frames
from rollwright.experience.journal.records import (
    AnyRecord,
    Begin,
    Checkpoint,
    Closed,
    End,
    Files,
    Phase,
    Published,
    Trained,
    encode,
    pack_value,
)
from rollwright.tracking.logging import getLogger

logger = getLogger("journal")

_NAME = re.compile(r"(\d{6,})-(\d{4,})\.journal")
_ARGUMENTS_KEPT = 4096  # generation arguments that are recognised, and not written again
_SMALLEST_REDACTED = 4  # characters of a text that is looked for as a secret


class Journal:
    """The journal of one process: its present file, and what was begun in it and has not ended.

    Safe to use from several threads. Nothing is made before the first record.

    Args:
        directory: of the journal, made here; only its user may enter.
        config: when it is flushed, begun anew and removed.
        secrets: texts of the config that are secret; they are replaced by ``***`` wherever a record has them as text.
    """

    def __init__(self, directory: str | Path, config: JournalConfig | None = None, secrets: Iterable[str] = ()) -> None:
        self.directory = Path(directory)
        self.config = config or JournalConfig()
        self.writer = -1  # number of this process among those that wrote here
        self.size = 0  # of the present file
        self.failure: JournalError | None = None  # the first failed write; later records may be missing
        self._secrets = [secret.encode() for secret in secrets if len(secret) >= _SMALLEST_REDACTED]
        self._segment = -1
        self._file: int | None = None
        self._ended: list[int] = []  # files that are written and may not have reached the disk
        self._lock = threading.RLock()
        self._flushing = threading.Lock()
        self._episodes = itertools.count()
        self._first: dict[int, int] = {}  # ordinals of training tasks -> the file that their first episode begins in
        self._checkpoints: list[tuple[int, int]] = []  # frontier of each, and the first file that going on from it needs
        #: The highest ordinal that earlier processes have episodes of, which this one goes on with: their files are needed so long.
        self.goes_on_to = -1
        self._arguments: dict[bytes, int] = {}  # that the present file holds, the latest of them
        self._next_arguments = 0
        self._flusher: threading.Thread | None = None
        self._unflushed = threading.Event()
        self._is_closed = False
        self._process = os.getpid()

    # -- records in ----------------------------------------------------------------------------------------------------

    def write(self, record: AnyRecord, *, may_hold_secrets: bool = True) -> None:
        """Append a record; when this returns, it outlives the process.

        Raises:
            JournalError: the disk is full or gone; what was written of the record is taken back.
        """
        try:
            body = encode(record)
        except UnicodeEncodeError:  # the message of what a workflow raised may hold any text
            body = encode(type(record)(*map(_as_unicode, msgspec.structs.astuple(record))))
        if may_hold_secrets and self._secrets:
            body = self._redacted(body)
        packed = frame(body)
        with self._lock:
            if self._is_closed or self._process != os.getpid():
                return  # a child of this process that was forked, or a sample that goes on after the end
            if self._file is None:
                self._open_next()
            if self.config.keep is not None and isinstance(record, Begin) and not record.is_eval:
                self._first.setdefault(record.ordinal, self._segment)
            self._append(packed)
            if isinstance(record, End):
                self._end_large_file()
        if not self._unflushed.is_set():
            self._unflushed.set()

    def next_episode(self) -> int:
        """A number for an episode."""
        return next(self._episodes)

    def arguments(self, gconfig: object, make: type) -> int:
        """The number of these generation arguments, which are written first where the present file has them not.

        Args:
            gconfig: a dataclass.
            make: the record's class.
        """
        packed = pack_value(gconfig)
        # Without the lock: a file may end meanwhile, but a process gives each number once, and the file that has it is read with this one.
        if (known := self._arguments.get(packed)) is not None:
            return known
        with self._lock:
            if self._file is None and not self._is_closed:
                self._open_next()
            number = self._arguments.get(packed)
            if number is None:
                if len(self._arguments) >= _ARGUMENTS_KEPT:  # requests with a seed of their own have arguments of their own
                    self._arguments.clear()
                number = self._arguments[packed] = self._next_arguments
                self._next_arguments += 1
                self.write(make(number, msgspec.msgpack.decode(packed)))
            return number

    def _append(self, packed: bytes) -> None:
        assert self._file is not None
        try:
            written = os.write(self._file, packed)
            while written < len(packed):
                written += os.write(self._file, packed[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise self._cannot_be_written(error) from error
        self.size += len(packed)

    def _cannot_be_written(self, error: OSError) -> JournalError:
        """Error for a failed write; also stored in ``failure``, because the caller's code may swallow the exception."""
        failure = JournalError(
            f"The journal in {self.directory} cannot be written ({error}), so the episodes' answers would be lost with this "
            f"process: {remedy_of(error)}, then start the run again, which goes on from its last checkpoint."
        )
        self.failure = self.failure or failure
        return failure

    def redacted(self, packed: bytes) -> bytes:
        """Packed values as a record has them: without what is secret."""
        return self._redacted(packed) if self._secrets else packed

    def _redacted(self, body: bytes) -> bytes:
        found = [secret for secret in self._secrets if secret in body]
        if not found:
            return body
        return encode(_without(msgspec.msgpack.decode(body), found))

    # -- files -----------------------------------------------------------------------------------------------------------

    def _open_next(self) -> None:
        try:
            self._open_file()
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _open_file(self) -> None:
        if self._segment < 0:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._segment += 1
        while self._file is None:
            if self._segment == 0:
                self.writer = 1 + max((name[0] for name in map(_numbers, self.directory.iterdir()) if name), default=-1)
            try:
                self._file = os.open(self._path(self._segment), flags, 0o600)
            except FileExistsError:  # another process of the run took the number
                if self._segment:
                    raise
        self.size = 0
        self._arguments = {}
        try:
            self._append(VERSION)
            self._append(frame(encode(Files(self._sizes(), time.time()))))
        except (JournalError, OSError):  # without a version the records could not be read
            os.close(self._file)
            self._file = None
            raise
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_now_and_then, name="rollwright-journal", daemon=True)
            self._flusher.start()

    def _sizes(self, without: Iterable[Path] = ()) -> dict[str, int]:
        """Sizes of the journal's files; for files of other processes a lower bound."""
        sizes = {}
        for path in journal_files(self.directory):
            if path not in without:
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    sizes[path.name] = path.stat().st_size
        return sizes

    def _path(self, segment: int) -> Path:
        return self.directory / f"{self.writer:06d}-{segment:04d}.journal"

    def _flush_now_and_then(self) -> None:
        while not self._is_closed:
            self._unflushed.wait()
            time.sleep(self.config.fsync_seconds)
            self._flush_or_say()

    def _flush_or_say(self) -> None:
        try:
            self.flush()
        except JournalError as error:  # the next checkpoint cannot be made if the disk still fails then
            logger.error("%s", error)

    def flush(self) -> None:
        """Have what was written reach the disk.

        Raises:
            JournalError: it did not.
        """
        self._unflushed.clear()
        with self._flushing:
            with self._lock:
                ended, file = list(self._ended), None if self._file is None else os.dup(self._file)
            try:
                for each in ended:
                    os.fsync(each)
                    with self._lock:
                        self._ended.remove(each)
                    os.close(each)
                if file is not None:
                    os.fsync(file)
            except OSError as error:
                raise JournalError(
                    f"The journal in {self.directory} did not reach the disk ({error}), so a power failure would lose what episodes "
                    "were answered: look after that disk, then start the run again, which goes on from its last checkpoint."
                ) from error
            finally:
                if file is not None:
                    os.close(file)

    def checkpoint(self, step: int, frontier: int) -> None:
        """A recover checkpoint is about to be seen: what it builds on is on the disk. Large files end here, and old ones go.

        Raises:
            JournalError: it did not reach the disk.
        """
        with self._lock:
            self.write(Checkpoint(step, frontier, time.time()))
            self._first = {ordinal: file for ordinal, file in self._first.items() if ordinal >= frontier}
            needed = min([self._segment, *self._first.values()])
        self.flush()
        with self._lock:
            self._end_large_file()
            if self.config.keep is not None:
                self._checkpoints = [*self._checkpoints[-self.config.keep :], (frontier, needed)]
                self._remove_old(self.config.keep)

    def _end_large_file(self) -> None:
        if self._file is not None and self.size >= self.config.rotate_mib * 2**20:
            self._append(frame(encode(Closed(time.time()))))
            self._ended.append(self._file)  # closed when it has reached the disk
            self._file = None
            self._open_next()

    def _remove_old(self, keep: int) -> None:
        """Remove files that none of the last ``keep`` checkpoints, nor the one before, needs to go on from."""
        if len(self._checkpoints) <= keep:
            return
        frontier, needed = self._checkpoints[0]
        oldest = (0, 0) if frontier > self.goes_on_to else (self.writer, 0)
        old = [path for path in journal_files(self.directory) if oldest <= file_numbers(path) < (self.writer, needed)]
        if old:  # includes files of earlier processes
            self.write(Files(self._sizes(without=old), time.time()))
        for path in old:
            path.unlink()

    def close(self) -> None:
        """Flush and close; what comes later is not written. Idempotent."""
        self._flush_or_say()
        with self._lock:
            if self._file is not None:
                if not self._is_closed and self._process == os.getpid():
                    with contextlib.suppress(JournalError):
                        self._append(frame(encode(Closed(time.time()))))
                os.close(self._file)
                self._file = None
            self._is_closed = True
        with self._flushing:
            while self._ended:  # the disk failed
                os.close(self._ended.pop())
        self._unflushed.set()


def _without(value: object, secrets: list[bytes]) -> object:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret.decode(), "***")
        return value
    if isinstance(value, bytes):
        if any(secret in value for secret in secrets):
            with contextlib.suppress(msgspec.DecodeError):  # packed values; tokens hold no text
                return msgspec.msgpack.encode(_without(msgspec.msgpack.decode(value, strict=False), secrets))
        return value
    if isinstance(value, list):
        return [_without(item, secrets) for item in value]
    if isinstance(value, dict):
        return {_without(key, secrets): _without(item, secrets) for key, item in value.items()}
    return value


def _as_unicode(value: Any) -> Any:
    """Text, and the text of a list, with ``?`` in place of halves of surrogate pairs."""
    if isinstance(value, list):
        return [_as_unicode(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _numbers(path: Path) -> tuple[int, int] | None:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else None


# -- records out ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A range of bytes, or a whole file, without a complete record.

    Attributes:
        path: path of the file.
        begin, end: half-open range of bytes.
        steps: the last step that its process recorded before the gap and the first one after it; None if there is none.
        is_tail: no complete record follows: the writer was killed during a write or is still writing, or the end is lost.
        note: the reason, if there are no bytes to show.
    """

    path: Path
    begin: int
    end: int
    steps: tuple[int | None, int | None] = (None, None)
    is_tail: bool = False
    note: str = ""

    def __str__(self) -> str:
        first, last = self.steps
        between = f", {_between(first, last)}" if first is not None or last is not None else ""
        if self.note:
            return f"{self.path.name}: {self.note}{between}"
        kind = "trailing bytes without a complete record" if self.is_tail else "damaged, and left out"
        return f"{self.path.name}, bytes {self.begin:,} to {self.end:,} ({self.end - self.begin:,}){between}: {kind}"


def _between(first: int | None, last: int | None) -> str:
    if first is None:
        return f"before the end of step {last}"
    if last is None:
        return f"after step {first}"
    return f"in step {first}" if first == last else f"between step {first} and step {last}"


def step_of(record: AnyRecord) -> int | None:
    """The step of a record; None if it has none."""
    return record.step if isinstance(record, Trained | Published | Phase | Checkpoint) else None


@dataclass(frozen=True)
class Place:
    """Where a record stands: the number of its writer, its file, and the byte behind it."""

    writer: int
    path: Path
    end: int


def journal_files(directory: str | Path) -> list[Path]:
    """The files of a journal in the order in which they were begun: by writer, then by number."""
    if not Path(directory).is_dir():
        return []
    found = [(numbers, path) for path in Path(directory).iterdir() if (numbers := _numbers(path))]
    return [path for _, path in sorted(found)]


def file_numbers(path: Path) -> tuple[int, int]:
    """The number of the process that wrote a file of a journal, and that of the file among its own."""
    numbers = _numbers(path)
    assert numbers is not None
    return numbers


def read_records(directory: str | Path, files: Iterable[Path] | None = None) -> Iterator[tuple[Place, AnyRecord]]:
    """Yield all records of a journal, or of some of its files, file by file, in constant memory.

    Bytes without a complete record are skipped with a log message: they are damaged, or their writer was killed during a write or is
    still writing.

    Raises:
        JournalError: a file is not a journal, or has a later version.
    """
    for place, record in read_all(directory, files):
        if not isinstance(record, Gap | Files | Closed):
            yield place, record


def read_all(directory: str | Path, files: Iterable[Path] | None = None) -> Iterator[tuple[Place, AnyRecord | Gap]]:
    """Like ``read_records``, but includes the records about files and yields each gap in its place."""
    for path in journal_files(directory) if files is None else files:
        yield from read_file(path)


def read_file(path: Path) -> Iterator[tuple[Place, AnyRecord | Gap]]:
    """Yield the records and gaps of one file; see ``read_all``. A gap is yielded once the next record is found."""
    numbers = _numbers(path)
    writer = numbers[0] if numbers else 0
    end, begin, step = len(VERSION), -1, None
    while end != begin:  # what was written meanwhile is read, too
        begin = end
        for start, after, body in frames(path, 0 if begin == len(VERSION) else begin):
            record = decoded(body, path, after)
            if start > end:
                gap = Gap(path, end, start, (step, step_of(record)))
                logger.warning("%s", gap)
                yield Place(writer, path, start), gap
            end = after
            if (made := step_of(record)) is not None:
                step = made
            yield Place(writer, path, end), record
    left = path.stat().st_size - end
    if left > 0:  # below 0: made, and nothing written yet
        logger.warning(
            "%s: the last %d bytes, from byte %d on, are no whole record and are left out: its writer was stopped in the middle "
            "of a write, is at work, or the file is damaged.",
            path,
            left,
            end,
        )
        yield Place(writer, path, end + left), Gap(path, end, end + left, (step, None), is_tail=True)


def lost_files(directory: Path, listed: Files) -> list[Gap]:
    """Files, or ends of files, that the journal has lost since they were listed."""
    found = []
    for name, size in sorted(listed.sizes.items()):
        path = directory / name
        left = path.stat().st_size if path.exists() else -1
        if left < size:
            lost = (
                f"at least its last {size - left:,} bytes are missing"
                if left > 0
                else "it is empty"
                if not left
                else "this file is missing"
            )
            found.append(Gap(path, max(0, left), size, note=lost))
    return found
