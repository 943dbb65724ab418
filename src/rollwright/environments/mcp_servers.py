"""MCP servers: the tools that they offer, for one episode.

A server talks over the standard streams of a process, which runs in a box, or over streamable HTTP. The SDK is the package ``mcp``, version 1
or 2. It demands that a session is opened and closed in one task; an ``McpSession`` has such a task, and can be used from any::

    session = McpSession(McpServer(command="python3 notes.py", directory="tools"))
    try:
        tools = await session.list_tools()
        text, ok, images = await session.call("add_note", {"text": "Buy milk."})
    finally:
        await session.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from rollwright.errors import ConfigError, LostToolError, SandboxError
from rollwright.processes.box import Box, BoxProcess, BoxSpec
from rollwright.processes.boxes import box_limits, make_box, programs_in
from rollwright.processes.sandbox import sandbox_name
from rollwright.registry import nearest
from rollwright.tracking.logging import getLogger

logger = getLogger("tools")

WORKDIR, HOME, ERRORS = "/app", "/home/agent", "/logs/stderr"
#: Runs the command with its standard error in a file, which a message quotes if the server fails.
_WITH_ERRORS = f'exec "$0" "$@" 2>{ERRORS}'
_MOST_LINE = 1 << 24  # bytes of a message
_STOP_SECONDS = 15.0  # for a session to end; the process gets 2 s of them
_CONNECT_SECONDS = 30.0
_CHECK_SECONDS = 5.0
_ENDED = "it has ended"
_TOLD = 2000  # characters of a server's standard error in messages
_OF_COMMAND = ("environment", "directory", "programs", "network", "limits", "image")
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")  # types of images that are passed on
_HEADER_MISMATCH, _UNSUPPORTED_REVISION = -32020, -32022  # the protocol's codes of errors
_NAME = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class McpServer:
    """An MCP server whose tools a workflow offers. Either ``command`` or ``url`` is set.

    Attributes:
        command: command line of a server that talks over its standard streams. Each episode starts it in a box of its own.
        url: address of a server that talks over streamable HTTP. Each episode has a session of its own.
        headers: of requests to ``url``.
        environment: variables of the command.
        directory: directory of this machine that the command starts in and can read.
        programs: directories of this machine with programs, which the box can read: virtual environments, directories with
            ``node_modules``, or others, which are put into ``PATH`` themselves.
        network: let the command reach the network.
        limits: fields of ``BoxLimits``.
        image: image of a docker or podman box.
        tools: names of the tools to offer; empty: all.
        prefix: put before the names of the tools, to tell apart those of several servers.
        durable: kind of durable call that a tool call is: ``recorded``, ``restart`` or ``pure``. Empty: ``recorded`` for tools that the
            server declares as read-only, else ``restart``, because the server's state is lost when a run is resumed.
        start_timeout: time limit in seconds of starting the server and listing its tools.

    Raises:
        ConfigError: the attributes contradict each other, or the package ``mcp`` is missing.
    """

    command: str | Sequence[str] = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    programs: Sequence[str] | str = ()
    network: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    image: str = ""
    tools: Sequence[str] = ()
    prefix: str = ""
    durable: str = ""
    start_timeout: float = 60.0

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                f"an MCP server has a command or a url, one of them; {'both are' if self.url else 'neither is'} set."
            )
        unread = ["headers"] if self.command and self.headers else []
        if self.url:
            unread = [name for name in _OF_COMMAND if getattr(self, name)]
            if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
                raise ConfigError(f"MCP server: the url is {self.url!r}; it has to begin with http:// or https:// and a host.")
        if unread:
            raise ConfigError(
                f"MCP server {self}: {', '.join(unread)} has no effect with a {'url' if self.url else 'command'}."
            )
        if self.durable not in ("", "recorded", "restart", "pure"):
            raise ConfigError(f"MCP server {self}: durable is {self.durable!r}; choose recorded, restart or pure.")
        if self.start_timeout <= 0 or _NAME.search(self.prefix):
            raise ConfigError(f"MCP server {self}: start_timeout is above 0, and prefix has only letters, digits, '_' and '-'.")
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(f"MCP server {self}: the package mcp is missing: pip install 'rollwright[mcp]'.")
        if self.command:
            self._spec()

    def __str__(self) -> str:
        address = urlsplit(self.url)  # without what may be a secret
        if self.url:
            return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> McpServer:
        """Make one from the keys and values of a config."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ConfigError(f"an MCP server has no key {unknown[0]!r}; {nearest(unknown[0], known)}")
        return cls(**given)

    @property
    def uses_sandbox(self) -> bool:
        """True if the server runs in a box."""
        return bool(self.command)

    def _command_line(self) -> list[str]:
        words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        return ["sh", "-c", _WITH_ERRORS, *programs_in(self.programs).on_path(words)]

    def _spec(self) -> BoxSpec:
        readable = dict(programs_in(self.programs, own=(WORKDIR, HOME)).readable)
        if self.directory:
            if not self._directory.is_dir():
                raise ConfigError(f"MCP server {self}: the directory {self._directory} does not exist.")
            readable[str(self._directory)] = self._directory
        return BoxSpec(
            limits=box_limits(self.limits),
            readable=readable,
            writable=(WORKDIR, HOME, "/tmp", "/logs"),
            environment=self.environment,
            network=self.network,
            image=self.image,
        )

    @property
    def _directory(self) -> Path:
        return Path(self.directory).expanduser().resolve()


class McpSession:
    """A session with a server. It begins with the first call of a method, and is used from one event loop.

    Methods raise ``LostToolError`` if the server cannot be reached or has ended, and ``SandboxError`` if there is no box for it. A lost session
    stays lost.
    """

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._starting = asyncio.Lock()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._session: Any = None
        self._lost = ""  # why requests are not answered any more
        self._said = ""  # the end of the server's standard error, if it failed

    async def start(self) -> None:
        """Start the server and open the session, if that has not been done."""
        async with self._starting:
            if self._session is not None:
                return
            if self._owner is not None:
                raise await self._failure("did not start")
            loop = asyncio.get_running_loop()
            ready = loop.create_future()
            self._owner = loop.create_task(self._own(ready))
            try:
                await asyncio.wait({ready, self._owner}, timeout=self.server.start_timeout, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self.stop()
                raise
            if not ready.done():
                if not self._owner.done():
                    self._lost = self._lost or f"it gave no answer within {self.server.start_timeout:g} seconds"
                    await self.stop()
                raise await self._failure("did not start")
            self._session = ready.result()

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools: ``name``, ``description``, ``inputSchema`` and ``annotations``, as the protocol names them.

        Raises:
            LostToolError: see above; or the server lacks a tool that ``McpServer.tools`` names.
        """
        await self.start()
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = {} if cursor is None else {"cursor": cursor}
            try:
                async with asyncio.timeout(self.server.start_timeout):
                    answer = await self._answer(lambda page=page: self._session.list_tools(params=_paged(**page)))
            except (LostToolError, SandboxError):
                raise
            except Exception as error:  # the SDK raises various types
                raise LostToolError(
                    f"the MCP server {self.server} does not list its tools: {error or 'no answer in time'}"
                ) from error
            found += answer["tools"]
            cursor = answer.get("nextCursor")
            if not cursor:
                break
        if missing := [name for name in self.server.tools if name not in {tool["name"] for tool in found}]:
            names = [tool["name"] for tool in found]
            raise LostToolError(f"the MCP server {self.server} has no tool {missing[0]!r}; {nearest(missing[0], names)}")
        return [tool for tool in found if not self.server.tools or tool["name"] in self.server.tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool, list[str]]:
        """Call a tool; return the text that the model reads, whether the call succeeded, and the images as ``data:`` URLs."""
        await self.start()
        try:
            answer = await self._called(name, arguments)
        except (LostToolError, SandboxError):
            raise
        except Exception as error:  # the protocol's errors, and results that do not fit the tool's own schema
            await self.check()
            return str(error) or type(error).__name__, False, []
        images = [f"data:{block['mimeType']};base64,{block['data']}" for block in answer.get("content", ()) if _is_image(block)]
        return _text(answer), not answer.get("isError"), images

    async def _called(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        def request() -> Awaitable[Any]:
            return self._session.call_tool(name, dict(arguments))

        try:
            return await self._answer(request)
        except Exception as error:  # the versions of the SDK have different types
            if getattr(getattr(error, "error", None), "code", None) != _HEADER_MISMATCH:
                raise
        await self.list_tools()  # says which arguments are headers, too; a replayed list did not come from this session
        return await self._answer(request)

    async def check(self) -> None:
        """Raise if the server is gone. A server over HTTP is asked; one that is only busy need not answer."""
        if self._lost:
            raise await self._failure("is gone")
        if self.server.command:
            return  # the end of its process is noticed
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self._answer(lambda: self._session.list_tools(params=_paged()))  # newer revisions have no ping
        except (LostToolError, SandboxError):
            raise
        except Exception as error:  # any answer, also an error, shows that it is there; no answer, that it is busy
            logger.debug("the MCP server %s does not list its tools: %r", self.server, error)

    async def stop(self) -> None:
        """End the session and the server. Idempotent."""
        self._closing.set()
        if self._owner is not None:
            await asyncio.shield(asyncio.ensure_future(self._stopped(self._owner)))

    async def _stopped(self, owner: asyncio.Task[None]) -> None:
        if self._session is None:
            owner.cancel()  # it waits for the handshake
        await asyncio.wait({owner}, timeout=_STOP_SECONDS)
        owner.cancel()
        await asyncio.wait({owner}, timeout=_STOP_SECONDS)
        if not owner.done():
            logger.error("the session with the MCP server %s does not end", self.server)
        elif not owner.cancelled() and (error := owner.exception()) is not None:
            logger.debug("the session with the MCP server %s ended with %s", self.server, error)

    async def _answer(self, request: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        """Return the answer to a request in the protocol's own names, which both versions of the SDK share."""
        assert self._owner is not None
        if self._lost:
            raise await self._failure("is gone")
        asked = asyncio.ensure_future(request())
        try:
            await asyncio.wait({asked, self._owner}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() or (asked.exception() is not None and self._lost):
                raise await self._failure("is gone")
            return asked.result().model_dump(by_alias=True, mode="json", exclude_none=True)
        finally:
            asked.cancel()

    async def _failure(self, what: str) -> Exception:
        """Return the error for a session that is lost, with the reason."""
        assert self._owner is not None
        self._closing.set()
        await asyncio.wait({self._owner}, timeout=_STOP_SECONDS)
        reason: BaseException | None = None
        if self._owner.done() and not self._owner.cancelled():
            reason = self._owner.exception()
        while isinstance(reason, BaseExceptionGroup):
            reason = reason.exceptions[0]
        if isinstance(reason, ConfigError | SandboxError):
            return reason
        is_known = self._lost not in ("", _ENDED) or reason is None or isinstance(reason, LostToolError)
        why = (self._lost or _ENDED) if is_known else f"{type(reason).__name__}: {reason}"
        said = f" It said: {self._said}" if self._said else ""
        return LostToolError(f"the MCP server {self.server} {what}: {why}.{said}")

    # -- the task that opens and closes the session ----------------------------------------------------------------------

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        from mcp import ClientSession

        streams = self._streams_of_box() if self.server.command else self._streams_of_http()
        async with streams as (receive, send), ClientSession(receive, send) as session:
            await self._agree(session)
            ready.set_result(session)
            try:
                await self._closing.wait()
            finally:
                self._lost = self._lost or _ENDED  # before the SDK answers open requests with an error of its own

    async def _agree(self, session: Any) -> None:
        """Agree with the server on a revision of the protocol.

        The handshake is tried first, because it gives the session a state of its own at servers over HTTP. Servers of the revisions from 2026-07-28
        on may refuse it, and are asked which revisions they speak instead.
        """
        error_of_sdk: Any = getattr(importlib.import_module("mcp"), "McpError" if _has_version_1() else "MCPError")
        try:
            await session.initialize()
        except error_of_sdk as refused:
            if _has_version_1():
                self._check_revisions(refused.error.code, refused.error.data)
                raise
            try:
                await session.discover()
            except error_of_sdk as error:
                self._check_revisions(error.error.code, error.error.data)
                raise refused from error
            self._lost = ""  # an HTTP status may have refused the handshake

    def _check_revisions(self, code: int, data: Any) -> None:
        """Raise a ``ConfigError`` if a server's error says that the SDK speaks none of its revisions of the protocol."""
        if code == _UNSUPPORTED_REVISION:
            supported = " or ".join((data or {}).get("supported", ())) or "unknown"
            advice = "pip install 'mcp>=2'" if _has_version_1() else "pip install --upgrade mcp"
            raise ConfigError(
                f"the MCP server {self.server} speaks revision {supported} of the protocol, and mcp "
                f"{importlib.metadata.version('mcp')} does not: {advice}."
            )

    @contextlib.asynccontextmanager
    async def _streams_of_http(self) -> AsyncIterator[tuple[Any, Any]]:
        try:
            from mcp.client.streamable_http import streamable_http_client
        except ImportError as error:
            raise ConfigError(f"MCP over HTTP needs mcp 1.24 or later ({error}): pip install 'rollwright[mcp]'.") from error
        library: Any = importlib.import_module("httpx" if _has_version_1() else "httpx2")
        client = library.AsyncClient(
            headers=dict(self.server.headers),
            timeout=library.Timeout(_CONNECT_SECONDS, read=None),  # the call has a time limit
            event_hooks={"response": [self._look_at]},
            trust_env=urlsplit(self.server.url).hostname not in ("localhost", "127.0.0.1", "::1"),  # a proxy leads elsewhere
        )
        async with client, streamable_http_client(self.server.url, http_client=client) as streams:
            yield streams[0], streams[1]

    async def _look_at(self, response: Any) -> None:
        """Notice an answer that comes from no server of the protocol, or from one that has lost the session."""
        if response.request.method == "POST" and response.status_code >= 400 and response.status_code != 400:
            self._lost = self._lost or f"it answered with HTTP status {response.status_code}"
        elif response.status_code == 400 and _has_version_1() and self._session is None:
            await response.aread()
            with contextlib.suppress(
                ValueError, TypeError, KeyError, AttributeError
            ):  # not every 400 has an error of the protocol
                error = response.json()["error"]
                self._check_revisions(error["code"], error.get("data"))

    @contextlib.asynccontextmanager
    async def _streams_of_box(self) -> AsyncIterator[tuple[Any, Any]]:
        box = make_box(sandbox_name(), self.server._spec())
        await box.start()
        try:
            where = str(self.server._directory) if self.server.directory else None
            process = await box.open(self.server._command_line(), cwd=where)
            try:
                async with self._streams_of_process(process) as streams:
                    yield streams
            finally:
                exit_code = await process.end()
                if self._lost and exit_code:
                    self._lost = f"it has ended with exit code {exit_code}"
        except Exception:  # whatever went wrong, the server may have said why
            self._said = await _end_of_errors(box)
            raise
        finally:
            await box.stop()

    @contextlib.asynccontextmanager
    async def _streams_of_process(self, process: BoxProcess) -> AsyncIterator[tuple[Any, Any]]:
        """Yield the streams of messages that the SDK reads and writes; a message is a line of the process's streams."""
        import anyio
        from mcp.shared.message import SessionMessage

        received, receive = anyio.create_memory_object_stream[Any](0)
        send, to_send = anyio.create_memory_object_stream[Any](0)

        async def read() -> None:
            async with received:
                rest = b""
                while chunk := await process.read():
                    *lines, rest = (rest + chunk).split(b"\n")
                    if len(rest) > _MOST_LINE:
                        self._lost = f"it sent a message of more than {_MOST_LINE} bytes"
                        raise LostToolError(self._lost)
                    for line in filter(bytes.strip, lines):
                        try:
                            message = _messages().validate_json(line)
                        except ValueError:
                            logger.warning(
                                "MCP server %s: printed %r, which is no message of the protocol", self.server, line[:200]
                            )
                            continue
                        await received.send(SessionMessage(message))
                self._lost = self._lost or _ENDED
                raise LostToolError(self._lost)

        async def write() -> None:
            async with to_send:
                async for each in to_send:
                    line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    try:
                        await process.write(line.encode("utf-8", "replace") + b"\n")
                    except SandboxError:
                        return  # it has ended, which ``read`` notices

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(write)
            try:
                yield receive, send
            finally:
                group.cancel_scope.cancel()


async def _end_of_errors(box: Box) -> str:
    with contextlib.suppress(SandboxError):
        result = await box.exec(["tail", "-c", str(_TOLD), ERRORS], timeout=5)
        return result.stdout.strip()
    return ""


def _has_version_1() -> bool:
    """Return whether the SDK is of version 1."""
    return importlib.metadata.version("mcp").startswith("1.")


@functools.cache
def _messages() -> TypeAdapter[Any]:
    from mcp.types import JSONRPCMessage

    return TypeAdapter(JSONRPCMessage)


def _paged(cursor: str | None = None) -> Any:
    from mcp.types import PaginatedRequestParams

    return PaginatedRequestParams(cursor=cursor)


def _is_image(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "image" and block.get("mimeType") in _IMAGES


def _text(result: Mapping[str, Any]) -> str:
    """Return the text of a result without its images. Sounds, and images of other types, are named."""
    parts = []
    for block in result.get("content", ()):
        if _is_image(block):
            continue
        resource = block.get("resource", block)
        if "text" in resource:
            parts.append(resource["text"])
        elif "uri" in resource:
            parts.append(f"[{resource['uri']}]")
        else:
            parts.append(f"[{block['type']}, {block.get('mimeType', 'unknown type')}, not shown]")
    if not parts and result.get("structuredContent") is not None and not any(map(_is_image, result.get("content", ()))):
        parts.append(json.dumps(result["structuredContent"], ensure_ascii=False))
    return "\n".join(parts)


def tool_name(server: McpServer, name: str) -> str:
    """Return the name under which a model sees a tool: chat APIs allow fewer characters than MCP."""
    return _NAME.sub("_", server.prefix + name)[:64]
