"""The inference server: all protocols and the control routes over one engine, behind a key, limits and metrics."""

from __future__ import annotations

import hmac
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
from rollwright.inference.server.adapter_routes import AdapterRoutes, current_run
from rollwright.inference.server.control import Control, ServerMetrics
from rollwright.inference.server.exchange import RequestError, given_key
from rollwright.inference.server.native import NativeProtocol
from rollwright.inference.server.openai import ROUTES, OpenAIProtocol
from rollwright.inference.server.request_guard import Guard
from rollwright.inference.server.service import bind, make_service, run, url_of
from rollwright.inference.server.settings import ServerSettings
from rollwright.tracking.logging import getLogger

logger = getLogger("ServeModel")

#: Paths whose requests count towards ``max_pending``.
_GENERATION_PATHS = frozenset(
    {"/generate", *(path for method, path, *_ in ROUTES if method == "POST" and not path.endswith("/count_tokens"))}
)

#: Paths of SGLang's servers that are not served, and what to do instead.
_REFUSED = {
    "/update_weights_from_tensor": "it takes pickled tensors, which could run any code; use /update_weights_from_disk or "
    "/update_weights_from_distributed",
    "/update_weights_from_ipc": "it takes handles of GPU memory; use /update_weights_from_disk or /update_weights_from_distributed",
}

#: Paths that a run's key opens besides those of ``_GENERATION_PATHS``. The others concern the base or all runs.
_RUN_PATHS = frozenset(
    {
        *("/health", "/ping", "/model_info", "/get_model_info", "/server_info", "/get_server_info"),
        *("/weight_version", "/get_weight_version", "/pause_generation", "/continue_generation", "/abort_request"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"),
        *(path for method, path, *_ in ROUTES if "{" not in path),
    }
)
_RUN_PREFIXES = tuple(path.partition("{")[0] for _, path, *_ in ROUTES if "{" in path)


def create_application(engine: BuiltinEngine, settings: ServerSettings, *, model_path: str = "") -> FastAPI:
    """Build the application of ``rollwright serve-model``.

    Args:
        engine: the engine; destroyed when the application shuts down.
        settings: key, limits and names. Empty values are filled in.
        model_path: path of the model, shown to clients.
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

    limits = {"max_prompt_tokens": settings.max_prompt_tokens, "max_samples": settings.max_samples}
    adapters = AdapterRoutes(engine, settings, metrics.weight_updates.labels("adapter").inc)
    routers = [
        Control(engine, settings, metrics, model_path, adapters).router,
        adapters.router,
        NativeProtocol(engine, engine.tokenizer, adapters, **limits).router,
    ]
    openai = None
    if engine.tokenizer is not None:
        openai = OpenAIProtocol(
            engine, engine.tokenizer, settings.model_name, **limits, adapters=adapters, image_hosts=settings.image_hosts
        )
        routers.append(openai.router)
    return make_service(
        "rollwright serve-model",
        routers,
        settings,
        guard=partial(Gate, metrics=metrics),
        refused=_REFUSED,
        lifespan=lifespan,
    )


def serve(
    model: str, settings: ServerSettings, *, threads: int | None = None, log_level: str = "warning", **engine_settings: Any
) -> None:
    """Serve a model until SIGINT or SIGTERM.

    The port is bound before the model is loaded, so an occupied port is reported at once.

    Args:
        model: directory or name of the model.
        settings: settings of the server.
        threads: number of compute threads. None keeps torch's default.
        log_level: log level of the HTTP server.
        engine_settings: arguments of ``BuiltinEngine``.

    Raises:
        ConfigError: the port is in use.
    """
    sockets = bind(settings)
    if threads is not None:
        torch.set_num_threads(threads)
    engine = BuiltinEngine(model, max_adapters=settings.max_adapters, **engine_settings)
    app = create_application(engine, settings, model_path=model)
    logger.info("Serving %s at %s", settings.model_name, url_of(settings))
    try:
        run(app, settings, sockets, log_level)
    finally:
        engine.destroy()
        for listener in sockets:
            listener.close()


class Gate(Guard):
    """Guard that also limits the number of concurrent requests and records request metrics.

    Args:
        app: the guarded application.
        settings: names, key and limits of the server.
        metrics: metrics to update.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: ServerMetrics) -> None:
        super().__init__(app, settings)
        self._metrics, self._max_pending, self._run_keys = metrics, settings.max_pending, settings.run_keys
        self._pending = 0

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """See ``Guard.refusal``."""
        path = scope["path"] if scope["path"] in _GENERATION_PATHS else "other"
        refusal = super().refusal(scope, headers)
        if refusal is None and self._run_of(headers) and not self._is_open_to_runs(scope["path"]):
            refusal = RequestError(
                f"{scope['path']} concerns all runs of this server: it takes the server's own key, not that of a run. A run publishes "
                "adapters (/load_lora_adapter), which needs no such call.",
                status=403,
                kind="permission_error",
            )
        if refusal is None and path != "other" and self._pending >= self._max_pending:
            refusal = RequestError(
                f"{self._pending} requests are pending, the limit of this server; send again later.",
                status=429,
                kind="rate_limit_error",
            )
        if refusal is not None:
            self._metrics.requests.labels(path, str(refusal.status)).inc()
        return refusal

    def is_known(self, scope: Scope, headers: Headers) -> bool:
        """See ``Guard.is_known``."""
        return super().is_known(scope, headers) or bool(self._run_of(headers))

    def _is_open_to_runs(self, path: str) -> bool:
        return path in _RUN_PATHS | _GENERATION_PATHS | self.open_paths or path.startswith(_RUN_PREFIXES)

    def _run_of(self, headers: Headers) -> str:
        """Return the run whose key a request carries, or an empty string."""
        given = (given_key(headers) or "").encode()
        return next((run for run, key in self._run_keys.items() if hmac.compare_digest(given, key.encode())), "")

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ``Guard.answer``."""
        current_run.set(self._run_of(Headers(scope=scope)))
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
