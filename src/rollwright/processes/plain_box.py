"""The box ``unsafe``: plain processes in directories of their own, with limits but without isolation. Only for programs that you trust."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollwright.errors import SandboxError
from rollwright.processes.box import BoxSpec
from rollwright.processes.pids_limit import pids_limited
from rollwright.processes.server_box import ServerBox, ServerStart, box_server_command


def make_plain_box(spec: BoxSpec) -> ServerBox:
    """Return a box that is not isolated: its programs see all of this machine, and the spec's writable directories are elsewhere."""
    if spec.image:
        raise SandboxError(f"an unsafe box has no image, and {spec.image!r} was given: use the box docker or podman.")
    return ServerBox(spec, _prepare)


@contextlib.contextmanager
def _prepare(spec: BoxSpec) -> Iterator[ServerStart]:
    with contextlib.ExitStack() as until_ended:
        top = until_ended.enter_context(tempfile.TemporaryDirectory(prefix="rollwright-box-", ignore_cleanup_errors=True))
        paths = {path: os.path.realpath(top) + path for path in spec.writable}
        for path in paths.values():
            os.makedirs(path)
        for inside, outside in spec.readable.items():
            _show(inside, outside.resolve(), paths)
        command, clean = pids_limited(box_server_command(sys.executable), spec.limits.processes)
        until_ended.callback(clean)
        yield ServerStart(
            command,
            paths=paths,
            environment={
                "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}",
                "LANG": "C.UTF-8",
            },
            server_paths={port: str(path.resolve()) for port, path in spec.ports.items()},
            clean=until_ended.pop_all().close,
        )


def _show(inside: str, outside: Path, writable: dict[str, str]) -> None:
    """Make a readable path of the spec visible: by a link in a writable directory, or because it is where the spec says."""
    for path, place in writable.items():
        if inside.startswith(f"{path}/"):
            link = Path(place + inside[len(path) :])
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(outside)
            return
    if Path(inside).resolve() != outside:
        raise SandboxError(
            f"an unsafe box shows files where they are: {outside} cannot be at {inside}; give it that path itself."
        )
