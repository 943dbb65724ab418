"""The server: its application (both protocols and control over one engine, behind a key, limits and metrics), and serving it."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright import __version__
from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.network import allow_many_connections
from rollwright.inference.server.control import Control, ServerMetrics
from rollwright.inference.server.exchange import RequestError, error_response, path_refusal
from rollwright.inference.server.native import NativeProtocol
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.settings import ServerSettings
from rollwright.tracking.logging import getLogger

logger = getLogger("ServeModel")

#: Paths that need no key: they say nothing but that the server lives.
_OPEN_PATHS = frozenset({"/health", "/ping"})
#: Paths whose requests count against max_pending.
_GENERATION_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})

#: Paths of SGLang that clients may try, and what to do instead.
_REFUSED = {
    "/update_weights_from_tensor": "it takes pickled tensors, which could run any code; use /update_weights_from_disk or "
    "/update_weights_from_distributed",
    "/update_weights_from_ipc": "it takes handles of GPU memory; use /update_weights_from_disk or /update_weights_from_distributed",
    "/load_lora_adapter": "this server serves one set of weights; merge the adapter and publish that",
    "/unload_lora_adapter": "this server serves one set of weights and no adapters",
}


def create_application(engine: BuiltinEngine, settings: ServerSettings, *, model_path: str = "") -> FastAPI:
    """The application of ``rollwright serve-model``.

    Args:
        engine: it is closed when the application ends.
        settings: key, limits, names.
        model_path: shown to clients.
    """
    settings.model_name = settings.model_name or model_path or "default"
    metrics = ServerMetrics(engine.stats)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.destroy()

    async def refuse_path(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404 and (path := request.url.path) in _REFUSED:
            return error_response(RequestError(f"{path} is not served: {_REFUSED[path]}."))
        return path_refusal(request, error, paths)

    app = FastAPI(title="rollwright serve-model", version=__version__, lifespan=lifespan, openapi_url=None)
    tokenizer = engine.tokenizer
    limits = {"max_prompt_tokens": settings.max_prompt_tokens, "max_samples": settings.max_samples}
    routers = [Control(engine, settings, metrics, model_path).router, NativeProtocol(engine, tokenizer, **limits).router]
    if tokenizer is not None:
        routers.append(OpenAIProtocol(engine, tokenizer, settings.model_name, **limits).router)
    for router in routers:
        app.include_router(router)
    paths = sorted({getattr(route, "path", "") for router in routers for route in router.routes})
    app.add_exception_handler(HTTPException, refuse_path)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    return app


def serve(
    model: str, settings: ServerSettings, *, threads: int | None = None, log_level: str = "warning", **engine_settings: Any
) -> None:
    """Serve until SIGINT or SIGTERM.

    The port is bound before the model is loaded, so a port that is taken is said at once.

    Args:
        model: a directory or name.
        settings: of the server.
        threads: compute threads; None: one for each core.
        log_level: of the HTTP server.
        engine_settings: of the ``BuiltinEngine``.

    Raises:
        ConfigError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise ConfigError(f"{settings.host}:{settings.port} cannot be bound ({error}): choose another --port.") from error
    settings.port = listener.getsockname()[1]
    if threads is not None:
        torch.set_num_threads(threads)
    engine = BuiltinEngine(model, **engine_settings)
    app = create_application(engine, settings, model_path=model)
    logger.info("Serving %s at http://%s:%d", settings.model_name, settings.host, settings.port)
    allow_many_connections()
    config = uvicorn.Config(app, log_level=log_level, timeout_keep_alive=30, timeout_graceful_shutdown=5, access_log=False)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.destroy()
        listener.close()


class Gate:
    """ASGI middleware: the key, the size of bodies, the number of requests at once, and the request metrics.

    Written against ASGI itself, because a wrapping of responses would hide a client's disconnection from the handlers.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._pending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], Headers(scope=scope)
        is_counted, received = path in _GENERATION_PATHS, 0
        if refusal := self._refusal(path, headers):
            self._metrics.requests.labels(path if is_counted else "other", str(refusal.status)).inc()
            await error_response(refusal)(scope, receive, send)
            return
        self._pending += is_counted
        started, status = time.perf_counter(), 499

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._settings.max_body_bytes:
                raise self._too_large()
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, limited_receive, watched_send)
        finally:
            self._pending -= is_counted
            if is_counted:
                self._metrics.requests.labels(path, str(status)).inc()
                self._metrics.latency.observe(time.perf_counter() - started)

    def _refusal(self, path: str, headers: Headers) -> RequestError | None:
        key, length = self._settings.api_key, headers.get("content-length", "0")
        if key and path not in _OPEN_PATHS:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                said = "The request carries no valid key: send the header Authorization: Bearer KEY."
                return RequestError(said, status=401, kind="authentication_error")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            return self._too_large()
        if path in _GENERATION_PATHS and self._pending >= self._settings.max_pending:
            said = f"{self._pending} requests are pending, the limit of this server; send again later."
            return RequestError(said, status=429, kind="rate_limit_error")
        return None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"The body is larger than {self._settings.max_body_bytes} bytes, the limit of this server (--max-body-bytes).",
            status=413,
        )
