"""Run Python source in a process of its own under limits on time, memory, files, processes and network.

**This is no security boundary.** It stops accidents (endless loops, huge allocations, stray files, forgotten servers) and
keeps the environment's secrets out of reach, but code that sets out to escape, with ``ctypes`` for instance, can. Run
hostile code in a container or a virtual machine.

Scripts are forked from a process in which Python has started already (``sandbox_script``): a script of one line costs 3 ms of
the processor instead of the 27 ms that a fresh interpreter takes.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar
from weakref import WeakKeyDictionary

from rollwright.errors import RewardError
from rollwright.processes.child import program

#: All that scripts see of the environment: what Python and numerical libraries need, no keys, no proxies.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_SECONDS_TO_END = 5.0
_CHUNK = 65536
_READS_AT_THE_END = 64  # far more than a pipe holds; only a process that left the script's session could go on writing


@dataclass(frozen=True)
class SandboxLimits:
    """What the code may use. The defaults suit tool calls and unit tests of small functions."""

    memory_bytes: int = 512 * 2**20  # address space
    file_bytes: int = 16 * 2**20  # each file that it writes
    open_files: int = 64
    processes: int = 0  # that it may start; threads are free
    network: bool = False
    output_bytes: int = 2**20  # kept of standard output and of standard error; the rest is thrown away


@dataclass(frozen=True)
class SandboxResult:
    """What came of a run."""

    stdout: str
    stderr: str
    exit_code: int | None  # None where it was killed for time
    timed_out: bool
    seconds: float
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """True where the code ran to its end without an error."""
        return self.exit_code == 0 and not self.timed_out


async def run_python(
    source: str,
    stdin: str = "",
    timeout: float = 10.0,
    memory_bytes: int | None = None,
    *,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run ``source`` as a script in an empty temporary directory, which is removed afterwards.

    Args:
        source: Python source.
        stdin: what it reads from standard input.
        timeout: seconds of wall-clock time; the process and all that it started are then killed.
        memory_bytes: address space; None: that of ``limits``.
        limits: the other limits.

    Returns:
        Output, exit code and whether time ran out. Code that fails is no error here: its traceback is in ``stderr``.

    Raises:
        RewardError: a limit is out of range, or no process can be started.
    """
    limits = limits or SandboxLimits()
    memory_bytes = limits.memory_bytes if memory_bytes is None else memory_bytes
    if timeout <= 0 or memory_bytes < 2**26:
        raise RewardError(
            f"run_python: timeout is {timeout} s and memory {memory_bytes} bytes; allow more than 0 s and 64 MiB."
        )
    settings = {**asdict(limits), "memory_bytes": memory_bytes, "cpu_seconds": int(timeout) + 2}
    async with _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(SCRIPTS_AT_ONCE)):
        ours, theirs = socket.socketpair()
        future: Future[SandboxResult] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up ends the script by its socket

        def run() -> None:  # in a thread of its own: an event loop that comes late loses nothing and ends nothing
            try:
                future.set_result(_run(source, stdin, timeout, settings, ours, theirs))
            except BaseException as error:  # the awaiting call raises it
                future.set_exception(error)

        threading.Thread(target=run, name="sandbox", daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            _end(ours)
            raise


#: Scripts of one event loop that run at once; others wait, and their time does not run.
SCRIPTS_AT_ONCE = 4 * (os.cpu_count() or 1)
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _end(script: socket.socket) -> None:
    """End a script and its session, from any thread."""
    with contextlib.suppress(OSError):
        script.shutdown(socket.SHUT_RDWR)


def _run(
    source: str, stdin: str, timeout: float, settings: dict[str, Any], ours: socket.socket, theirs: socket.socket
) -> SandboxResult:
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as directory,
        _Output(settings["output_bytes"]) as out,
        _Output(settings["output_bytes"]) as err,
        ours,
        ours.makefile("r") as answers,
    ):
        Path(directory, "main.py").write_text(source, "utf-8", "surrogatepass")
        with theirs, tempfile.TemporaryFile() if stdin else open(os.devnull, "rb") as file:
            if stdin:
                file.write(stdin.encode("utf-8", "surrogatepass"))
                file.seek(0)
            request = json.dumps({**settings, "directory": directory}).encode()
            server = ForkServer.shared(settings["network"])
            try:
                socket.send_fds(ours, [request], [file.fileno(), out.theirs.fileno(), err.theirs.fileno()])
                socket.send_fds(server.control, [b"+"], [theirs.fileno()])
            except OSError as error:
                raise RewardError(f"run_python cannot reach the sandbox's fork server: {error}.") from error
        out.theirs.close()
        err.theirs.close()
        if reason := _line(answers).removeprefix("begun").removeprefix("refused "):
            raise _cannot_start(reason)
        started = time.monotonic()
        has_ended = _watch(started + timeout, ours, out, err)
        exit_code = int(_line(answers).removeprefix("exit ")) if has_ended else None
        seconds = time.monotonic() - started
        _end(ours)
        for output in (out, err):  # what a script that has ended has written is there already
            for _ in range(_READS_AT_THE_END):
                if not output.take():
                    break
        return SandboxResult(
            stdout=out.text,
            stderr=err.text,
            exit_code=exit_code,
            timed_out=exit_code is None,
            seconds=seconds,
            output_truncated=out.truncated or err.truncated,
        )


def _watch(deadline: float, script: socket.socket, *outputs: _Output) -> bool:
    """Read what the script says until it ends; False where its time is over first."""
    with selectors.DefaultSelector() as selector:
        selector.register(script, selectors.EVENT_READ)
        for output in outputs:
            selector.register(output, selectors.EVENT_READ, output.take)
        while True:
            left = deadline - time.monotonic()
            for key, _ in selector.select(max(0.0, left)):
                if key.data is None:
                    return True
                if not key.data():
                    selector.unregister(key.fileobj)
            if left <= 0:
                return False


def _cannot_start(reason: object) -> RewardError:
    return RewardError(f"run_python cannot start a process: {reason}; is the machine out of processes or memory?")


def _line(answers: IO[str]) -> str:
    line = answers.readline()
    if not line:
        raise RewardError("run_python: the sandbox's fork server has ended; the next call starts another.")
    return line.rstrip()


class _Output(contextlib.AbstractContextManager["_Output"]):
    """A pipe that a script writes to: what it held up to a limit; the rest is thrown away, so that the writer is not blocked."""

    def __init__(self, limit: int) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._ours, self.theirs = os.fdopen(ours, "rb", 0), os.fdopen(theirs, "wb", 0)
        self._limit = limit
        self._kept = bytearray()
        self.truncated = False

    def __exit__(self, *exception: object) -> None:
        self._ours.close()
        self.theirs.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def take(self) -> bool:
        """Read what is there, at most a chunk; False where nothing is, or nothing will be."""
        chunk = self._ours.read(_CHUNK)  # None where nothing is there now
        if not chunk:
            return False
        room = self._limit - len(self._kept)
        self._kept += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return True

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


class ForkServer:
    """A fork server of this process, shared by all who run scripts; it ends with this process.

    Args:
        network: its scripts have the machine's network; otherwise one without any other end, where the kernel lets us.

    Attributes:
        control: takes the socket of each script, as a descriptor with one byte; a process is then forked for it.
    """

    _shared: ClassVar[dict[tuple[int, bool], ForkServer]] = {}
    _starting = threading.Lock()

    def __init__(self, network: bool) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    program("rollwright.processes.sandbox_script", "-I", str(theirs.fileno()), "network" if network else ""),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env=_ENVIRONMENT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                self.control.close()
                raise _cannot_start(error) from error
        atexit.register(self.close)

    @classmethod
    def shared(cls, network: bool) -> ForkServer:
        """This process's server, started where it is missing or has ended."""
        key = (os.getpid(), network)  # a fork of this process starts its own
        with cls._starting:
            server = cls._shared.get(key)
            if server is None or server._process.poll() is not None:
                if server is not None:
                    server.close()
                server = cls._shared[key] = cls(network)
            return server

    def close(self) -> None:
        """End the server and all of its scripts."""
        atexit.unregister(self.close)
        self.control.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
