"""LoRA adapters over HTTP, in vLLM's and in SGLang's form, and the runs that share a server.

A run has a key. Requests with that key are the run's: they can load, unload and name only adapters called ``RUN-…``, and a request that
names no adapter is computed with the run's newest one. The server's own key names any adapter; without a name it means the base.

Loading needs no pause and changes no running request. Unloading takes the name away at once and answers when no request uses the
adapter; while requests that use it are paused it answers at once, so it cannot wait for ever.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field

from rollwright.errors import ConfigError, RollwrightError, WeightUpdateError
from rollwright.inference.backends.builtin.adapters import Adapter
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.bodies import NotEmpty
from rollwright.inference.server.control_bodies import LAST_VERSION, ControlBody
from rollwright.inference.server.exchange import RequestError, Routes, as_request_error
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.adapter import CONFIG_FILE
from rollwright.inference.weights.files import content_digest, read_stream
from rollwright.tracking.logging import getLogger

logger = getLogger("serve-model")

#: Run whose key the current request carries; empty for the server's own key, or if there are no keys.
current_run: ContextVar[str] = ContextVar("current_run", default="")

_FIRST_WAIT, _LONGEST_WAIT = 0.01, 0.5  # seconds between two looks at whether an unloaded adapter is still in use


class LoadAdapter(ControlBody):
    """``/v1/load_lora_adapter`` and ``/load_lora_adapter``."""

    lora_name: NotEmpty
    lora_path: NotEmpty = Field(description="a directory that PEFT wrote")
    load_inplace: bool = False
    weight_version: int | None = Field(None, ge=0, le=LAST_VERSION, description="a whole number: versions count weight updates")
    content_digest: str | None = None


class UnloadAdapter(ControlBody):
    """``/v1/unload_lora_adapter`` and ``/unload_lora_adapter``."""

    lora_name: NotEmpty


def allowed_directory(settings: ServerSettings, path: str, param: str) -> Path:
    """Resolve the path of a directory, and check that weights may be loaded from it.

    Raises:
        RequestError: they may not, or it is no directory.
    """
    if not settings.weights_roots:
        raise RequestError(
            "This server loads no weights from disk: start it with --weights-root DIRECTORY.", status=403, param=param
        )
    try:
        directory = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"{path!r:.200} is no path: {error}.", param=param) from error
    if not any(directory.is_relative_to(Path(root).resolve()) for root in settings.weights_roots):
        raise RequestError(f"{path} is not below a weights root of this server.", status=403, param=param)
    if not directory.is_dir():
        raise RequestError(f"{path} is not a directory.", param=param)
    return directory


class AdapterRoutes:
    """Loads and unloads the adapters of an engine, and chooses the adapter of a request.

    Args:
        engine: the engine.
        settings: names, runs and directories of the server.
        loaded: called after an adapter was loaded.
    """

    def __init__(self, engine: BuiltinEngine, settings: ServerSettings, loaded: Callable[[], object]) -> None:
        self._engine, self._settings, self._loaded = engine, settings, loaded
        self._changing = asyncio.Lock()

    @property
    def router(self) -> Routes:
        """The routes."""
        return Routes(
            [
                ("POST", "/v1/load_lora_adapter", self._vllm_load, LoadAdapter),
                ("POST", "/v1/unload_lora_adapter", self._vllm_unload, UnloadAdapter),
                ("POST", "/load_lora_adapter", self._sglang_load, LoadAdapter),
                ("POST", "/unload_lora_adapter", self._sglang_unload, UnloadAdapter),
            ]
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def visible(self) -> list[Adapter]:
        """Return the adapters that the current request may name."""
        run = current_run.get()
        return [adapter for adapter in self._engine.adapters if run in ("", adapter.run)]

    def newest_version(self) -> int:
        """Return the version of the current run's newest adapter, 0 before its first; for the server's own key, that of the base."""
        run = current_run.get()
        if not run:
            return self._engine.get_version()
        adapters = self._engine.adapters.of_run(run)
        return adapters[-1].version if adapters else 0

    def assign(self, request: ModelRequest, name: str | None, param: str) -> ModelRequest:
        """Set the adapter and the run of a request.

        Args:
            request: the request.
            name: the adapter that the client names. None or empty means none.
            param: the parameter that names it.

        Raises:
            RequestError: there is no such adapter, or it belongs to another run.
        """
        run = current_run.get()
        request.metadata["run"] = run
        if name:
            self.check(name, param)
            request.lora_name = name
        elif run:
            adapters = self._engine.adapters.of_run(run)
            request.lora_name = adapters[-1].name if adapters else ""
        return request

    def check(self, name: str, param: str) -> None:
        """Check that the current request may name an adapter.

        Raises:
            RequestError: there is no such adapter, or it belongs to another run.
        """
        names = [adapter.name for adapter in self.visible()]
        if name not in names:
            held = f"there are {', '.join(names)}" if names else "there are none"
            base = f" The base is {self._settings.model_name!r}." if param == "model" else ""
            raise RequestError(
                f"There is no adapter {name!r} here; {held}.{base}", status=404 if param == "model" else 400, param=param
            )

    async def described(self) -> list[dict[str, Any]]:
        """Describe the adapters that the current request may name."""
        requests = await asyncio.to_thread(self._engine.adapter_requests)
        return [
            {
                "name": adapter.name,
                "version": adapter.version,
                "rank": adapter.spec.rank,
                "run": adapter.run,
                "path": adapter.path,
                "requests": requests.get(adapter.name, 0),
            }
            for adapter in self.visible()
        ]

    # -- loading -------------------------------------------------------------------------------------------------------

    async def _load(self, body: LoadAdapter) -> None:
        self._check_name(body.lora_name)
        directory = allowed_directory(self._settings, body.lora_path, "lora_path")
        async with self._changing:
            adapter = await asyncio.to_thread(self._read, body, directory)
            held = self._engine.adapters.get(body.lora_name)
            if held is not None and not body.load_inplace:
                if held.equals(adapter):  # the same call, sent again
                    return
                raise RequestError(
                    f"The lora adapter {body.lora_name!r} has already been loaded, with other tensors. Give each version a name of its "
                    "own, or set load_inplace.",
                    param="lora_name",
                )
            await asyncio.to_thread(self._engine.load_adapter, adapter)
        self._loaded()

    def _read(self, body: LoadAdapter, directory: Path) -> Adapter:
        if not (directory / CONFIG_FILE).is_file():
            raise WeightUpdateError(f"{directory} is no adapter: it has no {CONFIG_FILE}, which PEFT writes.")
        stream = read_stream(directory)
        digest = None if body.content_digest is None else content_digest(stream)
        if digest != body.content_digest:
            raise WeightUpdateError(
                f"The adapter in {directory} has the digest {digest}, not {body.content_digest}: it was changed or damaged since it "
                "was written. Publish it again."
            )
        version = body.weight_version if body.weight_version is not None else _version_in(body.lora_name)
        return Adapter.copied(
            body.lora_name, stream, self._engine.model, version, run=current_run.get(), path=body.lora_path, digest=digest or ""
        )

    async def _unload(self, body: UnloadAdapter) -> str:
        """Drop an adapter, wait until no request uses it, and return what to tell the client."""
        name, run = body.lora_name, current_run.get()
        self._check_name(name)
        async with self._changing:
            held = self._engine.adapters.get(name)
            if held is None or run not in ("", held.run):
                names = ", ".join(adapter.name for adapter in self.visible()) or "none"
                raise RequestError(
                    f"The lora adapter {name!r} cannot be found; loaded are {names}.", status=404, param="lora_name"
                )
            adapter = await asyncio.to_thread(self._engine.unload_adapter, name)
        seconds = _FIRST_WAIT
        while await asyncio.to_thread(self._engine.requests_to_wait_for, adapter):
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_WAIT)
        return f"LoRA adapter {name!r} removed successfully."

    def _check_name(self, name: str) -> None:
        """Check that the current run may use a name.

        Raises:
            RequestError: it is another run's, or the base's.
        """
        run = current_run.get()
        if name == self._settings.model_name:
            raise RequestError(f"{name!r} is the name of the base; give the adapter another.", param="lora_name")
        owners = [other for other in self._settings.run_keys if name.startswith(f"{other}-")]
        if run and max(owners, key=len, default="") != run:
            raise RequestError(
                f"The key belongs to the run {run!r}, whose adapters are called {run}-…; {name!r} is not one of them.",
                status=403,
                kind="permission_error",
                param="lora_name",
            )

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _vllm_load(self, body: LoadAdapter) -> Response:
        await _refused_as_request(self._load(body))
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    async def _vllm_unload(self, body: UnloadAdapter) -> Response:
        return PlainTextResponse(f"Success: {await _refused_as_request(self._unload(body))}")

    async def _sglang_load(self, body: LoadAdapter) -> Response:
        return await self._in_sglangs_form(self._load(body))

    async def _sglang_unload(self, body: UnloadAdapter) -> Response:
        return await self._in_sglangs_form(self._unload(body))

    async def _in_sglangs_form(self, work: Awaitable[Any]) -> Response:
        status, message = 200, ""
        try:
            await work
        except (RequestError, RollwrightError) as error:
            status, message = (400 if isinstance(error, ConfigError) else as_request_error(error).status), str(error)
        loaded = {adapter.name: adapter.path for adapter in self.visible()}
        content = {"success": not message, "error_message": message, "loaded_adapters": loaded}
        return JSONResponse(content | ({"message": message} if message else {}), status_code=status)


async def _refused_as_request(work: Awaitable[Any]) -> Any:
    """Await ``work``, and report its refusals in OpenAI's form, as vLLM does."""
    try:
        return await work
    except (ConfigError, WeightUpdateError) as error:
        raise RequestError(str(error)) from error


def _version_in(name: str) -> int:
    """Return the version in a name such as ``policy-v3``, or 0."""
    found = re.search(r"-v(\d{1,9})$", name)
    return int(found[1]) if found else 0
