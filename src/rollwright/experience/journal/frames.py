"""The bytes of a journal file: records, each with a mark, its length and its checksum, and what is found of them after damage.

A file begins with its version. Where a record is not whole, reading goes on at the next place whose length and checksum hold: the mark
before each record says where to look. Files of the first version have no marks; there the names of the kinds of records, with which each
record begins, are looked for.
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
_MARK = b"\x1eRW\xf7"  # as a length more than any file has, so that the two versions cannot be taken for each other
_HEAD = struct.Struct("<4sIQ")  # mark, length and checksum of a record
_LENGTH = struct.Struct("<IQ")
_CHUNK = 4 << 20  # bytes read at a time
_FEW = 16 << 10  # bytes in which most records end
#: How a record begins: an array, and the name of its kind.
_KIND = re.compile(
    rb"(?:[\x90-\x9f]|\xdc[\x00-\xff]{2})(?:"
    + b"|".join(re.escape(msgspec.msgpack.encode(kind.__struct_config__.tag)) for kind in KINDS)
    + rb")",
    re.DOTALL,
)
_LONGEST_KIND = 24
_MARKED = re.compile(re.escape(_MARK))


def frame(body: bytes) -> bytes:
    """A packed record as it is written."""
    return _HEAD.pack(_MARK, len(body), xxhash.xxh3_64_intdigest(body)) + body


def frames(path: Path, begin: int = 0) -> Iterator[tuple[int, int, memoryview]]:
    """Where the whole records of a file begin and end, and what is in them, packed. What is between two of them is damaged.

    Args:
        path: of the file, which may grow meanwhile.
        begin: where a record begins; 0: the first.

    Raises:
        JournalError: the file is no journal, or of a later version.
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
    """The record that begins at a byte of an open file.

    Raises:
        JournalError: there is no whole record.
    """
    found = _Window(file, _FEW).whole(begin)
    if found is None:
        raise JournalError(f"{path}, byte {begin}: no whole record begins there; the file was changed after it was read.")
    return decoded(found[1], path, begin)


def decoded(body: bytes | memoryview, path: Path, place: int) -> AnyRecord:
    """A packed record.

    Raises:
        JournalError: it is of another version.
    """
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"{path}, byte {place}: a record of another version ({error}); use the version that wrote it."
        ) from None


def _first(window: _Window, path: Path) -> int | None:
    """Where the first record begins; None where there is none yet."""
    version = bytes(window.read(0, len(VERSION)))
    if version in (VERSION, WITHOUT_MARKS):
        return len(version)
    if len(version) < len(VERSION) and any(each.startswith(version) for each in (VERSION, WITHOUT_MARKS)):
        return None
    found = len(VERSION) if window.whole(len(VERSION)) else window.next_whole(0)
    if found is None:
        raise JournalError(f"{path} is no journal of this version: it begins with {version!r}. Move it away.")
    return found


class _Window:
    """The part of an open file that is looked at.

    Args:
        file: its descriptor.
        chunk: bytes that are read at once.
    """

    def __init__(self, file: int, chunk: int = _CHUNK) -> None:
        self.file, self.chunk = file, chunk
        self.size = os.fstat(file).st_size
        self._data, self._begin = memoryview(b""), 0

    def read(self, at: int, count: int) -> memoryview:
        """``count`` bytes from a place on, or those that there are."""
        start = at - self._begin
        if start < 0 or start + count > len(self._data):
            self._data, self._begin, start = memoryview(os.pread(self.file, max(count, self.chunk), at)), at, 0
        return self._data[start : start + count]

    def whole(self, at: int) -> tuple[int, memoryview] | None:
        """The end and the content of the record at a place; None where none is, or not the whole of it."""
        head = self.read(at, _HEAD.size)
        for skipped in (4, 0) if head[:4] == _MARK else (0, 4):  # a mark that is damaged loses nothing
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
        """The next place at which a whole record begins.

        No more than some times the file is read: what looks like records and is none cannot make this endless.
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
        """What stands behind a mark begins as a record does."""
        return _KIND.match(bytes(self.read(at + _HEAD.size, _LONGEST_KIND))) is not None

    def _length(self, at: int) -> int:
        head = self.read(at, _HEAD.size)
        skipped = 4 if head[:4] == _MARK else 0
        return min(self.size, _LENGTH.unpack_from(head, skipped)[0]) if len(head) == _HEAD.size else self.size
