"""Retries: requests that a client sends again, although they were answered, because the answer did not reach it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from fastapi import Request

from rollwright.inference.server.exchange import while_connected
from rollwright.inference.server.openai_answer import OpenAICall

#: Number of latest calls that a request is compared with.
_COMPARED = 32


class Retries:
    """Recognises retries among the requests of one run, so that they get the same answer and are recorded once.

    Args:
        resamples_equal: treat only requests that their client marks as retries as such. False treats every request that equals an
            answered one as a retry.

    Attributes:
        count: number of retries so far.
    """

    def __init__(self, resamples_equal: bool) -> None:
        self.count = 0
        self._resamples_equal = resamples_equal
        self._recent: deque[OpenAICall] = deque(maxlen=_COMPARED)
        self._running: set[str] = set()  # ids of calls
        self._finished: set[str] = set()

    async def answered_before(self, request: Request, endpoint: str, body: dict[str, Any], prefix: str) -> OpenAICall | None:
        """Return the finished call that a request repeats, or None if it has to be sampled.

        If the repeated call is still running, wait for it. If it then fails, the retry has to be sampled.
        """
        if self._resamples_equal and not _is_marked(request):
            return None
        asked = _asked(body)
        for call in reversed(self._recent):
            if (call.endpoint, call.prefix) == (endpoint, prefix) and _asked(call.body) == asked:
                while call.id in self._running:
                    await while_connected(request, asyncio.sleep(0.02))
                if call.id in self._finished:
                    self.count += 1
                    return call
        return None

    def opened(self, call: OpenAICall) -> None:
        """Compare later requests with this call."""
        self._recent.append(call)

    def finished(self, call: OpenAICall) -> None:
        """Let retries of this call have its answer."""
        self._finished.add(call.id)

    @contextlib.contextmanager
    def running(self, call: OpenAICall) -> Iterator[None]:
        """Let retries of this call wait until the end of the block."""
        self._running.add(call.id)
        try:
            yield
        finally:
            self._running.discard(call.id)


def _is_marked(request: Request) -> bool:
    """Return whether the client says that it sent the request before, as OpenAI's and Anthropic's do."""
    count = request.headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and int(count) > 0


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a body asks for; a client may retry a failed stream without streaming."""
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options") and value is not None}
