"""Exchange of requests and responses with clients: bodies, connections, errors and server-sent events.

Nothing in this module blocks the event loop for long, so other clients are not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
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

#: Size in bytes from which parsing or encoding text takes longer than starting a thread.
LARGE = 1 << 16
_BODY_SECONDS = 120
_large_bodies: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
#: Error code by which OpenAI's clients recognise that a conversation has outgrown the context.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestError(Exception):
    """Rejection of a request, with the fields of its error response.

    Args:
        message: what is wrong, and what to do.
        status: HTTP status of the response.
        param: field of the request that is wrong.
        kind: type of the error in OpenAI's protocol.
        code: code of the error in OpenAI's protocol. None uses the status.
    """

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
        """Return the body of the response, in a form that clients of OpenAI's and of SGLang's protocol read."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code or self.status}}


#: Engine error -> arguments of the ``RequestError`` that reports it.
_REFUSALS: dict[type[EngineError], dict[str, Any]] = {
    PromptTooLongError: {"param": "prompt", "code": CONTEXT_LENGTH_EXCEEDED},
    RequestAborted: {"status": 503, "kind": "server_error"},
    QueueFullError: {"status": 429, "kind": "rate_limit_error"},
}


class ClientGoneError(Exception):
    """The client closed its connection; nobody waits for the answer."""


def as_request_error(error: Exception) -> RequestError:
    """Convert an exception to a ``RequestError``."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError) and not isinstance(error, EngineStepError):
        return RequestError(str(error), **next((how for kind, how in _REFUSALS.items() if isinstance(error, kind)), {}))
    return RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Build the response that reports ``error``; a failed weight update is reported in SGLang's form."""
    if isinstance(error, WeightUpdateError):
        return JSONResponse({"success": False, "message": str(error)}, status_code=400)
    refusal = as_request_error(error)
    usual = {429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(refusal.status, {})
    return JSONResponse(refusal.body(), status_code=refusal.status, headers={**usual, **(headers or {})})


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request is refused; error.message says why.",
        "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}},
    }
}


class Routes(APIRouter):
    """Routes whose handlers' exceptions become responses that say what is wrong.

    Args:
        table: method, path, handler and body of each route. The body, a subclass of ``Body`` or None, is described in the service's
            schema. A handler with a parameter ``request`` gets the request; any other parameter gets the parsed body.
    """

    def __init__(self, table: Iterable[tuple[str, str, Callable[..., Any], Any]]) -> None:
        super().__init__()
        for method, path, handler, body in table:
            described = {"requestBody": {"content": {"application/json": {"schema": body.described()}}}} if body else None
            self.add_api_route(
                path,
                _endpoint(handler, body),
                methods=[method],
                name=path,
                description=inspect.getdoc(handler),
                response_model=None,
                openapi_extra=described,
                responses=_ERRORS,
            )


def _endpoint(handler: Callable[..., Any], body: Any) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that it returns a ``Response``; FastAPI would walk through every value of any other result."""
    parameters = inspect.signature(handler).parameters
    report = error_response if body is None else body.error_response

    async def endpoint(request: Request) -> Response:
        try:
            if "request" in parameters:
                result = await handler(request)
            else:
                given = None if body is None else await body.read(request)
                result = await (handler(given) if parameters else handler())
            return result if isinstance(result, Response) else JSONResponse(result)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=499)
        except HTTPException:
            raise
        except Exception as error:  # reported to the client, whatever it is
            if as_request_error(error).status == 500:
                logger.exception("%s failed", request.url.path)
            return report(error)

    return endpoint


async def read_object(request: Request) -> tuple[dict[str, Any], int]:
    """Read the JSON object in a request's body; an empty body is an empty object.

    A parsed body can take twenty times as much memory as its bytes. Therefore at most two large bodies are read and parsed at once;
    the others wait unread.

    Returns:
        The object, and the size of the body in bytes.

    Raises:
        RequestError: the body is not a JSON object, or does not arrive in time.
    """
    length = request.headers.get("content-length", "")
    is_small = length.isdecimal() and int(length) < LARGE
    large_bodies = _large_bodies.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(2))
    async with contextlib.nullcontext() if is_small else large_bodies:
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
    """Return the key of a request, from a bearer token or the header of Anthropic's clients, or None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")) or None


async def beside_the_loop(request: Request, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return ``work(*arguments)``, computed in a thread if it processes a large body.

    Args:
        request: the request that the work is for.
        size: bytes of the request's body.
        work: the function.
        arguments: arguments of ``work``.

    Raises:
        ClientGoneError: the client closed the connection first.
    """
    return work(*arguments) if size < LARGE else await while_connected(request, asyncio.to_thread(work, *arguments))


async def while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """Await ``work``, and cancel it if the client disconnects, which frees its slot at once.

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
        del task, watcher  # a failed task's traceback refers to this frame: the cycle would keep the request in memory


def event_line(value: Any) -> str:
    """Format a JSON value as a server-sent event."""
    return "data: " + json.dumps(value, ensure_ascii=False) + "\n\n"


def error_event(error: Exception) -> str:
    """Format an exception as the last event of a stream."""
    return event_line(as_request_error(error).body())


async def event_stream(
    request: Request, events: AsyncGenerator[str, None], describe: Callable[[Exception], str] = error_event
) -> StreamingResponse:
    """Stream ``events``.

    Args:
        request: the request to answer.
        events: formatted events.
        describe: formats an exception that ``events`` raises after the first event.

    Raises:
        Exception: ``events`` raised it before the first event; the response then gets an error status.
    """
    first = await while_connected(request, anext(events))

    async def body() -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except Exception as error:  # reported to the client, whatever it is
                yield describe(error)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
