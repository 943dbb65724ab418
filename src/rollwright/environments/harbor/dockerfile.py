"""Reads a Dockerfile as far as a box without images can follow it: files, directories and variables over a given system.

``FROM`` an image, ``RUN`` and whatever else needs docker are returned as ``Need`` with their lines.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from rollwright.errors import DataError

#: Instructions that say nothing about the files and variables that programs find in the box, because other programs are started in it.
_WITHOUT_EFFECT = ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL")
#: Directories of a box's system, over which nothing can be copied.
SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Need:
    """Something that only a container can do, and where the task asks for it."""

    where: str  # file:line
    what: str


@dataclass(frozen=True)
class Instruction:
    """One instruction, with the line on which it begins."""

    name: str
    arguments: str
    line: int


@dataclass
class BoxFiles:
    """What a Dockerfile puts into a box, beside its system.

    Attributes:
        copies: files and directories of this machine, each with its path in the box. Of a directory, the content is copied.
        environment: variables.
        workdir: working directory; None if the Dockerfile names none.
        directories: directories of the box that hold the copies, or were made by ``WORKDIR``.
        needs: what a box without images cannot do.
        base: image that the files are put over.
    """

    copies: list[tuple[Path, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    directories: list[str] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    base: str = "scratch"


def follow_dockerfile(path: Path, host_images: Sequence[str]) -> BoxFiles:
    """Follow a Dockerfile whose context is its directory.

    Args:
        path: the file.
        host_images: patterns of image names for which the box's own system stands in; ``scratch`` always is one.

    Raises:
        DataError: an instruction is malformed, or a file that it copies is missing.
    """
    follower = _Follower(path, host_images)
    for instruction in read_dockerfile(path):
        follower.follow(instruction)
    return follower.files


def read_dockerfile(path: Path) -> list[Instruction]:
    """Split a Dockerfile into instructions; continued lines are joined and comments left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    return [
        Instruction(name.upper(), arguments.strip(), line)
        for line, text in _logical_lines(lines)
        for name, _, arguments in [text.partition(" ")]
    ]


def _logical_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    parts: list[str] = []
    first = 0
    ends_at = ""  # of a heredoc
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if ends_at:
            ends_at = "" if bare == ends_at else ends_at
            continue
        if not bare or bare.startswith("#"):
            continue
        first = first if parts else number
        parts.append(bare.removesuffix("\\").strip())
        if not bare.endswith("\\"):
            text = re.sub(r"\s+", " ", " ".join(parts))
            if heredoc := re.search(r"<<-?[\"']?(\w+)", text):
                ends_at = heredoc[1]
            yield first, text
            parts = []


class _Follower:
    def __init__(self, path: Path, host_images: Sequence[str]) -> None:
        self.path = path
        self.host_images = ["scratch", *host_images]
        self.files = BoxFiles()
        self.arguments: dict[str, str] = {}
        self._stages = 0
        if (path.parent / ".dockerignore").exists():
            self._need(1, "leaves out the files that .dockerignore lists")

    def follow(self, instruction: Instruction) -> None:
        """Carry out one instruction."""
        method = getattr(self, f"_{instruction.name.lower()}", None)
        if method is not None:
            method(instruction)
        elif instruction.name not in _WITHOUT_EFFECT:
            self._need(instruction.line, f"{instruction.name} {instruction.arguments}")

    def _need(self, line: int, what: str) -> None:
        self.files.needs.append(Need(f"{self.path}:{line}", what if len(what) < 80 else f"{what[:79]}…"))

    def _from(self, instruction: Instruction) -> None:
        self._stages += 1
        words = [word for word in instruction.arguments.split() if not word.startswith("--")]
        self.files.base = image = self._filled(words[0]) if words else ""
        if self._stages > 1 or not any(fnmatchcase(image, pattern) for pattern in self.host_images):
            self._need(instruction.line, f"FROM {instruction.arguments}")

    def _workdir(self, instruction: Instruction) -> None:
        target = posixpath.normpath(posixpath.join(self.files.workdir or "/", self._filled(instruction.arguments)))
        self.files.workdir = target
        if self._is_free(target, instruction):
            self.files.directories.append(target)

    def _user(self, instruction: Instruction) -> None:
        if instruction.arguments.split(":")[0] not in ("root", "0"):
            self._need(instruction.line, f"USER {instruction.arguments}")

    def _arg(self, instruction: Instruction) -> None:
        for word in self._words(instruction):
            name, has_default, default = word.partition("=")
            self.arguments[name] = self._filled(default) if has_default else self.arguments.get(name, "")

    def _env(self, instruction: Instruction) -> None:
        words = self._words(instruction)
        if words and "=" not in words[0]:  # the old form: ENV NAME the whole rest
            words = ["=".join(instruction.arguments.split(" ", 1))]
        for word in words:
            name, _, value = word.partition("=")
            self.files.environment[name] = self._filled(value)

    def _copy(self, instruction: Instruction) -> None:
        words = self._words(instruction)
        if any(word.startswith("--") for word in words) or "<<" in instruction.arguments or len(words) < 2:
            self._need(instruction.line, f"{instruction.name} {instruction.arguments}")
            return
        *sources, target = map(self._filled, words)
        to_directory = target.endswith("/") or target in (".", "./") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.files.workdir or "/", target))
        to_directory = to_directory or target in self.files.directories
        if self._is_free(target, instruction):
            for source in sources:
                self._copy_one(source, target, to_directory, instruction)

    def _add(self, instruction: Instruction) -> None:
        if re.search(r"://|\.(tar|tgz|gz|bz2|xz|zst)\b|^git@", instruction.arguments):
            self._need(instruction.line, f"ADD {instruction.arguments}")
        else:
            self._copy(instruction)

    def _copy_one(self, source: str, target: str, to_directory: bool, instruction: Instruction) -> None:
        context = self.path.parent
        found = sorted(context.glob(source.strip("/") or ".")) if source.strip("/.") else [context]
        if not found or any(not each.resolve().is_relative_to(context.resolve()) for each in found):
            raise DataError(f"{self.path}:{instruction.line}: there is no {source!r} in {context} to copy.")
        for each in found:
            inside = to_directory or len(found) > 1
            into = posixpath.join(target, each.name) if inside and each.is_file() else target
            directory = posixpath.dirname(into) if each.is_file() else into
            if directory == "/":
                self._need(instruction.line, f"{instruction.name} {instruction.arguments}, which changes the system of the box")
                return
            self.files.copies.append((each, into))
            self.files.directories.append(directory)

    def _is_free(self, target: str, instruction: Instruction) -> bool:
        if target == "/" or any(target == each or target.startswith(f"{each}/") for each in SYSTEM):
            self._need(instruction.line, f"{instruction.name} {instruction.arguments}, which changes the system of the box")
            return False
        return True

    def _words(self, instruction: Instruction) -> list[str]:
        try:
            if instruction.arguments.startswith("["):
                return [str(each) for each in json.loads(instruction.arguments)]
            return shlex.split(instruction.arguments)
        except ValueError as error:
            raise DataError(f"{self.path}:{instruction.line}: {instruction.name} cannot be read: {error}.") from error

    def _filled(self, text: str) -> str:
        """Replace ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:+other}``."""
        known = {**self.arguments, **self.files.environment}

        def value(match: re.Match[str]) -> str:
            if match[0] == r"\$":
                return "$"
            found = known.get(match[1] or match[4], "")
            if match[2] == "-":
                return found or match[3]
            return (match[3] if found else "") if match[2] == "+" else found

        return _VARIABLE.sub(value, text)
