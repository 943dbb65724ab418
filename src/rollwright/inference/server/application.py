"""The server's application: both protocols and control over one engine, behind a key, limits and metrics."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rollwright import __version__
from rollwright.inference.server.control import Control
from rollwright.inference.server.errors import RequestError, error_body, error_response, path_refusal
from rollwright.inference.server.metrics import ServerMetrics
from rollwright.inference.server.native import NativeProtocol
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.settings import ServerSettings

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


class Gate:
    """ASGI middleware: the key, the size of bodies, the number of requests at once, and the request metrics.

    Written against ASGI itself, because a wrapping of responses would hide a client's disconnection from the handlers.
    """

    def __init__(self, app: Any, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._pending = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        refusal = self._refusal(path, headers)
        if refusal is not None:
            status, message, kind = refusal
            self._metrics.count("requests", path=path if path in _GENERATION_PATHS else "other", status=str(status))
            await _send_json(send, status, error_body(message, kind=kind, status=status))
            return
        counted = path in _GENERATION_PATHS
        self._pending += counted
        started, status = time.perf_counter(), 499

        async def watched_send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, self._limited(receive, headers), watched_send)
        finally:
            self._pending -= counted
            if counted:
                self._metrics.count("requests", path=path, status=str(status))
                self._metrics.observe_latency(time.perf_counter() - started)

    def _too_large(self) -> str:
        return f"The body is larger than {self._settings.max_body_bytes} bytes, the limit of this server (--max-body-bytes)."

    def _refusal(self, path: str, headers: dict[str, str]) -> tuple[int, str, str] | None:
        key = self._settings.api_key
        if key and path not in _OPEN_PATHS:
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                return (
                    401,
                    "The request carries no valid key: send the header Authorization: Bearer KEY.",
                    "authentication_error",
                )
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._settings.max_body_bytes:
            return 413, self._too_large(), "invalid_request_error"
        if path in _GENERATION_PATHS and self._pending >= self._settings.max_pending:
            return 429, f"{self._pending} requests are pending, the limit of this server; send again later.", "rate_limit_error"
        return None

    def _limited(self, receive: Any, headers: dict[str, str]) -> Any:
        if "content-length" in headers:
            return receive
        received = 0

        async def counting() -> dict[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._settings.max_body_bytes:
                raise RequestError(self._too_large(), status=413)
            return message

        return counting


async def _send_json(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def create_application(engine: Any, settings: ServerSettings, *, model_path: str = "") -> FastAPI:
    """The application of ``rollwright serve-model``.

    Args:
        engine: a ``BuiltinEngine``; it is closed when the application ends.
        settings: key, limits, names.
        model_path: shown to clients.
    """
    settings.model_name = settings.model_name or model_path or "default"
    metrics = ServerMetrics(engine.stats)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.destroy()

    app = FastAPI(title="rollwright serve-model", version=__version__, lifespan=lifespan, openapi_url=None)
    tokenizer = engine.tokenizer
    limits = {"max_prompt_tokens": settings.max_prompt_tokens, "max_samples": settings.max_samples}
    routers = [Control(engine, settings, metrics, model_path).router, NativeProtocol(engine, tokenizer, **limits).router]
    if tokenizer is not None:
        routers.append(OpenAIProtocol(engine, tokenizer, settings.model_name, **limits).router)
    for router in routers:
        app.include_router(router)
    app.state.paths = sorted({getattr(route, "path", "") for router in routers for route in router.routes})
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    return app


async def _refuse_path(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException) and error.status_code == 404 and (path := request.url.path) in _REFUSED:
        return error_response(RequestError(f"{path} is not served: {_REFUSED[path]}."))
    return path_refusal(request, error, request.app.state.paths)
