"""What the processes that run inside a jail (``jail_server``) or a box (``box_server``) share. It uses only the standard library.

Process 1 of a separate process namespace cannot be killed, stopped or traced by the programs that it starts, and ends all of them with
one call. It measures what they use together, because the kernel limits single processes only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

#: True in process 1 of a separate process namespace.
IS_ALONE = os.getpid() == 1
CHUNK = 65536  # bytes of a read
_READS_AT_THE_END = 64  # far more than a pipe holds
_PR_SET_DUMPABLE, _PR_SET_SECCOMP = 4, 22
_FILTER_MODE = 2


def set_dumpable(is_dumpable: bool) -> None:
    """Set whether other processes of the same user can access this process's memory and descriptors."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(is_dumpable))


def wake_descriptor() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ends, wake = os.pipe()
    os.set_blocking(ends, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return ends


def reaped(options: int) -> dict[int, int]:
    """Reap ended children (without ``os.WNOHANG``: wait for all children) and return their statuses by process id."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, options))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


class ProcessUse(NamedTuple):
    """What one process uses."""

    parent: int
    is_zombie: bool  # it has ended: no thread of it runs
    tasks: int  # threads
    memory: int  # resident bytes, shared pages included
    started: int  # clock ticks after the machine's start


def other_processes() -> dict[int, ProcessUse]:
    """Return all processes except this one, by process id."""
    found, own, page = {}, str(os.getpid()), resource.getpagesize()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError):
            if name.isdigit() and name != own:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                state, tasks, memory = fields[0], int(fields[17]), int(fields[21]) * page
                if state == "Z" and tasks > 1:  # its first thread has ended, and the kernel shows no memory there
                    state, memory = "S", resident(int(name))
                found[int(name)] = ProcessUse(int(fields[1]), state == "Z", tasks, memory, int(fields[19]))
    return found


def resident(process: int) -> int:
    """Return the resident bytes of a process as its threads see them, 0 if it has ended."""
    pages = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/task/{thread}/statm") as file:
                pages = max(pages, int(file.read().split()[1]))
    return pages * resource.getpagesize()


def scheduling(process: int) -> tuple[Any, ...]:
    """Return what other processes of the same user can change of one that is not dumpable, besides its end; ``prlimit`` is refused."""
    return os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process), os.sched_getaffinity(process)


def below(table: Mapping[int, ProcessUse], leaders: Iterable[int]) -> set[int]:
    """Return the descendants of some processes."""
    children: dict[int, list[int]] = {}
    for process, use in table.items():
        children.setdefault(use.parent, []).append(process)
    found: set[int] = set()
    waiting = list(leaders)
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    return found


def proportional_memory(process: int, use: ProcessUse) -> int:
    """Return resident bytes in which a page that several processes share counts in part. A process that hides them counts in full."""
    try:
        with open(f"/proc/{process}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (ProcessLookupError, FileNotFoundError):  # it has ended since the table was made, or its first thread has
        return resident(process)
    except (OSError, StopIteration):
        return use.memory


class Outputs:
    """The output streams of a program, read without blocking.

    Args:
        reads: their descriptors.
        most: bytes of each that are kept; the rest is dropped.

    Attributes:
        is_cut: True if something was dropped.
    """

    def __init__(self, reads: Iterable[int], most: int) -> None:
        self.is_cut = False
        self._most = most
        self._kept = {descriptor: bytearray() for descriptor in reads}
        for descriptor in self._kept:
            os.set_blocking(descriptor, False)

    def take(self, descriptor: int) -> bool:
        """Read at most a chunk of what is available. Returns False if nothing is available or the stream has ended."""
        try:
            chunk = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        room = self._most - len(self._kept[descriptor])
        self._kept[descriptor] += chunk[:room]
        self.is_cut = self.is_cut or len(chunk) > room
        return bool(chunk)

    def finish(self) -> list[str]:
        """Read and close the streams of a program that has ended, and return their texts: all that it wrote is in the pipes already."""
        for descriptor in self._kept:
            for _ in range(_READS_AT_THE_END):
                if not self.take(descriptor):
                    break
            os.close(descriptor)
        return [kept.decode("utf-8", "replace") for kept in self._kept.values()]


def files_in(roots: Iterable[str]) -> tuple[int, int]:
    """Return the number and the bytes of the files of file systems that belong to a jail or box alone."""
    places = [os.statvfs(root) for root in roots]
    count = sum(place.f_files - place.f_ffree for place in places)
    return count, sum((place.f_blocks - place.f_bfree) * place.f_frsize for place in places)


def first_excess(measures: Iterable[tuple[int, int, str]]) -> str:
    """Describe the first measure (amount, limit, unit) that is over its limit, or return an empty string."""
    return next((f"more than {most} {what}" for amount, most, what in measures if amount > most), "")


def empty(directory: str, kept: Collection[str] = ()) -> None:
    """Remove everything in a directory except the ``kept`` paths and the directories that they are in."""
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if entry.path in kept:
                continue
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif any(path.startswith(f"{entry.path}/") for path in kept):
                empty(entry.path, kept)
            else:
                _remove(entry.path)


def _remove(directory: str) -> None:
    """Remove a directory tree of any depth. Subdirectories are moved up first, because nested paths may exceed the kernel's limit."""
    waiting, beside = [directory], os.path.dirname(directory)
    while waiting:
        place = waiting.pop()
        with contextlib.suppress(PermissionError):  # a program may have taken its own rights away
            os.chmod(place, 0o700)
        with os.scandir(place) as entries:
            for entry in list(entries):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                with contextlib.suppress(PermissionError):
                    os.chmod(entry.path, 0o700)
                waiting.append(os.path.join(beside, os.urandom(16).hex()))
                os.rename(entry.path, waiting[-1])
        os.rmdir(place)


# ------------------------------------------------------------------ in processes that run untrusted programs


def restrict(limits: Mapping[int, int], programs: Iterable[bytes]) -> None:
    """Apply resource limits and seccomp programs to this process and all that it starts.

    Args:
        limits: ``resource.RLIMIT_…`` -> value.
        programs: compiled filters of system calls.
    """
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    set_dumpable(True)
    for program in programs:
        kept = ctypes.create_string_buffer(program, len(program))
        pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
        if ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _FILTER_MODE, pointer):
            raise OSError("the filter of system calls was refused")


def end_as(status: int) -> None:
    """End this process with the status of another one that has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def exit_code(body: Callable[[], None], script: str) -> int:
    """Run ``body`` and return the exit code that Python would give the script; printed tracebacks begin in the file ``script``."""
    try:
        body()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # raised by the script; SystemExit is handled above
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def finish(module: types.ModuleType) -> None:
    """Do the parts of an interpreter's shutdown that a script can observe. The other parts would take 6 ms of processor time."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name in reversed(list(module.__dict__)):
        module.__dict__.pop(name)  # runs destructors and writes files
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
