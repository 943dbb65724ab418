"""A child process that runs one of this package's modules: both the parent's and the child's side.

The child has a channel for framed messages. It ends when its parent ends, even by SIGKILL, and is killed together with all of its
descendants; on Linux, a guard process between parent and child (``tree.guarded``) also kills double-forked daemons. Children import this
module first, so it uses little besides the standard library.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollwright.neighbours import NEIGHBOURS
from rollwright.processes.tree import SWEEP_SECONDS, end_guarded, kill_tree

START = b"S"
_HEADER = struct.Struct("<cQ")
_SEND_SECONDS = 120
_READ_BYTES = 1 << 16  # several short frames at once


class Channel:
    """Framed messages over a socket. A frame is a kind (one byte), a length (8 bytes, little endian) and a body of that length.

    Any number of threads may send, but only one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._socket = connection
        self._arrived = bytearray()  # bytes that were read but not yet received as a frame
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Send one frame.

        Raises:
            OSError: the other side is gone, or has read nothing for two minutes (a ``TimeoutError``).
        """
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(body)) + body)
        except BlockingIOError:
            raise TimeoutError("the other side reads nothing") from None

    def receive(self, seconds: float | None = None) -> tuple[bytes, bytes]:
        """Receive the next frame.

        Args:
            seconds: how long to wait for the beginning of the frame. None waits without a limit.

        Raises:
            TimeoutError: no frame began in time.
            EOFError: the other side is gone.
        """
        if seconds is not None and not self._arrived and not self._readable.poll(seconds * 1000):
            raise TimeoutError("no answer within the limit")
        kind, size = _HEADER.unpack(self._read(_HEADER.size))
        return kind, self._read(size)

    def close(self) -> None:
        """Close this side of the channel. Only the receiving thread may call this method."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        while (missing := size - len(self._arrived)) > 0:
            try:
                part = self._socket.recv(min(max(missing, _READ_BYTES), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other side is gone")
            self._arrived += part
        content = bytes(self._arrived[:size])
        del self._arrived[:size]
        return content


class UncountedTime:
    """Seconds that do not count against a time limit, such as the start of worker processes. Any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting, self._since, self._passed = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, including those of a start in progress."""
        with self._lock:
            return self._passed + (time.monotonic() - self._since if self._starting else 0.0)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Exclude the time inside the context; the time of overlapping contexts is excluded once."""
        with self._lock:
            self._since = self._since if self._starting else time.monotonic()
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                if not self._starting:
                    self._passed += time.monotonic() - self._since


#: Uncounted time of the sample that runs in this context; nothing reads the default.
UNCOUNTED: contextvars.ContextVar[UncountedTime] = contextvars.ContextVar("uncounted", default=UncountedTime())  # noqa: B039


class ChildProcess:
    """A process that runs ``main()`` of a module; ``main`` must first call ``connect()``.

    The process ends when the thread that creates this object ends, and therefore also when this process ends. Its output goes to this
    process's standard error.

    Args:
        module: module to run, such as ``rollwright.processes.pool``.
        setup: plain data that ``connect`` returns in the child.
        python: another interpreter, which keeps its own import path. Default: this one.
        env: environment variables of the child, besides those of this process.

    Attributes:
        pid: process id of the guard, or of the child if there is no guard.

    Raises:
        OSError: ``python`` cannot be run.
    """

    def __init__(self, module: str, setup: Any = None, *, python: str = "", env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                program(module, "-P", str(theirs.fileno()), guard_for=os.getpid(), python=python),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, **(env or {})},
                start_new_session=True,  # its descendants are killed with it, and Ctrl-C reaches only this process
            )
        self.pid = self._process.pid
        with contextlib.suppress(OSError):  # it has already ended, which the next receive reports
            self.channel.send(START, pickle.dumps((None if python else (list(sys.path), NEIGHBOURS.directories), setup)))

    @property
    def is_running(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process and all its descendants. Any thread may call this method."""
        if sys.platform != "linux":
            kill_tree(self.pid)
        elif self.is_running:  # a guard leaves nothing behind when it ends
            end_guarded(self.pid)

    def close(self) -> None:
        """Kill the process, wait for its end and release its channel."""
        self.kill()
        try:
            self._process.wait(SWEEP_SECONDS + 5.0)
        except subprocess.TimeoutExpired:
            kill_tree(self.pid)
            self._process.wait()
        self.channel.close()

    def cause_of_death(self) -> str:
        """Describe how the process ended, such as "signal SIGSEGV" or "exit code 3"."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SWEEP_SECONDS + 5.0)
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def program(module: str, isolation: str, *arguments: str, guard_for: int | None = None, python: str = "") -> list[str]:
    """Return the command that runs ``main()`` of one of this package's modules in a fresh interpreter.

    Args:
        module: name of the module.
        isolation: the interpreter's option ``-P``, or ``-I``, which also ignores Python's environment variables.
        arguments: ``sys.argv[1:]`` of the new process.
        guard_for: id of the parent process, for the guard (see ``tree.guarded``). None starts no guard.
        python: another interpreter than this one.
    """
    root = str(Path(__file__).parents[2])
    guard = f"from rollwright.processes.tree import guarded; guarded({guard_for}); " if guard_for is not None else ""
    code = f"import sys; sys.path.insert(0, {root!r}); {guard}from {module} import main; del sys.path[0]; sys.exit(main())"
    return [python or sys.executable, isolation, "-c", code, *arguments]


def connect() -> tuple[Channel, Any]:
    """Return the channel to the parent and the setup, and adopt the parent's import path. Called in a child of ``ChildProcess``.

    A child with another interpreter keeps its own import path.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    channel = Channel(connection)
    paths, setup = pickle.loads(channel.receive()[1])  # noqa: S301 - from our own parent
    if paths is not None:
        sys.path[:], directories = paths
        NEIGHBOURS.adopt(directories)
    return channel, setup
