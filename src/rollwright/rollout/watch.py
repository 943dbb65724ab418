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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rollwright.rollout.sample import SampleEngine
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
        step: which task or callback, of which beat.
        since: when it was first seen.
        waited: seconds that the loop's thread had waited for a processor by then.
        late: seconds that the watch was woken too late since: the machine is busy, or another thread holds the interpreter.
        places: where the loop's thread stood, look by look.
    """

    step: tuple[int, float]
    since: float
    waited: float
    late: float = 0.0
    places: Counter[str] = field(default_factory=Counter)
    is_reported: bool = False

    def held(self, now: float, waited: float) -> float:
        """Seconds that the step itself has taken, whether it computed or blocked."""
        return now - self.since - max(self.late, waited - self.waited)


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
        self._scheduling = Path()
        self._ended = threading.Event()
        self._reported: Counter[str] = Counter()
        self.reports = 0
        self.latest = ""

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._thread_id = threading.get_ident()
        self._scheduling = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._beat = time.monotonic()
        self._loop.call_soon(self._pulse)
        threading.Thread(target=self._watch, name="rollwright-loop-watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()

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
        woke = time.monotonic()
        while not self._ended.wait(BEAT):
            now = time.monotonic()
            late, woke = max(0.0, now - woke - 2 * BEAT), now
            step = self._step() if now - self._beat > 2 * BEAT else None
            if step is None:
                current = None
                continue
            waited = self._waited()
            if current is None or current.step != step:
                current, late = _Standstill(step, now, waited), 0.0
            current.late += late
            place = self.where()
            if place is not None:
                current.places[place] += 1
            held = current.held(now, waited) + BEAT  # it began before it was first seen
            if held >= self._slow and current.places and not current.is_reported:
                current.is_reported = True
                self._report(current.places.most_common(1)[0][0], held)

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

    def _waited(self) -> float:
        """Seconds that the loop's thread could run and had no processor, since it began; 0 where the system does not say."""
        try:
            return int(self._scheduling.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _step(self) -> tuple[int, float] | None:
        """Which step of which task or callback the loop is in; None where it is in none."""
        frame = sys._current_frames().get(self._thread_id) if self._thread_id is not None else None
        below = None
        while frame is not None:
            if frame.f_code is asyncio.Handle._run.__code__:
                return None if below is None else (id(below), self._beat)
            below, frame = frame, frame.f_back
        return None


def _describe(frame: FrameType) -> str | None:
    """The innermost line of user code that is on the stack, and the workflow whose episode it belongs to."""
    workflow, users = None, None
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        file = code.co_filename.replace("\\", "/")
        if code.co_name == "arun_episode" and "self" in current.f_locals and workflow is None:
            workflow = type(current.f_locals["self"]).__qualname__
        sample = current.f_locals.get("sample")
        if isinstance(sample, SampleEngine) and workflow is None:
            workflow = sample.workflow
        is_own = any(part in file for part in _OWN) or file.startswith((sys.base_prefix, "<string>", "<frozen"))
        is_own = is_own or "site-packages" in file
        if users is None and not is_own:
            users = current
        current = current.f_back
    if users is None:
        return None  # the executor's own work
    file, line = users.f_code.co_filename, users.f_lineno
    source = linecache.getline(file, line).strip()
    return f"{workflow or 'a task of a workflow'} at {file}:{line} in {users.f_code.co_name}: {source}"
