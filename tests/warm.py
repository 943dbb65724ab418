"""Commands of ``rollwright`` and scripts as forks of a process that has imported everything: a tenth of a second each instead of several.

Only the process that a test starts itself is a fork; what it starts (ranks, servers, workers) starts as always.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


@functools.cache
def shared_warm() -> Warm:
    """The one of this process, which ends with it; also the fixture ``warm``."""
    warm = Warm()
    atexit.register(warm.close)
    return warm


class Warm:
    """The process whose forks the commands are."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_program.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C is for who asks it
        )
        self._lock = threading.Lock()
        assert self._answer() == "ready"

    def ask(self, *request: object) -> object:
        """The answer to a request."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return self._answer()

    def start(self, arguments: Sequence[str], directory: Path, log: Path, environment: Mapping[str, str]) -> WarmProcess:
        """Start ``rollwright`` with arguments, in a session of its own.

        Args:
            arguments: of the command.
            directory: in which it runs; modules are found there, too.
            log: file that its output is appended to.
            environment: variables in addition to those of this process.
        """
        return self._start(["rollwright", *arguments], directory, (log, log), environment)

    def start_script(
        self, script: Path, arguments: Sequence[str], directory: Path, log: Path, environment: Mapping[str, str]
    ) -> WarmProcess:
        """Start a script as Python would, in a session of its own; the arguments are those of ``start``."""
        return self._start([str(script), *arguments], directory, (log, log), environment)

    def run(
        self, command: Sequence[object], directory: Path, environment: Mapping[str, str] | None = None, timeout: float = 500.0
    ) -> subprocess.CompletedProcess[str]:
        """Do what ``subprocess.run(command, cwd=directory, capture_output=True, text=True)`` does.

        Args:
            command: ``rollwright`` or the path of a script, and arguments.
            directory: in which it runs; modules are found there, too.
            environment: variables in addition to those of this process.
            timeout: seconds, after which it is killed.
        """
        argv = list(map(str, command))
        with tempfile.TemporaryDirectory(prefix="warm-") as place:
            logs = Path(place, "out"), Path(place, "err")
            process = self._start(argv, directory, logs, environment or {})
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
            return subprocess.CompletedProcess(argv, status, *(log.read_text(encoding="utf-8") for log in logs))

    def _start(self, argv: list[str], directory: Path, logs: tuple[Path, Path], environment: Mapping[str, str]) -> WarmProcess:
        for log in logs:
            log.touch()  # tests read it as soon as this returns
        pid = self.ask("start", argv, str(directory), *map(str, logs), dict(environment))
        return WarmProcess(self, int(str(pid)))

    def _answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process that starts others ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """End it, and what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class WarmProcess:
    """A started command, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs."""
        if self.returncode is None:
            self.returncode = self._warm.ask("poll", self.pid)  # type: ignore[assignment]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)
