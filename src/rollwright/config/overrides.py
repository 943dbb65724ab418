"""Overrides: ``key=value`` arguments of the command line, parsed and applied to the data of a config file."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from rollwright.config.secrets import command_line
from rollwright.config.source import Override, dotted, merge, parse_value, undotted
from rollwright.errors import ConfigError


def parse_override(text: str) -> Override:
    """Parse ``a.b.0.c=value``.

    Raises:
        ConfigError: there is no ``=``, or no key before it.
    """
    key, equals, raw = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r}: write key=value, such as actor.optimizer.lr=1e-5.")
    return Override(text=command_line([text]), path=undotted(key), value=parse_value(raw), raw=raw)


def merge_overrides(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Return a copy of ``data`` with the overrides applied in order.

    Raises:
        ConfigError: two overrides contradict each other, or one has an impossible path.
    """
    for outer, inner in itertools.permutations(overrides, 2):
        if outer.value is None and len(inner.path) > len(outer.path) and inner.path[: len(outer.path)] == outer.path:
            raise ConfigError(
                f"override {inner.text!r}: sets a key of {dotted(outer.path)}, which override {outer.text!r} takes out; keep one of them."
            )
    data = copy.deepcopy(data)
    for override in overrides:
        apply_override(data, override)
    return data


def apply_override(data: dict[str, Any], override: Override) -> None:
    """Apply one override in place. List elements are selected by position or by their ``name``.

    Raises:
        ConfigError: the path goes through a value without keys, or past the end of a list.
    """
    node: Any = data
    part: Any
    for depth, part in enumerate(override.path):
        last = depth == len(override.path) - 1
        if isinstance(node, list):
            part = _position(node, part, override)
        elif isinstance(node, dict):
            part = next((key for key in node if str(key) == str(part)), str(part))
            if not last and node.get(part) is None:
                node[part] = {}
        else:
            above = dotted(override.path[:depth])
            raise ConfigError(f"override {override.text!r}: {above} is {node!r} and holds no keys; set {above} itself.")
        if last:
            old = node[part] if isinstance(node, list) or part in node else None
            node[part] = merge(old, override.value)
        else:
            node = node[part]


def _position(node: list[Any], part: str | int, override: Override) -> int:
    names = [element.get("name") if isinstance(element, dict) else None for element in node]
    if part in names:
        return names.index(part)
    if not isinstance(part, int):
        known = ", ".join(str(name) for name in names if name) or f"positions 0 to {len(node) - 1}"
        raise ConfigError(f"override {override.text!r}: the list has no element {part!r}; known: {known}.")
    if part >= len(node):
        raise ConfigError(f"override {override.text!r}: the list has {len(node)} elements; positions count from 0.")
    return part
