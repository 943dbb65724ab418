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
import shutil
import socket
import subprocess
import tempfile
import threading
import time
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
    directory = tempfile.mkdtemp(prefix="sandbox-")
    settings = {**asdict(limits), "memory_bytes": memory_bytes, "cpu_seconds": int(timeout) + 2, "directory": directory}
    try:
        async with _slots():
            process = await asyncio.to_thread(_start, directory, source, stdin, settings)
            with contextlib.closing(process):
                await process.begun()
                return await _watch(process, timeout, limits.output_bytes)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


#: Scripts of one event loop that run at once; others wait, and their time does not run.
SCRIPTS_AT_ONCE = 4 * (os.cpu_count() or 1)
_slots_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _slots() -> asyncio.Semaphore:
    return _slots_of_loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(SCRIPTS_AT_ONCE))


def _start(directory: str, source: str, stdin: str, settings: dict[str, Any]) -> ScriptProcess:
    Path(directory, "main.py").write_text(source, "utf-8", "surrogatepass")
    return ForkServer.shared(settings["network"]).start(settings, stdin)


async def _watch(process: ScriptProcess, timeout: float, output_bytes: int) -> SandboxResult:
    """Read what a script says until it ends, or until its time is over and it is killed."""
    started = time.monotonic()
    with _Output(process.stdout, output_bytes) as out, _Output(process.stderr, output_bytes) as err:
        try:
            async with asyncio.timeout(timeout):
                exit_code = await process.exit_code()
        except TimeoutError:
            exit_code = process.exit_code_now()  # it ended in time, and the event loop comes late
        process.kill()
    return SandboxResult(
        stdout=out.text,
        stderr=err.text,
        exit_code=exit_code,
        timed_out=exit_code is None,
        seconds=time.monotonic() - started,
        output_truncated=out.truncated or err.truncated,
    )


class ScriptProcess:
    """A process that runs a script. Its owner must ``close`` it, which ends it if it has not ended.

    Attributes:
        stdout, stderr: our ends of its output.
    """

    def __init__(self, own: socket.socket, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self._socket = own
        self._socket.setblocking(False)
        self._received = b""
        self.stdout = stdout
        self.stderr = stderr

    async def begun(self) -> None:
        """Wait until it is there.

        Raises:
            RewardError: the machine has no room for a further process.
        """
        line = await self._line()
        if line != "begun":
            raise RewardError(
                f"run_python cannot start a process: {line.removeprefix('refused ')}; is the machine out of processes or memory?"
            )

    async def exit_code(self) -> int:
        """Wait for its end; below 0 where a signal ended it."""
        return _exit_code(await self._line())

    def exit_code_now(self) -> int | None:
        """Its exit code where it has ended, else None; nothing is waited for."""
        self._receive()
        line, end, _ = self._received.partition(b"\n")
        return _exit_code(line.decode()) if end else None

    def kill(self) -> None:
        """End it and its session."""
        self._socket.close()

    def close(self) -> None:
        """``kill`` it and let go of its output."""
        self.kill()
        self.stdout.close()
        self.stderr.close()

    async def _line(self) -> str:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._received:
            readable = loop.create_future()  # nothing is taken while waiting: a cancelled wait would lose it
            loop.add_reader(self._socket, lambda done=readable: done.done() or done.set_result(None))
            try:
                await readable
            finally:
                loop.remove_reader(self._socket)
            self._receive()
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _receive(self) -> None:
        try:
            part = self._socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:
            part = b""
        if not part:
            raise RewardError("run_python: the sandbox's fork server has ended; the next call starts another.")
        self._received += part


def _exit_code(line: str) -> int:
    return int(line.removeprefix("exit "))


class ForkServer:
    """A fork server of this process, shared by all who run scripts; it ends with this process.

    Args:
        network: its scripts have the machine's network; otherwise one without any other end, where the kernel lets us.
    """

    _shared: ClassVar[dict[tuple[int, bool], ForkServer]] = {}
    _starting = threading.Lock()

    def __init__(self, network: bool) -> None:
        self._control, theirs = socket.socketpair()
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
                self._control.close()
                raise RewardError(
                    f"run_python cannot start a process: {error}; is the machine out of processes or memory?"
                ) from error
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

    def start(self, settings: dict[str, Any], stdin: str) -> ScriptProcess:
        """Ask for a process; ``ScriptProcess.begun`` says when it is there. Blocks for as long as ``stdin`` takes to write.

        Args:
            settings: the script's directory and limits, for ``sandbox_script``.
            stdin: what it reads from standard input.
        """
        own, theirs = socket.socketpair()
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        process = ScriptProcess(own, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0))
        try:
            with theirs, tempfile.TemporaryFile() if stdin else open(os.devnull, "rb") as file:
                if stdin:
                    file.write(stdin.encode("utf-8", "surrogatepass"))
                    file.seek(0)
                socket.send_fds(own, [json.dumps(settings).encode()], [file.fileno(), their_out, their_err])
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            process.close()
            raise RewardError(f"run_python cannot reach the sandbox's fork server: {error}.") from error
        finally:
            os.close(their_out)
            os.close(their_err)
        return process

    def close(self) -> None:
        """End the server and all of its scripts."""
        atexit.unregister(self.close)
        self._control.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Output:
    """What a pipe held, up to a limit; the rest is read and thrown away, so that the writer is not blocked.

    Inside ``with``, the event loop reads it as it comes. At the end what is left is read at once: a script that has ended has
    written all that it will, so nothing is waited for, and nothing is lost where the event loop comes late.
    """

    def __init__(self, pipe: IO[bytes], limit: int) -> None:
        self._descriptor = pipe.fileno()
        self._limit = limit
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self.truncated = False

    def __enter__(self) -> _Output:
        os.set_blocking(self._descriptor, False)
        self._loop.add_reader(self._descriptor, self._read)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.remove_reader(self._descriptor)
        for _ in range(_READS_AT_THE_END):
            if not self._read():
                return

    def _read(self) -> bool:
        """Read what is there, at most a chunk; False where nothing is, or nothing will be."""
        try:
            chunk = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._descriptor)
            return False
        room = self._limit - len(self._kept)
        self._kept += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return True

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")
