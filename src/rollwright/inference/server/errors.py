"""Refusals as HTTP: an error says what is wrong with which parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rollwright.errors import EngineError, EngineStepError, PromptTooLongError, QueueFullError, RequestAborted


class RequestError(Exception):
    """A request that is refused, with an HTTP status."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind


def error_body(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, status: int = 400
) -> dict[str, Any]:
    """The body of an error, in the form that clients of both protocols read."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def as_request_error(error: Exception) -> RequestError:
    """The refusal that an engine's error becomes."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptTooLongError):
        return RequestError(str(error), param="prompt")
    if isinstance(error, RequestAborted):
        return RequestError(str(error), status=503, kind="server_error")
    if isinstance(error, QueueFullError):
        return RequestError(str(error), status=429, kind="rate_limit_error")
    if isinstance(error, EngineError) and not isinstance(error, EngineStepError):
        return RequestError(str(error))
    return RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


def error_response(error: Exception) -> JSONResponse:
    """The response that reports ``error``."""
    refusal = as_request_error(error)
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    body = error_body(str(refusal), kind=refusal.kind, param=refusal.param, status=refusal.status)
    return JSONResponse(body, status_code=refusal.status, headers=headers)


def path_refusal(request: Request, error: Exception, paths: Iterable[str]) -> JSONResponse:
    """The response to a path or method that nothing answers, in the form of every other error.

    Args:
        request: it.
        error: Starlette's ``HTTPException``.
        paths: those that there are.
    """
    assert isinstance(error, HTTPException)
    path, message = request.url.path, str(error.detail)
    if error.status_code == 404:
        message = f"There is no {path} here; there are {', '.join(known for known in paths if known)}."
    elif error.status_code == 405:
        message = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}."
    body = error_body(message, kind="invalid_request_error", status=error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=dict(error.headers or {}))


def refuse_outside(name: str, value: float, low: float | None, high: float | None) -> None:
    """Refuse a parameter that is out of its range; None: there is no limit on that side.

    Raises:
        RequestError: it names the limits.
    """
    if (low is None or value >= low) and (high is None or value <= high):
        return
    limits = (
        f"between {low} and {high}" if None not in (low, high) else f"at least {low}" if high is None else f"at most {high}"
    )
    raise RequestError(f"{name}={value}; it has to be {limits}.", param=name)
