"""The server of `rollwright view`: pages about runs, behind the request guard that all services use.

Models and tools wrote the recorded text, so none of it is trusted: templates escape all of it, and the
Content-Security-Policy allows only the viewer's own scripts and styles, and no other origin.
"""

from __future__ import annotations

import hmac
import mimetypes
import re
import secrets
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import cookie_parser
from starlette.types import Message, Receive, Scope, Send

from rollwright.errors import DataError, RollwrightError
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.request_guard import Guard
from rollwright.inference.server.service import make_service
from rollwright.inference.server.settings import LOOPBACK, ServiceSettings
from rollwright.tracking.logging import getLogger
from rollwright.viewer import (
    again_page,
    compare_page,
    evaluation_pages,
    pair_page,
    run_list,
    run_pages,
    samples_page,
    step_and_sample_pages,
    sweep_pages,
    whole_run_pages,
)
from rollwright.viewer.again import Engines
from rollwright.viewer.pages import Pages

logger = getLogger("viewer")

#: Headers of every response: nothing is loaded from elsewhere, no inline script or style runs, and no other site may frame or read a page.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TOKEN = "token"
#: The only addresses that take POST: one for tags and notes, one to sample a call again.
_POSTED = re.compile(r"/run/[^/]+/(notes|again)")


class ViewGuard(Guard):
    """A request guard whose key a browser sends once in the address and then in a cookie."""

    open_paths = Guard.open_paths - {"/"}  # "/" lists the runs, so it is protected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and add the security headers to the response."""

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await super().__call__(scope, receive, send_safely)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that passed all checks; move a token in the address to a cookie."""
        asked = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        token = dict(asked).get(_TOKEN)
        if token and self._is_key(token):
            rest = urlencode([(name, value) for name, value in asked if name != _TOKEN])
            path = "/" + scope["raw_path"].decode("latin-1").lstrip("/")  # "//name" would be another host
            response = RedirectResponse(path + (f"?{rest}" if rest else ""), status_code=303)
            response.set_cookie(self._cookie, token, httponly=True, samesite="lax", max_age=30 * 86400)
            await response(scope, receive, send)
        else:
            await super().answer(scope, receive, send)

    def _is_key(self, given: str) -> bool:
        key = self.settings.api_key
        return bool(key) and hmac.compare_digest(given.encode(), str(key).encode())

    @property
    def _cookie(self) -> str:
        return f"rollwright-view-{self.settings.port}"  # browsers share cookies between ports

    def is_known(self, scope: Scope, headers: Headers) -> bool:
        """Return True if no key is needed, or the address, a cookie or a header contains the key."""
        if not self.settings.api_key or super().is_known(scope, headers):
            return True
        asked = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        cookies = cookie_parser(headers.get("cookie", ""))
        return self._is_key(asked.get(_TOKEN, "")) or self._is_key(cookies.get(self._cookie, ""))

    def refusal(self, scope: Scope, headers: Headers) -> RequestError | None:
        """Return the error for a request that is not allowed, or None."""
        is_post = scope["method"] == "POST" and _POSTED.fullmatch(scope["path"]) is not None
        if scope["method"] not in ("GET", "HEAD") and not is_post:
            return RequestError("The viewer takes only GET at this address.", status=405)
        if is_post and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return RequestError("Send JSON with Content-Type: application/json.", status=415)  # no other site's form can
        refused = super().refusal(scope, headers)
        if refused is not None and refused.status == 401:
            said = "Open the address that rollwright view printed: it ends with the token that this page asks for."
            return RequestError(said, status=401, kind="authentication_error")
        return refused


def make_app(places: Sequence[str | Path], settings: ServiceSettings | None = None) -> FastAPI:
    """Create the application.

    Args:
        places: directories that are searched for runs.
        settings: address and token.
    """
    pages = Pages(places)
    router = APIRouter()
    for name, content in pages.static.items():
        router.add_api_route(f"/static/{name}", _static_file(name, content), methods=["GET", "HEAD"], include_in_schema=False)
    run_list.add_routes(router, pages)
    run_pages.add_routes(router, pages)
    compare_page.add_routes(router, pages)
    sweep_pages.add_routes(router, pages)
    evaluation_pages.add_routes(router, pages)
    pair_page.add_routes(router, pages)
    whole_run_pages.add_routes(router, pages)
    step_and_sample_pages.add_routes(router, pages)
    samples_page.add_routes(router, pages)
    engines = Engines()
    again_page.add_routes(router, pages, engines)
    app = make_service("rollwright view", [router], settings or ServiceSettings(), guard=ViewGuard)

    async def show_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return pages.error(error.status_code, "Not found" if error.status_code == 404 else "Refused", str(error.detail))
        if isinstance(error, DataError):
            return pages.indexing(request) or pages.error(404, "Not found", str(error))
        logger.warning("%s: %s", request.url.path, error)
        if isinstance(error, sqlite3.Error):
            said = f"The index beside the journal cannot be read now ({error}). Load this page again; an index that is damaged is built anew."
            return pages.error(500, "This cannot be read", said)
        if isinstance(error, OverflowError):
            return pages.error(404, "Not found", "A number in the address is larger than any of a run.")
        return pages.error(422 if isinstance(error, ValueError) else 500, "This cannot be read", str(error))

    for kind in (HTTPException, RollwrightError, OSError, ValueError, OverflowError, sqlite3.Error):
        app.add_exception_handler(kind, show_error)
    app.router.on_shutdown += [engines.end, pages.runs.close]
    app.state.pages = pages
    app.state.engines = engines
    return app


def _static_file(name: str, content: bytes) -> Any:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"

    async def answer() -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "public, max-age=31536000, immutable"})

    return answer


def settings_of(host: str, port: int, allowed_hosts: Sequence[str] = (), with_token: bool = False) -> ServiceSettings:
    """Return the settings of a viewer, with a generated token if other machines can reach it or ``with_token`` is set."""
    token = None if host in LOOPBACK and not with_token else secrets.token_urlsafe(24)
    return ServiceSettings(host=host, port=port, api_key=token, allowed_hosts=list(allowed_hosts))


def first_page(app: FastAPI, settings: ServiceSettings) -> str:
    """Return the path to open first: the list, or the run if there is only one, with the token, if any."""
    entries = app.state.pages.entries()
    found = {entry["whole_url"] or entry["url"] for entry in entries}
    path = found.pop() if len(found) == 1 else "/"
    return path + (f"?{_TOKEN}={settings.api_key}" if settings.api_key else "")
