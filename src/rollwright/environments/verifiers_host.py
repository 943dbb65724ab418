"""The process of an environment of verifiers: runs in the interpreter in which verifiers is installed.

It serves a Unix socket with one request per connection, a line of JSON: ``{"do": "tasks", …}`` lists tasks, ``{"do": "run", …}`` plays one.
Closing the connection cancels the request. verifiers is imported only after ``main`` has started, when the import path is complete. The
classic environments (verifiers up to 0.3.1) are ``_Classic``; those of ``verifiers.v1`` are in ``verifiers_v1``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import json
import ssl
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

READY, FAILED = b"R", b"F"
LINE_BYTES = 1 << 28

#: What reward functions raised in the rollout of this context: name, weight and error.
_RAISED: ContextVar[list[tuple[str, float, str]]] = ContextVar("raised")


class _Environment(Protocol):
    def tasks(self, split: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows of a split, and whether the environment itself keeps splits apart."""
        ...

    async def run(self, task: dict[str, Any], base_url: str, api_key: str, model: str, seconds: float) -> dict[str, Any]:
        """Play a task; return ``reward`` and ``metrics``, or ``failure`` (``reward`` or ``environment``) and ``said``."""
        ...

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Hold what all rollouts share."""
        ...


# -- classic environments ------------------------------------------------------------------------------------------------


class _Classic:
    """An environment with ``load_environment``: a dataset, and a rubric of reward functions."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import verifiers

        self.environment: Any = verifiers.load_environment(name, **args)
        if self.environment.requires_group_rollouts:
            raise ValueError(
                f"the rubric of {name} scores whole groups of rollouts ({', '.join(_group_functions(self.environment.rubric))}), and a sample "
                "is one rollout"
            )
        # The front speaks plain HTTP on this machine. Loading certificates and a proxy's settings anew would cost 30 ms an episode.
        self._no_certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for rubric in _rubrics(self.environment.rubric):
            rubric.funcs = [_noticing(function, weight) for function, weight in zip(rubric.funcs, rubric.weights, strict=True)]

    def tasks(self, split: str) -> tuple[list[dict[str, Any]], bool]:
        held_out = self.environment.build_eval_dataset()
        chosen = held_out if held_out is not None and split != "train" else self.environment.build_dataset()
        if chosen is None:
            raise ValueError("it has no dataset")
        return [dict(row) for row in chosen], held_out is not None

    async def run(self, task: dict[str, Any], base_url: str, api_key: str, model: str, seconds: float) -> dict[str, Any]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        raised: list[tuple[str, float, str]] = []
        _RAISED.set(raised)
        http = DefaultAsyncHttpxClient(verify=self._no_certificates, trust_env=False)
        async with AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0, timeout=seconds, http_client=http
        ) as connection:
            output = await self.environment.run_rollout(task, _client(connection), model, {})
        if output.get("error"):
            return {"failure": "environment", "said": _error_text(output["error"])}
        for name, weight, said in raised:
            if weight:
                return {"failure": "reward", "said": f"its reward function {name} raised {said}"}
        unscored = {name for name, _, _ in raised}
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if name not in unscored}
        return {"reward": output["reward"], "metrics": metrics}

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return contextlib.nullcontext()


def _client(connection: Any) -> Any:
    """The client of verifiers, which lets the environment score an empty reply; its own fails the rollout as if the model were broken."""
    from verifiers.legacy.clients import OpenAIChatCompletionsClient
    from verifiers.legacy.errors import EmptyModelResponseError

    class Client(OpenAIChatCompletionsClient):
        async def raise_from_native_response(self, response: Any) -> None:
            with contextlib.suppress(EmptyModelResponseError):
                await super().raise_from_native_response(response)

    return Client(connection)


def _rubrics(rubric: Any) -> Iterator[Any]:
    """A rubric, and those that it groups."""
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _group_functions(rubric: Any) -> list[str]:
    return [function.__name__ for each in _rubrics(rubric) for function in each.funcs if each._is_group_func(function)]


def _noticing(function: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Wrap a reward function so that an error is noticed: the rubric would count it as 0."""

    def note(error: Exception) -> None:
        name = getattr(function, "__name__", repr(function))
        _RAISED.get().append((name, weight, f"{_described(error)}, in {_place(error)}"))

    async def awaited(value: Any) -> Any:
        try:
            return float(await value)
        except Exception as error:  # whatever a reward function raises; raised again for the rubric
            note(error)
            raise

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        try:
            value = function(*arguments, **keywords)
            return awaited(value) if inspect.isawaitable(value) else float(value)
        except Exception as error:  # as above
            note(error)
            raise

    return called


def _error_text(error: Any) -> str:
    """The text of a rollout's error, which is an exception, or a record of one."""
    if isinstance(error, dict):
        return str(error.get("error_chain_repr") or error.get("error") or error)
    return _described(error) if isinstance(error, BaseException) else str(error)


# -- the process ---------------------------------------------------------------------------------------------------------


def _described(error: BaseException) -> str:
    """Describe an error and its causes on one line."""
    parts: list[str] = []
    while error is not None and len(parts) < 4:
        parts.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        error = error.__cause__  # type: ignore[assignment]
    return ", from ".join(parts)


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _load(name: str, args: dict[str, Any]) -> _Environment:
    module = importlib.import_module(name.split("/")[-1].split("@")[0].replace("-", "_"))
    version = tuple(map(int, importlib.metadata.version("verifiers").split(".")[:2]))
    if hasattr(module, "load_environment"):
        if version != (0, 3):
            raise ValueError(
                f"{name} is a classic environment, and verifiers {version[0]}.{version[1]} is installed: install 'verifiers<0.4'"
            )
        return _Classic(name, args)
    if version < (0, 4):
        raise ValueError(
            f"{name} is no classic environment, and verifiers {version[0]}.{version[1]} is installed: install 'verifiers>=0.4'"
        )
    from rollwright.environments.verifiers_v1 import V1

    return V1(name, args)


async def _serve(environment: _Environment, path: str, tell_ready: Callable[[], None]) -> None:
    async def perform(request: dict[str, Any]) -> dict[str, Any]:
        kind = request.pop("do")
        try:
            if kind == "tasks":
                tasks, keeps_splits = await asyncio.to_thread(environment.tasks, **request)
                return {"tasks": tasks, "keeps_splits": keeps_splits}
            return await environment.run(**request)
        except Exception as error:  # whatever the environment raises fails this request, not those of other episodes
            traceback.print_exc()
            return {"failure": "environment", "said": _described(error)}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            work, gone = asyncio.ensure_future(perform(request)), asyncio.ensure_future(reader.read(1))
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not work.done():
                work.cancel()
                return
            try:
                line = json.dumps(work.result())
            except (TypeError, ValueError) as error:
                line = json.dumps({"failure": "environment", "said": f"its rows or results are no JSON: {error}"})
            writer.write(line.encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()

    async with environment.serving():
        # Hundreds of episodes may begin while this loop is busy; connections beyond the backlog would be refused.
        server = await asyncio.start_unix_server(answer, path, limit=LINE_BYTES, backlog=4096)
        tell_ready()
        async with server:
            await server.serve_forever()


def main() -> None:
    """Load the environment and answer requests until the parent ends."""
    from rollwright.processes.child import connect

    channel, setup = connect()
    try:
        environment = _load(setup["name"], setup["args"])
    except Exception as error:  # whatever its package raises at import; the parent reports it
        traceback.print_exc()
        channel.send(FAILED, _described(error).encode())
        return
    asyncio.run(_serve(environment, setup["socket"], lambda: channel.send(READY)))
