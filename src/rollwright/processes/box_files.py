"""Files on their way into a box and out of it, as a tar archive. Both sides use this module, and only the standard library.

The programs of a box write what is copied out of it, so nothing in an archive is believed: a name or link that leads out of the copied
directory, a device, or more bytes than allowed is refused. No symbolic link is followed, on either side.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

MOST_FILES = 100_000
_CHUNK = 1 << 20
_HEAD_BYTES = 4096  # of an archive, for each file
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RefusedFileError(Exception):
    """A file is not copied; the message names it and says why."""


# -- into an archive ---------------------------------------------------------------------------------------------------


def pack(source: str, stream: BinaryIO, most_bytes: int, left_out: Collection[str] = ()) -> None:
    """Write a file, or what a directory contains, to a stream as an archive.

    The archive of a directory begins with an entry ``.``; that of a file has one entry.

    Args:
        source: absolute path without symbolic links.
        stream: where the archive goes.
        most_bytes: size of all files together.
        left_out: paths below the source that are not copied.

    Raises:
        RefusedFileError: the source is missing, is or contains what is not copied, or is too large.
    """
    if os.path.realpath(source) != os.path.normpath(source):
        raise RefusedFileError(f"{source} is a symbolic link or below one, which is not followed")
    if not os.path.exists(source):
        raise RefusedFileError(f"there is no {source}")
    room = most_bytes
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for count, (path, name) in enumerate(_tree(source, left_out)):
            room -= _add(archive, path, name, room)
            if count > MOST_FILES:
                raise RefusedFileError(f"{source} has more than {MOST_FILES} files")


def _tree(source: str, left_out: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the name in the archive of everything that is copied; directories come before what they contain."""
    if not os.path.isdir(source):
        yield source, os.path.basename(source)
        return
    waiting = ["."]
    while waiting:
        name = waiting.pop()
        path = os.path.join(source, name) if name != "." else source
        if path in left_out:
            continue
        yield path, name
        if os.path.isdir(path) and not os.path.islink(path):
            waiting += [entry if name == "." else f"{name}/{entry}" for entry in sorted(os.listdir(path), reverse=True)]


def _add(archive: tarfile.TarFile, path: str, name: str, room: int) -> int:
    """Add one file, directory or link to an archive, and return the number of its bytes."""
    found, entry = os.lstat(path), tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(entry)
    elif stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    elif stat.S_ISREG(found.st_mode):
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # it may be another file by now
            entry.size = os.fstat(file.fileno()).st_size
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or entry.size > room:
                raise RefusedFileError(f"{name} is too large, or no longer a file")
            archive.addfile(entry, _Padded(file))  # type: ignore[arg-type]
    else:
        raise RefusedFileError(f"{name} is a device, a socket or a pipe")
    return entry.size


class _Padded:
    """A file that another process may shorten while it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        return self._file.read(size).ljust(size, b"\0")


# -- out of an archive -------------------------------------------------------------------------------------------------


def unpack(stream: BinaryIO, target: str, most_bytes: int) -> None:
    """Write the content of an archive to a path, whose parents are made.

    Existing files are replaced. Existing links are never followed: not in the target's path, and not below it.

    Args:
        stream: the archive; it is read once, from beginning to end.
        target: absolute path without symbolic links: a directory if the archive is that of a directory, else a file.
        most_bytes: size of all files together.

    Raises:
        RefusedFileError: an entry is not copied. What came before it has been written.
    """
    limited: Any = _Limited(stream, most_bytes + MOST_FILES * _HEAD_BYTES)
    try:
        with tarfile.open(fileobj=limited, mode="r|") as archive:
            first = archive.next()
            if first is None:
                raise RefusedFileError("the archive is empty")
            if first.name == ".":
                with _opened(target) as root:
                    _make_links(_unpack_directory(archive, root, most_bytes), root)
            elif first.isreg() and first.size <= most_bytes:
                with _opened(os.path.dirname(target)) as parent:
                    _write(archive, first, parent, os.path.basename(target))
            else:
                raise RefusedFileError(f"{first.name} is no file, or larger than {most_bytes} bytes")
        while limited.read(_CHUNK):  # otherwise the other side could not write its end
            pass
    except (tarfile.TarError, OSError) as error:
        raise RefusedFileError(f"{target}: {error}") from error


def _unpack_directory(archive: tarfile.TarFile, root: int, room: int) -> dict[str, str]:
    """Write files and directories, and return the symbolic links, which are made last: nothing is written through one."""
    links: dict[str, str] = {}
    for count, entry in enumerate(archive):
        if count == 0:
            continue  # the directory itself
        *parents, name = _parts(entry.name)
        room -= entry.size
        if room < 0 or count > MOST_FILES:
            raise RefusedFileError(f"more than {MOST_FILES} files, or more bytes than allowed")
        if entry.issym():
            links[entry.name] = entry.linkname
        elif entry.isdir():
            with _opened("/".join([*parents, name]), root) as directory:
                os.chmod(directory, entry.mode & 0o777 | 0o700)
        elif entry.isreg():
            with _opened("/".join(parents), root) as parent:
                _write(archive, entry, parent, name)
        else:
            raise RefusedFileError(f"{entry.name} is a device, a hard link or something else that is not copied")
    return links


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in name or len(name) > 2048:
        raise RefusedFileError(f"{name[:200]!r} is a name that is too long or leads elsewhere")
    return parts


@contextlib.contextmanager
def _opened(path: str, root: int | None = None) -> Iterator[int]:
    """Open a directory below ``root`` (by default ``/``), making it where it is missing and following no link."""
    here = os.open("/", _DIRECTORY) if root is None else os.dup(root)
    try:
        for part in filter(None, path.split("/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            try:
                inner = os.open(part, _DIRECTORY, dir_fd=here)
            except OSError as error:
                raise RefusedFileError(f"{part} in {path} is a link, or no directory that can be opened ({error})") from error
            os.close(here)
            here = inner
        yield here
    finally:
        os.close(here)


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    content: Any = archive.extractfile(entry)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(name, flags, entry.mode & 0o777 | 0o600, dir_fd=parent), "wb") as file:
        os.fchmod(file.fileno(), entry.mode & 0o777 | 0o600)
        while chunk := content.read(_CHUNK):
            file.write(chunk)


def _make_links(links: dict[str, str], root: int) -> None:
    for name, target in links.items():
        _check_link(name, target, links)
    for name, target in links.items():
        *parents, last = _parts(name)
        with _opened("/".join(parents), root) as parent:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=parent)
            os.symlink(target, last, dir_fd=parent)


def _check_link(name: str, target: str, links: dict[str, str]) -> None:
    """Refuse a symbolic link that leads out of the directory or through another link, so that the steps to its target are those it names."""
    place = _parts(name)[:-1]
    for step in ["/", *target.split("/")] if target.startswith("/") else target.split("/"):
        if "/".join(place) in links or step == "/" or (step == ".." and not place):
            raise RefusedFileError(
                f"{name} is a link to {target}, which leads out of the copied directory or through another link"
            )
        if step == "..":
            place.pop()
        elif step not in ("", "."):
            place.append(step)


class _Limited:
    """A stream of which at most a number of bytes can be read."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, size: int) -> bytes:
        content = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise RefusedFileError("the archive is larger than the files may be")
        return content
