"""The boxes by name. See :mod:`rollwright.processes.box` for what a box does."""

from __future__ import annotations

from collections.abc import Callable

from rollwright.errors import SandboxError
from rollwright.processes.box import Box, BoxSpec
from rollwright.registry import Registry

#: Makers of boxes: functions or classes that are called with a ``BoxSpec``.
BOXES: Registry[Callable[[BoxSpec], Box]] = Registry(
    "box",
    SandboxError,
    variable="BOXES",
    built_in={"bubblewrap": "rollwright.processes.bubblewrap_box:make_bubblewrap_box"},
)


def make_box(name: str, spec: BoxSpec) -> Box:
    """Return a box that has not been started.

    Args:
        name: ``bubblewrap``; a name registered with ``@BOXES.register``; or an import path of a function or class that is called with the
            spec.
        spec: what the box contains.

    Raises:
        SandboxError: there is no box of that name, or it cannot be as the spec says.
    """
    return BOXES.build(name, spec)
