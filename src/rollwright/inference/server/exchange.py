"""Reading requests and writing answers while other clients are served: bodies, connections, server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from rollwright.inference.server.errors import RequestError

Result = TypeVar("Result")

#: From this size on a text takes longer to parse or to encode than a thread takes to start.
_LARGE = 1 << 16


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body; an empty body is an empty object.

    Raises:
        RequestError: it is not a JSON object.
    """
    body = await request.body()
    if not body:
        return {}
    try:
        value = await beside_the_loop(len(body), json.loads, body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise RequestError(f"The body is a JSON {type(value).__name__}, not an object with named parameters.")
    return value


async def beside_the_loop(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """``work``, in a thread where it reads much: health checks and other requests are answered meanwhile.

    Args:
        size: bytes or characters that it reads.
        work: parses or encodes them.
        arguments: of ``work``.
    """
    return work(*arguments) if size < _LARGE else await asyncio.to_thread(work, *arguments)


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Await ``work``, and cancel it when the client goes away, so that its slot is free at once.

    Raises:
        ClientGoneError: the client closed the connection first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_line(value: Any) -> str:
    """A server-sent event that carries a JSON value."""
    return "data: " + json.dumps(value, ensure_ascii=False) + "\n\n"
