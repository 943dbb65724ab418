"""Control of a server in SGLang's names: pause, abort, caches, weights, and what the server says about itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rollwright import __version__
from rollwright.errors import WeightUpdateError
from rollwright.inference.server.errors import RequestError, error_response
from rollwright.inference.server.exchange import read_object
from rollwright.inference.server.metrics import ServerMetrics
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.files import content_digest, read_weights
from rollwright.inference.weights.group import DEFAULT_GROUP, WeightGroup

#: What running requests do at the next weight update, by the mode of the pause before it.
_ON_UPDATE = {"retract": "recompute", "in_place": "keep", "abort": "recompute"}

#: What a client is told while something holds the engine.
_HELD = {
    "client": "paused",
    "update": "A weight update was begun: generation continues after /end_weight_update.",
    "parts": "Generation continues when the last part of the new weights has come, the one with a weight_version, or after "
    "/end_weight_update.",
}

#: Trajectories hold versions in 32 bits.
_LAST_VERSION = (1 << 31) - 1


class Control:
    """The routes that steer an engine; updates come one after the other."""

    def __init__(self, engine: Any, settings: ServerSettings, metrics: ServerMetrics, model_path: str) -> None:
        """Args:
        engine: a ``BuiltinEngine``.
        settings: the root that weights may be loaded from.
        metrics: shown at ``/metrics``.
        model_path: that the server was started with.
        """
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._model_path = model_path
        self._update = asyncio.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._holds: set[str] = set()  # why nothing is sampled: for a client, or until new weights are whole

    @property
    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter()
        for path, handler, methods in [
            ("/health", self._health, ["GET"]),
            ("/ping", self._health, ["GET"]),
            ("/health_generate", self._health_generate, ["GET"]),
            ("/model_info", self._model_info, ["GET"]),
            ("/get_model_info", self._model_info, ["GET"]),
            ("/server_info", self._server_info, ["GET"]),
            ("/get_server_info", self._server_info, ["GET"]),
            ("/weight_version", self._weight_version, ["GET"]),
            ("/get_weight_version", self._weight_version, ["GET"]),
            ("/metrics", self._metrics_text, ["GET"]),
            ("/pause_generation", self._guarded(self._pause), ["POST"]),
            ("/continue_generation", self._guarded(self._continue), ["POST"]),
            ("/abort_request", self._guarded(self._abort), ["POST"]),
            ("/flush_cache", self._guarded(self._flush_cache), ["GET", "POST"]),
            ("/update_weight_version", self._guarded(self._update_weight_version), ["POST"]),
            ("/begin_weight_update", self._guarded(self._begin_update), ["POST"]),
            ("/end_weight_update", self._guarded(self._end_update), ["POST"]),
            ("/update_weights_from_disk", self._guarded(self._update_from_disk), ["POST"]),
            ("/init_weights_update_group", self._guarded(self._init_group), ["POST"]),
            ("/destroy_weights_update_group", self._guarded(self._destroy_group), ["POST"]),
            ("/update_weights_from_distributed", self._guarded(self._update_from_distributed), ["POST"]),
            ("/weights_checker", self._guarded(self._weights_checker), ["GET", "POST"]),
            ("/release_memory_occupation", self._guarded(self._release_memory), ["GET", "POST"]),
            ("/resume_memory_occupation", self._guarded(self._resume_memory), ["GET", "POST"]),
        ]:
            router.add_api_route(path, handler, methods=methods, response_model=None)
        return router

    def _guarded(self, handler: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            try:
                answer = await handler(await read_object(request))
            except WeightUpdateError as error:  # SGLang's form of a failed update
                return JSONResponse({"success": False, "message": str(error)}, status_code=400)
            except Exception as error:  # every failure becomes a response that says what is wrong
                return error_response(error)
            return JSONResponse(answer)

        return route

    # -- about the server ----------------------------------------------------------------------------------------------

    async def _health(self) -> Response:
        return Response(status_code=200)

    async def _health_generate(self) -> Response:
        from rollwright.config.generation import GenerationHyperparameters
        from rollwright.inference.request import ModelRequest

        if self._holds:
            return PlainTextResponse(self._held(), status_code=503)
        request = ModelRequest(input_ids=[0], gconfig=GenerationHyperparameters(max_new_tokens=1, greedy=True), rid="health")
        try:
            await asyncio.wait_for(self._engine.agenerate(request), timeout=20.0)
        except Exception as error:  # whatever it is, the server is not healthy
            return error_response(error)
        return Response(status_code=200)

    async def _model_info(self) -> dict[str, Any]:
        config = self._engine.model.config
        return {
            "model_path": self._model_path,
            "served_model_name": self._settings.model_name,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": str(self._engine.get_version()),
            "model_type": getattr(config, "model_type", None),
            "architectures": getattr(config, "architectures", None),
            "has_image_understanding": False,
        }

    async def _server_info(self) -> dict[str, Any]:
        return {
            "server": "rollwright",
            "version": __version__,
            "model_path": self._model_path,
            "weight_version": str(self._engine.get_version()),
            "context_length": self._engine.context_length,
            "tp_size": 1,
            "enable_deterministic_inference": True,  # every request is drawn with the seed that it brings
            "weights_roots": self._settings.weights_roots,
            "paused": bool(self._holds),
            "stats": self._engine.stats(),
        }

    async def _weight_version(self) -> dict[str, Any]:
        return {"weight_version": str(self._engine.get_version())}

    async def _metrics_text(self) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if not isinstance(mode, str) or mode not in _ON_UPDATE:
            raise RequestError(f"mode={mode!r}; it has to be one of {', '.join(_ON_UPDATE)}.", param="mode")
        await self._hold("client")
        self._engine.on_weight_update = _ON_UPDATE[mode]
        if mode == "abort":
            await asyncio.to_thread(self._engine.abort)
        return {"message": "Generation paused.", "status": "ok"}

    async def _continue(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._release("client")
        if self._holds:
            return {"message": self._held(), "status": "ok"}
        return {"message": "Generation continues.", "status": "ok"}

    def _held(self) -> str:
        """What a client is told while something holds the engine; of several reasons, the first of the table."""
        return next(text for reason, text in _HELD.items() if reason in self._holds)

    async def _hold(self, reason: str) -> None:
        """Sample nothing until ``reason`` is released; returns when no step runs."""
        await asyncio.to_thread(self._engine.pause)
        self._holds.add(reason)

    async def _release(self, reason: str) -> None:
        """Go on, where nothing else holds the engine."""
        self._holds.discard(reason)
        if not self._holds:
            await asyncio.to_thread(self._engine.resume)

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        rid = body.get("rid")
        if not body.get("abort_all") and not (rid and isinstance(rid, str)):
            raise RequestError("Give rid, the id of one request in text, or abort_all: true.", param="rid")
        await asyncio.to_thread(self._engine.abort, None if body.get("abort_all") else rid)
        return {"success": True}

    async def _flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(self._engine.flush_cache)
        return {"success": True, "message": "The cache of finished requests is empty."}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _version(self, body: dict[str, Any], name: str = "weight_version") -> int:
        value = body.get(name)
        if value is None:
            return self._engine.get_version() + 1
        try:
            version = int(value)
        except (TypeError, ValueError, OverflowError):
            raise RequestError(f"{name}={value!r} is not a number; versions count weight updates.", param=name) from None
        if not 0 <= version <= _LAST_VERSION:
            raise RequestError(f"{name}={version}; it has to be between 0 and {_LAST_VERSION}.", param=name)
        return version

    async def _update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        version = self._version(body, "new_version")
        async with self._update:
            if body.get("abort_all_requests", True):
                await asyncio.to_thread(self._engine.abort)
            if version < self._engine.get_version():
                await asyncio.to_thread(self._engine.go_back, version)
            elif version > self._engine.get_version():
                await asyncio.to_thread(self._engine.publish, version)
        return {"success": True, "message": f"Weight version is {version}.", "new_version": str(version)}

    def _allowed(self, path: Any) -> Path:
        """``path``, if weights may be loaded from there."""
        if not isinstance(path, str) or not path:
            raise RequestError("model_path has to be a directory.", param="model_path")
        if not self._settings.weights_roots:
            raise RequestError(
                "This server loads no weights from disk: start it with --weights-root DIRECTORY.",
                status=403,
                param="model_path",
            )
        wanted = Path(path).resolve()
        if not any(wanted.is_relative_to(Path(root).resolve()) for root in self._settings.weights_roots):
            raise RequestError(f"{path} is not below a weights root of this server.", status=403, param="model_path")
        if not wanted.is_dir():
            raise RequestError(f"{path} is not a directory.", param="model_path")
        return wanted

    async def _update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        directory, version = self._allowed(body.get("model_path")), self._version(body)
        expected = body.get("content_digest")
        async with self._update:
            if body.get("abort_all_requests"):
                await asyncio.to_thread(self._engine.abort)
            digest = await asyncio.to_thread(self._load, directory, version, expected)
            await self._parts_are_whole()
        stats = self._engine.stats()
        return {
            "success": True,
            "message": f"Weights of version {version} are loaded.",
            "num_paused_requests": int(stats.get("running", 0)) if self._holds else 0,
            "content_digest": digest,
        }

    def _load(self, directory: Path, version: int, expected: str | None) -> str | None:
        named = dict(read_weights(directory))
        digest = None if expected is None else content_digest(named.items())
        if digest != expected:
            raise WeightUpdateError(
                f"The weights in {directory} have the digest {digest}, not {expected}: they were changed or damaged since they "
                "were written. Publish them again."
            )
        self._take(named, version)
        self._metrics.count("weight_updates", source="disk")
        return digest

    def _take(self, named: Any, version: int) -> None:
        if version < self._engine.get_version():  # a trainer that went back to a checkpoint, or another run's
            self._engine.go_back(version)
        self._engine.load_weights(named, version)

    async def _init_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body.get("group_name") or DEFAULT_GROUP)
        try:
            port, rank, size = (int(body[field]) for field in ("master_port", "rank_offset", "world_size"))
            arguments = str(body["master_address"]), port, rank, size
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"master_address, master_port, rank_offset and world_size are needed: {error!r}.") from error
        if not 0 < port <= 65535:
            raise RequestError(f"master_port={port}; it has to be between 1 and 65535.", param="master_port")
        if not 0 < rank < size:
            raise RequestError(
                f"rank_offset={rank} of world_size={size}: rank 0 is the trainer, and the server's rank is below world_size.",
                param="rank_offset",
            )
        backend = str(body.get("backend") or "nccl")
        if name in self._groups:
            self._groups.pop(name).close()
        self._groups[name] = await asyncio.to_thread(WeightGroup, *arguments, name, backend)
        return {"success": True, "message": f"Joined {name!r} as rank {arguments[2]} of {arguments[3]} over {backend}."}

    async def _destroy_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body.get("group_name") or DEFAULT_GROUP)
        if name not in self._groups:
            raise WeightUpdateError(f"There is no group {name!r}; there are {sorted(self._groups)}.")
        self._groups.pop(name).close()
        return {"success": True, "message": f"Left {name!r}."}

    async def _update_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        name = str(body.get("group_name") or DEFAULT_GROUP)
        group = self._groups.get(name)
        if group is None:
            raise WeightUpdateError(f"This server is in no group {name!r}: call /init_weights_update_group first.")
        names, dtypes, shapes = (_list(body, field) for field in ("names", "dtypes", "shapes"))
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one for each.")
        is_last = body.get("weight_version") is not None
        version = self._version(body) if is_last else self._engine.get_version()
        async with self._update:
            if body.get("abort_all_requests"):
                await asyncio.to_thread(self._engine.abort)
            if not is_last and not self._holds:  # no token may be sampled from weights of which only some parts have come
                await self._hold("parts")
            named = await asyncio.to_thread(group.receive, names, dtypes, shapes)
            await asyncio.to_thread(self._take, named, version)
            if is_last:
                await self._parts_are_whole()
        if is_last:
            self._metrics.count("weight_updates", source="distributed")
        return {"success": True, "message": f"Received {len(names)} tensors."}

    async def _parts_are_whole(self) -> None:
        if "parts" in self._holds:
            await self._release("parts")

    async def _begin_update(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._update:
            await self._hold("update")
        return {"success": True, "message": "Nothing is sampled until /end_weight_update."}

    async def _end_update(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._update:
            self._holds.discard("parts")
            await self._release("update")
        return {"success": True, "message": "The weights are whole."}

    async def _weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        action = body.get("action", "checksum")
        if action != "checksum":
            raise RequestError(f"action={action!r}; this server knows checksum.", param="action")
        async with self._update:
            state = dict(self._engine.model.named_parameters())
            digest = await asyncio.to_thread(content_digest, state.items())
        return {"success": True, "message": "", "payload": [{"per_gpu_checksum": digest, "checksums": {}}]}

    # -- memory --------------------------------------------------------------------------------------------------------

    def _check_tags(self, body: dict[str, Any]) -> None:
        others = [tag for tag in _list(body, "tags") if tag != "kv_cache"]
        if others:
            raise RequestError(f"tags {others} cannot be released: this engine keeps its weights; kv_cache can.", param="tags")

    async def _release_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_tags(body)
        await self._hold("client")
        await asyncio.to_thread(self._engine.flush_cache)
        return {"success": True, "message": "Paused; the cache of finished requests is released."}

    async def _resume_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check_tags(body)
        return {"success": True, **await self._continue(body)}


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestError(f"{name} is {value!r}; it has to be a list.", param=name)
    return value or []
