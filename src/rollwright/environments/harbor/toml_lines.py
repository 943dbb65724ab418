"""Reads a TOML file and finds the line of each key, for messages; ``tomllib`` keeps no lines."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollwright.errors import DataError

Key = tuple[str | int, ...]  #: A key with the names of its tables and the numbers of elements: ``("steps", 0, "name")``.

_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_TABLE = re.compile(rf"^\s*(\[\[?)\s*({_DOTTED})\s*\]\]?")
_ASSIGNMENT = re.compile(rf"^\s*({_DOTTED})\s*=")
#: What opens or closes something in a value: strings, comments, brackets.
_TOKEN = re.compile(r'"""|\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#.*|[\[\]{}]')


class TomlFile:
    """A parsed file.

    Attributes:
        path: the file.
        data: its content.

    Raises:
        DataError: the file cannot be read, or is no TOML.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            self.data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise DataError(f"{path}: this is not TOML ({error}).") from error
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}.") from error
        self._lines: dict[Key, int] = {}
        for key, line in _key_lines(text):
            for length in range(1, len(key) + 1):  # a table may have no line of its own
                self._lines.setdefault(key[:length], line)

    def where(self, key: Sequence[str | int]) -> str:
        """Return ``file:line`` of a key, or of the innermost table around it that has a line."""
        for length in range(len(key), 0, -1):
            if line := self._lines.get(tuple(key[:length])):
                return f"{self.path}:{line}"
        return str(self.path)


def _key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Yield each key and table with its line. Keys of inline tables are not found; their table is."""
    table: Key = ()
    elements: dict[Key, int] = {}  # array of tables -> number of its last element
    closing, depth = "", 0  # the string and the brackets that a value has left open
    for number, line in enumerate(text.splitlines(), 1):
        rest = line
        if not closing and not depth:
            if header := _TABLE.match(line):
                table = _placed(_names(header[2]), elements, is_element=header[1] == "[[")
                yield table, number
                continue
            if assignment := _ASSIGNMENT.match(line):
                yield (*table, *_names(assignment[1])), number
                rest = line[assignment.end() :]
        closing, depth = _left_open(rest, closing, depth)


def _names(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(_NAME, dotted)]


def _placed(names: list[str], elements: dict[Key, int], *, is_element: bool) -> Key:
    """Return the key of a table header; names of arrays of tables refer to their last element."""
    key: Key = ()
    for index, name in enumerate(names):
        key = (*key, name)
        if is_element and index == len(names) - 1:
            elements[key] = elements.get(key, -1) + 1
        if key in elements:
            key = (*key, elements[key])
    return key


def _left_open(text: str, closing: str, depth: int) -> tuple[str, int]:
    """Return the multi-line string that is open after ``text`` (or ``""``), and the number of open brackets."""
    position = 0
    while position < len(text):
        if closing:
            end = text.find(closing, position)
            if end < 0:
                return closing, depth
            position, closing = end + 3, ""
            continue
        token = _TOKEN.search(text, position)
        if token is None:
            break
        position = token.end()
        if token[0] in ('"""', "'''"):
            closing = token[0]
        depth += (token[0] in "[{") - (token[0] in "]}")
    return closing, depth
