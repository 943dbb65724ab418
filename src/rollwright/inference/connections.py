"""HTTP to inference servers: pools for each event loop, and errors that tell whether a response had begun."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import httpx

from rollwright.errors import EngineError

#: httpx looks at every connection of a pool on each event, so its cost per request grows with the pool. Small pools keep it
#: flat: 1,000 requests at once over pools of 64 cost about a quarter of the time that one pool of 1,000 takes.
POOL_SIZE = 64


class ConnectionLostError(EngineError):
    """The connection failed before a response began: the request can be sent again, to this server or another."""


class ServerRefusedError(EngineError):
    """The server answered with an error status; ``status`` holds it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """One for all clients: making it reads every root certificate, which takes longer than a request."""
    return ssl.create_default_context()


@dataclass
class _Pool:
    client: httpx.AsyncClient
    in_flight: int = 0


@dataclass
class _LoopPools:
    pools: list[_Pool] = field(default_factory=list)

    def emptiest(self, make: Any) -> _Pool:
        pool = min(self.pools, key=lambda candidate: candidate.in_flight, default=None)
        if pool is None or pool.in_flight >= POOL_SIZE:
            pool = _Pool(make())
            self.pools.append(pool)
        return pool


def _message_of(response: httpx.Response) -> str:
    """What an error response says, in one line."""
    try:
        body = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return response.text.strip()[:500]
    for key in ("error", "detail", "message"):
        if isinstance(body, dict) and key in body:
            value = body[key]
            return str(value.get("message", value) if isinstance(value, dict) else value)[:1000]
    return json.dumps(body)[:500]


class Connections:
    """Requests to any number of servers, awaited on any event loop or made synchronously.

    One set of pools belongs to each event loop, because a connection cannot be awaited on another loop than its own.
    """

    def __init__(self, *, api_key: str | None = None, timeout: float = 3600.0, connect_timeout: float = 10.0) -> None:
        """Args:
        api_key: sent as a bearer token.
        timeout: seconds for one whole exchange.
        connect_timeout: seconds for opening a connection.
        """
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout, connect=connect_timeout)
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopPools] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._sync = httpx.Client(headers=self._headers, timeout=self._timeout, trust_env=False, verify=_ssl_context())
        self._closed = False

    def _make(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=POOL_SIZE, max_keepalive_connections=POOL_SIZE, keepalive_expiry=4.0)
        return httpx.AsyncClient(
            headers=self._headers, timeout=self._timeout, limits=limits, trust_env=False, verify=_ssl_context()
        )

    async def post(self, url: str, payload: Any) -> dict[str, Any]:
        """POST JSON and give back the JSON of a 2xx response.

        Raises:
            ConnectionLostError: the connection failed before a response began.
            ServerRefusedError: an error status.
            EngineError: the time ran out, or the response broke off.
        """
        if self._closed:
            raise EngineError(f"The client is closed; {url} was not asked. Call initialize() first.")
        with self._lock:
            pools = self._by_loop.setdefault(asyncio.get_running_loop(), _LoopPools())
            pool = pools.emptiest(self._make)
            pool.in_flight += 1
        try:
            request = pool.client.build_request("POST", url, json=payload)
            try:
                response = await pool.client.send(request, stream=True)
            except httpx.TimeoutException as error:
                if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
                    raise ConnectionLostError(f"{url} did not accept a connection ({type(error).__name__}).") from error
                raise EngineError(
                    f"{url} did not answer within {self._timeout.read:g} s; raise rollout.request_timeout if requests take longer."
                ) from error
            except httpx.TransportError as error:
                raise ConnectionLostError(
                    f"The connection to {url} was lost before a response began ({type(error).__name__}: {error})."
                ) from error
            try:
                await response.aread()
            except httpx.TransportError as error:
                raise EngineError(f"The response of {url} broke off ({type(error).__name__}: {error}).") from error
            finally:
                await response.aclose()
        finally:
            with self._lock:
                pool.in_flight -= 1
        return self._parse(response)

    def request(self, method: str, url: str, payload: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """The same, synchronously; works while an event loop runs in this thread.

        Raises:
            ConnectionLostError, ServerRefusedError, EngineError: as ``post``.
        """
        try:
            response = self._sync.request(method, url, json=payload, timeout=self._timeout if timeout is None else timeout)
        except httpx.TimeoutException as error:
            raise EngineError(f"{url} did not answer in time ({type(error).__name__}).") from error
        except httpx.TransportError as error:
            raise ConnectionLostError(f"{url} cannot be reached ({type(error).__name__}: {error}).") from error
        return self._parse(response)

    @staticmethod
    def _parse(response: httpx.Response) -> dict[str, Any]:
        if response.status_code >= 400:
            raise ServerRefusedError(
                f"{response.request.url} answered {response.status_code}: {_message_of(response)}", response.status_code
            )
        if not response.content:
            return {}
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            return {"text": response.text}

    def close(self) -> None:
        """Close every pool. Those of another loop are closed on it where it still runs, and dropped where it does not."""
        self._closed = True
        self._sync.close()
        with self._lock:
            owned = list(self._by_loop.items())
            self._by_loop.clear()
        for loop, pools in owned:
            for pool in pools.pools:
                if loop.is_closed() or not loop.is_running():
                    continue
                loop.call_soon_threadsafe(lambda client=pool.client: asyncio.ensure_future(client.aclose()))
