"""Binary format of a journal file: records framed by a mark, length and checksum, and recovery after damage.

A file begins with its version. After an incomplete record, reading resumes at the next offset whose length and checksum are valid; the
mark before each record makes these offsets easy to find. Files of the first version have no marks; there the reader searches for the
type names that records begin with.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from rollwright.errors import JournalError
from rollwright.experience.journal.records import KINDS, AnyRecord, decode

VERSION = b"RWJRNL2\n"
WITHOUT_MARKS = b"RWJRNL1\n"
_MARK = b"\x1eRW\xf7"  # read as a length it exceeds any file, so the two versions cannot be confused
_HEAD = struct.Struct("<4sIQ")  # mark, length, checksum
_LENGTH = struct.Struct("<IQ")
_CHUNK = 4 << 20  # bytes read at a time
_FEW = 16 << 10  # bytes that hold most records
#: Start of a record: an array, then the name of its type.
_KIND = re.compile(
    rb"(?:[\x90-\x9f]|\xdc[\x00-\xff]{2})(?:"
    + b"|".join(re.escape(msgspec.msgpack.encode(kind.__struct_config__.tag)) for kind in KINDS)
    + rb")",
    re.DOTALL,
)
_LONGEST_KIND = 24
_MARKED = re.compile(re.escape(_MARK))


def frame(body: bytes) -> bytes:
    """Frame a packed record for writing."""
    return _HEAD.pack(_MARK, len(body), xxhash.xxh3_64_intdigest(body)) + body


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
    """Offset of the first record; None if there is none yet."""
    version = bytes(window.read(0, len(VERSION)))
    if version in (VERSION, WITHOUT_MARKS):
        return len(version)
    if len(version) < len(VERSION) and any(each.startswith(version) for each in (VERSION, WITHOUT_MARKS)):
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
        """Up to ``count`` bytes at an offset; fewer at the end of the file."""
        start = at - self._begin
        if start < 0 or start + count > len(self._data):
            self._data, self._begin, start = memoryview(os.pread(self.file, max(count, self.chunk), at)), at, 0
        return self._data[start : start + count]

    def whole(self, at: int) -> tuple[int, memoryview] | None:
        """End and body of the record at an offset; None if there is no complete record."""
        head = self.read(at, _HEAD.size)
        for skipped in (4, 0) if head[:4] == _MARK else (0, 4):  # a damaged mark loses nothing
            if len(head) < skipped + _LENGTH.size:
                continue
            length, checksum = _LENGTH.unpack_from(head, skipped)
            start = at + skipped + _LENGTH.size
            if not length or start + length > self.size:
                continue
            body = self.read(start, length)
            if len(body) == length and xxhash.xxh3_64_intdigest(body) == checksum:
                return start + length, body
        return None

    def next_whole(self, at: int) -> int | None:
        """Offset of the next complete record.

        The bytes read are bounded by a small multiple of the file size, even if many bytes look like the start of a record.
        """
        version = bytes(os.pread(self.file, len(VERSION), 0))
        marked, left = version != WITHOUT_MARKS, 8 * self.size
        patterns = [(_MARKED, 0)] if version == VERSION else [(_KIND, _LENGTH.size)]
        if version not in (VERSION, WITHOUT_MARKS):
            patterns = [(_MARKED, 0), (_KIND, _LENGTH.size)]
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
        """True if the bytes after a mark begin like a record."""
        return _KIND.match(bytes(self.read(at + _HEAD.size, _LONGEST_KIND))) is not None

    def _length(self, at: int) -> int:
        head = self.read(at, _HEAD.size)
        skipped = 4 if head[:4] == _MARK else 0
        return min(self.size, _LENGTH.unpack_from(head, skipped)[0]) if len(head) == _HEAD.size else self.size
