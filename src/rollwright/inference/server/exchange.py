"""Requests in, answers and refusals out, while other clients are served: bodies, connections, errors, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from rollwright.errors import (
    EngineError,
    EngineStepError,
    PromptTooLongError,
    QueueFullError,
    RequestAborted,
    WeightUpdateError,
)

Result = TypeVar("Result")

#: From this size on a text takes longer to parse or to encode than a thread takes to start.
_LARGE = 1 << 16


class RequestError(Exception):
    """A request that is refused, with an HTTP status."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind = status, param, kind

    def body(self) -> dict[str, Any]:
        """The body of the answer, in the form that clients of both protocols read."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


#: How engine errors that are no fault of the request's parameters are refused.
_REFUSALS: dict[type[EngineError], dict[str, Any]] = {
    PromptTooLongError: {"param": "prompt"},
    RequestAborted: {"status": 503, "kind": "server_error"},
    QueueFullError: {"status": 429, "kind": "rate_limit_error"},
}


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


def as_request_error(error: Exception) -> RequestError:
    """The refusal that an engine's error becomes."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError) and not isinstance(error, EngineStepError):
        return RequestError(str(error), **next((how for kind, how in _REFUSALS.items() if isinstance(error, kind)), {}))
    return RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


def error_response(error: Exception) -> JSONResponse:
    """The response that reports ``error``."""
    refusal = as_request_error(error)
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(refusal.status)
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=headers)


def path_refusal(request: Request, error: Exception, paths: Iterable[str]) -> JSONResponse:
    """The response to a path or method that nothing answers, in the form of every other error; it names the ``paths``."""
    assert isinstance(error, HTTPException)
    path, message = request.url.path, str(error.detail)
    if error.status_code == 404:
        message = f"There is no {path} here; there are {', '.join(known for known in paths if known)}."
    elif error.status_code == 405:
        message = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}."
    refusal = RequestError(message, status=error.status_code)
    return JSONResponse(refusal.body(), status_code=error.status_code, headers=dict(error.headers or {}))


class AnsweringRoute(APIRoute):
    """A route whose handler's exceptions become responses that say what is wrong."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientGoneError:
                return Response(status_code=499)
            except HTTPException:
                raise
            except WeightUpdateError as error:  # SGLang's form of a failed update
                return JSONResponse({"success": False, "message": str(error)}, status_code=400)
            except Exception as error:  # whatever it is, the client is told
                return error_response(error)

        return answer


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


def bearer_token(request: Request) -> str | None:
    """The bearer token of a request, or None."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


async def beside_the_loop(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """``work(*arguments)``, in a thread where it reads a large ``size`` (bytes), so that other requests are answered meanwhile."""
    return work(*arguments) if size < _LARGE else await asyncio.to_thread(work, *arguments)


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Await ``work``, and cancel it when the client goes away, so that its slot is free at once.

    Raises:
        ClientGoneError: the client closed the connection first.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def event_line(value: Any) -> str:
    """A server-sent event that carries a JSON value."""
    return "data: " + json.dumps(value, ensure_ascii=False) + "\n\n"


async def event_stream(request: Request, events: AsyncGenerator[str, None]) -> StreamingResponse:
    """The response that sends ``events``; what fails before the first of them gives the request a status, not a broken stream."""
    first = await while_connected(request, anext(events))

    async def body() -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(events):
            yield first
            async for event in events:
                yield event

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
