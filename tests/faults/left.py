"""What a run left behind when it was over: processes, ports, locks, shared memory."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from .parts import Part

SHARED_MEMORY = Path("/dev/shm")
SECONDS = 20.0  # that what was started gets to end


def shared_memory_of(root: Path) -> set[str]:
    """Entries of ``/dev/shm`` that processes of a run have open, mapped, or were told of."""
    found: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("ROLLWRIGHT_FAULTS") != str(root):
                continue
            words = [*process.cmdline(), *(file.path for file in process.open_files())]
            words += [area.path for area in process.memory_maps()]
        except psutil.Error:
            continue
        found |= {str(SHARED_MEMORY / Path(word).parts[3]) for word in words if word.startswith(f"{SHARED_MEMORY}/")}
    return found


def left_behind(parts: Iterable[Part], root: Path, shared: Iterable[str] = ()) -> list[str]:
    """In words, what is still there of parts that have ended.

    Args:
        parts: that ran in ``root``.
        root: of the run.
        shared: entries of ``/dev/shm`` that they had.
    """
    parts, deadline = list(parts), time.monotonic() + SECONDS
    while (left := _processes(parts, root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left += [f"port {port}" for part in parts for port in sorted(part.ports) if _is_taken(port)]
    left += [f"lock {path}" for path in sorted(root.rglob("*.lock")) if _is_locked(path)]
    return left + [f"shared memory {path}" for path in sorted(set(shared)) if os.path.exists(path)]


def _processes(parts: list[Part], root: Path) -> list[str]:
    family = {process for part in parts for process in part.family}
    for process in psutil.process_iter():
        try:
            if process.environ().get("ROLLWRIGHT_FAULTS") == str(root):
                family.add(process)
        except psutil.Error:
            continue
    left = []
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"process {process.pid} ({' '.join(process.cmdline())[:120]})")
        except psutil.Error:
            continue
    return left


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
