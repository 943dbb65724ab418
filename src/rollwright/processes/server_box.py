"""Boxes on this machine: the side that talks with a ``box_server``. How the server is started is what makes kinds of boxes differ."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollwright.errors import RefusedFilesError, SandboxError
from rollwright.processes.box import BoxProcess, BoxSpec, ExecResult
from rollwright.processes.box_files import RefusedFileError, pack, unpack
from rollwright.processes.box_streams import Asked, CommandStreams, KeptOutput, OpenProcess, ServerChannel
from rollwright.processes.jails import bundle
from rollwright.processes.tree import kill_tree

_MODULES = ("tree", "inside", "box_files", "box_ports", "box_server")  # what runs in a box
#: Receives the server's text over a socket, because the text would be seen in the box's list of processes. The argument is the path of
#: the socket; without one, it is standard input.
_RECEIVE = (
    "import os, socket, sys; c = socket.socket(socket.AF_UNIX) if sys.argv[1:] else socket.socket(fileno=os.dup(0)); "
    "sys.argv[1:] and c.connect(sys.argv[1]); f = c.makefile('rb', 0); n = int(f.readline()); b = b''\n"
    "while len(b) < n: b += f.read(n - len(b))\n"
    "sys.argv[1:] = [str(os.dup(c.fileno()))]; exec(b)"
)
SHARED_BYTES = 64 * 2**20  # of /dev/shm
USER = 1000  # of programs: no root, for which some agents refuse to work
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 15.0  # wait for an answer after a command's time limit, which the server inside enforces
_COPY_SECONDS = 600.0
_END_SECONDS = 3.0
_MOST_SAID = 65536


def box_server_command(python: str, *socket_path: str, first: str = "") -> list[str]:
    """Return the command that runs a box's server with a Python inside the box.

    Args:
        python: the program.
        socket_path: path of the socket that the server connects to; without one, it is standard input.
        first: lines of Python that are run before.
    """
    return [python, "-I", "-c", first + _RECEIVE, *socket_path]


def user_files(spec: BoxSpec, shell: str) -> dict[str, str]:
    """Return the files of ``/etc`` that name the user of a box's programs."""
    return {
        "/etc/passwd": f"agent:x:{USER}:{USER}:agent:{spec.writable[1]}:{shell}\n",
        "/etc/group": f"agent:x:{USER}:\n",
    }


@dataclass
class ServerStart:
    """How a box's server is started.

    Attributes:
        command: command line.
        paths: writable directory of the spec -> the same directory as programs see it.
        environment: environment of the command.
        server_paths: port -> path of its Unix socket, as the server sees it.
        filters: seccomp programs that the server applies to commands.
        pass_fds: descriptors that the command inherits.
        roots: further directories that programs can write to.
        kept: paths in the writable directories that cannot be removed.
        explain: converts the output of a failed start to an explanation.
        clean: called after the server has ended.
        listener: socket that the server connects to. None gives it a socket as standard input.
    """

    command: Sequence[str]
    paths: Mapping[str, str]
    environment: Mapping[str, str]
    server_paths: Mapping[int, str]
    filters: Sequence[bytes] = ()
    pass_fds: Sequence[int] = ()
    roots: Sequence[str] = ()
    kept: Sequence[str] = ()
    explain: Callable[[str], str] = str
    clean: Callable[[], Any] = field(default=lambda: None)
    listener: socket.socket | None = None


class ServerBox:
    """A box whose process 1 is a ``box_server``.

    Args:
        spec: what the box contains.
        prepare: makes what is needed to start the server; the context is left when the server has been started.
    """

    def __init__(self, spec: BoxSpec, prepare: Callable[[BoxSpec], AbstractContextManager[ServerStart]]) -> None:
        check_spec(spec)
        self.spec = spec
        self._prepare = prepare
        self._begun: ServerStart | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = ServerChannel()
        self._ports: dict[int, int] = {}

    # -- where things are ----------------------------------------------------------------------------------------------

    @property
    def workdir(self) -> str:
        """See :class:`Box`."""
        return self._inside(self.spec.writable[0])

    @property
    def home(self) -> str:
        """See :class:`Box`."""
        return self._inside(self.spec.writable[1])

    def url(self, port: int) -> str:
        """See :class:`Box`."""
        if port not in self._ports:
            raise SandboxError(f"the box has no port {port}: name it in BoxSpec.ports, and start the box first.")
        return f"http://127.0.0.1:{self._ports[port]}"

    def _inside(self, path: str) -> str:
        """Return a path of the spec, or one that programs see, as programs see it."""
        path, paths = posixpath.normpath(path), self._begun.paths if self._begun else {}
        for outer, inner in paths.items():
            if _is_below(path, outer) and not any(_is_below(path, other) for other in paths.values()):
                return inner + path[len(outer) :]
        return path

    def _word(self, word: str) -> str:
        """Return a word of a command, in which a path below a directory that programs see elsewhere is replaced."""
        return self._inside(word) if word.startswith("/") and self._inside(word) != posixpath.normpath(word) else word

    # -- start and end -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See :class:`Box`."""
        if self._begun is not None:
            raise SandboxError("a box is started once; make another one.")
        try:
            answer = await asyncio.wait_for(self._launch(), _START_SECONDS)
        except (TimeoutError, SandboxError, OSError) as error:
            said = await self._stopped()
            explain = self._begun.explain if self._begun else str
            raise SandboxError(f"the box does not start: {explain(said) if said else error}") from error
        except BaseException:
            await self.stop()
            raise
        self._ports = {int(port): number for port, number in answer["ports"].items()}

    async def _launch(self) -> dict[str, Any]:
        """Start the server, and return its first answer."""
        with self._prepare(self.spec) as begun:
            self._begun = begun
            try:
                ours = self._popen(begun)
            except OSError:
                begun.clean()
                raise
        if begun.listener:
            ours.close()
            ours = await self._accepted(begun.listener)
        self._channel.connect(ours)
        program = bundle(*_MODULES).encode()
        await self._channel.send(b"%d\n%s" % (len(program), program))
        settings = {
            "roots": [*begun.paths.values(), *begun.roots],
            "kept": [*map(self._inside, self.spec.readable), *begun.kept],
            "limits": asdict(self.spec.limits),
            "ports": begun.server_paths,
            "filters": [program.hex() for program in begun.filters],
        }
        return await (await self._channel.ask(settings)).answer

    async def _accepted(self, listener: socket.socket) -> socket.socket:
        """Wait until the server connects, or its process has ended."""
        listener.setblocking(False)
        accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
        try:
            while not accepting.done():
                has_ended = self._process is None or self._process.poll() is not None
                await asyncio.wait({accepting}, timeout=_LOOK_SECONDS)
                if has_ended and not accepting.done():
                    raise SandboxError("the program that starts it has ended and said nothing")
            return accepting.result()[0]
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listener.close()

    def _popen(self, begun: ServerStart) -> socket.socket:
        """Start the server's process, and return this side of its standard input."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                begun.command,
                stdin=subprocess.DEVNULL if begun.listener else theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=begun.environment,
                pass_fds=begun.pass_fds,
                start_new_session=True,
            )
        return ours

    async def stop(self) -> None:
        """See :class:`Box`."""
        await self._stopped()

    async def _stopped(self) -> str:
        """Stop the box, and return what its server said to standard error."""
        self._channel.close("was stopped")
        process, self._process = self._process, None
        if process is None:
            return ""
        return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._end, process)))

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        try:
            process.wait(_END_SECONDS)  # the server ends when the other side of its socket is gone
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
        if self._begun is not None:
            self._begun.clean()
        with process.stderr:  # type: ignore[union-attr]
            return process.stderr.read(_MOST_SAID).decode("utf-8", "replace").strip()  # type: ignore[union-attr]

    async def reset(self, keep: BoxProcess | None = None) -> None:
        """See :class:`Box`."""
        if keep is not None and not isinstance(keep, OpenProcess):
            raise SandboxError("reset: the process to keep is not one of this box.")
        kept = {} if keep is None else {"keep": keep.number}
        await self._outcome(await self._channel.ask({"op": "reset", **kept}), _COPY_SECONDS)

    async def _outcome(self, asked: Asked, seconds: float) -> dict[str, Any]:
        """Wait for the answer to a request, and end its command if nobody waits any longer."""
        try:
            answer = await asyncio.wait_for(asked.answer, seconds)
        except TimeoutError as error:
            await self.stop()
            raise SandboxError(f"the box did not answer for {seconds:g} s and was stopped.") from error
        except asyncio.CancelledError:
            self._channel.kill(asked)
            raise
        if "broken" in answer:
            await self.stop()
            raise SandboxError(f"the box is broken and was stopped: {answer['broken']}.")
        return answer

    # -- commands ------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        stdin: str = "",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """See :class:`Box`."""
        most = self.spec.limits.output_bytes
        request = {**self._run(command, cwd, env), "seconds": timeout}
        asked, streams = await self._with_pipes(request, has_errors=True)
        with streams:
            outputs = [KeptOutput(most), KeptOutput(most)]
            reading = [
                asyncio.ensure_future(output.fill(stream))
                for output, stream in zip(outputs, (streams.stdout, streams.stderr), strict=True)
            ]
            feeding = asyncio.ensure_future(streams.feed(stdin.encode("utf-8", "surrogatepass")))
            try:
                answer = await self._outcome(asked, timeout + _GRACE_SECONDS)
                await asyncio.wait(reading, timeout=_END_SECONDS)  # another command may have been given the pipe
            finally:
                for task in (feeding, *reading):
                    task.cancel()
        out, err = (output.text for output in outputs)
        is_cut = any(output.is_cut for output in outputs)
        return ExecResult(out, err, answer["exit"], answer["seconds"], answer["excess"], is_cut)

    async def open(
        self, command: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> OpenProcess:
        """See :class:`Box`."""
        asked, streams = await self._with_pipes(self._run(command, cwd, env), has_errors=False)
        return OpenProcess(self._outcome, lambda: self._channel.kill(asked), asked, streams)

    def _run(self, command: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
        if isinstance(command, str) or not command:
            raise SandboxError(f"exec: the command is {command!r}; give a list of words, such as ['sh', '-c', line].")
        own = {"HOME": self.home, "TMPDIR": self._inside("/tmp") if "/tmp" in self.spec.writable else self.workdir}
        return {
            "op": "run",
            "command": [self._word(str(word)) for word in command],
            "cwd": self._inside(cwd) if cwd else self.workdir,
            "env": {**own, **self.spec.environment, **(env or {})},
        }

    async def _with_pipes(self, request: dict[str, Any], *, has_errors: bool) -> tuple[Asked, CommandStreams]:
        """Start a command with pipes as its standard input, output and, optionally, error."""
        (reads, ours), (out, writes), (err, errors) = os.pipe(), os.pipe(), os.pipe()
        streams = CommandStreams()
        try:
            await streams.connect(ours, out, err)
            if not has_errors:
                os.close(errors)
                errors = os.open(os.devnull, os.O_WRONLY)
            return await self._channel.ask(request, (reads, writes, errors)), streams
        except BaseException:
            streams.close()
            raise
        finally:
            for descriptor in (reads, writes, errors):
                os.close(descriptor)

    # -- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, source: Path, target: str) -> None:
        """See :class:`Box`."""
        inside = self._target(target)
        most = self.spec.limits.disk_bytes

        def write(pipe: int) -> None:
            with open(pipe, "wb") as stream:
                pack(os.path.realpath(source), stream, most)

        await self._copy({"op": "unpack", "path": inside}, write)

    async def download(self, source: str, target: Path) -> None:
        """See :class:`Box`."""
        most = self.spec.limits.disk_bytes
        with received(target) as made:

            def read(pipe: int) -> None:
                with open(pipe, "rb") as stream:
                    unpack(stream, str(made), most)

            await self._copy({"op": "pack", "path": self._inside(source)}, read)

    def _target(self, path: str) -> str:
        """Check that a path is in a writable directory, and return it as programs see it."""
        inside = self._inside(path)
        if not any(_is_below(inside, self._inside(root)) for root in self.spec.writable):
            raise SandboxError(
                f"upload: {path} is in none of the box's writable directories ({', '.join(self.spec.writable)}): name its directory in "
                "BoxSpec.writable."
            )
        return inside

    async def _copy(self, request: dict[str, Any], move: Callable[[int], None]) -> None:
        """Have the server pack or unpack files, while a thread moves them through the other end of its pipe."""
        (reads, writes), (said, errors) = os.pipe(), os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        ours, theirs = (writes, (reads, null, errors)) if request["op"] == "unpack" else (reads, (null, writes, errors))
        streams = CommandStreams()
        try:
            await streams.connect(None, None, said)
            asked = await self._channel.ask({**request, "seconds": _COPY_SECONDS}, theirs)
        except BaseException:
            streams.close()
            os.close(ours)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        with streams:
            moving = asyncio.ensure_future(asyncio.to_thread(move, ours))
            answer = await self._outcome(asked, _COPY_SECONDS + _GRACE_SECONDS)
            why = (await streams.stderr.read(_MOST_SAID)).decode("utf-8", "replace").strip()
            [failure] = await asyncio.gather(moving, return_exceptions=True)
        if isinstance(failure, Exception) and not isinstance(failure, (RefusedFileError, RecursionError, OSError)):
            raise failure
        if failure is not None or answer["exit"] != 0:
            reason = failure if isinstance(failure, RefusedFileError) and not why else why or failure or answer["excess"]
            raise RefusedFilesError(f"{request['path']} was not copied: {reason or 'the copying process was killed'}.")


@contextlib.contextmanager
def received(target: Path) -> Iterator[Path]:
    """Yield a path to which files are copied, and move them to ``target``, which is missing or an empty directory, if nothing is raised."""
    target = Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise SandboxError(f"download: {target} exists; give a path that does not, or an empty directory.")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.parent.resolve() / f".{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        yield made
        if target.is_dir():
            target.rmdir()
        os.replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink(missing_ok=True)


# -- what a spec may say -----------------------------------------------------------------------------------------------


def check_spec(spec: BoxSpec) -> None:
    """Check paths and ports.

    Raises:
        SandboxError: one of them is unusable; the message says why.
    """
    faults = [
        f"writable {path!r} is no absolute path below /, or is listed twice, or is in another one"
        for number, path in enumerate(spec.writable)
        if path in ("/", "//")
        or not _is_plain(path)
        or any(_is_below(path, other) for at, other in enumerate(spec.writable) if at != number)
    ]
    faults += [f"readable {path!r} is no absolute path" for path in spec.readable if not _is_plain(path)]
    faults += [f"{path} (readable {name!r}) does not exist" for name, path in spec.readable.items() if not Path(path).exists()]
    faults += [f"port {port} is not between 1024 and 65535" for port in spec.ports if not 1024 <= port <= 65535]
    faults += [f"{path} (port {port}) is no Unix socket" for port, path in spec.ports.items() if not Path(path).is_socket()]
    if len(spec.writable) < 2:
        faults.append("writable must have a working directory and a home directory")
    if faults:
        raise SandboxError(f"BoxSpec: {'; '.join(faults)}.")


def _is_below(path: str, root: str) -> bool:
    return f"{path}/".startswith(f"{root}/")


def _is_plain(path: str) -> bool:
    return path.startswith("/") and posixpath.normpath(path) == path
