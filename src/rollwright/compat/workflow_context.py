"""Where a workflow runs, by the names that AReaL's files use: ``stats_tracker.get(workflow_context.stat_scope()).scalar(reward=1.0)``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from rollwright.rollout.sample_engine import CURRENT_SAMPLE

#: Seconds that a request of a shared client may take, and no limit of its own; model calls may queue.
REQUEST_SECONDS = 3600.0


@dataclass(frozen=True)
class WorkflowContext:
    """What is known of the running episode.

    Attributes:
        is_eval: it evaluates; what it reports is named ``eval/…``.
        task_id: ordinal of the task's draw; None outside of an executor.
    """

    is_eval: bool = False
    task_id: int | None = None


def get() -> WorkflowContext:
    """The context of the episode that the running asyncio task belongs to."""
    sample = CURRENT_SAMPLE.get()
    return WorkflowContext() if sample is None else WorkflowContext(sample.name.is_eval, sample.name.ordinal)


def stat_scope() -> str:
    """The scope of an episode's figures: ``rollout``. In an evaluation they are named ``eval/rollout/…``."""
    return "rollout"


async def get_httpx_client() -> Any:
    """An ``httpx.AsyncClient`` that the episodes of one event loop share; it is closed when the loop ends.

    Of httpx where it is installed, as by clients before openai 3, which take no other; else of httpx2, its continuation.
    """
    return await _shared(_httpx_client)


async def get_aiohttp_session() -> Any:
    """An ``aiohttp.ClientSession`` that the episodes of one event loop share; it is closed when the loop ends."""
    return await _shared(_aiohttp_session)


@contextlib.asynccontextmanager
async def _httpx_client() -> AsyncIterator[Any]:
    httpx: Any  # of the core, or the one that a workflow's own packages brought
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
#: Clients by event loop: each with the generator that holds it open, which the loop closes when it shuts down.
_clients: dict[asyncio.AbstractEventLoop, dict[Opener, tuple[Any, AsyncGenerator[Any, None]]]] = {}


async def _shared(opener: Opener) -> Any:
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    if opener not in clients:
        generator = _until_the_loop_ends(opener)
        clients[opener] = (await anext(generator), generator)  # neither client waits for anything while it is opened
    return clients[opener][0]


async def _until_the_loop_ends(opener: Opener) -> AsyncGenerator[Any, None]:
    loop = asyncio.get_running_loop()
    async with opener() as client:
        try:
            yield client
        finally:
            _clients.pop(loop, None)
