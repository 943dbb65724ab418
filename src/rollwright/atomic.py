"""Atomic writes of files and directories, and JSON with checksums.

Each file is written next to its target under a temporary name (``.<name>.<8 hex digits>.tmp``) and then renamed. A killed writer leaves
the old target unchanged and a temporary file that ``sweep`` removes. JSON objects and lines can have a checksum, which reveals damage.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

_CHECKSUM = "checksum"
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextmanager
def replaced_file(path: str | Path, *, durable: bool = False, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; the file replaces ``path`` when the block ends without an exception.

    Args:
        path: the target; its parent directories are created.
        durable: flush the file and its directory to the disk, so that the file survives a power failure.
        mode: permission bits of the file. If None, they are those of any new file.
    """
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        yield draft
        if mode is not None:
            draft.chmod(mode)
        if durable:
            _flush(draft)
        os.replace(draft, target)
        if durable:
            _flush(target.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def replaced_directory(
    directory: str | Path, *, durable: bool = True, before_visible: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Yield a temporary directory to fill, which replaces ``directory`` when the block ends without an exception.

    Args:
        directory: the target; its parent directories are created.
        durable: flush all files to the disk before they become visible.
        before_visible: called after all files are written and before they become visible; if it raises, nothing appears.
    """
    target = Path(directory).absolute()
    draft, old = (target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp" for _ in range(2))
    draft.mkdir(parents=True)
    try:
        yield draft
        if durable:
            for path in (*draft.rglob("*"), draft):
                _flush(path)
        if before_visible is not None:
            before_visible()
        if target.exists():
            target.rename(old)
        draft.rename(target)
        if durable:
            _flush(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: str | Path, text: str, *, durable: bool = False, mode: int | None = None) -> Path:
    """Write a UTF-8 file atomically; see ``replaced_file``. Returns its path."""
    with replaced_file(path, durable=durable, mode=mode) as draft:
        draft.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(
    path: str | Path,
    value: Any,
    *,
    indent: int | None = 2,
    default: Callable[[Any], Any] | None = None,
    durable: bool = False,
    mode: int | None = None,
    checked: bool = False,
) -> Path:
    """Write a value as JSON atomically; see ``json.dumps`` and ``replaced_file``. Returns the path.

    ``checked`` adds a key ``checksum`` to the object; ``read_json`` verifies it.
    """
    if checked:
        value = json.loads(json.dumps(value, default=default))
        value = {**value, _CHECKSUM: _checksum(value)}
    return write_text(path, json.dumps(value, indent=indent, default=default) + "\n", durable=durable, mode=mode)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read the object in a JSON file, without its checksum if it has one.

    Raises:
        ValueError: the file is damaged or does not contain an object.
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("it is empty")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    expected = value.pop(_CHECKSUM, None)
    if expected is not None and expected != _checksum(value):
        raise ValueError("its checksum does not match: it was changed or damaged")
    return value


#: Matches the end of a JSON line written by ``line_with_checksum``.
_AT_END = re.compile(rb', "checksum": "([0-9a-f]{16})"}\s*')


def line_with_checksum(value: Mapping[str, Any], number: int = 0) -> str:
    """Return an object as one line of JSON that ends with a checksum of its bytes and of its line number, if given."""
    text = json.dumps(value)
    return f'{text[:-1]}, "{_CHECKSUM}": "{xxhash.xxh3_64_hexdigest(text.encode(), seed=number)}"}}\n'


def number_of_line(line: bytes, numbers: Iterable[int] = (0,)) -> int | None:
    """Find which of ``numbers`` was the line number when a line was written; None if the line has no checksum.

    Raises:
        ValueError: no number fits the checksum, so the line is damaged.
    """
    match = _AT_END.search(line)
    if match is None or match.end() != len(line):
        return None
    text, expected = line[: match.start()] + b"}", match[1].decode()
    for number in numbers:
        if xxhash.xxh3_64_hexdigest(text, seed=number) == expected:
            return number
    raise ValueError("its checksum does not match")


def _checksum(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


#: Advice for a file that cannot be written, by errno.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on that disk"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), "put the directory back where it was"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable again"),
}


def remedy_of(error: OSError) -> str:
    """Return advice for a file that cannot be written."""
    return _REMEDIES.get(error.errno or 0, "check that disk")


def sweep(directory: str | Path, *, older_than: float = 3600.0) -> list[Path]:
    """Remove temporary files of killed writers directly in a directory, which need not exist. Returns the removed paths.

    Files that changed in the last ``older_than`` seconds are kept, because they may belong to a running writer.
    """
    latest, removed = time.time() - older_than, []
    for path in Path(directory).glob(".*.tmp"):
        if _LEFTOVER.fullmatch(path.name) and path.lstat().st_mtime <= latest:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _flush(path: Path) -> None:
    """Flush a file's content or a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
