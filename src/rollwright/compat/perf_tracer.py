"""Times the parts of a workflow, under the names of AReaL's interface: ``async with atrace_session_phase("generate"): …``.

Each span is an interval in the run's ``trace.json`` (``PhaseTimer.span``) and its seconds are the mean ``timeperf/<name>`` of the step's
metrics. A run writes both; there is nothing to configure or save.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

from rollwright.compat.stats_tracker import record_timing
from rollwright.tracking.metrics import current_timer


class Category(enum.StrEnum):
    """Category of a span in the trace."""

    COMPUTE = "compute"
    COMM = "comm"
    IO = "io"
    SYNC = "sync"
    SCHEDULER = "scheduler"
    INSTR = "instr"
    MISC = "misc"


@contextmanager
def trace_scope(name: str, category: str | None = None, args: dict[str, Any] | None = None) -> Iterator[None]:
    """Record a span over the block; ``args`` are shown with it in the trace."""
    with record_timing(name), current_timer().span(name, str(category or Category.MISC), args):
        yield


@asynccontextmanager
async def atrace_scope(name: str, category: str | None = None, args: dict[str, Any] | None = None) -> AsyncIterator[None]:
    """Record a span as ``trace_scope`` does, for ``async with``."""
    with trace_scope(name, category, args):
        yield


def trace_session_phase(
    phase: str, start_payload: dict[str, Any] | None = None, end_payload: dict[str, Any] | None = None
) -> AbstractContextManager[None]:
    """Record a span over a phase of an episode; the payloads are shown with it in the trace."""
    return trace_scope(phase, Category.MISC, {**(start_payload or {}), **(end_payload or {})})


def atrace_session_phase(
    phase: str, start_payload: dict[str, Any] | None = None, end_payload: dict[str, Any] | None = None
) -> AbstractAsyncContextManager[None]:
    """Record a span as ``trace_session_phase`` does, for ``async with``."""
    return atrace_scope(phase, Category.MISC, {**(start_payload or {}), **(end_payload or {})})


def trace_perf(name: str, *, category: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that records a span over each call of a function, plain or async."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return (atrace_scope if inspect.iscoroutinefunction(function) else trace_scope)(name, category)(function)

    return decorate


#: Another name for ``trace_perf``, for a phase of an episode.
trace_session = trace_perf


def session_context() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that records a span named ``session`` over a function that makes one sample. The executor's samples need none."""
    return trace_perf("session")
