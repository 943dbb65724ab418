"""Overrides and interpolation: from the document as it was written to the values that it means."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollwright.config.source import Origins, Override, dotted
from rollwright.errors import ConfigError

#: What ``${run_dir}`` means in every file.
RUN_DIR = "${cluster.fileroot}/${experiment_name}/${trial_name}"


def merge(base: Any, over: Any) -> Any:
    """``over`` onto ``base``: mappings are merged key by key, everything else replaces."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merge(base[key], value) if key in base else value for key, value in over.items()}}
    return copy.deepcopy(over)


def apply_override(data: dict[str, Any], override: Override) -> None:
    """Set one override in place. Lists are entered by position, or by the ``name`` of an element.

    Raises:
        ConfigError: the path leads through something that holds no keys, or beyond a list's end.
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


def resolve(
    data: dict[str, Any], defaults: Sequence[type], origins: Origins, around: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Resolve interpolations: ``${other.key}``, ``${oc.env:VAR,default}``, ``${run_dir}``.

    Args:
        data: the keys as written.
        defaults: dataclasses whose defaults an interpolation may name where the file does not give the key.
        origins: for messages.
        around: further keys that interpolations may name.

    Returns:
        The keys of ``data``, and no others, with values in place of interpolations.

    Raises:
        ConfigError: an interpolation leads nowhere, or an environment variable is not set and has no default.
    """
    context: dict[str, Any] = {"run_dir": RUN_DIR}
    for cls in defaults:
        context = merge(context, default_values(cls))
    try:
        config = OmegaConf.create(merge(merge(context, around or {}), data), flags={"allow_objects": True})
        resolved = {}
        for key, value in data.items():
            node = config._get_node(key)
            written = OmegaConf.is_config(node) and not node._is_interpolation()
            whole = OmegaConf.to_container(node, resolve=True) if written else _plain(config[key] if value != "???" else value)
            resolved[key] = _project(whole, value)
        return resolved
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        path = tuple(
            int(part) if part.isdigit() else part for part in key.replace("[", ".").replace("]", "").split(".") if part
        )
        cause = str(error).splitlines()[0].strip()
        name = f"{origins.name(path)}: " if path else ""
        raise ConfigError(f"{origins.of(path)}: {name}{cause}. Name a key that the config has, or give a default.") from error


def default_values(cls: type) -> dict[str, Any]:
    """The defaults of a dataclass as plain containers, without fields that have none or cannot be written in YAML."""
    values = {}
    for field in dataclasses.fields(cls):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is not dataclasses.MISSING:
            values[field.name] = plain(value)
    return values


def plain(value: Any) -> Any:
    """Dataclasses, enums and paths as what YAML can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(element) for key, element in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(element) for element in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return getattr(value, "value", value)
    return getattr(value, "value", str(value))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _project(resolved: Any, written: Any) -> Any:
    """``resolved`` without the keys that only the defaults brought in."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _project(resolved[key], value) for key, value in written.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [_project(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved
