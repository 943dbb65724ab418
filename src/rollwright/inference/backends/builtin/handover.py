"""Between event loops and the engine's thread: requests and responses that come together cross together.

Each crossing wakes a thread that then competes for the interpreter. Samples of one batch ask in the same turn of their loop, and
many of them are answered by the same step: one crossing for all of them each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, InvalidStateError
from typing import Any

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.batch import Sequence
from rollwright.inference.backends.builtin.step import Finished
from rollwright.inference.request import ModelRequest, ModelResponse

Batches = SequenceOf[list[Sequence]]


class Outbox:
    """Requests of one event loop that wait for the end of its turn.

    Args:
        queue: queues batches of requests in the engine, and says for each what is wrong with it.
        most: requests that are queued at once: those that can run do not wait for the rest of a long turn.
    """

    def __init__(self, queue: Callable[[Batches], list[EngineError | None]], most: int) -> None:
        self._queue = queue
        self._most = most
        self._batches: list[list[Sequence]] = []
        self._count = 0
        self._flush_asked = False

    def send(self, sequences: list[Sequence]) -> list[asyncio.Future[ModelResponse]]:
        """Queue requests together; they get their responses in futures of the running loop."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in sequences]
        for sequence, future in zip(sequences, futures, strict=True):
            sequence.future = future
        self._batches.append(sequences)
        self._count += len(sequences)
        if self._count >= self._most:
            self._flush()
        elif not self._flush_asked:
            self._flush_asked = True
            loop.call_soon(self._flush_at_end_of_turn, context=contextvars.Context())
        return futures

    def _flush_at_end_of_turn(self) -> None:
        self._flush_asked = False
        self._flush()

    def _flush(self) -> None:
        batches = [[s for s in sequences if not s.future.done()] for sequences in self._batches]
        self._batches, self._count = [], 0
        for sequences, error in zip(batches, self._queue(batches), strict=True):
            if error is not None and sequences:
                sequences[0].future.set_exception(error)  # whoever awaits it cancels the others


def resolve(finished: list[Finished]) -> None:
    """Hand responses and errors to whoever waits for them: each event loop is woken once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[ModelResponse], ModelResponse | BaseException]]] = {}
    for sequence, outcome in finished:
        future = sequence.future
        if isinstance(future, asyncio.Future):
            by_loop.setdefault(future.get_loop(), []).append((future, outcome))
        else:
            _settle(future, outcome)
    for loop, outcomes in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed; nobody listens any more
            loop.call_soon_threadsafe(_settle_all, outcomes, context=contextvars.Context())


def _settle_all(outcomes: list[tuple[asyncio.Future[ModelResponse], ModelResponse | BaseException]]) -> None:
    for future, outcome in outcomes:
        _settle(future, outcome)


def _settle(future: Future[ModelResponse] | asyncio.Future[ModelResponse], outcome: ModelResponse | BaseException) -> None:
    # A future may be cancelled at any moment by whoever waits for it.
    with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


async def stream(
    submit: Callable[..., list[Future[ModelResponse]]], request: ModelRequest
) -> AsyncGenerator[ModelResponse, None]:
    """The response to ``request`` as it grows; see ``BuiltinEngine.astream``.

    Args:
        submit: the engine's.
        request: the request.
    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    sampled: list[tuple[Sequence, int, float, int]] = []

    def note(*token: Any) -> None:
        sampled.append(token)
        with contextlib.suppress(RuntimeError):  # the loop was closed; nobody listens any more
            loop.call_soon_threadsafe(news.set)

    future = asyncio.wrap_future(submit([request], note)[0])
    future.add_done_callback(lambda _: news.set())
    given = 0
    try:
        while not future.done():
            await news.wait()
            news.clear()
            if len(sampled) > given and not future.done():
                given = len(sampled)
                _, tokens, logprobs, versions = zip(*sampled[:given], strict=True)
                yield sampled[0][0].response(sampled=(list(tokens), list(logprobs), list(versions)))
        yield future.result()
    finally:
        future.cancel()
