"""Requests in, answers and refusals out, while other clients are served: bodies, connections, errors, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rollwright.errors import (
    EngineError,
    EngineStepError,
    PromptTooLongError,
    QueueFullError,
    RequestAborted,
    WeightUpdateError,
)
from rollwright.tracking.logging import getLogger

logger = getLogger("Service")

Result = TypeVar("Result")

#: From this size on a text takes longer to parse or to encode than a thread takes to start.
LARGE = 1 << 16
_BODY_SECONDS = 120
_large_bodies: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


#: The code by which OpenAI's clients know that a conversation has outgrown the context.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestError(Exception):
    """A request that is refused, with an HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.kind, self.code = status, param, kind, code

    def body(self) -> dict[str, Any]:
        """The body of the answer, in the form that clients of both protocols read."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code or self.status}}


#: How engine errors that are no fault of the request's parameters are refused.
_REFUSALS: dict[type[EngineError], dict[str, Any]] = {
    PromptTooLongError: {"param": "prompt", "code": CONTEXT_LENGTH_EXCEEDED},
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


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response that reports ``error``."""
    refusal = as_request_error(error)
    usual = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(refusal.status, {})
    return JSONResponse(refusal.body(), status_code=refusal.status, headers={**usual, **(headers or {})})


class AnsweringRoute(APIRoute):
    """A route whose handler's exceptions become responses that say what is wrong."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except (ClientGoneError, ClientDisconnect):
                return Response(status_code=499)
            except HTTPException:
                raise
            except WeightUpdateError as error:  # SGLang's form of a failed update
                return JSONResponse({"success": False, "message": str(error)}, status_code=400)
            except Exception as error:  # whatever it is, the client is told
                if as_request_error(error).status == 500:
                    logger.exception("%s failed", request.url.path)
                return error_response(error)

        return answer


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request is refused; error.message says why.",
        "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}},
    }
}


class Routes(APIRouter):
    """Routes whose handlers' exceptions become responses that say what is wrong.

    Args:
        table: method, path, handler and body of each. A body (a ``Body``) is described in the service's schema; it is read and
            given to a handler that takes an argument, except one that takes the ``request`` itself.
    """

    def __init__(self, table: Iterable[tuple[str, str, Callable[..., Any], Any]]) -> None:
        super().__init__(route_class=AnsweringRoute)
        for method, path, handler, body in table:
            endpoint = _answering(handler if body is None else _reading(body, handler))
            described = {"requestBody": {"content": {"application/json": {"schema": body.described()}}}} if body else None
            self.add_api_route(
                path, endpoint, methods=[method], response_model=None, openapi_extra=described, responses=_ERRORS, name=path
            )


def _answering(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The endpoint with its answer as a response: FastAPI would walk through every value of it first, to make JSON's types."""

    @functools.wraps(endpoint)
    async def answer(*arguments: Any, **named: Any) -> Response:
        result = await endpoint(*arguments, **named)
        return result if isinstance(result, Response) else JSONResponse(result)

    return answer


def _reading(body: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    if "request" in (parameters := inspect.signature(handler).parameters):
        return handler

    async def endpoint(request: Request) -> Any:
        given = await body.read(request)
        return await (handler(given) if parameters else handler())

    return endpoint


async def read_object(request: Request) -> tuple[dict[str, Any], int]:
    """The JSON object in a request's body, and the body's size in bytes; an empty body is an empty object.

    A parsed body may take twenty times the memory of its bytes, so only two large ones are read and parsed at once; the others
    are left in the network until then.

    Raises:
        RequestError: it is not a JSON object, or does not arrive in time.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) < LARGE:
        value, size = await _read(request)
    else:
        async with _large_bodies.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(2)):
            value, size = await _read(request)
    if not isinstance(value, dict):
        raise RequestError(f"The body is a JSON {type(value).__name__}, not an object with named parameters.")
    return value, size


async def _read(request: Request) -> tuple[Any, int]:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            body = b"".join([chunk async for chunk in request.stream()])
        return (await beside_the_loop(request, len(body), from_json, body) if body else {}), len(body)
    except TimeoutError:
        raise RequestError(f"The body did not arrive within {_BODY_SECONDS} s.", status=408) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.") from error


def given_key(headers: Headers) -> str | None:
    """The key of a request, as a bearer token or as Anthropic's clients send it; None where it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")) or None


async def beside_the_loop(request: Request, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """``work(*arguments)``; where it reads a large ``size`` (bytes), in a thread, so that other requests are answered meanwhile.

    Raises:
        ClientGoneError: nobody waits for it any more.
    """
    return work(*arguments) if size < LARGE else await while_connected(request, asyncio.to_thread(work, *arguments))


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
        del (
            task,
            watcher,
        )  # the error of a task holds this frame: together they would keep the request until a garbage collection


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
