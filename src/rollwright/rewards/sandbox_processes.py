"""Our end of the sandbox's fork server: starting it, and the processes that it forks for scripts."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, ClassVar

from rollwright.errors import RewardError

_PROGRAM = Path(__file__).with_name("sandbox_fork_server.py")
_SECONDS_TO_END = 5.0


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
        while b"\n" not in self._received:
            await self._readable()
            self._receive()
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    async def _readable(self) -> None:
        """Wait without taking anything: what a cancelled wait had taken would be lost."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)

    def _receive(self) -> None:
        try:
            part = self._socket.recv(4096)
        except BlockingIOError:
            return
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
                    [sys.executable, "-I", str(_PROGRAM), str(theirs.fileno()), "network" if network else "no-network"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(),
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
            settings: the script's directory and limits, for ``sandbox_child``.
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


def _environment() -> dict[str, str]:
    """Nothing of ours but what Python and numerical libraries need: no keys, no proxies."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
