"""A response as it grows: tokens that the engine's thread samples, told to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Future

from rollwright.inference.backends.builtin.sequence import Sequence
from rollwright.inference.request import ModelResponse


class TokenStream:
    """Listens to one sequence, which is queued afterwards.

    Args:
        sequence: its tokens are followed.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._sequence = sequence
        self._sampled: list[tuple[int, float, int]] = []  # token, log-probability, version
        sequence.on_token = self._listen

    def _listen(self, token: int, logprob: float, version: int) -> None:
        """Called by the engine's thread for each token."""
        self._sampled.append((token, logprob, version))
        with contextlib.suppress(RuntimeError):  # the loop was closed; nobody listens any more
            self._loop.call_soon_threadsafe(self._news.set)

    async def responses(self, pending: Future[ModelResponse]) -> AsyncGenerator[ModelResponse, None]:
        """Each holds all tokens of the one before it, and the last is ``pending``'s; leaving early cancels that."""
        future = asyncio.wrap_future(pending)
        future.add_done_callback(lambda _: self._news.set())
        try:
            given = 0
            while not future.done():
                await self._news.wait()
                self._news.clear()
                if len(self._sampled) > given and not future.done():
                    given = len(self._sampled)
                    yield self._sequence.partial_response(self._sampled[:given])
            yield future.result()
        finally:
            future.cancel()
