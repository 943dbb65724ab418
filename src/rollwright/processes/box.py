"""Boxes: where an agent's programs run during one episode, with files of their own and no network but what is let in.

A box is started for an episode, runs commands, exchanges files with this machine, and is stopped with everything that runs in it::

    box = make_box("bubblewrap", BoxSpec(ports={8000: front.socket}))
    await box.start()
    try:
        await box.upload(task / "files", box.workdir)
        result = await box.exec(["python3", "solve.py"], timeout=60)
        await box.download("/logs", kept)
    finally:
        await box.stop()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class BoxLimits:
    """What the programs of a box may use, all of them together."""

    memory_bytes: int = 2 * 2**30  # resident
    disk_bytes: int = 2**30  # files in the writable directories
    processes: int = 512  # processes and threads
    output_bytes: int = 2**22  # kept of a command's standard output, and of its standard error; the rest is dropped


@dataclass(frozen=True)
class BoxSpec:
    """What a box contains besides its system.

    Attributes:
        limits: resource limits.
        ports: port on the box's loopback -> Unix socket of this machine that it leads to.
        readable: absolute path in the box -> file or directory of this machine, which the box can read but not change.
        writable: directories of the box that its programs may change; they are empty at first. The first is the working directory, the
            second the home directory.
        environment: variables of every command, in addition to a minimal set (``PATH``, ``HOME``, ``LANG``, ``TMPDIR``).
        network: let programs reach the network.
        image: image of a docker or podman box, which must contain ``python3``; empty for the default one. Other boxes refuse one.
    """

    limits: BoxLimits = BoxLimits()
    ports: Mapping[int, Path] = field(default_factory=dict)
    readable: Mapping[str, Path] = field(default_factory=dict)
    writable: Sequence[str] = ("/work", "/home/agent", "/tmp", "/logs", "/tests", "/solution")
    environment: Mapping[str, str] = field(default_factory=dict)
    network: bool = False
    image: str = ""


@dataclass(frozen=True)
class ExecResult:
    """Result of a command."""

    stdout: str
    stderr: str
    exit_code: int | None  # None if a limit ended the command
    seconds: float
    excess: str = ""  # the limit that ended the command, such as "time" or "more than 2147483648 bytes of memory"
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """True if the command ended by itself with exit code 0."""
        return self.exit_code == 0


class BoxProcess(Protocol):
    """A command that runs in a box while this process writes to it and reads from it."""

    async def write(self, data: bytes) -> None:
        """Write to standard input."""
        ...

    async def read(self, most: int = 65536) -> bytes:
        """Read from standard output; empty at its end."""
        ...

    async def end(self) -> int | None:
        """Close standard input, end the command if it does not end by itself soon, and return its exit code."""
        ...


class Box(Protocol):
    """One episode's machine. Methods are coroutines and may be called from one event loop at a time."""

    spec: BoxSpec

    @property
    def workdir(self) -> str:
        """The working directory, ``spec.writable[0]``."""
        ...

    @property
    def home(self) -> str:
        """The home directory, ``spec.writable[1]``."""
        ...

    def url(self, port: int) -> str:
        """``http://host:port`` at which the box's programs reach the Unix socket of ``spec.ports[port]``, after ``start``."""
        ...

    async def start(self) -> None:
        """Start the box.

        Raises:
            SandboxError: this machine lacks a requirement; the message says what to install or to configure.
        """
        ...

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        stdin: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a command until it ends or exceeds a limit, after which it is killed with everything that it started.

        Args:
            command: program and arguments; for a line of shell, ``["sh", "-c", line]``.
            timeout: seconds of wall-clock time.
            stdin: the command's standard input.
            cwd: directory; default: ``workdir``.
            env: variables in addition to those of the spec.

        Raises:
            SandboxError: the box is gone. A command that fails raises no error.
        """
        ...

    async def open(self, command: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> BoxProcess:
        """Start a command to talk with, such as a server over standard input and output.

        Raises:
            SandboxError: this kind of box cannot, or is gone.
        """
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or what a directory contains, to a writable directory or to a path below one, whose parents are made.

        Existing files are replaced.

        Raises:
            RefusedFilesError: a link leads out of the source, or a program of the box has put a link in the target's place.
        """
        ...

    async def download(self, source: str, target: Path) -> None:
        """Copy a file, or what a directory contains, to this machine. ``target`` must be missing or an empty directory.

        Raises:
            RefusedFilesError: the source is missing, or has links that lead out of it, device files, names that lead elsewhere or more
                bytes than ``disk_bytes``; nothing was copied. The box's programs are to blame.
        """
        ...

    async def reset(self, keep: BoxProcess | None = None) -> None:
        """End everything that runs and empty the writable directories, so that another episode can use the box.

        Args:
            keep: a process of ``open`` that stays, without the processes that it started.

        Raises:
            SandboxError: this kind of box cannot, or is gone, or a program has ended or changed ``keep``; start another one.
        """
        ...

    async def stop(self) -> None:
        """End everything that runs in the box and remove its files. Idempotent."""
        ...
