"""HTTP to inference servers: one session for each event loop, and errors that tell whether a response had begun.

Generation uses aiohttp, which costs this process 0.2 ms per request (httpx2 costs several milliseconds when hundreds run at once). The
rare control calls are synchronous and use httpx2, each on a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import threading
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import httpx2

from rollwright.errors import EngineError, PromptTooLongError, WeightUpdateError
from rollwright.inference.network import allow_many_connections

#: Below the keep-alive limits of servers (uvicorn's is 5 s), so that a reused connection is rarely about to be closed.
_KEEP_ALIVE_SECONDS = 4.0
_RESPONSE_BYTES = 1 << 20


class ConnectionLostError(EngineError):
    """The connection failed before a response began, so the request can be sent again, to this server or another."""


class ServerRefusedError(EngineError):
    """The server answered with an error status; ``status`` holds it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class LostServersError(WeightUpdateError):
    """No server took new weights because servers were lost meanwhile; restarted servers can take the weights."""


class UpdateRefusedError(WeightUpdateError):
    """A server rejected an update before it read any weight, so it still computes with its old weights."""


#: Phrases that servers use when a prompt leaves no room for a token.
_TOO_LONG = ("longer than", "too long", "context length", "no room", "maximum model length", "exceeds")


def refusal_of(error: ServerRefusedError) -> EngineError:
    """Convert a server's rejection of a generation request to the caller's error; a prompt that is too long has its own type."""
    text = str(error).lower()
    if error.status in (400, 422) and any(sign in text for sign in _TOO_LONG):
        return PromptTooLongError(f"{error} Shorten the prompt, or start the server with a larger context.")
    return EngineError(str(error))


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return a context that all clients share, because creating one reads every root certificate, which takes longer than a request."""
    return ssl.create_default_context()


def _message_of(content: bytes) -> str:
    """Extract the message of an error response, shortened if it is long."""
    text = content.decode(errors="replace").strip()
    with contextlib.suppress(json.JSONDecodeError):
        body = json.loads(text)
        for key in ("error", "detail", "message"):
            if isinstance(body, dict) and key in body:
                value = body[key]
                return str(value.get("message", value) if isinstance(value, dict) else value)[:1000]
    return text[:500]


def _parse(url: str, status: int, content: bytes) -> dict[str, Any]:
    if status >= 400:
        remedy = " Set rollout.api_key, or ROLLWRIGHT_API_KEY." if status == 401 else ""
        raise ServerRefusedError(f"{url} answered {status}: {_message_of(content)}{remedy}", status)
    if not content:
        return {}
    try:
        return json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {"text": content.decode(errors="replace")}


class Connections:
    """Requests to any number of servers, awaited on any event loop or made synchronously.

    Each event loop has a session of its own, because a connection can only be awaited on the loop that opened it.
    """

    def __init__(self, *, api_key: str | None = None, timeout: float = 3600.0, connect_timeout: float = 10.0) -> None:
        """Args:
        api_key: sent as a bearer token.
        timeout: seconds for a whole exchange.
        connect_timeout: seconds for opening a connection.
        """
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=connect_timeout)
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator]] = {}
        self._lock = threading.Lock()
        self._sync = httpx2.Client(
            headers=self._headers,
            timeout=httpx2.Timeout(timeout, connect=connect_timeout),
            # Connections are not reused: uvicorn closes them without notice after an exception (a 500) and after 5 s without a
            # request. A control call whose connection breaks cannot be sent again, because it may have been carried out.
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
            verify=_ssl_context(),
        )
        self._closed = False
        self._most_connections = allow_many_connections()

    async def _open_session(self) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Yield the session of this loop once, and close it when the loop shuts down its asynchronous generators."""
        connector = aiohttp.TCPConnector(
            limit=self._most_connections, keepalive_timeout=_KEEP_ALIVE_SECONDS, ssl=_ssl_context()
        )
        session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout, read_bufsize=_RESPONSE_BYTES
        )
        try:
            yield session
        finally:
            await session.close()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop in self._sessions:
            return self._sessions[loop][0]
        owner = self._open_session()
        session = await anext(owner)
        with self._lock:
            self._sessions = {other: entry for other, entry in self._sessions.items() if not other.is_closed()}
            self._sessions[loop] = (session, owner)
        return session

    async def post(self, url: str, payload: Any) -> dict[str, Any]:
        """POST JSON and return the JSON of a 2xx response.

        Raises:
            ConnectionLostError: the connection failed before a response began.
            ServerRefusedError: the response has an error status.
            EngineError: the request timed out, or the response broke off.
        """
        if self._closed:
            raise EngineError(f"The client is closed; {url} was not asked. Call initialize() first.")
        session = await self._session()
        response: aiohttp.ClientResponse | None = None
        try:
            async with session.post(url, json=payload) as response:
                return _parse(url, response.status, await response.read())
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise ConnectionLostError(f"{url} did not accept a connection in time.") from error
            raise EngineError(
                f"{url} did not answer within {self._timeout.total:g} s; raise rollout.request_timeout if requests take longer."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            if response is not None:
                raise EngineError(f"The response of {url} broke off ({type(error).__name__}: {error}).") from error
            raise ConnectionLostError(
                f"The connection to {url} was lost before a response began ({type(error).__name__}: {error})."
            ) from error

    def request(self, method: str, url: str, payload: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Make a synchronous request; works while an event loop runs in this thread.

        Raises:
            ConnectionLostError, ServerRefusedError, EngineError: see ``post``.
        """
        limit = httpx2.USE_CLIENT_DEFAULT if timeout is None else timeout
        try:
            response = self._sync.request(method, url, json=payload, timeout=limit)
        except httpx2.TimeoutException as error:
            raise EngineError(f"{url} did not answer in time ({type(error).__name__}).") from error
        except httpx2.TransportError as error:
            raise ConnectionLostError(f"{url} cannot be reached ({type(error).__name__}: {error}).") from error
        return _parse(url, response.status_code, response.content)

    def close(self) -> None:
        """Close every session: on its loop if that is running, otherwise when its loop ends."""
        self._closed = True
        self._sync.close()
        with self._lock:
            sessions, self._sessions = self._sessions, {}
        for loop, (session, _) in sessions.items():
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(session.close(), loop)
