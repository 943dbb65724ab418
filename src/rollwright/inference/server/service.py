"""What every service has in common: who may ask and how much, errors in one form, its sockets, and serving it.

The inference server, the retrieval service, the OpenAI front and ``serve`` mode are all made here, so that a check that guards
one guards all.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright import __version__
from rollwright.errors import ConfigError
from rollwright.inference.network import allow_many_connections
from rollwright.inference.server.exchange import RequestError, Routes, error_response, given_key
from rollwright.inference.server.settings import LOOPBACK, ServiceSettings

#: Paths that need no key: they say nothing but that the service lives.
_OPEN_PATHS = frozenset({"/health", "/ping"})
_START_SECONDS = 30.0
_BACKLOG = 2048  # connections that may wait to be taken, when many clients begin at once


class Guard:
    """ASGI middleware: which names a service answers to, who may ask, the key, and the form and size of bodies.

    A web page that a user has open may send requests to this machine. So the Host has to be a name of the service (or a page
    could give the service's address a name of its own), the Origin one too, and a body has to be declared as JSON (which a page
    may send elsewhere only after asking). Written against ASGI itself, because a wrapping of responses would hide a client's
    disconnection from the handlers.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app, self.settings = app, settings
        of_this_machine = () if settings.host in LOOPBACK else (socket.gethostname(), socket.getfqdn())
        names = (*LOOPBACK, settings.host, *of_this_machine, *settings.allowed_hosts)
        self._names = {name.strip("[]").lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif refusal := self.refusal(scope, Headers(scope=scope)):
            await error_response(refusal)(scope, receive, send)
        else:
            await self.answer(scope, self._limited(receive), send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that nothing was found against."""
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Why a request is refused before its body is read, or None."""
        key, length = self.settings.api_key, headers.get("content-length", "0")
        own_address, _ = scope.get("server") or ("", 0)  # of this connection
        for header, prefix in (("host", "//"), ("origin", "")):
            for value in headers.getlist(header):
                if (name := _hostname(prefix + value)) is None or name not in {*self._names, own_address}:
                    return RequestError(
                        f"{header.title()} {value!r} is not a name of this service: ask it by the address that it was started with, "
                        "or start it with that name among its allowed_hosts.",
                        status=403,
                        kind="permission_error",
                    )
        is_known = not key or hmac.compare_digest((given_key(headers) or "").encode(), key.encode())
        if not is_known and scope["path"] not in _OPEN_PATHS:
            said = "The request carries no valid key: send the header Authorization: Bearer KEY (or x-api-key: KEY)."
            return RequestError(said, status=401, kind="authentication_error")
        if not length.isdecimal() or len(length) > 15 or int(length) > self.settings.max_body_bytes:
            return self._too_large()
        if int(length) or "transfer-encoding" in headers:
            kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                said = (
                    f"The body is declared as {', '.join(kinds) or 'nothing'}: send JSON with Content-Type: application/json."
                )
                return RequestError(said, status=415)
        return None

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.settings.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> RequestError:
        return RequestError(
            f"The body is larger than {self.settings.max_body_bytes} bytes, the limit of this service (max_body_bytes): send less "
            "at a time, or raise the limit.",
            status=413,
        )


def _hostname(url: str) -> str | None:
    """The host of a URL, or None."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def make_service(
    title: str,
    routers: Iterable[Routes],
    settings: ServiceSettings,
    *,
    guard: Callable[..., Guard] = Guard,
    refused: Mapping[str, str] | None = None,
    lifespan: Any = None,
) -> FastAPI:
    """An application behind a guard, with every error in one form, and its schema at ``/openapi.json``.

    Args:
        title: of its schema.
        routers: what it answers.
        settings: key and limits.
        guard: makes the middleware.
        refused: paths that clients may try, and what to say.
        lifespan: of the application.
    """
    app = FastAPI(title=title, version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for router in routers:
        app.include_router(router)
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
    """Bound sockets; a loopback host has one of both its families, so that the name localhost reaches it too.

    Where the port is 0, ``settings.port`` is the port from then on.

    Raises:
        ConfigError: the port is taken or the host is not this machine's.
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


def url_of(settings: ServiceSettings) -> str:
    """``http://host:port`` of a service that listens."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def run(app: FastAPI, sockets: list[socket.socket], log_level: str = "warning") -> None:
    """Serve until SIGINT or SIGTERM."""
    allow_many_connections()
    _server(app, log_level=log_level, timeout_keep_alive=30, timeout_graceful_shutdown=5).run(sockets=sockets)


def _server(app: FastAPI, **settings: Any) -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(app, access_log=False, proxy_headers=False, backlog=_BACKLOG, **settings))


class ServerThread:
    """A service in a daemon thread, at ``url``.

    Raises:
        ConfigError: the port is taken, or the service does not start.
    """

    def __init__(self, app: FastAPI, settings: ServiceSettings) -> None:
        self._sockets = bind(settings)
        self.url = url_of(settings)
        self._server = _server(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._sockets}, name=app.title, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise ConfigError(f"the service at {self.url} did not start; the log says why.")
            time.sleep(0.005)

    def stop(self) -> None:
        """End the server; requests that are answered get a second to finish."""
        self._server.should_exit = True
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        for listener in self._sockets:
            listener.close()
