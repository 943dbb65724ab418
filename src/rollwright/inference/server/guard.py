"""The guard before every service: who may ask, by which names, with which key, and how much."""

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
    """ASGI middleware: which names a service answers to, who may ask, the key, and the form and size of bodies.

    A web page that a user has open may send requests to this machine. So the Host has to be a name of the service (or a page
    could give the service's address a name of its own), the Origin one too, and a body has to be declared as JSON (which a page
    may send elsewhere only after asking). Written against ASGI itself, because a wrapping of responses would hide a client's
    disconnection from the handlers.

    Attributes:
        open_paths: paths that need no key, as they only show that the service is alive.
    """

    open_paths: ClassVar[frozenset[str]] = frozenset({"/", "/health", "/ping"})

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app, self.settings = app, settings
        of_this_machine = () if settings.host in LOOPBACK else (socket.gethostname(), socket.getfqdn())
        names = (*LOOPBACK, settings.host, *of_this_machine, *settings.allowed_hosts)
        self._names = {name.strip("[]").lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif refusal := self.refusal(scope, Headers(scope=scope)):
            await error_response(refusal)(scope, receive, send)
        else:
            await self.answer(scope, self._limited(receive), send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that nothing was found against."""
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Why a request is refused before its body is read, or None."""
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
            said = "The request carries no valid key: send the header Authorization: Bearer KEY (or x-api-key: KEY)."
            return RequestError(said, status=401, kind="authentication_error")
        if not length.isdecimal() or len(length) > 15 or int(length) > self.settings.max_body_bytes:
            return self._too_large()
        if int(length) or "transfer-encoding" in headers:
            kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
            if kinds != ["application/json"]:
                said = (
                    f"The body is declared as {', '.join(kinds) or 'nothing'}: send JSON with Content-Type: application/json."
                )
                return RequestError(said, status=415)
        return None

    def is_known(self, scope: Scope, headers: Headers) -> bool:
        """True where a request carries the key, or none is needed."""
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
    """The host of a URL, or None."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
