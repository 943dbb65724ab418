"""``--plugin-dir``: files, and directories of files, that register workflows, rewards, losses and so on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollwright.config.loading import Stage

PluginDirectories = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin-dir",
        help="Python file, or directory of such, that registers workflows, rewards, losses and so on; repeatable.",
    ),
]


def announce_plugins(directories: list[Path] | None) -> None:
    """Add plugins for this process and those that it starts.

    Raises:
        ConfigError: one of them does not exist.
    """
    from rollwright.registry import PLUGINS

    for directory in directories or []:
        PLUGINS.add(directory)


def look_up_names(stages: Sequence[Stage]) -> None:
    """Refuse workflows, rewards and operators that nothing has, plugins included."""
    from rollwright.trainers.unknown_names import refuse_unknown_names
    from rollwright.workflows.registry import WORKFLOWS

    WORKFLOWS.load_plugins()
    refuse_unknown_names(stages)
