"""A hard limit on the number of processes and threads in a jail or box that root starts.

The kernel limits a user's processes in a user namespace (``RLIMIT_NPROC``), but exempts root of the machine. There, the ``pids``
controller of control groups sets the limit. Where root cannot make a control group, such as in a container of Docker, the servers
inside only count processes from time to time; start such a container with ``--pids-limit``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_NAME = "rollwright"
#: Processes besides those that the servers inside count: bwrap, the server, and one for each command.
OWN_PROCESSES = 32
_REMOVE_SECONDS = 2.0
_numbers = itertools.count()


def pids_limited(command: Sequence[str], most: int) -> tuple[list[str], Callable[[], None]]:
    """Return a command line that starts ``command`` with at most about ``most`` processes and threads, and a function to call after its end.

    For users other than root, and where control groups cannot be written, the command line is ``command``.
    """
    group = _new_group(most + OWN_PROCESSES) if os.geteuid() == 0 else None
    if group is None:
        return list(command), lambda: None
    enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    return [*enter, *command], lambda: _remove(group)


def _new_group(most: int) -> Path | None:
    """Make a control group, or return None if this is not possible here."""
    parent = _parent()
    if parent is None:
        return None
    _remove_abandoned(parent)
    group = parent / f"{_NAME}-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        (group / "pids.max").write_text(str(most))
    except OSError:
        _remove(group)
        return None
    return group


def _parent() -> Path | None:
    """Return the control group whose children can have a limit: with version 1 this process's own, with version 2 the topmost one."""
    if (_MOUNT / "pids" / "cgroup.procs").exists():
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "pids" in controllers.split(","):
                return _MOUNT / "pids" / path.lstrip("/")
    with contextlib.suppress(OSError):
        if "pids" in (_MOUNT / "cgroup.subtree_control").read_text().split():
            return _MOUNT
    return None


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _REMOVE_SECONDS
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # its processes have been killed, but are not all gone
            group.rmdir()
            return
        time.sleep(0.005)


def _remove_abandoned(parent: Path) -> None:
    """Remove the empty groups of processes that were killed."""
    for group in parent.glob(f"{_NAME}-*-*"):
        if not Path("/proc", group.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
