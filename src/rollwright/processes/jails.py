"""Jails: processes that run Python code written by a model.

A jail is a process (``jail_server``) that runs scripts on request, isolated by a sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rollwright.errors import SandboxError
from rollwright.processes.tree import kill_tree

#: All environment variables of scripts: those for Python and numerical libraries, but no keys and no proxies.
ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_START_SECONDS = 60.0
GRACE_SECONDS = 10.0  # wait for an answer after the script's time limit, which the jail itself enforces
_HEAD_BYTES = 65536
SHARED_BYTES = 16 * 2**20  # of /dev/shm
INSTEAD = "or set rollout.sandbox to docker, podman, or unsafe (a plain process: only for code that you trust)"


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of a script. The defaults suit tool calls and unit tests of small functions."""

    memory_bytes: int = 512 * 2**20  # address space of each process
    file_bytes: int = 16 * 2**20  # size of each file
    disk_bytes: int = 64 * 2**20  # size of all files together, which are in memory
    open_files: int = 64
    processes: int = 0  # child processes at a time, not counting threads
    network: bool = False
    output_bytes: int = 2**20  # size of standard output, and of standard error; the rest is dropped


@dataclass(frozen=True)
class SandboxResult:
    """Result of a script."""

    stdout: str
    stderr: str
    exit_code: int | None  # None if the script timed out
    timed_out: bool
    seconds: float
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """True if the script ended without an error."""
        return self.exit_code == 0 and not self.timed_out


class Sandbox(Protocol):
    """Starts jails."""

    def start(self, limits: SandboxLimits) -> Jail:
        """Start a jail without waiting until it is ready.

        Raises:
            SandboxError: this machine lacks a requirement of the sandbox; the message says what to install or to configure.
        """
        ...


class Jail:
    """One jail. It runs scripts one after another, and removes everything that a script leaves behind before the next script.

    Args:
        command: command line that starts ``jail_server`` inside the sandbox.
        limits: resource limits of each script.
        roots: directories that scripts may write to, as seen from inside the jail; the first is the working directory.
        filters: seccomp programs that apply to scripts.
        pass_fds: file descriptors that the command inherits.
        environment: environment of the command.
        patience: seconds that the command may take to end by itself after its input has ended, before it is killed.
        explain: converts the output of a failed start to an explanation.
        clean: called after the jail has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: SandboxLimits,
        roots: Sequence[str],
        *,
        filters: Sequence[bytes] = (),
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] = ENVIRONMENT,
        patience: float = 0.0,
        explain: Callable[[str], str] = str,
        clean: Callable[[], Any] | None = None,
    ) -> None:
        self._settings = {"roots": list(roots), "filters": [program.hex() for program in filters]}
        self._patience = patience
        self._limits, self._explain, self._clean = limits, explain, clean
        self._closing = threading.Lock()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=environment,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            if clean is not None:
                clean()
            raise _no_process(error) from error

    @property
    def is_alive(self) -> bool:
        """True if the jail can run another script."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the jail's Python runs.

        Raises:
            SandboxError: the jail did not start; the message says why.
        """
        try:
            self._answer(_START_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            said = self._process.stderr.read().decode("utf-8", "replace").strip()  # type: ignore[union-attr]
            self.close()
            reason = self._explain(said) if said else f"it said nothing for {_START_SECONDS:g} s"
            raise SandboxError(f"the sandbox does not start: {reason}") from error

    def run(self, source: str, stdin: str, timeout: float) -> SandboxResult:
        """Run a script and wait until it ends. A jail that the script has ended or broken is closed.

        Raises:
            SandboxError: the jail cannot start a process.
        """
        limits = {**asdict(self._limits), "seconds": timeout}
        request = json.dumps({**self._settings, "limits": limits, "source": source, "stdin": stdin})
        started = time.monotonic()
        try:
            self._socket.settimeout(timeout + GRACE_SECONDS)
            self._socket.sendall(request.encode() + b"\n")
            answer = self._answer(timeout + GRACE_SECONDS)
            if "broken" in answer:
                self.close()
            if "exit" not in answer:
                raise _no_process(answer["broken"])
            timed_out = answer["excess"] == "time"
            return SandboxResult(
                stdout=str(answer["out"]),
                stderr=str(answer["err"]) + (f"sandbox: {answer['excess']}\n" if answer["excess"] and not timed_out else ""),
                exit_code=None if timed_out else int(answer["exit"]),
                timed_out=timed_out,
                seconds=float(answer["seconds"]),
                output_truncated=bool(answer["cut"]),
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.close()
            timed_out = isinstance(error, TimeoutError)
            said = "" if timed_out else "sandbox: the script ended its jail\n"
            return SandboxResult("", said, None if timed_out else -signal.SIGKILL, timed_out, time.monotonic() - started)

    def kill(self) -> None:
        """End the jail and everything in it, without waiting. Any thread may call this method at any time."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread that waits for an answer
        if self.is_alive and not self._patience:
            kill_tree(self._process.pid)

    def close(self) -> None:
        """End the jail and everything in it, and wait until it has ended. Idempotent."""
        self.kill()
        with self._closing:
            try:
                self._process.wait(self._patience or None)
            except subprocess.TimeoutExpired:
                kill_tree(self._process.pid)
                self._process.wait()
            self._socket.close()
            self._process.stderr.close()  # type: ignore[union-attr]
            clean, self._clean = self._clean, None
        if clean is not None:
            clean()

    def _answer(self, seconds: float) -> dict[str, Any]:
        """Read the next line. Its size and the time are limited, because jails are not trusted."""
        deadline, line = time.monotonic() + seconds, bytearray()
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._socket.recv(1 << 20)
            if not part:
                raise EOFError("the jail has ended")
            line += part
            if len(line) > 12 * self._limits.output_bytes + _HEAD_BYTES:  # JSON may escape a character as six bytes
                raise ValueError("an answer without an end")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("no answer")
        return answer


def _no_process(reason: object) -> SandboxError:
    return SandboxError(f"the sandbox cannot start a process: {reason}; is the machine out of processes or memory?")


#: Runs files of this package where it is not installed. Modules are found under their names, and the last is the program.
_BUNDLE = """
import sys, types
for name, text in {files!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""


@functools.cache
def bundle(*modules: str) -> str:
    """Return a program of some modules of this package that use each other and the standard library; the last one is run."""
    texts = [Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in modules]
    names = [*(f"rollwright.processes.{name}" for name in modules[:-1]), "__main__"]
    return _BUNDLE.format(files=list(zip(names, texts, strict=True)))


def server_command(python: str) -> list[str]:
    """Return the command that runs a jail's server."""
    return [python, "-I", "-c", bundle("inside", "jail_server")]
