"""The guard in front of every HTTP service: it checks the host, origin and key of a request, and the type and size of its body."""

from __future__ import annotations

import hmac
import socket
from typing import ClassVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollwright.inference.server.exchange import RequestError, error_response, given_key
from rollwright.inference.server.settings import LOOPBACK, ServiceSettings


class Guard:
    """ASGI middleware that checks a request's host, origin and key, and the type and size of its body.

    A web page that is open in a user's browser can send requests to this machine. Therefore Host and Origin must be names of the service
    (against DNS rebinding), and a body must be declared as JSON, which browsers send to another origin only after a preflight request.
    The class implements ASGI itself, because a middleware that wraps responses would hide a client's disconnection from the handlers.

    Args:
        app: the guarded application.
        settings: names, key and limits of the service.

    Attributes:
        open_paths: paths that need no key, because they only show that the service is alive.
    """

    open_paths: ClassVar[frozenset[str]] = frozenset({"/", "/health", "/ping"})

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app, self.settings = app, settings
        machine = () if settings.host in LOOPBACK else (socket.gethostname(), socket.getfqdn())
        self._names = {name.strip("[]").lower() for name in (*LOOPBACK, settings.host, *machine, *settings.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif refusal := self.refusal(scope, Headers(scope=scope)):
            await error_response(refusal)(scope, receive, send)
        else:
            await self.answer(scope, self._limited(receive), send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that passed all checks."""
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Return why a request is rejected before its body is read, or None if it is accepted."""
        length = headers.get("content-length", "0")
        own_address, _ = scope.get("server") or ("", 0)  # of this connection
        for header, prefix in (("host", "//"), ("origin", "")):
            for value in headers.getlist(header):
                if (name := _hostname(prefix + value)) is None or name not in {*self._names, own_address}:
                    return RequestError(
                        f"{header.title()} {value!r} is not a name of this service: ask it by the address that it was started with, "
                        "or start it with that name among its allowed_hosts.",
                        status=403,
                        kind="permission_error",
                    )
        if not self.is_known(scope, headers) and scope["path"] not in self.open_paths:
            return RequestError(
                "The request carries no valid key: send the header Authorization: Bearer KEY (or x-api-key: KEY).",
                status=401,
                kind="authentication_error",
            )
        if not length.isdecimal() or len(length) > 15 or int(length) > self.settings.max_body_bytes:
            return self._too_large()
        if int(length) or "transfer-encoding" in headers:
            kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                return RequestError(
                    f"The body is declared as {', '.join(kinds) or 'nothing'}: send JSON with Content-Type: application/json.",
                    status=415,
                )
        return None

    def is_known(self, scope: Scope, headers: Headers) -> bool:
        """True if a request carries the key, or the service needs none."""
        key = self.settings.api_key
        return not key or hmac.compare_digest((given_key(headers) or "").encode(), key.encode())

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.settings.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> RequestError:
        return RequestError(
            f"The body is larger than {self.settings.max_body_bytes} bytes, the limit of this service (max_body_bytes): send less "
            "at a time, or raise the limit.",
            status=413,
        )


def _hostname(url: str) -> str | None:
    """Return the host of a URL, or None if the URL cannot be parsed."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
