"""Read the files of a journal while they are being written, after a crash, and around damage.

Bytes that hold no complete record are skipped and reported (``Gap``). Reading resumes at the next offset that has a valid length and
checksum; the mark before each record makes these offsets easy to find. Files of the first version have no marks; there the reader
searches for the type names that records begin with.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from rollwright.errors import JournalError
from rollwright.experience.journal.records import (
    HEAD,
    KINDS,
    LENGTH,
    MARK,
    VERSION,
    VERSION_WITHOUT_MARKS,
    AnyRecord,
    Begin,
    Checkpoint,
    Closed,
    Files,
    Phase,
    Published,
    Trained,
    decode,
)
from rollwright.tracking.logging import getLogger

logger = getLogger("journal")

_NAME = re.compile(r"(\d{6,})-(\d{4,})\.journal")


@dataclass(frozen=True)
class Gap:
    """A range of bytes or a whole file without a complete record.

    Attributes:
        path: path of the file.
        begin, end: half-open range of bytes.
        steps: last step that the process recorded before the gap, and first step after it; each may be None.
        is_tail: True if no complete record follows: the writer was killed during a write or is still writing, or the end is lost.
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
    """Return the step of a record, or None if it has none."""
    return record.step if isinstance(record, Trained | Published | Phase | Checkpoint) else None


@dataclass(frozen=True)
class RecordPosition:
    """Position of a record: the number of its writer, its file and the offset of its end."""

    writer: int
    path: Path
    end: int


def journal_files(directory: str | Path) -> list[Path]:
    """List the files of a journal, ordered by writer and number."""
    paths = Path(directory).iterdir() if Path(directory).is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=file_numbers)


def file_numbers(path: Path) -> tuple[int, int]:
    """Return the number of the process that wrote a journal file, and the file's number among those of that process."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def read_records(directory: str | Path, files: Iterable[Path] | None = None) -> Iterator[tuple[RecordPosition, AnyRecord]]:
    """Yield all records of a journal, or of some of its files, file by file, in constant memory.

    Bytes without a complete record are skipped with a log message: they are damaged, or their writer was killed during a write or is
    still writing.

    Raises:
        JournalError: a file is not a journal, or has a later version.
    """
    for place, record in read_all(directory, files):
        if not isinstance(record, Gap | Files | Closed):
            yield place, record


def read_all(directory: str | Path, files: Iterable[Path] | None = None) -> Iterator[tuple[RecordPosition, AnyRecord | Gap]]:
    """Yield the same as ``read_records``, and also the records about files and, in order, the gaps."""
    for path in journal_files(directory) if files is None else files:
        yield from read_file(path)


def read_file(path: Path) -> Iterator[tuple[RecordPosition, AnyRecord | Gap]]:
    """Yield the records and gaps of one file; see ``read_all``. A gap is yielded once the next record is found."""
    writer = file_numbers(path)[0] if _NAME.fullmatch(path.name) else 0
    end, begin, step = len(VERSION), -1, None
    while end != begin:  # also read what was written meanwhile
        begin = end
        for start, after, body in frames(path, 0 if begin == len(VERSION) else begin):
            record = decoded(body, path, after)
            if start > end:
                gap = Gap(path, end, start, (step, step_of(record)))
                logger.warning("%s", gap)
                yield RecordPosition(writer, path, start), gap
            end = after
            if (made := step_of(record)) is not None:
                step = made
            yield RecordPosition(writer, path, end), record
    left = path.stat().st_size - end
    if left > 0:  # negative if the file is still empty
        logger.warning(
            "%s: the last %d bytes, from byte %d on, are not a complete record and are skipped: its writer was stopped during "
            "a write or is still writing, or the file is damaged.",
            path,
            left,
            end,
        )
        yield RecordPosition(writer, path, end + left), Gap(path, end, end + left, (step, None), is_tail=True)


def lost_files(directory: Path, listed: Files) -> list[Gap]:
    """Find the files, or ends of files, that the journal has lost since ``listed`` was written."""
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


# -- the records of one file -------------------------------------------------------------------------------------------

_CHUNK = 4 << 20  # bytes read at a time
_FEW = 16 << 10  # bytes; most records are shorter
#: Start of a record: an array, then the name of its type.
_KIND = re.compile(
    rb"(?:[\x90-\x9f]|\xdc[\x00-\xff]{2})(?:"
    + b"|".join(re.escape(msgspec.msgpack.encode(kind.__struct_config__.tag)) for kind in KINDS)
    + rb")",
    re.DOTALL,
)
_LONGEST_KIND = 24
_MARKED = re.compile(re.escape(MARK))


def frames(path: Path, begin: int = 0) -> Iterator[tuple[int, int, memoryview]]:
    """Yield begin, end and packed body of each complete record of a file. Bytes between two records are damaged.

    Args:
        path: path of the file, which may grow while it is read.
        begin: offset of a record; 0 starts at the first.

    Raises:
        JournalError: the file is not a journal, or has a later version.
    """
    with path.open("rb", buffering=0) as file:
        window = _Window(file.fileno())
        at = begin or _first(window, path)
        while at is not None and at < window.size:
            found = window.whole(at)
            if found is None:
                at = window.next_whole(at + 1)
            else:
                yield at, *found
                at = found[0]


def record_at(file: int, begin: int, path: Path) -> AnyRecord:
    """Read the record at an offset of an open file.

    Raises:
        JournalError: there is no complete record.
    """
    found = _Window(file, _FEW).whole(begin)
    if found is None:
        raise JournalError(f"{path}, byte {begin}: no complete record begins there; the file was changed after it was read.")
    return decoded(found[1], path, begin)


def decoded(body: bytes | memoryview, path: Path, place: int) -> AnyRecord:
    """Decode a packed record.

    Raises:
        JournalError: it has another version.
    """
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path}, byte {place}: a record of another version ({error}); use the version of rollwright that wrote it."
        ) from None


def _first(window: _Window, path: Path) -> int | None:
    """Return the offset of the first record, or None if there is none yet."""
    version = bytes(window.read(0, len(VERSION)))
    if version in (VERSION, VERSION_WITHOUT_MARKS):
        return len(version)
    if len(version) < len(VERSION) and any(each.startswith(version) for each in (VERSION, VERSION_WITHOUT_MARKS)):
        return None
    found = len(VERSION) if window.whole(len(VERSION)) else window.next_whole(0)
    if found is None:
        raise JournalError(f"{path} is not a journal of this version: it begins with {version!r}. Move it away.")
    return found


class _Window:
    """Buffered view of an open file.

    Args:
        file: file descriptor.
        chunk: bytes per read.
    """

    def __init__(self, file: int, chunk: int = _CHUNK) -> None:
        self.file, self.chunk = file, chunk
        self.size = os.fstat(file).st_size
        self._data, self._begin = memoryview(b""), 0

    def read(self, at: int, count: int) -> memoryview:
        """Read ``count`` bytes at an offset; fewer at the end of the file."""
        start = at - self._begin
        if start < 0 or start + count > len(self._data):
            self._data, self._begin, start = memoryview(os.pread(self.file, max(count, self.chunk), at)), at, 0
        return self._data[start : start + count]

    def whole(self, at: int) -> tuple[int, memoryview] | None:
        """Return the end and body of the record at an offset, or None if there is no complete record."""
        head = self.read(at, HEAD.size)
        for skipped in (4, 0) if head[:4] == MARK else (0, 4):  # tried both ways, so that a damaged mark loses nothing
            if len(head) < skipped + LENGTH.size:
                continue
            length, checksum = LENGTH.unpack_from(head, skipped)
            start = at + skipped + LENGTH.size
            if not length or start + length > self.size:
                continue
            body = self.read(start, length)
            if len(body) == length and xxhash.xxh3_64_intdigest(body) == checksum:
                return start + length, body
        return None

    def next_whole(self, at: int) -> int | None:
        """Return the offset of the next complete record, or None.

        The bytes read are bounded by a small multiple of the file size, even if many bytes look like the start of a record.
        """
        version = bytes(os.pread(self.file, len(VERSION), 0))
        marked, left = version != VERSION_WITHOUT_MARKS, 8 * self.size
        patterns = [(_MARKED, 0)] if version == VERSION else [(_KIND, LENGTH.size)]
        if version not in (VERSION, VERSION_WITHOUT_MARKS):
            patterns = [(_MARKED, 0), (_KIND, LENGTH.size)]
        for pattern, before in patterns:
            place = at
            while place < self.size:
                data = bytes(self.read(place, self.chunk))
                for match in pattern.finditer(data):
                    candidate = place + match.start() - before
                    if candidate < at or (marked and not before and not self._is_record(candidate)):
                        continue
                    left -= self._length(candidate)
                    if left < 0:
                        return None
                    if self.whole(candidate) is not None:
                        return candidate
                if place + len(data) >= self.size or not data:
                    break
                place += max(1, len(data) - _LONGEST_KIND)
        return None

    def _is_record(self, at: int) -> bool:
        """Return whether the bytes after a mark begin like a record."""
        return _KIND.match(bytes(self.read(at + HEAD.size, _LONGEST_KIND))) is not None

    def _length(self, at: int) -> int:
        head = self.read(at, HEAD.size)
        skipped = 4 if head[:4] == MARK else 0
        return min(self.size, LENGTH.unpack_from(head, skipped)[0]) if len(head) == HEAD.size else self.size


# -- the files that hold given tasks ------------------------------------------------------------------------------------

_BEGIN = b"\xa5begin"  # packed tag of ``Begin``
_decode = msgspec.msgpack.Decoder(Begin).decode


class TaskFiles:
    """Index from tasks to the files that hold their records. Each file is scanned once; later only appended bytes are scanned.

    Use it in a process that reads repeatedly while others write. A run that resumes reads its journal only once and does not need it.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, set[int]]] = {}  # bytes scanned, and the ordinals that begin in the file

    def of(self, directory: str | Path, is_open: Callable[[int], bool]) -> list[Path]:
        """Return the files that may hold records of the selected training tasks.

        For each process, these are the first file in which an episode of such a task begins, and all later files.

        Args:
            directory: directory of the journal.
            is_open: predicate that selects the ordinals of tasks.

        Raises:
            JournalError: a file is not a journal, or has a later version.
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
