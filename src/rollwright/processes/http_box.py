"""A box on another machine, which ``rollwright serve-boxes`` lends over HTTP (``environments.box_service``)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rollwright.errors import RefusedFilesError, SandboxError
from rollwright.processes.box import BoxProcess, BoxSpec, ExecResult
from rollwright.processes.box_files import RefusedFileError, pack, unpack
from rollwright.processes.server_box import check_spec, received
from rollwright.tracking.logging import getLogger

logger = getLogger("boxes")

#: Variable with the key of the service.
KEY = "ROLLWRIGHT_BOXES_KEY"
#: Status of an answer that says that the box's programs are to blame for files that were not copied.
REFUSED_FILES = 422
_ANSWER_SECONDS = 60.0  # for what takes no time
_COPY_SECONDS = 600.0
_CHUNK = 65536


class HttpBox:
    """A box of a service. ``start`` and ``stop`` are called in the same event loop, which has to run meanwhile.

    The programs of ``spec.readable`` have to be on the service's machine, at the same paths.

    Args:
        url: address of the service.
        spec: what the box contains.
    """

    def __init__(self, url: str, spec: BoxSpec) -> None:
        check_spec(spec)
        self.spec = spec
        self._service = url.rstrip("/")
        self._address = urlsplit(url)
        if not self._address.hostname:
            raise SandboxError(f"the box {url!r} is no address of a service of boxes, such as http://boxes.example.com:8200.")
        self._box: dict[str, Any] = {}
        self._relays: list[asyncio.Server] = []

    @property
    def workdir(self) -> str:
        """See :class:`Box`."""
        return self._box.get("workdir", self.spec.writable[0])

    @property
    def home(self) -> str:
        """See :class:`Box`."""
        return self._box.get("home", self.spec.writable[1])

    def url(self, port: int) -> str:
        """See :class:`Box`."""
        if str(port) not in self._box.get("urls", {}):
            raise SandboxError(f"the box has no port {port}: name it in BoxSpec.ports, and start the box first.")
        return self._box["urls"][str(port)]

    async def start(self) -> None:
        """See :class:`Box`."""
        if self._box:
            raise SandboxError("a box is started once; make another one.")
        spec, ports = self.spec, {}
        try:
            for port, path in spec.ports.items():
                relay = await asyncio.start_server(
                    relay_to(lambda path=path: asyncio.open_unix_connection(path)), self._own_address()
                )
                self._relays.append(relay)
                ports[str(port)] = relay.sockets[0].getsockname()[1]
            body = {
                "limits": asdict(spec.limits),
                "ports": ports,
                "readable": {name: str(path) for name, path in spec.readable.items()},
                "writable": list(spec.writable),
                "environment": dict(spec.environment),
                "network": spec.network,
                "image": spec.image,
            }
            self._box = await self._post("/start", body, _COPY_SECONDS)
        except BaseException:
            self._close_relays()
            raise

    def _own_address(self) -> str:
        """Return the address of this machine at which the service's machine reaches it."""
        family, kind, _, _, address = socket.getaddrinfo(
            self._address.hostname, self._address.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]

    def _close_relays(self) -> None:
        for relay in self._relays:
            relay.close()
        self._relays.clear()

    async def stop(self) -> None:
        """See :class:`Box`."""
        self._close_relays()
        if self._box and "stopped" not in self._box:
            self._box["stopped"] = True
            try:
                await asyncio.shield(asyncio.ensure_future(self._of_box("/stop")))
            except SandboxError as error:  # the episode is over, and the service stops a box without requests
                logger.warning("a box was not stopped: %s", error)

    async def reset(self, keep: BoxProcess | None = None) -> None:
        """See :class:`Box`."""
        if keep is not None and not isinstance(keep, HttpProcess):
            raise SandboxError("reset: the process to keep is not one of this box.")
        await self._of_box("/reset", keep=None if keep is None else keep.number, seconds=_COPY_SECONDS)

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
        given = {"stdin": stdin, "timeout": float(timeout), **_command(command, cwd, env)}
        return ExecResult(**await self._of_box("/exec", **given, seconds=timeout + _ANSWER_SECONDS))

    async def open(
        self, command: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> HttpProcess:
        """See :class:`Box`."""
        opened = await self._of_box("/open", **_command(command, cwd, env))
        return HttpProcess(opened["process"], self._of_box)

    # -- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, source: Path, target: str) -> None:
        """See :class:`Box`."""
        archive = await asyncio.to_thread(packed, Path(source), self.spec.limits.disk_bytes)
        await self._of_box("/upload", path=target, archive=archive, seconds=_COPY_SECONDS)

    async def download(self, source: str, target: Path) -> None:
        """See :class:`Box`."""
        with received(target) as made:
            answer = await self._of_box("/download", path=source, seconds=_COPY_SECONDS)
            await asyncio.to_thread(unpacked, answer["archive"], made, self.spec.limits.disk_bytes)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _of_box(self, route: str, /, *, seconds: float = _ANSWER_SECONDS, **given: Any) -> dict[str, Any]:
        if not self._box:
            raise SandboxError("the box has not been started.")
        return await self._post(route, {"box": self._box["box"], **given}, seconds)

    async def _post(self, route: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        key = os.environ.get(KEY)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        is_local = self._address.hostname in ("localhost", "127.0.0.1", "::1")  # where a proxy leads elsewhere
        try:
            async with httpx2.AsyncClient(timeout=seconds, trust_env=not is_local) as client:
                answer = await client.post(self._service + route, content=json.dumps(body), headers=headers)
            content = answer.json()
        except (httpx2.HTTPError, ValueError) as error:
            why = f"{type(error).__name__} {error}".strip()
            raise SandboxError(f"the service of boxes at {self._service} does not answer as it should: {why}.") from error
        if answer.status_code >= 400:
            kind = RefusedFilesError if answer.status_code == REFUSED_FILES else SandboxError
            where = "" if kind is RefusedFilesError else f"the service of boxes at {self._service} says: "
            advice = f" Set {KEY}." if answer.status_code == 401 else ""
            raise kind(f"{where}{content['error']['message']}{advice}")
        return content


class HttpProcess:
    """A command in an :class:`HttpBox` that this process talks with."""

    def __init__(self, number: int, ask: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self.number, self._ask = number, ask

    async def write(self, data: bytes) -> None:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        await self._ask("/write", process=self.number, data=base64.b64encode(data).decode())

    async def read(self, most: int = _CHUNK) -> bytes:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        while True:  # the service answers now and then, although there is nothing to read
            answer = await self._ask("/read", process=self.number, most=most)
            if answer["data"] or answer["ended"]:
                return base64.b64decode(answer["data"])

    async def end(self) -> int | None:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        return (await self._ask("/end", process=self.number))["exit_code"]


def _command(command: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
    if isinstance(command, str) or not command:
        raise SandboxError(f"exec: the command is {command!r}; give a list of words, such as ['sh', '-c', line].")
    return {"command": [str(word) for word in command], "cwd": cwd, "env": dict(env or {})}


# -- what both sides use -------------------------------------------------------------------------------------------------


def packed(source: Path, most_bytes: int) -> str:
    """Return an archive of a file, or of what a directory contains, in base64.

    Raises:
        RefusedFilesError: it has what is not copied, or is too large.
    """
    stream = io.BytesIO()
    try:
        pack(os.path.realpath(source), stream, most_bytes)
    except (RefusedFileError, RecursionError, OSError) as error:
        raise RefusedFilesError(f"{source} was not copied: {error}.") from error
    return base64.b64encode(stream.getbuffer()).decode()


def unpacked(archive: str, target: Path, most_bytes: int) -> None:
    """Write the content of an archive in base64 to a path that does not exist.

    Raises:
        RefusedFilesError: an entry is not copied.
    """
    try:
        unpack(io.BytesIO(base64.b64decode(archive, validate=True)), str(target), most_bytes)
    except (RefusedFileError, RecursionError, OSError, ValueError) as error:
        raise RefusedFilesError(f"{target.name} was not copied: {error}.") from error


def relay_to(
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return the callback of a server that connects each of its clients to another server."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # one of them has gone
            try:
                other_reader, other_writer = await connect()
                try:
                    await asyncio.gather(_copied(reader, other_writer), _copied(other_reader, writer))
                finally:
                    other_writer.close()
            finally:
                writer.close()

    return relay


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
