"""Ends processes together with their parent, or together with all their descendants."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_SECONDS = 10.0  # time limit for killed processes to end
#: Prefix of the run name of a torchrun agent that we started; the agent's process id follows.
AGENT = "rollwright-"


def die_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Arrange that this process ends when its parent ends in any way, even if this process hangs.

    Args:
        parent: the parent's process id, to detect that the parent has already ended. None uses the current parent.
        number: signal that ends this process (Linux only).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)  # sent when the parent's thread that started this process ends
        if parent is not None and os.getppid() != parent:
            os._exit(1)
        return
    import threading  # imported late, because it makes the sandbox's forks slower

    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def children(pid: int) -> list[int]:
    """Return the child processes of a process, in any session. The list is empty on systems other than Linux."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on; see ``children``."""
    return [below for child in children(pid) for below in (child, *descendants(child))]


def kill_tree(leader: int, number: int = signal.SIGKILL, root: int | None = None) -> None:
    """Send a signal to a process group and to processes that have left the group. Each process gets the signal once.

    Args:
        leader: leader of the group.
        number: the signal.
        root: process whose descendants may have left the group. None uses the leader.
    """
    below = descendants(leader if root is None else root)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
    for process in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process) != leader:
                os.kill(process, number)


# -- a guard -----------------------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, including double-forked daemons (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def guarded(parent: int) -> None:
    """Fork a child and return in it. This process becomes its guard, which kills all descendants when the child or the parent ends.

    Call this function first, while the process has only one thread. From then on the kernel signals the guard when its parent ends, so
    later imports do not delay the cleanup. On systems other than Linux there is no guard: this process ends with its parent, and
    double-forked processes outside its group outlive it.

    Args:
        parent: id of the process that started this one, which may have ended already.
    """
    if sys.platform != "linux":
        die_with_parent(parent)
        return
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    for number in awaited:  # sigwait does not see ignored signals, and they may be ignored from the start
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    guard = os.getpid()
    if (child := os.fork()) == 0:
        die_with_parent(guard)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.closerange(3, 4096)  # otherwise readers of the child's pipes would not see its end
    status: int | None = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        status = _reaped(child)
    deadline = time.monotonic() + SWEEP_SECONDS
    while (below := children(guard)) and time.monotonic() < deadline:
        for process in (below for above in below for below in (above, *descendants(above))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        status = _reaped(child, status)
        time.sleep(0.005)
    code = 128 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # end as the child did
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})  # only this signal: a pending SIGTERM would not be the cause
        os.kill(guard, -code)
    os._exit(code)


def _reaped(child: int, status: int | None = None) -> int | None:
    """Reap ended children; return the status of ``child`` if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def end_guarded(guard: int) -> None:
    """Kill a guard's descendants, including any that start in the meantime, and end the guard."""
    for process in descendants(guard):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(guard, signal.SIGTERM)
