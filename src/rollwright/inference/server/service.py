"""The common parts of all HTTP services: their error responses, their sockets, and serving them behind ``request_guard``.

The inference server, the retrieval service, the service of boxes, the OpenAI front, the viewer and ``serve`` mode are all made by
``make_service``, so they all have the same checks.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollwright import __version__
from rollwright.errors import ConfigError
from rollwright.inference.network import allow_many_connections
from rollwright.inference.server.exchange import RequestError, error_response
from rollwright.inference.server.request_guard import Guard
from rollwright.inference.server.settings import LOOPBACK, ServiceSettings
from rollwright.tracking.logging import getLogger

logger = getLogger("service")

_START_SECONDS = 30.0
_BACKLOG = 2048  # connections that may wait to be accepted when many clients start at once


def make_service(
    title: str,
    routers: Iterable[APIRouter],
    settings: ServiceSettings,
    *,
    guard: Callable[..., Guard] = Guard,
    refused: Mapping[str, str] | None = None,
    lifespan: Any = None,
) -> FastAPI:
    """Build an application behind a guard, with all errors in one form and its schema at ``/openapi.json``.

    Args:
        title: title of the schema.
        routers: routes that the application serves.
        settings: key and limits.
        guard: builds the middleware.
        refused: path -> advice for its error message, for paths that clients may try but that are not served.
        lifespan: FastAPI's lifespan context.
    """
    app = FastAPI(title=title, version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)

    async def root() -> JSONResponse:
        return JSONResponse({"service": title, "version": __version__})

    for method in ("GET", "HEAD"):  # liveness probes
        app.add_api_route("/", root, methods=[method], operation_id=f"root_{method.lower()}")
    paths = sorted({getattr(route, "path", "") for router in routers for route in router.routes})

    async def refuse_path(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path, message = request.url.path, str(error.detail)
        if error.status_code == 404 and path in (refused or {}):
            return error_response(RequestError(f"{path} is not served: {(refused or {})[path]}."))
        if error.status_code == 404:
            message = f"There is no {path} here; there are {', '.join(paths)}."
        elif error.status_code == 405:
            message = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}."
        return error_response(RequestError(message, status=error.status_code), error.headers)

    app.add_exception_handler(HTTPException, refuse_path)
    app.add_middleware(partial(guard, settings=settings))
    return app


def bind(settings: ServiceSettings) -> list[socket.socket]:
    """Bind the sockets of a service. A loopback host gets an IPv4 and an IPv6 socket, so that ``localhost`` reaches it either way.

    If ``settings.port`` is 0, it is set to the free port that was chosen.

    Raises:
        ConfigError: the port is in use or the host is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    for name in ["127.0.0.1", "::1"] if settings.host in LOOPBACK else [settings.host]:
        listener = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if ":" in name:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((name, settings.port))
        except OSError as error:
            listener.close()
            if sockets:
                continue  # this machine has no IPv6, or no loopback address of it
            raise ConfigError(f"{settings.host}:{settings.port} cannot be bound ({error}): choose another port.") from error
        sockets.append(listener)
        settings.port = sockets[0].getsockname()[1]
    return sockets


def _bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o666)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the Unix socket {path} cannot be made ({error}); is the path of TMPDIR longer than 80 characters?"
        ) from error
    return listener


def url_of(settings: ServiceSettings) -> str:
    """Return ``http://host:port`` of a listening service."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def run(app: FastAPI, settings: ServiceSettings, sockets: list[socket.socket], log_level: str = "warning") -> None:
    """Serve until SIGINT or SIGTERM."""
    allow_many_connections()
    _server(app, settings, log_level=log_level, timeout_keep_alive=30, timeout_graceful_shutdown=5).run(sockets=sockets)


def _server(app: FastAPI, settings: ServiceSettings, **options: Any) -> uvicorn.Server:
    protocol: Any = partial(TimedRequests, receive_seconds=settings.receive_seconds)
    options = {"access_log": False, "proxy_headers": False, "backlog": _BACKLOG, "http": protocol, "ws": "none", **options}
    return uvicorn.Server(uvicorn.Config(app, **options))


class TimedRequests(HttpToolsProtocol):
    """Closes a connection if a request, headers and body, does not arrive within ``receive_seconds``.

    The timer starts when the client connects and, after a response, with the next byte. So a client that trickles bytes cannot hold a
    connection for longer, with or without a key. The duration of a response is not limited.
    """

    def __init__(self, *arguments: Any, receive_seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._receive_seconds = receive_seconds
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer when a client has connected."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Start the timer when bytes arrive, unless a request is being answered."""
        if self.cycle is None or self.cycle.response_complete:
            self._begin()
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Start the timer, if it is not running, at the beginning of a request."""
        self._begin()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Stop the timer at the end of a request."""
        self._end()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer when either side has closed the connection."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._limit is None:
            self._limit = self.loop.call_later(self._receive_seconds, self._give_up)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        self._limit = None
        client = ":".join(map(str, self.client or ("a socket",)))
        logger.info("closed the connection of %s: no complete request arrived within %g s", client, self._receive_seconds)
        self.transport.abort()


class ServerThread:
    """Serves an application at ``url`` from a daemon thread.

    Args:
        app: the application, as ``make_service`` builds it.
        settings: address and limits.
        unix_socket: path of a Unix socket to make, at which the application is served too. Whoever can open it can connect.

    Raises:
        ConfigError: the port is in use, or the service does not start.
    """

    def __init__(self, app: FastAPI, settings: ServiceSettings, unix_socket: Path | None = None) -> None:
        local = [] if unix_socket is None else [_bind_unix(unix_socket)]
        self._sockets = [*bind(settings), *local]
        self.url = url_of(settings)
        self._server = _server(app, settings, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._sockets}, name=app.title, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(f"the service at {self.url} did not start; the log says why.")
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop the server; requests in progress get a second to finish."""
        self._server.should_exit = True
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        for listener in self._sockets:
            listener.close()
