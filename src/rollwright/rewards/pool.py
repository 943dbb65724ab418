"""Worker processes that run reward functions apart, each under a time limit, and are replaced when they hang or crash.

Every worker is owned by one thread, which starts it, hands it one call at a time, waits for the answer with a limit and
kills it (with what it started) where the limit passes. Callers put calls into a queue and get a future, so a pool serves any
number of event loops and threads. Processes are spawned, never forked, start when there is work, import no more than their
function needs, and end with this process, also when it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from rollwright.errors import RewardError
from rollwright.rewards import worker as protocol

#: Seconds that a worker may take to start and to load a function with all that it imports; not counted as its run time.
START_SECONDS = 120.0


class WorkerTimeoutError(RewardError):
    """The function did not return within its limit; its worker was killed."""


class WorkerCrashError(RewardError):
    """The worker died under the function."""


class FunctionFailedError(RewardError):
    """The function raised, or returned something that is not a number; the message is the worker's traceback."""


@dataclass
class _Call:
    future: Future[float]
    key: bytes
    function: bytes  # pickled
    arguments: bytes  # pickled
    seconds: float


class _Worker:
    """One process and its pipes. Used by one thread."""

    def __init__(self) -> None:
        self._running = False
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-P", protocol.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # so that what a function starts is killed with it, and ^C is ours alone
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._output = self.process.stdout.fileno()
        self._input = self.process.stdin.fileno()
        os.set_blocking(self._input, False)
        self._poll_output = select.poll()
        self._poll_output.register(self._output, select.POLLIN)
        self._poll_input = select.poll()
        self._poll_input.register(self._input, select.POLLOUT)
        deadline = time.monotonic() + START_SECONDS
        self._send(protocol.START, pickle.dumps((os.getpid(), list(sys.path))), deadline)
        self._receive(deadline)

    def run(self, call: _Call) -> float:
        deadline = time.monotonic() + START_SECONDS
        self._send(protocol.CALL, call.key + call.arguments, deadline)
        kind, body = self._receive(deadline)
        if kind == protocol.NEED:
            self._send(protocol.LOAD, call.function, deadline)
            kind, body = self._receive(deadline)
        if kind == protocol.READY:
            self._running = True
            kind, body = self._receive(time.monotonic() + call.seconds)
            self._running = False
        if kind == protocol.VALUE:
            return protocol.FLOAT.unpack(body)[0]
        raise FunctionFailedError(body.decode("utf-8", "replace").rstrip())

    def kill(self) -> None:
        """End the process and everything in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, kind: bytes, body: bytes, deadline: float) -> None:
        rest = memoryview(protocol.HEADER.pack(kind, len(body)) + body)
        while rest:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                self._wait(self._poll_input, deadline)
            except BrokenPipeError:
                raise self._crash() from None

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        header = self._read(protocol.HEADER.size, deadline)
        kind, size = protocol.HEADER.unpack(header)
        return kind, self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        parts, missing = [], size
        while missing:
            self._wait(self._poll_output, deadline)
            part = os.read(self._output, missing)
            if not part:
                raise self._crash()
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _wait(self, poll: select.poll, deadline: float) -> None:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if self._running:
                raise WorkerTimeoutError("no answer within the limit")
            raise WorkerCrashError(f"the worker process was not ready to run the function after {START_SECONDS:g} s")

    def _crash(self) -> WorkerCrashError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        code = self.process.returncode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerCrashError(f"the worker process died ({cause})")


class WorkerPool:
    """At most ``size`` workers behind one queue."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._workers: set[_Worker] = set()

    def submit(self, key: bytes, function: bytes, arguments: bytes, seconds: float) -> Future[float]:
        """Run a pickled function on pickled ``(arguments, keywords)``; the limit counts from when it begins to run."""
        call = _Call(Future(), key, function, arguments, seconds)
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers were closed; a closed pool takes no calls.")
            if self._idle <= self._calls.qsize() and len(self._threads) < self.size:
                thread = threading.Thread(target=self._serve, name=f"reward-worker-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._calls.put(call)
        return call.future

    def close(self) -> None:
        """Kill all workers; calls that wait or run raise ``RewardError``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers)
        for _ in self._threads:
            self._calls.put(None)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)

    def _serve(self) -> None:
        worker: _Worker | None = None
        while True:
            with self._lock:
                self._idle += 1
            call = self._calls.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                break
            if not call.future.set_running_or_notify_cancel():
                continue
            if self._closed:
                call.future.set_exception(RewardError("the reward workers were closed while the call waited."))
                continue
            try:
                if worker is None:
                    worker = _Worker()
                    with self._lock:
                        self._workers.add(worker)
                value = worker.run(call)
            except FunctionFailedError as error:
                call.future.set_exception(error)
            except BaseException as error:  # whatever ended the exchange, the worker's pipe may hold half a message
                worker = self._discard(worker)
                call.future.set_exception(error)
            else:
                call.future.set_result(value)
        self._discard(worker)

    def _discard(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.kill()


_pools: dict[int, WorkerPool] = {}
_pools_lock = threading.Lock()


def shared_pool(max_workers: int | None = None) -> WorkerPool:
    """The pool of that many workers (default: one for each CPU), shared by all wrappers of this process."""
    size = max_workers or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    with _pools_lock:
        if size not in _pools:
            _pools[size] = WorkerPool(size)
        return _pools[size]


@atexit.register
def close_pools() -> None:
    """Kill the workers of all pools; the next call starts new ones."""
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
