"""The event loop that all samples share: its thread, calls into it, reports of a blocked loop, and garbage collection.

Invariant: a call from another thread ends, whatever happens to the loop meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import gc
import linecache
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rollwright.errors import RolloutError
from rollwright.rollout.sample_engine import CURRENT_SAMPLE
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

Result = TypeVar("Result")

STOP_SECONDS = 10.0  # time for tasks to end after their cancellation
LOOK_SECONDS = 0.1  # interval at which the monitor inspects the loop
BLOCKED_SECONDS = 0.5  # a step that takes at least this long is reported
REPORTS_PER_LINE = 3

#: For ``gc.set_threshold``: a full collection runs after a million more allocations than frees of containers (Python 3.11: 70,000).
GC_THRESHOLDS = (2_000, 10, 50)

_NOT_USERS = (os.path.dirname(asyncio.__file__), os.path.dirname(__file__), "site-packages")
_OWN_CODE = ("rollwright/rollout/", "rollwright/experience/", "/asyncio/", "/threading.py")


class LoopThread:
    """Owns an event loop and its thread, from the first call to ``stop``. The thread does not keep the process alive.

    Args:
        at_exit: function that calls ``stop``. It runs if the process exits first, because a thread inside torch would abort the process.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.monitor = BlockedLoopMonitor()
        self._thread = threading.Thread(target=self._run, name="rollwright-rollout", daemon=True)
        self._at_exit = at_exit
        self._lock = threading.RLock()
        self._calls: set[concurrent.futures.Future[Any]] = set()  # calls that threads wait for
        self.is_stopped = False

    def start(self) -> None:
        """Start the thread. Idempotent.

        Raises:
            RolloutError: the thread was stopped.
        """
        with self._lock:
            if self.is_stopped:
                raise RolloutError("this rollout executor was destroyed; make a new one.")
            if self._thread.ident is None:
                self._thread.start()
                atexit.register(self._at_exit)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run a function on the loop and return what it returns.

        Raises:
            RolloutError: the call comes from the loop's own thread, which would wait for itself; or the loop is stopped before or during
                the wait.
        """
        self.refuse_inside()
        outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                outcome.set_result(function(*args))
            except BaseException as error:  # raised in the caller's thread
                outcome.set_exception(error)

        with self._lock:
            self.start()
            self._calls.add(outcome)
            self.loop.call_soon_threadsafe(run)
        try:
            return outcome.result()
        finally:
            self._calls.discard(outcome)

    def refuse_inside(self) -> None:
        """Raise a ``RolloutError`` if called in the loop's own thread."""
        if threading.current_thread() is self._thread:
            raise RolloutError(
                "a synchronous rollout call was made from inside a workflow: it would wait for the loop that it blocks. "
                "In a workflow use the engine that arun_episode was given."
            )

    def stop(self, first: Callable[[], None]) -> None:
        """Call ``first`` on the loop, cancel its tasks, and end the thread. Idempotent."""
        self.refuse_inside()
        with self._lock:
            if self.is_stopped:
                return
            self.is_stopped = True
        atexit.unregister(self._at_exit)
        try:
            if self._thread.ident is not None:
                asyncio.run_coroutine_threadsafe(self._cancel_all(first), self.loop).result(STOP_SECONDS + 5.0)
                self.loop.call_soon_threadsafe(self.loop.stop)
                self._thread.join(STOP_SECONDS)
            if not self._thread.is_alive():
                self.loop.close()
        except concurrent.futures.TimeoutError:
            where = self.monitor.where() or "place unknown"
            logger.error("rollout's event loop is blocked and could not be stopped: %s", where)
        finally:
            for call in list(self._calls):
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # answered in the meantime
                    call.set_exception(RolloutError("the rollout executor was destroyed while this call waited."))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.monitor.start()
        try:
            sys.set_coroutine_origin_tracking_depth(1)  # un-awaited coroutines are reported with their source line
            with rare_full_collections():
                while True:
                    try:
                        self.loop.run_forever()
                        return
                    except (SystemExit, KeyboardInterrupt) as error:  # also raised where the task is awaited
                        name = type(error).__name__
                        logger.error("a task of a workflow raised %s in rollout's event loop, which goes on.", name)
        finally:
            self.monitor.stop()

    async def _cancel_all(self, first: Callable[[], None]) -> None:
        first()
        deadline, cancelled = self.loop.time() + STOP_SECONDS, set[asyncio.Task[Any]]()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            if self.loop.time() >= deadline:
                logger.warning("%d samples did not end within %.0f s of their cancellation.", len(left), STOP_SECONDS)
                for task in left:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # already logged above, once for all
                break
            for task in left - cancelled:  # includes tasks started meanwhile, such as a client closing its connections
                task.cancel()
            cancelled |= left
            await asyncio.wait(left, timeout=min(0.1, deadline - self.loop.time()))
        await self.loop.shutdown_asyncgens()


# -- a blocked loop ----------------------------------------------------------------------------------------------------


class BlockedLoopMonitor:
    """Logs which workflow blocks an event loop, and on which line. Runs in a thread of its own.

    A workflow that computes, sleeps or reads a file without awaiting stops all other samples. Only a single long step is reported, not a
    loop that is busy with many samples; time in which the thread waits for a CPU (as counted by Linux) is excluded. The monitor inspects
    the loop and never wakes it.

    Args:
        blocked_seconds: shortest duration of a step that is reported.
    """

    def __init__(self, blocked_seconds: float = BLOCKED_SECONDS) -> None:
        self._blocked_seconds = blocked_seconds
        self._thread_id = 0
        self._native_id = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._reported: Counter[str] = Counter()
        self.reports = 0
        self.latest = ""

    def start(self) -> None:
        """Start watching the calling thread, which runs the loop."""
        self._thread_id, self._native_id = threading.get_ident(), threading.get_native_id()
        self._thread = threading.Thread(target=self._watch, name="rollwright-loop-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the monitor, and wait until its thread has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def where(self) -> str | None:
        """Describe what the loop's thread is running: workflow, file, line and source. Returns None during the executor's own work.

        The line is the innermost one of user code or, for a workflow in an installed package, the outermost one of installed code. The
        workflow is that of an ``arun_episode`` on the stack, or of the sample whose task or callback the loop runs.
        """
        workflow, users, installed = None, None, None
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            code, file = frame.f_code, frame.f_code.co_filename.replace("\\", "/")
            if workflow is None and code.co_name == "arun_episode" and "self" in frame.f_locals:
                workflow = type(frame.f_locals["self"]).__qualname__
            elif workflow is None and code is asyncio.Handle._run.__code__:
                handle = frame.f_locals["self"]  # None at the end of a step, where asyncio breaks a cycle of references
                sample = None if handle is None else handle._context.get(CURRENT_SAMPLE)
                workflow = None if sample is None else sample.workflow
            is_own = any(part in file for part in _OWN_CODE) or file.startswith((sys.base_prefix, "<string>", "<frozen"))
            if "site-packages" in file:
                installed = installed if is_own else frame
            elif users is None and not is_own:
                users = frame
            frame = frame.f_back
        users = users or installed
        if users is None:
            return None
        file, line = users.f_code.co_filename, users.f_lineno or users.f_code.co_firstlineno  # some instructions have no line
        source = linecache.getline(file, line).strip()
        return f"{workflow or 'a task of a workflow'} at {file}:{line} in {users.f_code.co_name}: {source}"

    def _watch(self) -> None:
        step: weakref.ref[asyncio.Handle] | None = None  # the current step; weak, so that a sample's memory can be freed
        held, is_reported = 0.0, False
        places: Counter[str] = Counter()  # where the loop's thread was at each inspection
        woke, before = time.monotonic(), None
        while not self._ended.wait(LOOK_SECONDS):
            now, current = time.monotonic(), self._step()
            times = None if current is None else ThreadTimes.of(self._native_id)
            if current is not step:  # ``weakref.ref`` returns the same object while the handle lives
                held, is_reported, places = 0.0, False, Counter()
            else:  # if this thread had to wait too, the machine is busy or another thread holds the interpreter lock
                held += own_time(min(now - woke, 2 * LOOK_SECONDS), before, times)
            woke, before, step = now, times, current
            if step is None:
                continue
            place = self.where()
            if place is not None:
                places[place] += 1
            if held >= self._blocked_seconds and places and not is_reported:
                is_reported = True
                self.reports += 1
                self.latest = places.most_common(1)[0][0]
                self._reported[self.latest] += 1
                if self._reported[self.latest] <= REPORTS_PER_LINE:
                    logger.warning(
                        "the event loop of all samples has stood still for %.1f s: %s. Await instead of blocking: asyncio.sleep "
                        "for time.sleep, an async client for requests, asyncio.to_thread for work.",
                        held,
                        self.latest,
                    )

    def _step(self) -> weakref.ref[asyncio.Handle] | None:
        """Return the task step or callback that the loop is running, or None."""
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            if frame.f_code is asyncio.Handle._run.__code__:
                handle = frame.f_locals["self"]  # may be None, as in ``where``
                return None if handle is None else weakref.ref(handle)
            frame = frame.f_back
        return None


class ThreadTimes(NamedTuple):
    """Times of a thread as counted by the system: seconds spent running, and seconds spent waiting for a CPU."""

    computed: float
    waited: float
    is_runnable: bool  # running or waiting for a CPU, not blocked

    @classmethod
    def of(cls, native_id: int) -> ThreadTimes | None:
        """Read the times of a thread. Returns None if the system does not provide them."""
        directory = Path(f"/proc/self/task/{native_id}")
        try:
            computed, waited, _ = (directory / "schedstat").read_text().split()
            state = (directory / "stat").read_text().rpartition(") ")[2][:1]
        except (OSError, ValueError):
            return None
        return cls(int(computed) / 1e9, int(waited) / 1e9, state == "R")


def own_time(elapsed: float, before: ThreadTimes | None, now: ThreadTimes | None) -> float:
    """Return the part of ``elapsed`` in which a thread computed or was blocked, excluding its waits for a CPU."""
    if before is None or now is None:
        return elapsed
    if now.is_runnable:  # the system counts a wait when it ends
        return min(elapsed, now.computed - before.computed)
    return max(0.0, elapsed - (now.waited - before.waited))


def place_of(task: asyncio.Task[Any]) -> str:
    """Return the file and line at which a task waits: the innermost line of the workflow's own code, if there is any."""
    current: Any = task.get_coro()
    frames = []
    while current is not None:
        parts = (getattr(current, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))
        if (frame := next(filter(None, parts), None)) is not None:
            frames.append(frame)
        current = (
            getattr(current, "cr_await", None) or getattr(current, "gi_yieldfrom", None) or getattr(current, "ag_await", None)
        )
    users = [frame for frame in frames if not any(part in frame.f_code.co_filename for part in _NOT_USERS)]
    chosen = (users or frames or [None])[-1]
    return "unknown" if chosen is None else f"{chosen.f_code.co_filename}:{chosen.f_lineno}"


# -- garbage collection ------------------------------------------------------------------------------------------------

_gc_lock = threading.Lock()
_gc_users = 0
_gc_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """Make full garbage collections rarer (``GC_THRESHOLDS``) inside the context.

    With ten thousand samples in flight, a full collection stops all threads for up to 0.3 s, which adds up to a sixth of a run. Samples do
    not need it, because reference counting frees them. Thresholds that are already higher, or that are changed meanwhile, are kept.
    """
    global _gc_users, _gc_before
    with _gc_lock:
        _gc_users += 1
        current = gc.get_threshold()
        if _gc_users == 1 and all(0 < now <= ours for now, ours in zip(current, GC_THRESHOLDS, strict=True)):
            _gc_before = current
            gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0 and _gc_before is not None:
                if gc.get_threshold() == GC_THRESHOLDS:
                    gc.set_threshold(*_gc_before)
                _gc_before = None
