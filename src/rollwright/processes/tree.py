"""How processes end: with their parent, or killed with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
#: Before the process id of a torchrun agent of ours, in the name of its run.
AGENT = "rollwright-"


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, in whatever way, also while this process hangs.

    Args:
        parent: the parent's process id, where it may have ended already; on Linux None takes whoever is the parent now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of the parent's thread that started this process
        if parent is not None and os.getppid() != parent:
            os._exit(1)
        return
    import threading  # not above: where it is loaded, forks of the sandbox take longer

    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def children(pid: int) -> list[int]:
    """Processes that a process started, in whatever session; empty where the kernel does not list them (other than Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Processes below a process; see ``children``."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_tree(leader: int, number: int = signal.SIGKILL, root: int | None = None) -> None:
    """Send a signal to a process group, and to processes that left it.

    Args:
        leader: of the group.
        number: of the signal; each process gets it once.
        root: the process below which those are that left the group; None: the leader.
    """
    below = descendants(leader if root is None else root)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
    for process in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process) != leader:
                os.kill(process, number)
