"""Routes that control a server, named as in SGLang: pause, abort, caches, weights, metrics and information about the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import prometheus_client
from fastapi import Response
from fastapi.responses import PlainTextResponse
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor

from rollwright import __version__
from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.builtin.engine import BuiltinEngine, OnWeightUpdate
from rollwright.inference.backends.builtin.loading import paired
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.adapter_routes import AdapterRoutes, allowed_directory, current_run
from rollwright.inference.server.control_bodies import (
    LAST_VERSION,
    Abort,
    Checker,
    ControlBody,
    FromDisk,
    FromDistributed,
    GroupName,
    JoinGroup,
    Memory,
    NewVersion,
    Pause,
)
from rollwright.inference.server.exchange import RequestError, Routes
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.files import content_digest, content_digests, read_weights, total_digest
from rollwright.inference.weights.group import WeightGroup
from rollwright.inference.weights.names import IncompleteWeightsError
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger

logger = getLogger("serve-model")

#: Mode of a pause -> how running requests treat the next weight update.
_ON_UPDATE: dict[str, OnWeightUpdate] = {"retract": "recompute", "in_place": "keep", "abort": "recompute"}

#: Reason why sampling is held (paused) -> message to clients. If there are several reasons, the first in this order counts.
_HELD = {
    "client": "paused",
    "memory": "The memory of the cache was released: generation continues after /resume_memory_occupation.",
    "update": "A weight update was begun: generation continues after /end_weight_update.",
    "parts": "Generation continues when the last part of the new weights has come, the one with a weight_version, or after "
    "/end_weight_update.",
}

_LATENCY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: Statistics of the engine that only grow; the others are gauges.
_ENGINE_COUNTERS = frozenset(
    [
        "steps",
        "prefill_tokens",
        "generated_tokens",
        "finished",
        "aborted",
        "preemptions",
        "reused_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "wide_steps",
        "malformed_tool_calls",
    ]
)

prometheus_client.disable_created_metrics()


class ServerMetrics:
    """Metrics of a server for Prometheus: requests, weight updates, latencies, and the engine's statistics.

    Args:
        engine_stats: returns the engine's statistics; called at each scrape.
    """

    def __init__(self, engine_stats: Callable[[], Mapping[str, float]]) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        of_ours: dict[str, Any] = {"namespace": "rollwright", "registry": self.registry}
        self.requests = prometheus_client.Counter("requests", "Requests answered.", ["path", "status"], **of_ours)
        self.weight_updates = prometheus_client.Counter("weight_updates", "Updates of the weights.", ["source"], **of_ours)
        self.latency = prometheus_client.Histogram(
            "request_seconds", "Seconds that generation requests took.", buckets=_LATENCY_BOUNDS, **of_ours
        )
        self._engine_stats = engine_stats
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's statistics; called by ``prometheus_client``."""
        for name, value in sorted(self._engine_stats().items()):
            kind = CounterMetricFamily if name in _ENGINE_COUNTERS else GaugeMetricFamily
            yield kind(f"rollwright_{name}", "Of the engine.", value=value)


class Control:
    """Routes that control an engine; weight updates run one at a time.

    Parts of new weights are buffered until they are complete, then copied into the engine together. If no call comes for
    ``update_seconds`` before that, the trainer is presumably gone and the update is undone.

    Args:
        engine: the engine that the server's other routes sample from.
        settings: the server's settings, including the root directory for weights.
        metrics: metrics shown at ``/metrics``.
        model_path: the model that the server was started with.
        adapters: routes and names of the LoRA adapters that the engine holds.
    """

    def __init__(
        self, engine: BuiltinEngine, settings: ServerSettings, metrics: ServerMetrics, model_path: str, adapters: AdapterRoutes
    ) -> None:
        self._adapters = adapters
        self._engine, self._settings, self._metrics, self._model_path = engine, settings, metrics, model_path
        self._update = asyncio.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._holds: set[str] = set()  # why the engine is held; keys of ``_HELD``
        self._parts: dict[str, Tensor] = {}  # tensors of new weights, by name
        self._undo_timer: asyncio.TimerHandle | None = None
        self._undone = False  # the last update was undone, and no other has begun since

    @property
    def router(self) -> Routes:
        """The routes."""
        return Routes(
            [
                ("GET", "/health", self._health, None),
                ("GET", "/ping", self._health, None),
                ("GET", "/health_generate", self._health_generate, None),
                ("GET", "/model_info", self._model_info, None),
                ("GET", "/get_model_info", self._model_info, None),
                ("GET", "/server_info", self._server_info, None),
                ("GET", "/get_server_info", self._server_info, None),
                ("GET", "/weight_version", self._weight_version, None),
                ("GET", "/get_weight_version", self._weight_version, None),
                ("GET", "/metrics", self._metrics_text, None),
                ("GET", "/weights_checker", self._weights_checker, None),
                ("POST", "/weights_checker", self._weights_checker, Checker),
                ("POST", "/pause_generation", self._pause, Pause),
                ("POST", "/continue_generation", self._continue, ControlBody),
                ("POST", "/abort_request", self._abort, Abort),
                ("POST", "/flush_cache", self._flush_cache, ControlBody),
                ("POST", "/update_weight_version", self._update_weight_version, NewVersion),
                ("POST", "/begin_weight_update", self._begin_update, ControlBody),
                ("POST", "/end_weight_update", self._end_update, ControlBody),
                ("POST", "/update_weights_from_disk", self._update_from_disk, FromDisk),
                ("POST", "/init_weights_update_group", self._init_group, JoinGroup),
                ("POST", "/destroy_weights_update_group", self._destroy_group, GroupName),
                ("POST", "/update_weights_from_distributed", self._update_from_distributed, FromDistributed),
                ("POST", "/release_memory_occupation", self._release_memory, Memory),
                ("POST", "/resume_memory_occupation", self._resume_memory, Memory),
            ]
        )

    # -- about the server ----------------------------------------------------------------------------------------------

    async def _health(self) -> Response:
        return Response(status_code=200)

    async def _health_generate(self) -> Response:
        if self._holds:
            return PlainTextResponse(self._held(), status_code=503)
        request = ModelRequest(input_ids=[0], gconfig=GenerationHyperparameters(max_new_tokens=1, greedy=True), rid="health")
        await asyncio.wait_for(self._engine.agenerate(request), timeout=20.0)
        return Response(status_code=200)

    async def _model_info(self) -> dict[str, Any]:
        config = self._engine.model.config
        return {
            "model_path": self._model_path,
            "served_model_name": self._settings.model_name,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": str(self._adapters.newest_version()),
            "model_type": getattr(config, "model_type", None),
            "architectures": getattr(config, "architectures", None),
            "has_image_understanding": False,
        }

    async def _server_info(self) -> dict[str, Any]:
        weights = next(self._engine.model.parameters())
        return {
            "server": "rollwright",
            "version": __version__,
            "model_path": self._model_path,
            "weight_version": str(self._adapters.newest_version()),
            "context_length": self._engine.context_length,
            "tp_size": 1,
            "device": str(weights.device),
            "dtype": str(weights.dtype).removeprefix("torch."),
            "enable_deterministic_inference": True,  # every request is sampled with its own seed
            "batch_invariant": self._engine.is_batch_invariant,
            "enable_return_routed_experts": self._engine.records_experts,
            "weights_roots": self._settings.weights_roots,
            "paused": bool(self._holds) or current_run.get() in self._engine.paused_runs(),
            "serves_adapters": True,
            "run": current_run.get() or None,
            "adapters": await self._adapters.described(),
            "stats": self._engine.stats(),
        }

    async def _weight_version(self) -> dict[str, Any]:
        return {"weight_version": str(self._adapters.newest_version())}

    async def _metrics_text(self) -> Response:
        return PlainTextResponse(
            prometheus_client.generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4"
        )

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _pause(self, body: Pause) -> dict[str, Any]:
        if run := current_run.get():
            await asyncio.to_thread(self._engine.pause_run, run)
            if body.mode == "abort":
                await asyncio.to_thread(self._engine.abort, run=run)
            return {"message": f"The requests of the run {run!r} are paused.", "status": "ok"}
        await self._hold("client")
        self._undone = False
        self._engine.on_weight_update = _ON_UPDATE[body.mode]
        if body.mode == "abort":
            await asyncio.to_thread(self._engine.abort)
        return {"message": "Generation paused.", "status": "ok"}

    async def _continue(self) -> dict[str, Any]:
        if run := current_run.get():
            await asyncio.to_thread(self._engine.resume_run, run)
            return {"message": self._held() if self._holds else "Generation continues.", "status": "ok"}
        if self._parts and self._holds == {"client"}:  # the client paused, and sent parts without a version
            async with self._updating():
                await self._load_parts(self._engine.get_version(), or_wait=False)
        await self._release("client")
        if not self._holds and not self._parts:
            self._stop_undo_timer()
        return {"message": self._held() if self._holds else "Generation continues.", "status": "ok"}

    def _held(self) -> str:
        """Return the message to clients while the engine is held."""
        return next(text for reason, text in _HELD.items() if reason in self._holds)

    async def _hold(self, reason: str) -> None:
        """Pause sampling until ``reason`` is released; returns when no step is running."""
        await asyncio.to_thread(self._engine.pause)
        self._holds.add(reason)

    async def _release(self, reason: str) -> None:
        """Drop a reason, and resume sampling if no other is left."""
        self._holds.discard(reason)
        if not self._holds:
            await asyncio.to_thread(self._engine.resume)

    async def _abort(self, body: Abort) -> dict[str, Any]:
        await asyncio.to_thread(self._engine.abort, None if body.abort_all else body.rid, current_run.get() or None)
        return {"success": True}

    async def _flush_cache(self) -> dict[str, Any]:
        await asyncio.to_thread(self._engine.flush_cache)
        return {"success": True, "message": "The cache of finished requests is empty."}

    async def _release_memory(self) -> dict[str, Any]:
        await self._hold("memory")
        try:
            await asyncio.to_thread(self._engine.release_memory)
        except EngineError:  # requests are running: they go on
            await self._release("memory")
            raise
        return {"success": True, "message": "Paused; the memory of the cache is released."}

    async def _resume_memory(self) -> dict[str, Any]:
        await self._release("memory")
        return {"success": True, "message": self._held() if self._holds else "Generation continues."}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _next(self, version: int | None) -> int:
        if version is None and self._engine.get_version() == LAST_VERSION:
            raise RequestError(f"No version follows {LAST_VERSION}: name a version.", param="weight_version")
        return self._engine.get_version() + 1 if version is None else version

    async def _update_weight_version(self, body: NewVersion) -> dict[str, Any]:
        version = self._next(body.new_version)
        async with self._update:
            if body.abort_all_requests:
                await asyncio.to_thread(self._engine.abort)
            if version < self._engine.get_version():
                await asyncio.to_thread(self._engine.go_back, version)
            elif version > self._engine.get_version():
                await asyncio.to_thread(self._engine.publish, version)
        return {"success": True, "message": f"Weight version is {version}.", "new_version": str(version)}

    async def _update_from_disk(self, body: FromDisk) -> dict[str, Any]:
        directory = allowed_directory(self._settings, body.model_path, "model_path")
        version = self._next(body.weight_version)
        async with self._updating():
            if body.abort_all_requests:
                await asyncio.to_thread(self._engine.abort)
            await asyncio.to_thread(self._load, directory, version, body.content_digest)
            await self._updated("disk")
        return {
            "success": True,
            "message": f"Weights of version {version} are loaded.",
            "num_paused_requests": int(self._engine.stats()["running"]) if self._holds else 0,
            "content_digest": body.content_digest,
        }

    def _load(self, directory: Path, version: int, expected: str | None) -> None:
        named = dict(read_weights(directory))
        digest = None if expected is None else content_digest(named.items())
        if digest != expected:
            raise WeightUpdateError(
                f"The weights in {directory} have the digest {digest}, not {expected}: they were changed or damaged since they "
                "were written. Publish them again."
            )
        self._load_named(named, version)

    def _load_named(self, named: Any, version: int) -> None:
        if version < self._engine.get_version():  # the trainer went back to a checkpoint, or belongs to another run
            paired(self._engine.model, WeightStream.of(named))  # raises before anything changes
            self._engine.go_back(version)
        self._engine.update_weights(version=version, weights=named)

    async def _load_parts(self, version: int, *, or_wait: bool) -> None:
        """Copy the parts into the engine.

        Args:
            version: version of the new weights.
            or_wait: wait for further parts if some are missing. Otherwise, incomplete weights are discarded like invalid ones.

        Raises:
            WeightUpdateError: the parts do not fit the model.
        """
        try:
            await asyncio.to_thread(self._load_named, dict(self._parts), version)
        except WeightUpdateError as error:
            if or_wait and isinstance(error, IncompleteWeightsError):
                if not self._holds:
                    await self._hold("parts")
                return
            self._parts.clear()
            await self._release("parts")
            raise
        await self._updated("distributed")

    @asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """Guard one call of a weight update. If the update needs further calls and none comes, the update is undone."""
        async with self._update:
            self._stop_undo_timer()
            failed = True
            try:
                yield
                failed = False
            finally:
                if self._parts or self._holds & {"update", "parts"} or (failed and self._holds):
                    loop, limit = asyncio.get_running_loop(), self._settings.update_seconds
                    self._undo_timer = loop.call_later(limit, lambda: loop.create_task(self._undo()))

    def _stop_undo_timer(self) -> None:
        if self._undo_timer is not None:
            self._undo_timer.cancel()
            self._undo_timer = None

    async def _undo(self) -> None:
        """Discard the parts received so far and continue with the engine's current weights."""
        timer = self._undo_timer
        async with self._update:
            if timer is None or timer is not self._undo_timer:  # a call arrived in the meantime
                return
            parts, held = len(self._parts), self._holds
            self._parts.clear()
            self._undo_timer, self._holds, self._undone = None, set(), True
            logger.warning(
                "A weight update was begun, but no further call came for %g s: it is undone (%d tensors had arrived), and requests "
                "continue with version %d.",
                self._settings.update_seconds,
                parts,
                self._engine.get_version(),
            )
            if held:
                await asyncio.to_thread(self._engine.resume)

    async def _init_group(self, body: JoinGroup) -> dict[str, Any]:
        name, rank, size = body.group_name, body.rank_offset, body.world_size
        if name in self._groups:
            self._groups.pop(name).close()
        self._undone = False
        self._groups[name] = await asyncio.to_thread(
            WeightGroup, body.master_address, body.master_port, rank, size, name, body.backend
        )
        return {"success": True, "message": f"Joined {name!r} as rank {rank} of {size} over {body.backend}."}

    async def _destroy_group(self, body: GroupName) -> dict[str, Any]:
        name = body.group_name
        if name not in self._groups:
            raise WeightUpdateError(f"There is no group {name!r}; there are {sorted(self._groups)}.")
        self._groups.pop(name).close()
        return {"success": True, "message": f"Left {name!r}."}

    async def _update_from_distributed(self, body: FromDistributed) -> dict[str, Any]:
        group = self._groups.get(body.group_name)
        if group is None:
            raise WeightUpdateError(f"This server is in no group {body.group_name!r}: call /init_weights_update_group first.")
        version = body.weight_version
        async with self._updating():
            if self._undone:
                raise WeightUpdateError(
                    f"The update that this part belongs to was undone, after {self._settings.update_seconds:g} s without a call "
                    "(--update-seconds): begin it again with /pause_generation, /begin_weight_update or a new group."
                )
            if body.abort_all_requests:
                await asyncio.to_thread(self._engine.abort)
            if version is None and not self._holds:  # requests wait for the new weights
                await self._hold("parts")
            named = await asyncio.to_thread(
                group.receive, body.names, body.dtypes, body.shapes, flat=body.load_format == "flattened_bucket"
            )
            self._parts.update((name, tensor.cpu()) for name, tensor in named)  # a second copy would not fit on the GPU
            if version is not None:
                await self._load_parts(version, or_wait=True)
        return {"success": True, "message": f"Received {len(body.names)} tensors."}

    async def _updated(self, source: str) -> None:
        self._parts.clear()
        self._metrics.weight_updates.labels(source).inc()
        if "parts" in self._holds:
            await self._release("parts")

    async def _begin_update(self) -> dict[str, Any]:
        async with self._updating():
            self._undone = False
            await self._hold("update")
        return {"success": True, "message": "Nothing is sampled until /end_weight_update."}

    async def _end_update(self) -> dict[str, Any]:
        async with self._updating():
            try:
                if self._parts:
                    await self._load_parts(self._engine.get_version(), or_wait=False)
            finally:
                self._holds.discard("parts")
                await self._release("update")
        return {"success": True, "message": "The weights are whole."}

    async def _weights_checker(self) -> dict[str, Any]:
        async with self._update:
            digests = await asyncio.to_thread(content_digests, dict(self._engine.model.named_parameters()).items())
        checksums = {name: digest.hex() for name, digest in digests.items()}
        return {
            "success": True,
            "message": "",
            "payload": [{"per_gpu_checksum": total_digest(digests), "checksums": checksums}],
        }
