"""The service of boxes: ``rollwright serve-boxes`` lends boxes of its machine over HTTP to runs on others.

* ``POST /start`` makes and starts a box of a ``BoxSpec``, and returns its name in all other requests, ``box``. ``ports`` are TCP ports of the
  client, to which the box's ports lead.
* ``POST /exec``, ``/upload``, ``/download``, ``/reset`` and ``/stop`` are the methods of a box; ``POST /open`` starts a process for ``/write``,
  ``/read`` and ``/end``. Files are archives in base64.
* ``GET /health`` says how many boxes there are.

Every error is ``{"error": {"message": ...}}``. The status 422 is an error of the box's programs, such as a link that leads out.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field

from rollwright.errors import ConfigError, RefusedFilesError, SandboxError
from rollwright.inference.server.bodies import Body
from rollwright.inference.server.exchange import ClientGoneError, RequestError, Routes
from rollwright.inference.server.service import make_service
from rollwright.inference.server.settings import ServiceSettings
from rollwright.processes.box import Box, BoxProcess, BoxSpec
from rollwright.processes.boxes import box_limits, make_box
from rollwright.processes.http_box import REFUSED_FILES, packed, relay_to, unpacked
from rollwright.tracking.logging import getLogger

logger = getLogger("boxes")

_LOOK_SECONDS = 0.2  # between looks at whether the client of a command has gone
_READ_SECONDS = 20.0  # after which a read is answered although there is nothing to read
_MOST_READ = 1 << 20
Words = Annotated[list[str], Field(min_length=1)]


class Start(Body):
    """Body of ``/start``: the fields of a ``BoxSpec``."""

    limits: dict[str, int] = Field(default_factory=dict)
    ports: dict[str, Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=dict)
    readable: dict[str, str] = Field(default_factory=dict)
    writable: list[str]
    environment: dict[str, str] = Field(default_factory=dict)
    network: bool = False
    image: str = ""


class OfBox(Body):
    """What every other body has."""

    box: str


class Reset(OfBox):
    """Body of ``/reset``."""

    keep: int | None = None


class Open(OfBox):
    """Body of ``/open``."""

    command: Words
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)


class Exec(Open):
    """Body of ``/exec``."""

    timeout: float = Field(gt=0)
    stdin: str = ""


class Upload(OfBox):
    """Body of ``/upload``."""

    path: str
    archive: str


class Download(OfBox):
    """Body of ``/download``."""

    path: str


class OfProcess(OfBox):
    """Body of ``/end``."""

    process: int


class Write(OfProcess):
    """Body of ``/write``."""

    data: str


class Read(OfProcess):
    """Body of ``/read``."""

    most: int = Field(65536, ge=1)


@dataclass
class _Lent:
    box: Box
    directory: tempfile.TemporaryDirectory[str]  # of the sockets
    relays: list[asyncio.Server] = field(default_factory=list)
    processes: dict[int, BoxProcess] = field(default_factory=dict)
    reads: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)  # that go on although the client was answered
    requests: int = 0  # that are being answered
    used: float = field(default_factory=time.monotonic)

    async def stop(self) -> None:
        for relay in self.relays:
            relay.close()
        for read in self.reads.values():
            read.cancel()
        await self.box.stop()
        self.directory.cleanup()


class BoxService:
    """Lends boxes.

    Args:
        sandbox: kind of the boxes, as in ``rollout.sandbox``.
        readable: directories of this machine that boxes may show to their programs.
        max_boxes: boxes that exist at a time.
        idle_seconds: time without a request after which a box is stopped, because its client has gone.
    """

    def __init__(self, sandbox: str, readable: Sequence[Path] = (), max_boxes: int = 64, idle_seconds: float = 3600.0) -> None:
        if sandbox.startswith(("http://", "https://")):
            raise ConfigError(f"serve-boxes lends boxes of this machine, and {sandbox} is another service.")
        self._sandbox, self._max_boxes, self._idle_seconds = sandbox, max_boxes, idle_seconds
        self._readable = [each.expanduser().resolve() for each in readable]
        self._lent: dict[str, _Lent] = {}
        self._starting = 0
        self._watch: asyncio.Task[None] | None = None

    def app(self, settings: ServiceSettings) -> FastAPI:
        """Build the application."""
        table: list[tuple[str, str, Callable[..., Any], Any]] = [
            ("POST", "/start", self._start, Start),
            ("POST", "/exec", self._exec, Exec),
            ("POST", "/open", self._open, Open),
            ("POST", "/write", self._write, Write),
            ("POST", "/read", self._read, Read),
            ("POST", "/end", self._end, OfProcess),
            ("POST", "/upload", self._upload, Upload),
            ("POST", "/download", self._download, Download),
            ("POST", "/reset", self._reset, Reset),
            ("POST", "/stop", self._stop, OfBox),
        ]

        async def health() -> dict[str, Any]:
            return {"status": "ok", "sandbox": self._sandbox, "boxes": len(self._lent), "max_boxes": self._max_boxes}

        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.gather(*(lent.stop() for lent in self._lent.values()), return_exceptions=True)

        routes = Routes(
            [*((*each[:2], _reported(each[2], each[3]), each[3]) for each in table), ("GET", "/health", health, None)]
        )
        return make_service("rollwright serve-boxes", [routes], settings, lifespan=lifespan)

    # -- boxes ---------------------------------------------------------------------------------------------------------

    async def _start(self, request: Request, given: Start) -> dict[str, Any]:
        if len(self._lent) + self._starting >= self._max_boxes:
            raise RequestError(
                f"there are {self._max_boxes} boxes already; wait until one is stopped, or raise --max-boxes.", status=503
            )
        assert request.client is not None
        directory = tempfile.TemporaryDirectory(prefix="rollwright-boxes-")
        relays: list[asyncio.Server] = []
        self._starting += 1
        try:
            ports = {}
            for port, of_client in given.ports.items():
                ports[int(port)] = path = Path(directory.name, f"{port}.sock")
                connect = functools.partial(asyncio.open_connection, request.client.host, of_client)
                relays.append(await asyncio.start_unix_server(relay_to(connect), path))
                os.chmod(path, 0o666)  # programs of the box have another user
            spec = BoxSpec(
                limits=box_limits(given.limits),
                ports=ports,
                readable={name: self._shown(path) for name, path in given.readable.items()},
                writable=given.writable,
                environment=given.environment,
                network=given.network,
                image=given.image,
            )
            lent = _Lent(make_box(self._sandbox, spec), directory, relays)
            await lent.box.start()
            if await request.is_disconnected():  # nobody would stop it
                await lent.box.stop()
                raise ClientGoneError
        except BaseException:  # also if the request is cancelled: no box will own these
            for relay in relays:
                relay.close()
            directory.cleanup()
            raise
        finally:
            self._starting -= 1
        name = secrets.token_urlsafe(16)
        self._lent[name] = lent
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._stop_idle())
        urls = {port: lent.box.url(int(port)) for port in given.ports}
        return {"box": name, "workdir": lent.box.workdir, "home": lent.box.home, "urls": urls}

    def _shown(self, path: str) -> Path:
        """Return a path of this machine that a box may show."""
        resolved = Path(path).resolve()
        if not any(resolved.is_relative_to(root) for root in self._readable):
            roots = ", ".join(map(str, self._readable)) or "none"
            raise SandboxError(
                f"boxes may not show {path}; they may show {roots}. Start serve-boxes with --readable, and have the programs there."
            )
        return resolved

    async def _stop_idle(self) -> None:
        while self._lent:
            await asyncio.sleep(min(10.0, self._idle_seconds))
            now = time.monotonic()
            for name, lent in list(self._lent.items()):
                if not lent.requests and now - lent.used > self._idle_seconds:
                    logger.warning("a box without a request for %g s is stopped", self._idle_seconds)
                    del self._lent[name]
                    await lent.stop()

    @contextlib.contextmanager
    def _used(self, name: str) -> Iterator[_Lent]:
        lent = self._lent.get(name)
        if lent is None:
            raise SandboxError("there is no such box; it was stopped.")
        lent.requests += 1
        try:
            yield lent
        finally:
            lent.requests -= 1
            lent.used = time.monotonic()

    async def _stop(self, request: Request, given: OfBox) -> dict[str, Any]:
        lent = self._lent.pop(given.box, None)
        if lent is not None:
            await lent.stop()
        return {}

    async def _reset(self, request: Request, given: Reset) -> dict[str, Any]:
        with self._used(given.box) as lent:
            await lent.box.reset(None if given.keep is None else _process(lent, given.keep))
        return {}

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _exec(self, request: Request, given: Exec) -> dict[str, Any]:
        with self._used(given.box) as lent:
            running = asyncio.ensure_future(
                lent.box.exec(given.command, timeout=given.timeout, stdin=given.stdin, cwd=given.cwd, env=given.env)
            )
            try:
                while not running.done():
                    await asyncio.wait({running}, timeout=_LOOK_SECONDS)
                    if await request.is_disconnected():
                        raise ClientGoneError
                result = running.result()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        return vars(result)

    async def _open(self, request: Request, given: Open) -> dict[str, Any]:
        with self._used(given.box) as lent:
            process = await lent.box.open(given.command, cwd=given.cwd, env=given.env)
            number = max(lent.processes, default=0) + 1
            lent.processes[number] = process
        return {"process": number}

    async def _write(self, request: Request, given: Write) -> dict[str, Any]:
        with self._used(given.box) as lent:
            await _process(lent, given.process).write(base64.b64decode(given.data))
        return {}

    async def _read(self, request: Request, given: Read) -> dict[str, Any]:
        with self._used(given.box) as lent:
            process = _process(lent, given.process)
            if given.process not in lent.reads:
                lent.reads[given.process] = asyncio.ensure_future(process.read(min(given.most, _MOST_READ)))
            read = lent.reads[given.process]
            await asyncio.wait({read}, timeout=_READ_SECONDS)
            if not read.done():
                return {"data": "", "ended": False}
            del lent.reads[given.process]
            return {"data": base64.b64encode(read.result()).decode(), "ended": not read.result()}

    async def _end(self, request: Request, given: OfProcess) -> dict[str, Any]:
        with self._used(given.box) as lent:
            return {"exit_code": await _process(lent, given.process).end()}

    # -- files ---------------------------------------------------------------------------------------------------------

    async def _upload(self, request: Request, given: Upload) -> dict[str, Any]:
        with self._used(given.box) as lent, tempfile.TemporaryDirectory() as directory:
            source = Path(directory, "files")
            await asyncio.to_thread(unpacked, given.archive, source, lent.box.spec.limits.disk_bytes)
            await lent.box.upload(source, given.path)
        return {}

    async def _download(self, request: Request, given: Download) -> dict[str, Any]:
        with self._used(given.box) as lent, tempfile.TemporaryDirectory() as directory:
            target = Path(directory, "files")
            await lent.box.download(given.path, target)
            return {"archive": await asyncio.to_thread(packed, target, lent.box.spec.limits.disk_bytes)}


def _process(lent: _Lent, number: int) -> BoxProcess:
    if number not in lent.processes:
        raise SandboxError(f"the box has no process {number}.")
    return lent.processes[number]


def _reported(handler: Callable[[Request, Any], Awaitable[dict[str, Any]]], kind: type[Body]) -> Callable[..., Any]:
    """Return a handler of a request, whose errors of boxes have a status of their own."""

    async def answer(request: Request) -> dict[str, Any]:
        try:
            return await handler(request, await kind.read(request))
        except RefusedFilesError as error:
            raise RequestError(str(error), status=REFUSED_FILES) from error
        except (SandboxError, ConfigError) as error:
            raise RequestError(str(error), status=409) from error

    return answer
