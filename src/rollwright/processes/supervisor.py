"""Restarts lost processes, and gives up on a process that is lost too often in a row.

``Supervisor`` does this in the background, for servers and for workers that run episodes. ``retry_lost`` does it for a blocking call: the
first start of a process, or a run that loses a rank. Both work for any process on any machine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rollwright.errors import LostProcessError, RolloutError, RollwrightError
from rollwright.tracking.logging import getLogger

logger = getLogger("processes")

Result = TypeVar("Result")

#: Maximum number of restarts in a row. The count starts again when a process proves itself, for example by running an episode.
RESTARTS = 3


class Process(Protocol):
    """A process that can be restarted and contains an object whose methods can be called.

    Attributes:
        name: name of the process in messages.
    """

    name: str

    @property
    def started(self) -> Future[None]:
        """Future that is done when the latest start has succeeded or failed. Each start has a new future."""
        ...

    def wait_started(self, timeout: float) -> None:
        """Wait for the latest start."""
        ...

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the object; the future raises ``LostProcessError`` if the process is lost."""
        ...

    def restart(self) -> None:
        """End the process and start a replacement.

        Raises:
            LostProcessError: the process was ended permanently.
        """
        ...


def retry_lost(
    attempt: Callable[[], Result],
    restart: Callable[[], object],
    lost_words: str,
    *,
    errors: tuple[type[RollwrightError], ...] = (LostProcessError,),
    progress: Callable[[], int] = lambda: 0,
) -> Result:
    """Call ``attempt`` and return its result; if it loses a process, ``restart`` and retry, at most ``RESTARTS`` times in a row.

    Args:
        attempt: called again after one of ``errors``. Other errors are not retried, because another process would fail in the same way.
        restart: called before each further attempt; its errors are not retried.
        lost_words: template of the final error message, in which ``{}`` stands for the number of losses.
        errors: types of errors that report a lost process.
        progress: returns how far the attempts have come. When this value has grown, losses are counted from zero again.

    Raises:
        RollwrightError: one of ``errors``: a process was lost ``RESTARTS + 1`` times in a row. The message includes the last cause.
    """
    losses, furthest = 0, 0
    while True:
        try:
            return attempt()
        except errors as error:
            reached = progress()
            losses = losses + 1 if reached <= furthest else 1
            furthest = max(furthest, reached)
            if losses > RESTARTS:
                raise type(error)(f"{lost_words.format(losses)}; the last time: {error}") from error
            logger.warning("%s; trying again", str(error).rstrip("."))
        restart()


def wait_running(process: Process, timeout: float, ask: str | None = None) -> Any:
    """Wait for the first start of a process, and restart the process if it is lost meanwhile.

    Args:
        process: a process that is starting.
        timeout: seconds that each start may take.
        ask: name of a method of the process's object that must also return.

    Returns:
        The result of ``ask``, or None.

    Raises:
        LostProcessError: see ``retry_lost``.
        RollwrightError: the process's object could not be created.
    """

    def attempt() -> Any:
        process.wait_started(timeout)
        return None if ask is None else process.call(ask).result(timeout)

    return retry_lost(attempt, process.restart, f"{process.name} was lost {{}} times while it started")


class Supervisor:
    """Restarts processes in the background.

    A process is given up if it is lost ``RESTARTS + 1`` times in a row without proving itself, or if it fails to start after no process
    has run for ``timeout`` seconds. When all processes have been given up, ``failed`` is called.

    Args:
        processes: running processes.
        purpose: how a process proves itself, such as "running an episode", for messages.
        timeout: seconds within which a process must start if no other process runs. While another process runs, a process may wait
            for free resources on the cluster without a limit.
        failed: called with the cause when no process is left.
        take_in: prepares a started process for use and calls ``admit``; a ``RollwrightError`` counts as a failed start. It may return
            text to append to the log message "server 0 runs again".

    Attributes:
        running: processes in use, in the order in which they were added.
        lock: held while ``running`` changes.
    """

    def __init__(
        self,
        processes: Sequence[Any],
        *,
        purpose: str,
        timeout: float,
        failed: Callable[[RolloutError], object],
        take_in: Callable[[Any], str | None] | None = None,
    ) -> None:
        self.running = list(processes)
        self.lock = threading.RLock()
        self._processes = list(processes)
        self._purpose, self._timeout, self._failed = purpose, timeout, failed
        self._take_in = take_in or self.admit
        self._losses = Counter[str]()  # losses in a row, by name of the process
        self._given_up = 0
        self._none_since: float | None = None  # when the last running process was lost; None while a process runs
        self._closed = threading.Event()

    def add(self, process: Any) -> None:
        """Add another process, which is used as soon as it has started."""
        with self.lock:
            self._processes.append(process)
        self._start_thread(process, is_new=True)

    def lost(self, process: Any, start: Future[None], cause: object) -> None:
        """Restart a process that was found lost.

        Args:
            process: a process of this supervisor.
            start: value of ``process.started`` before the loss was noticed; if the process has been restarted since, nothing is done.
            cause: cause of the loss.
        """
        with self.lock:
            if process not in self.running or process.started is not start or self._closed.is_set():
                return
            self.running = [other for other in self.running if other is not process]
            self._none_since = None if self.running else time.monotonic()
        if not self._is_given_up(process, cause):
            self._start_thread(process)

    def admit(self, process: Any) -> None:
        """Add a started process to ``running``."""
        with self.lock:
            self.running = [other for other in self._processes if other in self.running or other is process]
            self._none_since = None

    def proven(self, process: Any) -> None:
        """Record that a process has proven itself, so that its losses are counted from zero again."""
        self._losses.pop(process.name, None)

    def close(self) -> None:
        """Stop restarting processes. Whoever started them is responsible for ending them. Idempotent."""
        self._closed.set()

    def _start_thread(self, process: Any, is_new: bool = False) -> None:
        threading.Thread(target=self._bring_in, args=(process, is_new), name=f"start {process.name}", daemon=True).start()

    def _bring_in(self, process: Any, is_new: bool) -> None:
        is_starting = is_new
        while not self._closed.is_set():
            try:
                if not is_starting:
                    process.restart()
            except LostProcessError as error:  # the process was ended permanently
                if not self._closed.is_set():
                    self._give_up(str(error))
                return
            is_starting = False
            try:
                self._wait_started(process)
                where = self._take_in(process)
            except (RollwrightError, TimeoutError) as error:
                if self._closed.is_set() or self._is_given_up(process, error):
                    return
                logger.warning("%s could not be started again, and is started once more: %s", process.name, error)
            else:
                logger.info("%s runs%s%s", process.name, "" if is_new else " again", where or "")
                return

    def _wait_started(self, process: Any) -> None:
        while not self._closed.is_set():
            try:
                return process.started.result(1.0)
            except TimeoutError:
                if self._is_too_late():
                    raise RolloutError("nothing on the cluster has room for it") from None

    def _is_too_late(self) -> bool:
        """Return whether no process has run for ``timeout`` seconds."""
        return self._none_since is not None and time.monotonic() - self._none_since >= self._timeout

    def _is_given_up(self, process: Any, cause: object) -> bool:
        """Count a loss, and give the process up if it was lost too often in a row or no process has run for ``timeout`` seconds."""
        self._losses[process.name] += 1
        if self._losses[process.name] > RESTARTS:
            words = f"was started {RESTARTS + 1} times without {self._purpose}, and is not started again; the last time"
        elif self._is_too_late():
            words = f"could not be started again within {self._timeout:g} s"
        else:
            return False
        self._give_up(f"{process.name} {words}: {cause}")
        return True

    def _give_up(self, words: str) -> None:
        logger.error("%s", words)
        with self.lock:
            self._given_up += 1
            is_last = self._given_up == len(self._processes)
        if is_last:
            self._failed(RolloutError(words))
