"""The thread that an event loop runs in, and calls into it from outside.

Invariant: a call from outside ends, whatever becomes of the loop meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rollwright.errors import RolloutError
from rollwright.rollout.garbage import rarer_collections
from rollwright.rollout.watch import LoopWatch
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

Result = TypeVar("Result")

STOP_SECONDS = 10.0  # that tasks get to end after their cancellation


class LoopThread:
    """Owns an event loop and its thread, from the first call to ``stop``. The thread does not keep the process alive.

    Args:
        at_exit: called when the process ends and the thread still runs; it has to call ``stop``. A thread that computes in
            torch while Python ends would abort the process.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.watch = LoopWatch(self.loop)
        self._thread = threading.Thread(target=self._run, name="rollwright-rollout", daemon=True)
        self._at_exit = at_exit
        self._lock = threading.Lock()
        self._calls: set[concurrent.futures.Future[Any]] = set()  # that callers wait for
        self.is_started = False
        self.is_stopped = False

    def start(self) -> None:
        """Start the thread; once more is a no-op.

        Raises:
            RolloutError: it was stopped.
        """
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self.is_stopped:
            raise RolloutError("this rollout executor was destroyed; make a new one.")
        if not self.is_started:
            self._thread.start()
            self.is_started = True
            atexit.register(self._at_exit)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run a function on the loop and return what it returns.

        Raises:
            RolloutError: called in the loop's own thread, which would wait for itself; or stopped, also while it waits.
        """
        self.refuse_inside()
        outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                outcome.set_result(function(*args))
            except BaseException as error:  # it is the caller's
                outcome.set_exception(error)

        with self._lock:
            self._start()
            self._calls.add(outcome)
            self.loop.call_soon_threadsafe(run)
        try:
            return outcome.result()
        finally:
            self._calls.discard(outcome)

    def refuse_inside(self) -> None:
        """Raise in the loop's own thread."""
        if threading.current_thread() is self._thread:
            raise RolloutError(
                "a synchronous rollout call was made from inside a workflow: it would wait for the loop that it blocks. "
                "In a workflow use the engine that arun_episode was given."
            )

    def stop(self, first: Callable[[], None]) -> None:
        """Call ``first`` on the loop, cancel its tasks, and end the thread. Once more is a no-op."""
        self.refuse_inside()
        with self._lock:
            if self.is_stopped:
                return
            self.is_stopped = True
        atexit.unregister(self._at_exit)
        try:
            self._end(first)
        finally:
            for call in list(self._calls):
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # answered at this moment
                    call.set_exception(RolloutError("the rollout executor was destroyed while this call waited."))

    def _end(self, first: Callable[[], None]) -> None:
        if self.is_started:
            ended = asyncio.run_coroutine_threadsafe(self._cancel_all(first), self.loop)
            try:
                ended.result(STOP_SECONDS + 5.0)
            except concurrent.futures.TimeoutError:
                logger.error(
                    "rollout's event loop is blocked and could not be stopped: %s", self.watch.where() or "place unknown"
                )
                return
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.watch.start()
        try:
            with rarer_collections():
                while not self._run_until_stopped():
                    pass
        finally:
            self.watch.stop()

    def _run_until_stopped(self) -> bool:
        """False where a task of a workflow raised what asyncio lets through the loop: whoever awaits that task gets it."""
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.error("a task of a workflow raised %s in rollout's event loop, which goes on.", type(error).__name__)
            return False
        return True

    async def _cancel_all(self, first: Callable[[], None]) -> None:
        first()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            if left:
                logger.warning(
                    "%d samples did not end within %.0f s of their cancellation and are abandoned.", len(left), STOP_SECONDS
                )
        await self.loop.shutdown_asyncgens()
