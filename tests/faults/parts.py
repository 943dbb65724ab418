"""The processes of a run: started as forks of a warm one, looked at, killed, stopped, and kept from writing."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from warm import Warm, WarmProcess

#: Seconds that a process gets for what it has to do, on a machine that is busy with other things.
LIMIT = float(os.environ.get("ROLLWRIGHT_FAULTS_LIMIT", "240"))


class Part:
    """One process of a run; started again, it is another process of the same part.

    Args:
        warm: forks it.
        name: of the part.
        arguments: of ``rollwright``.
        root: directory that it runs in; its log is there.
    """

    def __init__(self, warm: Warm, name: str, arguments: list[str], root: Path) -> None:
        self.name, self.arguments, self.root = name, arguments, root
        self.environment = {"ROLLWRIGHT_FAULTS": str(root)}
        self.log = root / f"{name}.log"
        self.pid = 0
        self.status: int | None = None  # None: it runs, or was not started
        self.starts = 0
        self.family: set[psutil.Process] = set()  # all that was ever seen below it, and itself
        self.ports: set[int] = set()  # that it was ever seen to listen on
        self._warm = warm
        self._process: WarmProcess | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        self._process = self._warm.start(self.arguments, self.root, self.log, self.environment)
        self.pid = self._process.pid
        self.status = None
        self.starts += 1

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        if self.status is None and self._process is not None:
            self.status = self._process.poll()
        return self.status

    @property
    def runs(self) -> bool:
        """True from ``start`` to its end."""
        return self.pid != 0 and self.poll() is None

    def look(self) -> None:
        """Note the processes below it, and the ports that it listens on."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            self.family |= {process, *process.children(recursive=True)}
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN:
                    self.ports.add(each.laddr.port)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.look()
        os.kill(self.pid, signal.SIGKILL)
        self.wait(60)

    def wait(self, seconds: float = LIMIT) -> int | None:
        """Its exit status; None where it still runs after that time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.status

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def full_disk(self, room: int) -> Iterator[None]:
        """While the block runs, no file of it grows beyond ``room`` bytes (RLIMIT_FSIZE: a write fails with EFBIG)."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def said(self, characters: int = 3000) -> str:
        """The end of what it said, for messages."""
        return f"{self.name} (process {self.pid}, status {self.status}):\n{self.log.read_text(errors='replace')[-characters:]}"
