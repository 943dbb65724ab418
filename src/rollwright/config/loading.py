"""Reading a config: YAML, then ``key=value`` overrides, then interpolation, then strict construction, then the checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollwright.config.building import Builder
from rollwright.config.checks import faults_of
from rollwright.config.experiment import BaseExperimentConfig
from rollwright.config.recipes import apply_recipe
from rollwright.config.resolving import apply_override, plain, resolve
from rollwright.config.source import Document, Origins, Override, dump_yaml, parse_override, read_yaml
from rollwright.errors import ConfigError

ConfigType = TypeVar("ConfigType")


def load_expr_config(argv: Sequence[str], config_class: type[ConfigType]) -> tuple[ConfigType, str]:
    """Load one experiment's config.

    Args:
        argv: ``["--config", FILE, "key=value", …]`` or ``[FILE, "key=value", …]``.
        config_class: ``GRPOConfig``, ``SFTConfig``, … or a subclass of the user's with fields of its own.

    Returns:
        The config and the path of the file.

    Raises:
        ConfigError: naming every fault with its key and file:line (or the override that brought it).
    """
    file, overrides = split_arguments(argv)
    document = read_yaml(file)
    if "stages" in document.data:
        raise ConfigError(
            f"{file}:{document.lines.get(('stages',), 1)}: this file has stages; run it with 'rollwright run', or load it "
            "with rollwright.config.stages.load_stages."
        )
    return build_config(document, overrides, config_class), file


def split_arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The config file and the overrides of a command line.

    Raises:
        ConfigError: no file, several files, or an argument that is neither.
    """
    files: list[str] = []
    overrides: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            files.append(next(arguments, ""))
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        elif "=" in argument:
            overrides.append(argument)
        else:
            files.append(argument)
    if len(files) != 1 or not files[0]:
        got = f"got {', '.join(files)}" if any(files) else "none was given"
        raise ConfigError(f"give one config file (--config FILE) and key=value overrides; {got}.")
    return files[0], overrides


def build_config(document: Document, overrides: Sequence[str | Override], config_class: type[ConfigType]) -> ConfigType:
    """Build ``config_class`` from a document and overrides, with all checks; see ``load_expr_config``."""
    parsed = [parse_override(item) if isinstance(item, str) else item for item in overrides]
    origins = Origins(document, parsed)
    data = merge_overrides(document.data, parsed)
    builder = Builder(origins)
    resolved = resolve(data, [BaseExperimentConfig, config_class], origins)
    config = builder.build(config_class, resolved)
    builder.raise_faults()
    if hasattr(config, "actor"):
        try:
            apply_recipe(config, set(written_keys(resolved)))
        except ConfigError as error:
            builder.fault(("actor", "recipe"), str(error))
    for path, message in faults_of(config):
        builder.fault(path, message)
    builder.raise_faults()
    return config


def written_keys(data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys that hold values rather than sections."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from written_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def merge_overrides(data: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A copy of ``data`` in which the overrides are set, in order."""
    data = copy.deepcopy(data)
    for override in overrides:
        apply_override(data, override)
    return data


def config_to_dict(config: Any) -> dict[str, Any]:
    """A config as plain containers, every key with its value."""
    return plain(config)


def to_yaml(config: Any) -> str:
    """A config as YAML that loads to the same config."""
    return dump_yaml(config_to_dict(config))


def save_config(config: Any, file: str | Path) -> None:
    """Write ``to_yaml(config)`` to a file."""
    Path(file).write_text(to_yaml(config), encoding="utf-8")


__all__ = [
    "build_config",
    "config_to_dict",
    "dump_yaml",
    "load_expr_config",
    "merge_overrides",
    "save_config",
    "split_arguments",
    "to_yaml",
]
