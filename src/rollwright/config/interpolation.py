"""Interpolation: ``${other.key}``, ``${oc.env:VAR,default}`` and ``${run_dir}`` in the values of a config.

The notation is OmegaConf's: ``${a.b.0.c}`` or ``${a.b[0].c}`` is a key by its full path, ``${.c}`` a sibling of this key, and
``${..c}`` a sibling of the mapping that contains this key. ``${oc.env:VAR}`` is an environment variable, and ``${oc.decode:text}``
parses a string as YAML. Interpolations can be nested, and ``\\${`` is a literal ``${``.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rollwright.config.secrets import HIDDEN, Secret, hidden_by_name
from rollwright.config.source import KeyPath, Origins, default_of, dotted, merge, parse_value, plain, undotted
from rollwright.errors import ConfigError

#: Value of ``${run_dir}`` in every file.
RUN_DIR = "${cluster.fileroot}/${experiment_name}/${trial_name}"

_CALL = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:(.*)", re.DOTALL)
_QUOTED = re.compile(r"""(["'])(.*)\1""", re.DOTALL)


def resolve(
    data: dict[str, Any], defaults: Sequence[type], origins: Origins, around: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Resolve interpolations: ``${other.key}``, ``${oc.env:VAR,default}``, ``${run_dir}``.

    Args:
        data: the keys as written.
        defaults: dataclasses whose defaults an interpolation may refer to if the file does not give the key.
        origins: for messages.
        around: further keys that interpolations may refer to.

    Returns:
        ``data`` with values in place of interpolations. A string that comes from the environment, or whose key is named like a
        secret, is a ``Secret``.

    Raises:
        ConfigError: an interpolation refers to nothing, or an environment variable is not set and has no default.
    """
    context: dict[str, Any] = {"run_dir": RUN_DIR}
    for each in [each for cls in defaults for each in dataclasses.fields(cls)]:
        if (default := default_of(each)) is not dataclasses.MISSING:
            context = merge(context, {each.name: plain(default)})
    return _Resolver(merge(merge(context, around or {}), data), origins).value(data, ())


class _UnresolvedError(Exception):
    """Raised if an interpolation has no value; the message says why and what to do."""


class _Resolver:
    """Resolves values that contain interpolations."""

    def __init__(self, whole: dict[str, Any], origins: Origins) -> None:
        self.whole = whole
        self.origins = origins
        self._open: list[KeyPath] = []  # the keys that are being resolved, outermost first

    def value(self, written: Any, path: KeyPath) -> Any:
        """Resolve the value written at ``path``."""
        if isinstance(written, dict):
            return {key: hidden_by_name(key, self.value(item, (*path, key))) for key, item in written.items()}
        if isinstance(written, list):
            return [self.value(item, (*path, position)) for position, item in enumerate(written)]
        if not isinstance(written, str) or "${" not in written or isinstance(written, Secret):
            return written
        self._open.append(path)
        try:
            if path in self._open[:-1]:
                raise _UnresolvedError(f"Interpolation of {dotted(path)!r} leads back to itself. Give one of the keys a value.")
            return self._text(written)
        except _UnresolvedError as error:
            name = f"{self.origins.name(path)}: " if path else ""
            raise ConfigError(f"{self.origins.of(path)}: {name}{error}") from error
        finally:
            self._open.pop()

    def _text(self, text: str) -> Any:
        """Resolve a string: to any value if it is a single interpolation, else to a string with the values filled in."""
        parts: list[tuple[Any, str]] = []  # each part's value, and how it is written
        for source, is_interpolation in _split(text):
            value = self._interpolation(source[2:-1]) if is_interpolation else source.replace("\\${", "${")
            if source == text:
                return value
            parts.append(
                (value, source if not is_interpolation else value.written if isinstance(value, Secret) else str(value))
            )
        whole = "".join(str(value) for value, _ in parts)
        if not any(isinstance(value, Secret) for value, _ in parts):
            return whole
        written = [written for _, written in parts]
        return Secret(whole, HIDDEN if HIDDEN in written else "".join(written))

    def _interpolation(self, inside: str) -> Any:
        """Resolve the text between ``${`` and ``}``."""
        call = _CALL.fullmatch(inside)
        if call is None:
            return self._named(str(self._text(inside)))
        name, sources = call[1], list(_arguments(call[2]))
        arguments = [self._argument(source.strip()) for source in sources]
        first = str(arguments[0])
        if name == "oc.env":
            if first not in os.environ and not arguments[1:]:
                raise _UnresolvedError(f"Environment variable {first!r} not found. Set it, or give a default behind a comma.")
            if arguments[2:]:
                raise _UnresolvedError(
                    f"Interpolation oc.env has one default, not {len(arguments) - 1}: quote one with commas."
                )
            value = os.environ.get(first, *arguments[1:])
            value = None if value is None else str(value)
        elif name == "oc.decode":
            value = None if arguments[0] is None else parse_value(first)
            if not isinstance(arguments[0], Secret):
                return value
        else:
            raise _UnresolvedError(f"Interpolation type {name!r} is not known; known: oc.decode, oc.env.")
        if any(isinstance(argument, Secret) and HIDDEN in argument.written for argument in arguments):
            return _secret(value, HIDDEN)
        written = (_written(value) if "${" in source else source for source, value in zip(sources, arguments, strict=True))
        return _secret(value, f"${{{name}:{','.join(written)}}}")

    def _argument(self, source: str) -> Any:
        if quoted := _QUOTED.fullmatch(source):
            value = self._text(quoted[2].replace("\\" + quoted[1], quoted[1]))
            return value if isinstance(value, Secret) else str(value)
        return None if source == "null" else self._text(source)

    def _named(self, key: str) -> Any:
        """Return the value of another key."""
        key = key.strip()
        bare = key.lstrip(".")
        above = self._open[-1][: len(bare) - len(key)] if bare != key else ()
        node, is_resolved = self.whole, False
        path: KeyPath = ()
        found: Any = None
        for part in (*above, *undotted(bare.replace("[", ".").replace("]", ""))):
            if isinstance(node, str) and not is_resolved:  # the path goes through another interpolation
                node, is_resolved = self.value(node, path), True
            inner: dict[Any, Any] = dict(enumerate(node)) if isinstance(node, list) else node if isinstance(node, dict) else {}
            found = next((each for each in inner if str(each) == str(part)), None)
            if found is None:
                raise _UnresolvedError(f"Interpolation key {key!r} not found. Name a key that the config has.")
            node, path = inner[found], (*path, found)
        if node == "???":
            raise _UnresolvedError(f"Interpolation key {key!r} has no value yet (???). Give it one.")
        return hidden_by_name(found, node if is_resolved else self.value(node, path))


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a string, and whether each is an interpolation."""
    begin = position = 0
    while (at := text.find("${", position)) >= 0:
        if at and text[at - 1] == "\\":
            position = at + 2
            continue
        end = next((place + 1 for place, character in _outside_brackets(text, at + 2) if character == "}"), None)
        if end is None:
            raise _UnresolvedError(
                f"Interpolation {text[at : at + 40]!r} is not closed. Write \\${{ where it is meant as text."
            )
        if text[begin:at]:
            yield text[begin:at], False
        yield text[at:end], True
        begin = position = end
    if text[begin:]:
        yield text[begin:], False


def _arguments(text: str) -> Iterator[str]:
    begin = 0
    for place in [*(place for place, character in _outside_brackets(text, 0) if character == ","), len(text)]:
        yield text[begin:place]
        begin = place + 1


def _outside_brackets(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield position and character of each comma or closing brace from ``start`` on, except in quotes or nested brackets."""
    depth, quote = 0, ""
    for place in range(start, len(text)):
        character = text[place]
        if quote:
            quote = "" if character == quote and text[place - 1] != "\\" else quote
        elif character in "\"'" and text[:place].rstrip()[-1:] in (":", ",", ""):  # where an argument begins
            quote = character
        elif character in "{[":
            depth += 1
        elif depth:
            depth -= character in "]}"
        elif character in ",}":
            yield place, character


def _written(value: Any) -> str:
    """Write an argument as source text that resolves to the same value."""
    text = value.written if isinstance(value, Secret) else "null" if value is None else str(value)
    return text if re.fullmatch(r"[\w./:-]*|\$\{.*\}", text) else "'" + text.replace("'", r"\'") + "'"


def _secret(value: Any, written: str) -> Any:
    """Replace every string in a value from the environment with a ``Secret``."""
    if isinstance(value, dict):
        return {key: _secret(item, HIDDEN) for key, item in value.items()}
    if isinstance(value, list):
        return [_secret(item, HIDDEN) for item in value]
    return Secret(value, written) if isinstance(value, str) else value
