"""Where the time goes: phases of a run, timed without counting any second twice."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class PhaseTimer:
    """Times named phases of a step.

    Phases nest: a phase's seconds exclude those of phases inside it on the same thread, so that on one thread the
    phases of a step add up to at most its wall time. Phases of other threads are kept apart by their own stack.

    Args:
        max_events: how many intervals are kept for :meth:`write_chrome_trace`; older ones are let go.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(self, max_events: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._events: deque[tuple[str, float, float, int]] = deque(maxlen=max_events)
        self._origin = clock()
        self._origin_unix = time.time()
        self._current: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds inside to ``name``."""
        stack: list[float] = self._local.__dict__.setdefault("inner_seconds", [])
        stack.append(0.0)
        with self._lock:
            self._current.append(name)
        started = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - started
            own = elapsed - stack.pop()
            if stack:
                stack[-1] += elapsed
            with self._lock:
                self._current.remove(name)
                self._seconds[name] = self._seconds.get(name, 0.0) + own
                self._totals[name] = self._totals.get(name, 0.0) + own
                self._events.append((name, started, elapsed, threading.get_ident()))

    @property
    def current(self) -> str | None:
        """The phase that was entered last and still runs."""
        with self._lock:
            return self._current[-1] if self._current else None

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of each phase since the timer was made."""
        with self._lock:
            return dict(self._totals)

    def export(self, reset: bool = True) -> dict[str, float]:
        """Seconds of each phase since the last export with ``reset``."""
        with self._lock:
            seconds = dict(self._seconds)
            if reset:
                self._seconds.clear()
        return seconds

    def write_chrome_trace(self, path: str | Path) -> None:
        """Writes the kept intervals as Chrome trace events, for chrome://tracing or ui.perfetto.dev."""
        with self._lock:
            events = list(self._events)
        process = os.getpid()
        trace = {
            "traceEvents": [
                {
                    "name": name,
                    "ph": "X",
                    "ts": (start - self._origin) * 1e6,
                    "dur": elapsed * 1e6,
                    "pid": process,
                    "tid": thread,
                }
                for name, start, elapsed, thread in events
            ],
            "displayTimeUnit": "ms",
            "otherData": {"started_unix": self._origin_unix},
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(trace), encoding="utf-8")
