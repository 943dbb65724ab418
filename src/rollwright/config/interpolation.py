"""Interpolation: ``${other.key}``, ``${oc.env:VAR,default}`` and ``${run_dir}`` in the values of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollwright.config.overrides import merge
from rollwright.config.secrets import marked, names_environment, unresolved
from rollwright.config.source import Origins, default_of, plain, undotted
from rollwright.errors import ConfigError

#: What ``${run_dir}`` means in every file.
RUN_DIR = "${cluster.fileroot}/${experiment_name}/${trial_name}"


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
    for each in [each for cls in defaults for each in dataclasses.fields(cls)]:
        if (default := default_of(each)) is not dataclasses.MISSING:
            context = merge(context, {each.name: plain(default)})
    try:
        whole = merge(merge(context, around or {}), data)
        resolved = _resolved(whole, data)
        return marked(resolved, _resolved(unresolved(whole), data) if names_environment(whole) else resolved)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        path = undotted(key.replace("[", ".").replace("]", "")) if key else ()
        cause = str(error).splitlines()[0].strip()
        name = f"{origins.name(path)}: " if path else ""
        raise ConfigError(f"{origins.of(path)}: {name}{cause}. Name a key that the config has, or give a default.") from error


def _resolved(whole: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``data`` with the values that they have in ``whole``."""
    config, resolved = OmegaConf.create(whole, flags={"allow_objects": True}), {}
    for key, value in data.items():
        node: Any = config._get_node(key)
        if OmegaConf.is_config(node) and not node._is_interpolation():
            found = OmegaConf.to_container(node, resolve=True)
        else:
            found = config[key] if value != "???" else value
        resolved[key] = _project(OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found, value)
    return resolved


def _project(resolved: Any, written: Any) -> Any:
    """``resolved`` without the keys that only the defaults brought in."""
    if isinstance(resolved, dict) and isinstance(written, dict):
        return {key: _project(resolved[key], value) for key, value in written.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [_project(*pair) for pair in zip(resolved, written, strict=True)]
    return resolved
