"""The context of a running workflow, under AReaL's names: ``stats_tracker.get(workflow_context.stat_scope()).scalar(reward=1.0)``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from rollwright.rollout.sample_engine import CURRENT_SAMPLE

#: Time limit of a shared client's request in seconds; long, because model calls may queue.
REQUEST_SECONDS = 3600.0


@dataclass(frozen=True)
class WorkflowContext:
    """Facts about the running episode.

    Attributes:
        is_eval: True in an evaluation, whose metrics are named ``eval/…``.
        task_id: ordinal of the task's draw, or None outside an executor.
    """

    is_eval: bool = False
    task_id: int | None = None


def get() -> WorkflowContext:
    """Return the context of the episode that the current asyncio task belongs to."""
    sample = CURRENT_SAMPLE.get()
    return WorkflowContext() if sample is None else WorkflowContext(sample.name.is_eval, sample.name.ordinal)


def stat_scope() -> str:
    """Return the scope of an episode's metrics, ``rollout``. In an evaluation, they are named ``eval/rollout/…``."""
    return "rollout"


async def get_httpx_client() -> Any:
    """Return an ``httpx.AsyncClient`` that the episodes of one event loop share; it is closed when the loop ends.

    The client is from httpx if that is installed, because openai before version 3 accepts no other; otherwise, from its successor httpx2.
    """
    return await _shared(_httpx_client)


async def get_aiohttp_session() -> Any:
    """Return an ``aiohttp.ClientSession`` that the episodes of one event loop share; it is closed when the loop ends."""
    return await _shared(_aiohttp_session)


@contextlib.asynccontextmanager
async def _httpx_client() -> AsyncIterator[Any]:
    httpx: Any
    try:
        import httpx
    except ImportError:
        import httpx2 as httpx

    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
        yield client


@contextlib.asynccontextmanager
async def _aiohttp_session() -> AsyncIterator[Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


Opener = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
#: Clients by event loop, each with the generator that keeps it open; the loop closes the generator when it shuts down.
_clients: dict[asyncio.AbstractEventLoop, dict[Opener, tuple[Any, AsyncGenerator[Any, None]]]] = {}


async def _shared(opener: Opener) -> Any:
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if opener not in clients:
        generator = _until_the_loop_ends(opener)
        clients[opener] = (await anext(generator), generator)  # opening either client does not wait
    return clients[opener][0]


async def _until_the_loop_ends(opener: Opener) -> AsyncGenerator[Any, None]:
    loop = asyncio.get_running_loop()
    async with opener() as client:
        try:
            yield client
        finally:
            _clients.pop(loop, None)
