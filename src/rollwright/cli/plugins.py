"""``--plugin-dir``: directories whose Python files register workflows, rewards and operators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.config.loading import Stage

PluginDirectories = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Directory whose Python files register workflows, rewards and operators; repeatable."),
]


def announce_plugins(directories: list[Path] | None) -> None:
    """Put directories into the environment, so that processes that a run starts find them too.

    Raises:
        ConfigError: one of them is no directory.
    """
    from rollwright.errors import ConfigError
    from rollwright.workflows.registry import PLUGIN_VARIABLE

    if directories:
        if missing := [directory for directory in directories if not directory.is_dir()]:
            raise ConfigError(f"--plugin-dir {missing[0]}: there is no such directory; give one that holds Python files.")
        given = [str(directory.resolve()) for directory in directories]
        os.environ[PLUGIN_VARIABLE] = os.pathsep.join([*given, *filter(None, [os.environ.get(PLUGIN_VARIABLE)])])


def look_up_names(stages: Sequence[Stage]) -> None:
    """Refuse workflows, rewards and operators that nothing has, plugins included."""
    from rollwright.trainers.named_parts import refuse_unknown_names
    from rollwright.workflows.registry import WORKFLOWS

    WORKFLOWS.load_plugins()
    refuse_unknown_names(stages)
