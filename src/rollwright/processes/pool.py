"""Worker processes that call functions, each call under a time limit, and are replaced when they hang or crash.

Every worker is owned by one thread, which starts it, gives it one call at a time, waits for the answer with a limit and kills it
(with all that it started) when the limit passes. Callers put calls into a queue and get a future, so a pool serves any number of
event loops and threads. Workers are new interpreters, not forks; they start when there is work, import only what their functions
need, and end with this process.

The parent sends ``CALL`` (the key of a function, and arguments) and, when asked by ``NEED``, ``LOAD`` (the function). The worker
answers ``READY`` when the function is loaded, then ``VALUE`` (JSON) or ``FAILED`` (a traceback). Only what the parent sends is
unpickled.
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
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollwright.errors import RollwrightError
from rollwright.processes.child import ChildProcess, connect

#: Seconds that a worker may take to start and to load a function with all that it imports; not counted as its run time.
START_SECONDS = 120.0
KEPT_FUNCTIONS = 64
CALL, LOAD, NEED, READY, VALUE, FAILED = b"C", b"L", b"N", b"R", b"V", b"F"
_KEY_BYTES = 8


class WorkerError(RollwrightError):
    """A call in a worker process came to nothing."""


class WorkerTimeoutError(WorkerError):
    """The function did not return within its limit; its worker was killed."""


class WorkerCrashError(WorkerError):
    """The worker died under the function."""


class FunctionFailedError(WorkerError):
    """The function raised; the message is the worker's traceback."""


@dataclass
class _Call:
    future: Future[Any]
    key: bytes
    function: bytes
    arguments: bytes
    seconds: float

    def run(self, worker: ChildProcess) -> Any:
        channel, is_running = worker.channel, False
        try:
            channel.send(CALL, self.key + self.arguments)
            kind, body = channel.receive(START_SECONDS)
            if kind == NEED:
                channel.send(LOAD, self.function)
                kind, body = channel.receive(START_SECONDS)
            if kind == READY:
                is_running = True
                kind, body = channel.receive(self.seconds)
        except TimeoutError:
            if is_running:
                raise WorkerTimeoutError("no answer within the limit") from None
            raise WorkerCrashError(f"the worker process was not ready to run the function after {START_SECONDS:g} s") from None
        except (EOFError, OSError):
            raise WorkerCrashError(f"the worker process died ({worker.cause_of_death()})") from None
        if kind == FAILED:
            raise FunctionFailedError(body.decode("utf-8", "replace").rstrip())
        return json.loads(body)


class WorkerPool:
    """At most ``size`` workers behind one queue."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._workers: set[ChildProcess] = set()

    def submit(self, key: bytes, function: bytes, arguments: bytes, seconds: float) -> Future[Any]:
        """Call a function in a worker.

        Args:
            key: 8 bytes that name the function; a worker that has loaded it keeps it.
            function: pickled ``(function, modules)``; the modules are imported with it. It returns a value that JSON has.
            arguments: pickled ``(arguments, keywords)``.
            seconds: limit, from when the function begins to run.

        Returns:
            A future of its value, or of a ``WorkerError``.
        """
        call = _Call(Future(), key, function, arguments, seconds)
        with self._lock:
            if self._closed:
                raise WorkerError("the reward workers were closed; a closed pool takes no calls.")
            if self._idle <= self._calls.qsize() and len(self._threads) < self.size:
                thread = threading.Thread(target=self._serve, name=f"worker-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Kill all workers; calls that wait or run raise ``WorkerError``. Idempotent."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for _ in self._threads:
            self._calls.put(None)
        for worker in workers:
            worker.kill()

    def _serve(self) -> None:
        worker: ChildProcess | None = None
        while call := self._next():
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                if self._closed:
                    raise WorkerError("the reward workers were closed while the call waited.")
                worker = worker or self._start()
                call.future.set_result(call.run(worker))
            except FunctionFailedError as error:
                call.future.set_exception(error)
            except BaseException as error:  # whatever ended the exchange, half a message may be left in the channel
                worker = self._discard(worker)
                call.future.set_exception(error)
        self._discard(worker)

    def _next(self) -> _Call | None:
        with self._lock:
            self._idle += 1
        call = self._calls.get()
        with self._lock:
            self._idle -= 1
        return call

    def _start(self) -> ChildProcess:
        worker = ChildProcess("rollwright.processes.pool")
        with self._lock:
            self._workers.add(worker)
        return worker

    def _discard(self, worker: ChildProcess | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.close()


_pools: dict[int, WorkerPool] = {}
_pools_lock = threading.Lock()


def processor_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_pool(max_workers: int | None = None) -> WorkerPool:
    """The pool of that many workers (default: one for each processor), shared by all callers in this process."""
    size = max_workers or processor_count()
    with _pools_lock:
        return _pools.setdefault(size, WorkerPool(size))


@atexit.register
def close_pools() -> None:
    """Kill the workers of all shared pools; the next call starts new ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def _forget_pools() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)  # a forked child has neither our threads nor our workers


# ------------------------------------------------------------------ in the worker


def main() -> None:
    """Serve calls until the parent is gone."""
    channel, _ = connect()
    functions: OrderedDict[bytes, Any] = OrderedDict()
    with contextlib.suppress(EOFError, OSError):
        while True:
            body = channel.receive()[1]
            key, packed = body[:_KEY_BYTES], body[_KEY_BYTES:]
            try:
                if key not in functions:
                    channel.send(NEED)
                    functions[key] = _load(channel.receive()[1])
                    if len(functions) > KEPT_FUNCTIONS:
                        functions.popitem(last=False)
                functions.move_to_end(key)
                arguments, keywords = pickle.loads(packed)  # noqa: S301 - from our own parent
                channel.send(READY)
                answer = VALUE, json.dumps(functions[key](*arguments, **keywords)).encode()
            except Exception:
                answer = FAILED, traceback.format_exc().encode("utf-8", "backslashreplace")
            channel.send(*answer)


def _load(body: bytes) -> Any:
    function, modules = pickle.loads(body)  # noqa: S301 - from our own parent
    for module in modules:
        importlib.import_module(module)
    return function
