"""``--plugin-dir``: directories whose Python files register workflows, rewards and operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

PluginDirectories = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Directory whose Python files register workflows, rewards and operators; repeatable."),
]


def announce_plugins(directories: list[Path] | None) -> None:
    """Put directories into the environment, so that processes that a run starts find them too."""
    from rollwright.workflows.registry import PLUGIN_VARIABLE

    if directories:
        given = [str(directory.resolve()) for directory in directories]
        os.environ[PLUGIN_VARIABLE] = os.pathsep.join([*given, *filter(None, [os.environ.get(PLUGIN_VARIABLE)])])
