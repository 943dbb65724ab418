"""Runs one command and ends it, with all its descendants, when the process that started it is gone.

``supervised`` starts ``main`` in a separate process, the supervisor, whose standard input is a pipe from the parent. When the parent ends,
even by SIGKILL, the pipe closes and the supervisor ends the command. If another process has inherited the pipe, the supervisor notices
that its parent has changed. In both cases the supervisor also removes the directory that the parent shared with the command.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollwright.processes.child import program
from rollwright.processes.tree import adopt_orphans, descendants, die_with_parent, kill_tree

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.25


def supervised(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None, shared: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command under a supervisor. The command ends when the supervisor's standard input is closed.

    Args:
        command: command line.
        log_path: file that the output is appended to.
        environment: environment variables in addition to this process's own.
        shared: directory to remove if this process ends before the command does.

    Returns:
        The supervisor, whose exit status is the command's.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            program("rollwright.processes.ends_with_parent", "-I", str(os.getpid()), str(shared or ""), *command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches only this process, which decides what to end
        )


def main() -> int:
    """Run a command until it or the parent ends, and return the command's exit status. Called in the supervisor."""
    parent, shared, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopping.append(number))
    is_linux = sys.platform == "linux"
    adopt_orphans()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()) if is_linux else None,
    )
    is_abandoned = False
    while child.poll() is None and not is_abandoned and not stopping:
        readable, _, _ = select.select([0], [], [], POLL_SECONDS)
        is_abandoned = (bool(readable) and os.read(0, 1) == b"") or os.getppid() != parent
    _end(child)
    if is_abandoned and shared:
        shutil.rmtree(shared, ignore_errors=True)
    return 128 - child.returncode if child.returncode < 0 else child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the command and its descendants, and kill those that do not end in time."""
    kill_tree(child.pid, signal.SIGTERM, os.getpid())
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None and not _is_left(child.pid):
            return
        time.sleep(0.02)
    kill_tree(child.pid, signal.SIGKILL, os.getpid())
    child.wait()
    while _is_left(child.pid) and time.monotonic() < deadline + 1.0:
        kill_tree(child.pid, signal.SIGKILL, os.getpid())  # processes that were adopted in the meantime
        time.sleep(0.02)


def _is_left(group: int) -> bool:
    """Return whether an ended command has left a process, either in its group or adopted by this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, 0)
        return True
    return bool(descendants(os.getpid()))
