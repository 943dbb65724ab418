"""Deterministic mode: model requests go out in waves, so that what is batched together does not depend on the clock.

Requests of running samples are held until no running sample can go on without an answer. Then all of them go to the engine at
once, ordered by (evaluation, ordinal, sample, conversation, turn). The next wave begins when this one is answered. A sample that
awaits a tool holds up the wave: a limit would let the clock decide what is in a wave.

All asyncio tasks of a sample are followed to what they wait for. Only a wave can end a wait for a held request, another task of
the sample, or a lock, queue, event or task group (whoever holds that is looked at too). A wait for a timer, a socket or a
thread ends by itself. A sample whose own thread makes model calls, or that asks over HTTP, is blocked once a call is held.
"""

from __future__ import annotations

import asyncio
import asyncio.locks
import asyncio.queues
import asyncio.taskgroups
import asyncio.tasks
import contextvars
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rollwright.errors import EngineError, RequestAborted
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.rollout.sample_engine import CURRENT_SAMPLE, SampleEngine
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

LOOK_AGAIN = 0.02  # seconds between two looks at samples that gave no sign; it delays a wave, and never changes it
HELD_UP_WARNING_SECONDS = 30.0  # after which a sample that holds up all others is named in the log

_STRUCTURAL_FILES = {asyncio.locks.__file__, asyncio.queues.__file__, asyncio.taskgroups.__file__}
_NOT_USERS = (os.path.dirname(asyncio.__file__), os.path.dirname(__file__), "site-packages")
_SOCKET_FILE = os.path.join("anyio", "_backends", "_asyncio.py")
_STRUCTURAL_CODE = {asyncio.tasks._wait.__code__, asyncio.tasks.wait_for.__code__}  # type: ignore[attr-defined]


class _Wait(IntEnum):
    """What a task of a sample waits for; a sample of several tasks waits for the least."""

    NOTHING = 0  # it runs, or something outside will wake it by itself
    OTHERS = 1  # a lock, queue or group: whoever holds that is looked at too
    ANSWER = 2  # held requests, and nothing else


@dataclass(slots=True, eq=False)
class _Held:
    order: tuple[Any, ...]
    request: ModelRequest
    answer: asyncio.Future[ModelResponse]
    from_thread: bool


class WaveGate:
    """Holds the requests of a loop's samples and lets them go wave by wave.

    Args:
        engine: requests are queued together where it says so (``queues_together``); otherwise they are started in order.
        loop: the executor's loop; its task factory is set so that a sample's tasks are known.
        is_open: a wave may begin only while this says so (somebody waits for a batch that is not complete).
    """

    def __init__(self, engine: InferenceEngine, loop: asyncio.AbstractEventLoop, is_open: Callable[[], bool]) -> None:
        self._engine = engine
        self._loop = loop
        self._is_open = is_open
        self._held: dict[SampleEngine, list[_Held]] = {}
        self._samples: dict[SampleEngine, asyncio.Task[Any]] = {}  # with the task of the episode
        self._suspects: dict[SampleEngine, None] = {}  # samples that are not known to wait for answers only
        self._in_flight = False
        self._look: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._from_threads: set[int] = set()
        self._busy: SampleEngine | None = None
        self._busy_since = 0.0
        loop.set_task_factory(self._make_task)

    def enter(self, sample: SampleEngine, task: asyncio.Task[Any]) -> None:
        """A sample begins to run in ``task``: no wave goes out until it is blocked too."""
        self._samples[sample] = task
        self._suspects[sample] = None
        self._from_threads.discard(id(task))
        sample.tasks.add(task)

    def leave(self, sample: SampleEngine) -> None:
        """A sample has ended; what it still asked for is forgotten."""
        self._samples.pop(sample, None)
        self._suspects.pop(sample, None)
        for held in self._held.pop(sample, ()):
            held.answer.cancel()
        self.look()

    def look(self) -> None:
        """Look, when the loop comes to it, whether a wave can go out."""
        if self._look is None and self._held and not self._in_flight:
            self._look = self._loop.call_soon(self._try, context=contextvars.Context())  # the wave is nobody's task

    async def agenerate(self, sample: SampleEngine, request: ModelRequest, place: tuple[int, int]) -> ModelResponse:
        """Hold a request until its wave, and return its response."""
        current = asyncio.current_task()
        name = sample.name
        held = _Held(
            (name.is_eval, name.ordinal, name.index, *place),
            request,
            self._loop.create_future(),
            from_thread=current is not None and id(current) in self._from_threads,
        )
        self._held.setdefault(sample, []).append(held)
        self.look()
        try:
            return await held.answer
        except asyncio.CancelledError:  # the workflow gave the request up; its sample is looked at anew
            own = self._held.get(sample, [])
            if held in own:
                own.remove(held)
                if not own:
                    del self._held[sample]
            if sample in self._samples:
                self._suspects[sample] = None
            raise

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _try(self) -> None:
        self._look = None
        if self._in_flight or not self._held or not self._is_open():
            return
        busy = self._busy_sample()
        if busy is None:
            self._in_flight = True
            wave = sorted((held for own in self._held.values() for held in own), key=lambda held: held.order)
            self._held = {}
            self._suspects = dict.fromkeys(self._samples)
            self._wave = self._loop.create_task(self._run(wave), name="wave")
            return
        if self._later is None:
            self._later = self._loop.call_later(LOOK_AGAIN, self._try_later)
        now = self._loop.time()
        if busy is not self._busy:
            self._busy, self._busy_since = busy, now
        elif now - self._busy_since > HELD_UP_WARNING_SECONDS:
            self._busy_since = now
            places = [place_of(task) for task in busy.tasks if not task.done()]
            logger.warning(
                "%s has held up %d model requests of other samples for %.0f s: %s in %s awaits something that is no answer of the "
                "model (%s). Give its tools a limit, and end its background tasks with the episode.",
                busy.name,
                sum(map(len, self._held.values())),
                HELD_UP_WARNING_SECONDS,
                "a task" if len(places) > 1 else "its task",
                busy.workflow,
                "; ".join(places),
            )

    def _try_later(self) -> None:
        self._later = None
        self._try()

    async def _run(self, wave: list[_Held]) -> None:
        try:
            answers = await self._generate([held.request for held in wave])
        except Exception as error:  # whatever the engine raises, each sample of the wave is told
            answers = [error] * len(wave)
        finally:
            self._in_flight = False
        for held, answer in zip(wave, answers, strict=True):
            if held.answer.done():
                continue
            if isinstance(answer, BaseException):
                held.answer.set_exception(answer)
            else:
                held.answer.set_result(answer)
        self.look()

    async def _generate(self, requests: list[ModelRequest]) -> list[ModelResponse | BaseException]:
        """Answers in the order of the requests. One that is refused must not take the others of its wave with it."""
        if not self._engine.queues_together:
            return await asyncio.gather(*(self._engine.agenerate(r) for r in requests), return_exceptions=True)
        try:
            return list(await self._engine.agenerate_batch(requests))
        except RequestAborted:
            raise
        except EngineError as error:
            if len(requests) == 1:
                return [error]
        # Again in parts, which are the same for the same requests: those that are too long apart, else halves.
        limit, places = self._engine.context_length or math.inf, range(len(requests))
        too_long = {place for place in places if len(requests[place].input_ids) >= limit}
        if 0 < len(too_long) < len(requests):
            parts = [[place for place in places if place not in too_long], *([place] for place in sorted(too_long))]
        else:
            parts = [places[: len(requests) // 2], places[len(requests) // 2 :]]
        answers: dict[int, ModelResponse | BaseException] = {}
        for part in parts:
            answers |= zip(part, await self._generate([requests[place] for place in part]), strict=True)
        return [answers[place] for place in places]

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        sample = CURRENT_SAMPLE.get()
        if asyncio.current_task(loop) is None:  # begun by a callback: a call from another thread
            key = id(task)
            self._from_threads.add(key)
            task.add_done_callback(lambda _: self._from_threads.discard(key))
        elif sample is not None:
            sample.tasks.add(task)
        return task

    def _busy_sample(self) -> SampleEngine | None:
        """A sample that can go on without an answer, or None. One that waits for answers only is not looked at again."""
        for sample in list(self._suspects):
            wait = self._wait_of(sample)
            if wait is _Wait.NOTHING:
                return sample
            if wait is _Wait.ANSWER:
                del self._suspects[sample]
        return None

    def _wait_of(self, sample: SampleEngine) -> _Wait:
        if self._samples[sample].done():
            return _Wait.NOTHING  # it leaves in a moment, and others may start in its place
        held_requests = self._held.get(sample, [])
        held = {id(held.answer) for held in held_requests}
        in_thread = any(held.from_thread for held in held_requests)
        pending = [task for task in sample.tasks if not task.done()]
        own = {id(task) for task in pending}
        return min((_wait_of_task(task, held, own, in_thread) for task in pending), default=_Wait.ANSWER)


def _wait_of_task(task: asyncio.Task[Any], held: set[int], own: set[int], in_thread: bool) -> _Wait:
    waiter = getattr(task, "_fut_waiter", None)
    if waiter is None or waiter.done():
        return _Wait.NOTHING
    parts = getattr(waiter, "_children", None) or [waiter]  # of asyncio.gather
    if all(part.done() or id(part) in held or id(part) in own for part in parts):
        return _Wait.ANSWER
    *callers, code = _awaiting(task, "code") or [None]
    structural = code is not None and (code.co_filename in _STRUCTURAL_FILES or code in _STRUCTURAL_CODE)
    caller = callers[-1] if callers else None  # AnyIO's socket streams (httpx2, openai) wait for their transport by an event
    for_socket = caller is not None and caller.co_filename.endswith(_SOCKET_FILE) and caller.co_name in ("receive", "send")
    return _Wait.OTHERS if (structural and not for_socket) or in_thread else _Wait.NOTHING


def _awaiting(task: asyncio.Task[Any], part: str) -> list[Any]:
    """``code`` or ``frame`` of each link in a task's chain of awaits; the last is where it ends."""
    current: Any = task.get_coro()
    chain = []
    while current is not None:
        parts = (getattr(current, f"{kind}_{part}", None) for kind in ("cr", "gi", "ag"))
        if (found := next(filter(None, parts), None)) is not None:
            chain.append(found)
        current = (
            getattr(current, "cr_await", None) or getattr(current, "gi_yieldfrom", None) or getattr(current, "ag_await", None)
        )
    return chain


def place_of(task: asyncio.Task[Any]) -> str:
    """File and line at which a task waits: the innermost of the workflow's own code, where there is some."""
    frames = _awaiting(task, "frame")
    users = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _NOT_USERS)]
    chosen = (users or frames or [None])[-1]
    return "unknown" if chosen is None else f"{chosen.f_code.co_filename}:{chosen.f_lineno}"
