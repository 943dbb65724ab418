"""The watch over the event loop: who holds it up, and on which line.

All samples share one loop. A workflow that computes, sleeps or reads a file without awaiting stops all the others; the watch
sees that the loop's heart does not beat, looks where the loop's thread stands, and says so in the log. A loop that is merely
busy with very many samples is not reported: one and the same step has to be seen again and again. Nor is a loop that could
go on and is not let: the time that its thread waits for a processor, as Linux counts it, is nobody's fault here.
"""

from __future__ import annotations

import asyncio
import linecache
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rollwright.rollout.sample import CURRENT_SAMPLE
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

BEAT = 0.1  # seconds between two beats of the loop's heart
SLOW = 0.5  # seconds without a beat that are reported
REPORTS_OF_A_LINE = 3

_OWN = ("rollwright/rollout/", "rollwright/experience/", "/asyncio/", "/threading.py")


@dataclass
class _Standstill:
    """One step of the loop that lasts.

    Attributes:
        step: the loop's handle of it, not held: what a sample computes with must not be freed by the watch.
        held: seconds that the step itself has taken so far: it computed, or was blocked.
        places: where the loop's thread stood, look by look.
    """

    step: weakref.ref[asyncio.Handle]
    held: float = BEAT  # it began before it was first seen
    places: Counter[str] = field(default_factory=Counter)
    is_reported: bool = False


class _Scheduling(NamedTuple):
    """What the system has counted of a thread: its seconds on a processor, and those in which it could run and had none."""

    computed: float
    waited: float
    is_runnable: bool  # it computes or waits now, and is not blocked

    @classmethod
    def of(cls, native_id: int | None) -> _Scheduling | None:
        """Read it; None where the system does not say."""
        directory = Path(f"/proc/self/task/{native_id}")
        try:
            computed, waited, _ = (directory / "schedstat").read_text().split()
            state = (directory / "stat").read_text().rpartition(") ")[2][:1]
        except (OSError, ValueError):
            return None
        return cls(int(computed) / 1e9, int(waited) / 1e9, state == "R")


def own_time(elapsed: float, before: _Scheduling | None, now: _Scheduling | None) -> float:
    """Seconds of ``elapsed`` that a thread computed or was blocked, as against waited for a processor.

    A wait is counted by the system when it ends; so of a thread that is runnable only what it computed is known.
    """
    if before is None or now is None:
        return elapsed
    if now.is_runnable:
        return min(elapsed, now.computed - before.computed)
    return max(0.0, elapsed - (now.waited - before.waited))


class LoopWatch:
    """Watches one event loop from a thread of its own.

    Args:
        loop: the loop; ``start`` and ``stop`` are called in its thread.
        slow: seconds without a beat that are reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, slow: float = SLOW) -> None:
        self._loop = loop
        self._slow = slow
        self._beat = time.monotonic()
        self._thread_id: int | None = None
        self._native_id: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reported: Counter[str] = Counter()
        self.reports = 0
        self.latest = ""

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._beat = time.monotonic()
        self._loop.call_soon(self._pulse)
        self._thread = threading.Thread(target=self._watch, name="rollwright-loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, and wait until its thread has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def where(self) -> str | None:
        """File, line and source of what the loop's thread is doing, with the workflow where it is known."""
        frame = sys._current_frames().get(self._thread_id) if self._thread_id is not None else None
        return None if frame is None else _describe(frame)

    def _pulse(self) -> None:
        self._beat = time.monotonic()
        if not self._ended.is_set():
            self._loop.call_later(BEAT, self._pulse)

    def _watch(self) -> None:
        current: _Standstill | None = None
        woke, scheduling = time.monotonic(), _Scheduling.of(self._native_id)
        while not self._ended.wait(BEAT):
            now = time.monotonic()
            # Where this thread was kept waiting too, the machine is busy or another thread holds the interpreter.
            elapsed, woke = min(now - woke, 2 * BEAT), now
            before, scheduling = scheduling, _Scheduling.of(self._native_id)
            step = self._step() if now - self._beat > 2 * BEAT else None
            if step is None:
                current = None
                continue
            if current is None or current.step is not step:  # one reference for each handle that lives
                current = _Standstill(step)
            else:
                current.held += own_time(elapsed, before, scheduling)
            place = self.where()
            if place is not None:
                current.places[place] += 1
            if current.held >= self._slow and current.places and not current.is_reported:
                current.is_reported = True
                self._report(current.places.most_common(1)[0][0], current.held)

    def _report(self, place: str, held: float) -> None:
        self.reports += 1
        self.latest = place
        self._reported[place] += 1
        if self._reported[place] <= REPORTS_OF_A_LINE:
            logger.warning(
                "the event loop of all samples has stood still for %.1f s: %s. Await instead of blocking: asyncio.sleep for "
                "time.sleep, an async client for requests, asyncio.to_thread for work.",
                held,
                place,
            )

    def _step(self) -> weakref.ref[asyncio.Handle] | None:
        """Which step of a task, or which callback, the loop is in; None where it is in none."""
        frame = sys._current_frames().get(self._thread_id) if self._thread_id is not None else None
        while frame is not None:
            if frame.f_code is asyncio.Handle._run.__code__:
                return weakref.ref(frame.f_locals["self"])
            frame = frame.f_back
        return None


def _describe(frame: FrameType) -> str | None:
    """The innermost line of user code that is on the stack, and the workflow whose episode it belongs to.

    A workflow of an installed package is not told from the libraries that it calls: the line is then the outermost of them.
    """
    workflow, users, installed = None, None, None
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        file = code.co_filename.replace("\\", "/")
        if workflow is None:
            workflow = _workflow(current)
        is_own = any(part in file for part in _OWN) or file.startswith((sys.base_prefix, "<string>", "<frozen"))
        if "site-packages" in file:
            installed = installed if is_own else current
        elif users is None and not is_own:
            users = current
        current = current.f_back
    users = users or installed
    if users is None:
        return None  # the executor's own work
    file, line = users.f_code.co_filename, users.f_lineno
    source = linecache.getline(file, line).strip()
    return f"{workflow or 'a task of a workflow'} at {file}:{line} in {users.f_code.co_name}: {source}"


def _workflow(frame: FrameType) -> str | None:
    """The workflow that a frame tells of: its own episode's, or that of the sample whose task or callback the loop runs.

    Tasks that an episode starts inherit its context, and with it the sample.
    """
    if frame.f_code.co_name == "arun_episode" and "self" in frame.f_locals:
        return type(frame.f_locals["self"]).__qualname__
    if frame.f_code is asyncio.Handle._run.__code__:
        sample = frame.f_locals["self"]._context.get(CURRENT_SAMPLE)
        return sample.workflow if sample is not None else None
    return None
