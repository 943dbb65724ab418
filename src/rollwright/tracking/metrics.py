"""Metrics and phase times: threads report numbers during a step, and its end reduces them to one dictionary.

Each reduction is a method, and a metric keeps the reduction of its first report::

    tracker = get_tracker()
    tracker.scalar(reward=0.5)                 # the mean of all reports
    with tracker.scope("rollout"):
        tracker.sum(tokens=128)                # "rollout/tokens"
    tracker.get("rollout").maximum(length=77)  # the same prefix without a context
    metrics = tracker.export(reset=True)

``PhaseTimer`` times the phases of a step without counting any second twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rollwright.errors import RollwrightError


class MetricError(RollwrightError):
    """Raised if a metric is reported with two different reductions, or with a value that is not a number."""


#: Reductions that keep a single number: its initial value, and how it changes with each report.
_REDUCTIONS: dict[str, tuple[float, Callable[[float, float], float]]] = {
    "sum": (0.0, operator.add),
    "minimum": (math.inf, lambda total, value: value if math.isnan(value) else min(total, value)),
    "maximum": (-math.inf, lambda total, value: value if math.isnan(value) else max(total, value)),
    "gauge": (0.0, lambda total, value: value),
}


class _Entry:
    """The reports of one metric between two exports."""

    __slots__ = ("count", "kind", "total", "values")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.total = _REDUCTIONS[kind][0] if kind in _REDUCTIONS else 0.0
        self.count = 0.0
        self.values: list[float] = []

    def add(self, value: float, weight: float) -> None:
        if self.kind == "scalar":
            self.total += value * weight
            self.count += weight
        elif self.kind == "histogram":
            self.values.append(value)
        else:
            self.total = _REDUCTIONS[self.kind][1](self.total, value)

    def result(self, name: str) -> dict[str, float]:
        if self.kind == "scalar":
            return {name: self.total / self.count} if self.count else {}
        if self.kind != "histogram":
            return {name: self.total}
        ordered = sorted(self.values)
        if not ordered:
            return {}
        mean = math.fsum(ordered) / len(ordered)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        return {
            f"{name}/mean": mean,
            f"{name}/std": deviation,
            f"{name}/min": ordered[0],
            f"{name}/p50": _quantile(ordered, 0.5),
            f"{name}/p90": _quantile(ordered, 0.9),
            f"{name}/max": ordered[-1],
        }


def _quantile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


#: Characters of a text that an episode reports; the end of a longer one is left out.
LONGEST_NOTE = 4_000
#: Scopes that say nothing about an episode, because all of its figures have them.
_SCOPES_OF_ALL = ("eval/", "rollout/")


class EpisodeFigures:
    """The numbers and texts that one episode reported, by name without the scopes ``rollout`` and ``eval``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._texts: dict[str, str] = {}

    def add(self, kind: str, name: str, values: Sequence[float], weight: float) -> None:
        """Add reports of a metric; several are reduced as in the run's metrics."""
        with self._lock:
            entry = self._entries.setdefault(_without_scopes(name), _Entry(kind))
            for value in values:
                entry.add(value, weight)

    def note(self, name: str, text: str) -> None:
        """Set a text."""
        with self._lock:
            self._texts[_without_scopes(name)] = text[:LONGEST_NOTE]

    def export(self) -> dict[str, float | str]:
        """Return the reduced numbers and the texts."""
        with self._lock:
            numbers = {name: number for own, entry in self._entries.items() for name, number in entry.result(own).items()}
            return {**numbers, **self._texts}


def _without_scopes(name: str) -> str:
    for scope in _SCOPES_OF_ALL:
        name = name.removeprefix(scope)
    return name


#: The figures of the current asyncio task's episode; inherited by the tasks and threads that it starts.
FIGURES: contextvars.ContextVar[EpisodeFigures | None] = contextvars.ContextVar("figures", default=None)


class MetricsTracker:
    """Collects metrics from any number of threads and event loops.

    A tracker from :meth:`get` shares its parent's numbers and adds its scope to every name.
    Scopes opened with :meth:`scope` belong to the thread or asyncio task that opened them. What an episode reports is also kept with its
    sample (``EpisodeFigures``), where the viewer shows it.
    """

    def __init__(self) -> None:
        self._prefix = ""
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._scopes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("scopes", default=())

    def get(self, scope: str = "") -> Self:
        """Return a tracker that shares the numbers and prefixes its names with ``scope/``."""
        if not scope:
            return self
        child = object.__new__(type(self))
        vars(child).update(vars(self), _prefix=f"{self._prefix}{scope.strip('/')}/")
        return child

    @contextmanager
    def scope(self, name: str) -> Iterator[MetricsTracker]:
        """Prefix names that this thread or asyncio task reports in the block with ``name/``; scopes nest."""
        token = self._scopes.set((*self._scopes.get(), name.strip("/")))
        try:
            yield self
        finally:
            self._scopes.reset(token)

    def enter_scope(self, name: str) -> None:
        """Apply :meth:`scope` to all further reports of the current thread or asyncio task."""
        self._scopes.set((*self._scopes.get(), name.strip("/")))

    def scalar(self, **values: Any) -> None:
        """Report values whose mean is exported."""
        self._add("scalar", values)

    def weighted(self, weight: float, **values: Any) -> None:
        """Report values whose weighted mean is exported, such as token means weighted by tokens."""
        self._add("scalar", values, float(weight))

    def sum(self, **values: Any) -> None:
        """Report values whose sum is exported."""
        self._add("sum", values)

    def minimum(self, **values: Any) -> None:
        """Report values whose minimum is exported, or NaN if any value is NaN."""
        self._add("minimum", values)

    def maximum(self, **values: Any) -> None:
        """Report values whose maximum is exported, or NaN if any value is NaN."""
        self._add("maximum", values)

    def gauge(self, **values: Any) -> None:
        """Report values, the last of which is exported."""
        self._add("gauge", values)

    def histogram(self, **values: Any) -> None:
        """Report one or many values whose mean, std, min, p50, p90 and max are exported."""
        self._add("histogram", values)

    def note(self, **texts: str) -> None:
        """Report texts about the episode that runs, such as a judge's verdict. They are kept with its sample, and not exported."""
        if (figures := FIGURES.get()) is not None:
            for name, text in texts.items():
                figures.note(self.full_name(name), str(text))

    def export(self, reset: bool = True) -> dict[str, float]:
        """Reduce everything reported since the last reset. Returns full name (with scopes) -> number, sorted by name.

        ``reset`` then clears the reports. A tracker from :meth:`get` exports and resets only its own scope.
        """
        with self._lock:
            names = [name for name in self._entries if name.startswith(self._prefix)]
            entries = {name: self._entries.pop(name) if reset else self._entries[name] for name in names}
            results: dict[str, float] = {}
            for name in sorted(entries):
                results.update(entries[name].result(name))
        return results

    def take(self) -> list[list[Any]]:
        """Return the unreduced reports since the last reset, for ``merge`` in another process, and reset."""
        with self._lock:
            taken = [[name, each.kind, each.total, each.count, each.values] for name, each in self._entries.items()]
            self._entries.clear()
        return taken

    def merge(self, taken: Iterable[Iterable[Any]]) -> None:
        """Add reports that ``take`` returned in another process."""
        for name, kind, total, count, values in taken:
            with self._lock:
                entry = self._entries.setdefault(name, _Entry(kind))
                if entry.kind == "scalar":
                    entry.total, entry.count = entry.total + total, entry.count + count
                elif entry.kind == "histogram":
                    entry.values += values
                else:
                    entry.add(total, 1.0)

    def full_name(self, name: str) -> str:
        """Return the full name, with scopes, of a metric that is reported here as ``name``."""
        return "".join(f"{scope}/" for scope in self._scopes.get()) + self._prefix + name

    def _add(self, kind: str, values: dict[str, Any], weight: float = 1.0) -> None:
        prefix = self.full_name("")
        numbers = {name: _numbers(name, value) for name, value in values.items()}
        with self._lock:
            for name, items in numbers.items():
                entry = self._entries.setdefault(prefix + name, _Entry(kind))
                if entry.kind != kind:
                    raise MetricError(
                        f"metric {prefix + name!r} was reported as {entry.kind} and now as {kind}: give one of the two another name."
                    )
                for item in items:
                    entry.add(item, weight)
        if (figures := FIGURES.get()) is not None:
            for name, items in numbers.items():
                figures.add(kind, prefix + name, items, weight)


def _numbers(name: str, value: Any) -> list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    try:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            return [number for item in value for number in _numbers(name, item)]
        return [float(value)]
    except (TypeError, ValueError):
        raise MetricError(
            f"metric {name!r} was given {value!r}, which is no number: report a number, or a list or tensor of numbers."
        ) from None


_default = MetricsTracker()


def get_tracker(scope: str = "") -> MetricsTracker:
    """Return this process's tracker, restricted to ``scope`` if one is given."""
    return _default.get(scope)


class PhaseTimer:
    """Times named phases of a step; keeps ``max_events`` intervals for :meth:`write_chrome_trace`.

    Phases nest: a phase's seconds exclude those of phases inside it on the same thread, so the phases of a step on one thread
    add up to at most its wall time. Each thread has its own stack of phases.
    """

    def __init__(self, max_events: int = 100_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._events: deque[tuple[str, float, float, int, dict[str, Any]]] = deque(maxlen=max_events)
        self._origin = clock()
        self._origin_unix = time.time()
        self._current: list[str] = []
        self._began: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent in the block to the phase ``name``."""
        stack: list[float] = self._local.__dict__.setdefault("inner_seconds", [])
        stack.append(0.0)
        with self._lock:
            self._current.append(name)
        started = self._clock()
        with self._lock:
            self._began.setdefault(name, started)
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
                self._events.append((name, started, elapsed, threading.get_ident(), {}))

    @contextmanager
    def span(self, name: str, category: str = "misc", args: dict[str, Any] | None = None) -> Iterator[None]:
        """Record an interval in the trace only: spans of concurrent tasks overlap, so they belong to no phase.

        Args:
            name: name of the interval.
            category: category of the interval in the trace.
            args: values shown with the interval.
        """
        started = self._clock()
        try:
            yield
        finally:
            try:
                lane = id(asyncio.current_task())
            except RuntimeError:  # no event loop runs in this thread
                lane = threading.get_ident()
            with self._lock:
                self._events.append((name, started, self._clock() - started, lane, {"cat": category, "args": args or {}}))

    def beginnings(self) -> dict[str, float]:
        """Return when each phase first began since the last call, in seconds since the epoch."""
        with self._lock:
            began = {name: self._origin_unix + at - self._origin for name, at in self._began.items()}
            self._began.clear()
        return began

    @property
    def current(self) -> str | None:
        """The most recently entered phase that is still running, or None."""
        with self._lock:
            return self._current[-1] if self._current else None

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of each phase since the timer was created."""
        with self._lock:
            return dict(self._totals)

    def export(self, reset: bool = True) -> dict[str, float]:
        """Return the seconds of each phase since the last export with ``reset``."""
        with self._lock:
            seconds = dict(self._seconds)
            if reset:
                self._seconds.clear()
        return seconds

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write the recorded intervals as Chrome trace events, for chrome://tracing or ui.perfetto.dev."""
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
                    "tid": lane,
                    **more,
                }
                for name, start, elapsed, lane, more in events
            ],
            "displayTimeUnit": "ms",
            "otherData": {"started_unix": self._origin_unix},
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(trace, default=str), encoding="utf-8")


_timer = PhaseTimer()


def current_timer() -> PhaseTimer:
    """Return the timer of the run, or this process's timer if no run is active."""
    return _timer


def start_timer() -> PhaseTimer:
    """Start a new timer and make it the current one."""
    global _timer
    _timer = PhaseTimer()
    return _timer
