"""The boxes by name, and what a config says about one. See :mod:`rollwright.processes.box` for what a box does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from rollwright.errors import ConfigError, SandboxError
from rollwright.processes.box import Box, BoxLimits, BoxSpec
from rollwright.processes.containers import CONTAINERS, check_container
from rollwright.registry import Registry

#: Runs a command with further directories at the beginning of ``PATH``.
_WITH_PATH = 'PATH="$0:$PATH" exec "$@"'

#: Makers of boxes: functions or classes that are called with a ``BoxSpec``.
BOXES: Registry[Callable[[BoxSpec], Box]] = Registry(
    "box",
    SandboxError,
    variable="BOXES",
    built_in={
        "bubblewrap": "rollwright.processes.bubblewrap_box:make_bubblewrap_box",
        "docker": "rollwright.processes.container_box:make_docker_box",
        "podman": "rollwright.processes.container_box:make_podman_box",
        "unsafe": "rollwright.processes.plain_box:make_plain_box",
    },
)

UNSAFE_FOLDERS = "task folders write to paths such as /logs, which in an unsafe box are those of this machine: use bubblewrap, docker or podman."


def make_box(name: str, spec: BoxSpec) -> Box:
    """Return a box that has not been started.

    Args:
        name: ``bubblewrap``, ``docker``, ``podman`` or ``unsafe``; the URL of a service of boxes; a name registered with
            ``@BOXES.register``; or an import path of a function or class that is called with the spec. ``NAME:IMAGE`` sets the image of
            a spec that has none.
        spec: what the box contains.

    Raises:
        SandboxError: there is no box of that name, or it cannot be as the spec says.
    """
    if name.startswith(("http://", "https://")):
        from rollwright.processes.http_box import HttpBox

        return HttpBox(name, spec)
    kind, _, image = name.partition(":")
    if name not in BOXES and kind in BOXES and image:
        return BOXES.build(kind, replace(spec, image=spec.image or image))
    return BOXES.build(name, spec)


def check_box(name: str, image: str | None = "") -> None:
    """Start a box and stop it, so that missing requirements are reported before the first episode.

    Args:
        name: as in ``make_box``.
        image: image of the box; empty for the default one. None for task folders, each with its own: docker or podman has to answer.

    Raises:
        SandboxError: there is no such box, or it does not start; the message says what to do.
    """
    kind = name.partition(":")[0]
    if kind == "unsafe" and image is None:
        raise SandboxError(UNSAFE_FOLDERS)
    if kind in CONTAINERS and image is None:
        check_container(kind)
        return

    async def start_and_stop() -> None:
        box = make_box(name, BoxSpec(image=image or ""))
        try:
            await box.start()
        finally:
            await box.stop()

    with ThreadPoolExecutor(1) as thread:  # the caller's thread may have an event loop that runs
        thread.submit(asyncio.run, start_and_stop()).result()


# -- what a config says about a box --------------------------------------------------------------------------------------


def box_limits(limits: BoxLimits | Mapping[str, int] | None) -> BoxLimits:
    """Return the limits that a mapping of their names and values sets.

    Raises:
        ConfigError: there is no limit of a name.
    """
    known = [each.name for each in fields(BoxLimits)]
    if isinstance(limits, BoxLimits):
        return limits
    if unknown := sorted(set(limits or {}) - set(known)):
        raise ConfigError(f"limits has {', '.join(unknown)}; it may hold {', '.join(known)}.")
    return BoxLimits(**(limits or {}))


class Programs(NamedTuple):
    """Programs of this machine, as a box needs them.

    Attributes:
        readable: path in the box -> directory of this machine.
        directories: those of their executables.
    """

    readable: dict[str, Path]
    directories: list[str]

    def on_path(self, command: Sequence[str]) -> list[str]:
        """Return the command, run with the programs in its ``PATH``."""
        return ["sh", "-c", _WITH_PATH, ":".join(self.directories), *command] if self.directories else list(command)


def programs_in(directories: Sequence[str] | str, own: Sequence[str] = ()) -> Programs:
    """Find the programs of virtual environments, directories with ``node_modules``, and directories of executables.

    Args:
        directories: their paths.
        own: directories of the box, in whose place a program cannot be.

    Raises:
        ConfigError: a directory does not exist, or is in the place of a directory of the box.
    """
    readable: dict[str, Path] = {}
    entries: list[str] = []
    for each in [directories] if isinstance(directories, str) else directories:
        root = Path(each).expanduser().absolute()
        if not root.exists():
            raise ConfigError(f"programs names {each!r}, and there is no {root} on this machine.")
        if any(root.is_relative_to(place) for place in own):
            raise ConfigError(f"programs names {root}, but {' and '.join(own)} are the episode's own in a box.")
        readable |= {str(root): root.resolve(), str(root.resolve()): root.resolve()}  # scripts may name either
        inside = [place for place in (root / "node_modules" / ".bin", root / "bin") if place.is_dir()]
        entries += map(str, inside or [root])
        if (root / "pyvenv.cfg").exists():
            base = (root / "bin" / "python").resolve().parents[1]  # has the standard library
            if not base.is_relative_to("/usr"):
                readable[str(base)] = base
    return Programs(readable, entries)
