"""Worker processes that call functions under a time limit, and are replaced when they hang or crash.

Each worker belongs to one thread. The thread starts the worker, sends it one call at a time, waits for the answer, and kills the worker
with all its descendants if the time limit passes. Callers put calls into a queue and get a future, so a pool serves any number of event
loops and threads. Workers are new interpreters, not forks. They start when there is work, import only the modules of their functions, and
end with this process.

The parent sends ``CALL`` (the key of a function, and arguments). A worker that does not have the function answers ``NEED``, gets ``LOAD``
(the function) and answers ``READY`` when it has loaded the function. It answers each call with ``VALUE`` (JSON) or ``FAILED`` (a
traceback). Only data from the parent is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

from rollwright.errors import RollwrightError
from rollwright.neighbours import NEIGHBOURS
from rollwright.processes.child import UNCOUNTED, ChildProcess, UncountedTime, connect

#: Seconds that a worker may take to start and to load a function with its imports, which do not count against the function's limit.
START_SECONDS = 120.0
KEPT_FUNCTIONS = 64
CALL, LOAD, NEED, READY, VALUE, FAILED = b"C", b"L", b"N", b"R", b"V", b"F"
_KEY_BYTES = 8


class WorkerError(RollwrightError):
    """A call in a worker process failed."""


class WorkerTimeoutError(WorkerError):
    """The function did not return within its limit; its worker was killed."""


class WorkerCrashError(WorkerError):
    """The worker died while it ran the function."""


class FunctionFailedError(WorkerError):
    """The function raised an exception; the message is the worker's traceback."""


class WorkerPool:
    """At most ``size`` workers that share one queue."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[_Worker], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._closed = False
        self._workers: set[_Worker] = set()

    def submit(self, key: bytes, function: bytes, arguments: bytes, seconds: float) -> Future[Any]:
        """Call a function in a worker.

        Args:
            key: 8 bytes that identify the function, so that a worker loads it only once.
            function: pickled ``(function, modules)``; the modules are imported first. The function must return a JSON value.
            arguments: pickled ``(arguments, keywords)``.
            seconds: time limit, from when the function begins to run, or from when the call is sent if the worker has loaded the
                function before.

        Returns:
            A future that returns the function's value or raises a ``WorkerError``.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise WorkerError("the reward workers were closed; a closed pool takes no calls.")
            if not self._idle.acquire(blocking=False) and len(self._threads) < self.size:
                thread = threading.Thread(target=self._serve, name=f"worker-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put((future, partial(_call, key, function, arguments, seconds, UNCOUNTED.get())))
        return future

    def close(self) -> None:
        """Kill all workers; waiting and running calls raise ``WorkerError``. Idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for _ in self._threads:
            self._calls.put(None)
        for worker in workers:
            worker.kill()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while waiting := self._calls.get():
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    if self._closed:
                        raise WorkerError("the reward workers were closed while the call waited.")
                    if worker is None:
                        worker = _Worker("rollwright.processes.pool")
                        with self._lock:
                            self._workers.add(worker)
                    future.set_result(call(worker))
                except FunctionFailedError as error:
                    future.set_exception(error)
                except BaseException as error:  # the channel may contain a partial message, so the worker is discarded
                    worker = self._discard(worker)
                    future.set_exception(error)
            self._idle.release()
        self._discard(worker)

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


class _Worker(ChildProcess):
    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.loaded: set[bytes] = set()  # keys of all functions that the worker has ever loaded


def _call(key: bytes, function: bytes, arguments: bytes, seconds: float, uncounted: UncountedTime, worker: _Worker) -> Any:
    """Run one call; see ``WorkerPool.submit``. Starting the worker and loading the function count as ``uncounted`` time."""
    channel, is_running = worker.channel, key in worker.loaded
    try:
        with contextlib.nullcontext() if is_running else uncounted.passing():
            channel.send(CALL, key + arguments)
            kind, body = channel.receive(seconds if is_running else START_SECONDS)
        if kind == NEED:
            is_running = False
            worker.loaded.add(key)
            with uncounted.passing():
                channel.send(LOAD, pickle.dumps((NEIGHBOURS.directories, function)))
                kind, body = channel.receive(START_SECONDS)
        if kind == READY:
            is_running = True
            kind, body = channel.receive(seconds)
    except TimeoutError:
        if is_running:
            raise WorkerTimeoutError("no answer within the limit") from None
        raise WorkerCrashError(f"the worker process was not ready to run the function after {START_SECONDS:g} s") from None
    except (EOFError, OSError):
        raise WorkerCrashError(f"the worker process died ({worker.cause_of_death()})") from None
    if kind == FAILED:
        raise FunctionFailedError(body.decode("utf-8", "replace").rstrip())
    return json.loads(body)


_pools: dict[int, WorkerPool] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a forked child has neither our threads nor our workers


def processor_count() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_pool(max_workers: int | None = None) -> WorkerPool:
    """Return the pool of ``max_workers`` workers (default: one per processor) that all callers in this process share."""
    size = max_workers or processor_count()
    return _pools.setdefault(size, WorkerPool(size))


@atexit.register
def close_pools() -> None:
    """Close all shared pools and kill their workers; the next call starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


# ------------------------------------------------------------------ in the worker


def main() -> None:
    """Answer calls until the parent is gone."""
    channel, _ = connect()

    @lru_cache(KEPT_FUNCTIONS)
    def loaded(key: bytes) -> Any:
        channel.send(NEED)
        neighbours, pickled = pickle.loads(channel.receive()[1])  # noqa: S301 - from our own parent
        NEIGHBOURS.adopt(neighbours)  # of plugins that were loaded after this process had started
        function, modules = pickle.loads(pickled)  # noqa: S301
        for module in modules:
            importlib.import_module(module)
        return function

    with contextlib.suppress(EOFError, OSError):
        while True:
            body = channel.receive()[1]
            loads = loaded.cache_info().misses
            try:
                function = loaded(body[:_KEY_BYTES])
                arguments, keywords = pickle.loads(body[_KEY_BYTES:])  # noqa: S301 - from our own parent
                if loaded.cache_info().misses > loads:
                    channel.send(READY)
                answer = VALUE, json.dumps(function(*arguments, **keywords)).encode()
            except Exception:
                answer = FAILED, traceback.format_exc().encode("utf-8", "backslashreplace")
            channel.send(*answer)
