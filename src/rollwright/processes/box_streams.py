"""Talking with a ``box_server`` and with the commands that it has started. See there for the messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.errors import SandboxError

_CHUNK = 65536
_CLOSE_SECONDS = 2.0  # for an opened process to end after its input has ended
_MOST_LINE = 1 << 20


@dataclass
class Asked:
    """A request that was sent."""

    number: int
    answer: asyncio.Future[dict[str, Any]]


class ServerChannel:
    """Requests to a server and its answers. It may be used from one event loop after another."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sending = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._received = bytearray()
        self._why_closed = "has not been started"
        self._killing: set[asyncio.Task[None]] = set()

    def connect(self, control: socket.socket) -> None:
        """Use a connected socket."""
        control.setblocking(False)
        self._control = control

    async def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Asked:
        """Send a request and duplicates of some descriptors.

        Raises:
            SandboxError: the box is gone.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop and self._control is not None:
            self._loop, self._sending = loop, asyncio.Lock()
            loop.add_reader(self._control, self._receive)
        number, answer = next(self._numbers), loop.create_future()
        self._waiting[number] = answer
        body = json.dumps({**request, "number": number}).encode()
        async with self._sending:
            await self.send(len(body).to_bytes(4, "big"), descriptors)
            await self.send(body)
        return Asked(number, answer)

    async def send(self, content: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send bytes, and duplicates of some descriptors with the first of them.

        Raises:
            SandboxError: the box is gone.
        """
        while self._control is not None:
            with contextlib.suppress(BlockingIOError):
                try:
                    sent = socket.send_fds(self._control, [content], descriptors)
                except (BrokenPipeError, ConnectionResetError):
                    self.close("has ended")
                    break
                content, descriptors = content[sent:], ()
                if not content:
                    return
            await asyncio.sleep(0.005)
        raise SandboxError(f"the box {self._why_closed}.")

    def kill(self, asked: Asked) -> None:
        """Have the command of a request killed, without waiting."""
        if self._control is not None and self._loop is not None and not self._loop.is_closed():
            task = self._loop.create_task(self._kill(asked))
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)

    async def _kill(self, asked: Asked) -> None:
        with contextlib.suppress(SandboxError):
            await self.ask({"op": "kill", "of": asked.number})

    def close(self, why: str) -> None:
        """Close the channel, which ends the server. Requests without an answer fail. Idempotent."""
        control, self._control = self._control, None
        if control is None:
            return
        self._why_closed = why
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(control)
        control.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(f"the box {why}."))
                answer.exception()  # nobody may be waiting for it
        self._waiting.clear()

    def _receive(self) -> None:
        assert self._control is not None
        try:
            part = self._control.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        if not part or len(self._received) > _MOST_LINE:
            self.close("has ended")
            return
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            answer = self._waiting.pop(message["number"], None)
            if answer is not None and not answer.done():
                answer.set_result(message)


# -- the streams of a command ------------------------------------------------------------------------------------------


class CommandStreams:
    """This side of the pipes that are a command's standard input, output and error. A context that closes them."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self) -> None:
        self._transports: list[asyncio.BaseTransport] = []

    async def connect(self, stdin: int | None, stdout: int | None, stderr: int | None) -> None:
        """Take over descriptors. They are closed even if this fails."""
        if stdin is not None:
            self.stdin = await self._writer(stdin)
        if stdout is not None:
            self.stdout = await self._reader(stdout)
        if stderr is not None:
            self.stderr = await self._reader(stderr)

    async def _writer(self, descriptor: int) -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0))
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    async def _reader(self, descriptor: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        self._transports.append(transport)
        return reader

    async def feed(self, content: bytes) -> None:
        """Write all of the standard input, and close it. The command need not read it."""
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(content), _CHUNK):
                self.stdin.write(content[begin : begin + _CHUNK])
                await self.stdin.drain()
        self.stdin.close()

    def close(self) -> None:
        """Close all streams. Idempotent."""
        for transport in self._transports:
            transport.close()

    def __enter__(self) -> CommandStreams:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class KeptOutput:
    """The first bytes of a stream; the rest is dropped."""

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, bytearray()
        self.is_cut = False

    @property
    def text(self) -> str:
        """What was kept."""
        return self._kept.decode("utf-8", "replace")

    async def fill(self, stream: asyncio.StreamReader) -> None:
        """Read a stream to its end."""
        while chunk := await stream.read(_CHUNK):
            room = self._most - len(self._kept)
            self._kept += chunk[:room]
            self.is_cut = self.is_cut or len(chunk) > room


class OpenProcess:
    """A command that runs while this process talks with it; see :class:`rollwright.processes.box.BoxProcess`."""

    def __init__(
        self,
        outcome: Callable[[Asked, float], Awaitable[dict[str, Any]]],
        kill: Callable[[], None],
        asked: Asked,
        streams: CommandStreams,
    ) -> None:
        self._outcome, self._kill, self._asked, self._streams = outcome, kill, asked, streams
        self._answer: dict[str, Any] | None = None

    @property
    def number(self) -> int:
        """The number of the request that started it."""
        return self._asked.number

    async def write(self, data: bytes) -> None:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        try:
            if self._streams.stdin.is_closing():
                raise BrokenPipeError
            self._streams.stdin.write(data)
            await self._streams.stdin.drain()
        except ConnectionError as error:
            raise SandboxError("the process in the box has closed its standard input, or has ended.") from error

    async def read(self, most: int = _CHUNK) -> bytes:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        return await self._streams.stdout.read(most)

    async def end(self) -> int | None:
        """See :class:`rollwright.processes.box.BoxProcess`."""
        if self._answer is None:
            self._streams.stdin.close()
            await asyncio.wait([self._asked.answer], timeout=_CLOSE_SECONDS)
            if not self._asked.answer.done():
                self._kill()
            try:
                self._answer = await self._outcome(self._asked, 15.0)
            finally:
                self._streams.close()
        return self._answer["exit"]
