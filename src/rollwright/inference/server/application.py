"""The server: its application (both protocols and control over one engine, behind a key, limits and metrics), and serving it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.server.control import Control, ServerMetrics
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.guard import Guard
from rollwright.inference.server.native import NativeProtocol
from rollwright.inference.server.openai import ROUTES, OpenAIProtocol
from rollwright.inference.server.service import bind, make_service, run, url_of
from rollwright.inference.server.settings import ServerSettings
from rollwright.tracking.logging import getLogger

logger = getLogger("ServeModel")

#: Paths whose requests count against max_pending.
_GENERATION_PATHS = frozenset(
    {"/generate", *(path for method, path, *_ in ROUTES if method == "POST" and not path.endswith("/count_tokens"))}
)

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
    settings.max_body_bytes = settings.max_body_bytes or (1 << 20) + 256 * (engine.context_length or 1 << 16)

    def stats() -> dict[str, float]:
        return engine.stats() | ({} if openai is None else {"malformed_tool_calls": openai.malformed_tool_calls})

    metrics = ServerMetrics(stats)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.destroy()

    tokenizer = engine.tokenizer
    limits = {"max_prompt_tokens": settings.max_prompt_tokens, "max_samples": settings.max_samples}
    routers = [Control(engine, settings, metrics, model_path).router, NativeProtocol(engine, tokenizer, **limits).router]
    openai = None
    if tokenizer is not None:
        openai = OpenAIProtocol(engine, tokenizer, settings.model_name, **limits, image_hosts=settings.image_hosts)
    if openai is not None:
        routers.append(openai.router)
    gate = partial(Gate, metrics=metrics)
    return make_service("rollwright serve-model", routers, settings, guard=gate, refused=_REFUSED, lifespan=lifespan)


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
    sockets = bind(settings)
    if threads is not None:
        torch.set_num_threads(threads)
    engine = BuiltinEngine(model, **engine_settings)
    app = create_application(engine, settings, model_path=model)
    logger.info("Serving %s at %s", settings.model_name, url_of(settings))
    try:
        run(app, settings, sockets, log_level)
    finally:
        engine.destroy()
        for listener in sockets:
            listener.close()


class Gate(Guard):
    """Also the number of requests at once, and the request metrics."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        super().__init__(app, settings)
        self._metrics, self._max_pending = metrics, settings.max_pending
        self._pending = 0

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """See ``Guard.refusal``."""
        is_counted, refusal = (path := scope["path"]) in _GENERATION_PATHS, super().refusal(scope, headers)
        if refusal is None and is_counted and self._pending >= self._max_pending:
            said = f"{self._pending} requests are pending, the limit of this server; send again later."
            refusal = RequestError(said, status=429, kind="rate_limit_error")
        if refusal is not None:
            self._metrics.requests.labels(path if is_counted else "other", str(refusal.status)).inc()
        return refusal

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``Guard.answer``."""
        if (path := scope["path"]) not in _GENERATION_PATHS:
            return await self.app(scope, receive, send)
        started, status = time.perf_counter(), 499

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._pending += 1
        try:
            await self.app(scope, receive, watched_send)
        finally:
            self._pending -= 1
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.latency.observe(time.perf_counter() - started)
