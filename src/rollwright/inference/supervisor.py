"""Runs one command and ends it, with all its descendants, when whoever asked for it is gone.

Started as a script (``python -I supervisor.py [--remove DIRECTORY] COMMAND ...``) with a pipe as its standard input; nothing but the standard
library is imported, so that it starts at once and costs little. The pipe's other end is held by the parent: when the parent
ends in whatever way, SIGKILL included, the pipe closes and the command's process group is ended. Should the pipe have been
inherited by a process that lives on, the change of the parent process is seen too. Then the directory, which the parent shared
with the command and may be too dead to remove, is removed. The command's exit status is passed on.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.25


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the pipe alone has to do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _prepare_child() -> None:
    """In the child, before it becomes the command: a group of its own, which dies with this supervisor."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _reap() -> None:
    """Collect descendants that were handed to this process when their own parents ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_group(child: subprocess.Popen) -> None:
    """Ask the command's process group to end, and kill it when it does not."""
    group = child.pid
    _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        child.poll()
        if child.returncode is not None:
            _reap()
            if not _group_is_alive(group):
                return
        time.sleep(0.02)
    _signal_group(group, signal.SIGKILL)
    child.wait()
    time.sleep(0.05)
    _reap()


def main(arguments: list[str]) -> int:
    """Run a command until it ends or the parent does.

    Args:
        arguments: the command; before it may stand ``--remove`` and a directory.

    Returns:
        The command's exit status.
    """
    shared, command = (arguments[1], arguments[2:]) if arguments[0] == "--remove" else (None, arguments)
    parent = os.getppid()
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.append(True))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_child)
    abandoned = False
    while child.poll() is None:
        try:
            readable, _, _ = select.select([0], [], [], POLL_SECONDS)
            closed = bool(readable) and os.read(0, 1) == b""
        except InterruptedError:
            closed = False
        except OSError:
            closed = True
        abandoned = closed or os.getppid() != parent
        if abandoned or stopping:
            break
    end_group(child)
    if abandoned and shared is not None:
        shutil.rmtree(shared, ignore_errors=True)
    status = child.returncode
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
