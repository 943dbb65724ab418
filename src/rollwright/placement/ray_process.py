"""Handles that start, call and restart processes on a Ray cluster. ``RayCluster`` places the processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollwright import errors
from rollwright.errors import ClusterError, LostProcessError, RolloutError, RollwrightError
from rollwright.neighbours import NEIGHBOURS
from rollwright.placement.ray_host import Host, Place

#: Prefixes of the environment variables that are passed on to the processes; other variables come from the process's node.
_PASSED_ON = ("ROLLWRIGHT_", "HF_", "OMP_", "NCCL_", "GLOO_", "TOKENIZERS_", "PYTHONPATH")
#: Seconds that a process waits for room before spare processes are ended to make room.
SPARE_SECONDS = 30.0


class RayProcess:
    """A process on a Ray cluster that hosts one object. ``call`` calls that object's methods.

    Args:
        name: name of the process in messages.
        path: import path of the function or class that makes the object.
        arguments: called at every start; returns the arguments for ``path``.
        options: options of the Ray actor.
        log_path: path of the process's log file.
        make_room: called if the process has found no room ``SPARE_SECONDS`` after a restart. None for a spare process.
        output: directory, seen by this process too, in which the process writes while it makes the object, such as a server's log.

    Attributes:
        place: future of the node and GPUs; done when the process runs.
        started: future that is done when the object has been made.
    """

    def __init__(
        self,
        name: str,
        path: str,
        arguments: Callable[[], Sequence[Any]],
        options: dict[str, Any],
        log_path: str,
        make_room: Callable[[], None] | None = None,
        output: str | None = None,
    ) -> None:
        self.name = name
        self._make_room, self._output = make_room, output
        self._path, self._arguments, self._options, self._log_path = path, arguments, options, log_path
        self._lock = threading.Lock()
        self._is_ended = False
        self._lost: ClusterError | None = None
        self._answers = weakref.WeakSet[Future[Any]]()
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        make = ray.remote(Host).options(**self._options)
        self._actor: Any = make.remote(self._log_path, environment, [os.getcwd(), *_own_paths()], NEIGHBOURS.directories)
        self.place: Future[Place] = self._send("place")
        self.started: Future[None] = self._send("start", self._path, tuple(self._arguments()))

    def wait_started(self, timeout: float) -> None:
        """Wait until the object has been made, as long as the process writes to its ``output``.

        Raises:
            ClusterError: this took more than ``timeout`` seconds, counted from the last write.
        """
        written = self._written()
        while True:
            try:
                return self.answer(self.started, timeout, "start")
            except ClusterError:
                before, written = written, self._written()
                if self.started.done() or before == written:
                    raise

    def _written(self) -> int:
        """Return the number of bytes in the files of ``output``."""
        sizes = 0
        for file in Path(self._output).glob("*") if self._output is not None else ():
            with contextlib.suppress(OSError):  # it may be renamed
                sizes += file.stat().st_size
        return sizes

    def answer(self, future: Future[Any], timeout: float, action: str) -> Any:
        """Wait for the result of a future.

        Raises:
            ClusterError: there was no result within ``timeout`` seconds. ``action`` is the verb for the message ("did not start within …").
        """
        try:
            return future.result(timeout)
        except TimeoutError as error:
            raise ClusterError(
                f"{self.name} did not {action} within {timeout:g} s: its node is busy, or something else took its place there; its log "
                f"is {self._log_path}"
            ) from error

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a plain or async method of the object.

        The future raises the ``RollwrightError`` that the method raised, a ``RolloutError`` for any other exception, or
        ``LostProcessError``.
        """
        return self._send("call", method, *arguments)

    def restart(self) -> None:
        """End the process and place another one, with a new object.

        Raises:
            LostProcessError: ``end`` was called before. If Ray has been shut down since, placing a process would start a new cluster.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            if self._is_ended:
                raise LostProcessError(f"{self.name} has been ended; its log is {self._log_path}")
            self._kill()
            self._start()
            waiting = threading.Timer(SPARE_SECONDS, self._ask_for_room, [self.place])
        waiting.daemon = True
        waiting.start()

    def _ask_for_room(self, place: Future[Place]) -> None:
        if self._make_room is not None and not (place.done() or self._is_ended):
            self._make_room()

    def end(self) -> None:
        """End the process and its children permanently. Idempotent."""
        with self._lock:
            self._is_ended = True
            self._kill()

    def lose(self, error: ClusterError) -> None:
        """Fail all pending and future calls, because the cluster is lost."""
        self._lost = error
        for answer in list(self._answers):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(error)

    def _kill(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor)

    def is_in(self, group: Any) -> bool:
        """Return True if the process was placed in this placement group."""
        strategy = self._options["scheduling_strategy"]
        return isinstance(strategy, PlacementGroupSchedulingStrategy) and strategy.placement_group is group

    def _send(self, word: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        self._answers.add(answer)
        if self._lost is not None:
            answer.set_exception(self._lost)
            return answer
        reference = getattr(self._actor, word).remote(*arguments)
        reference.future().add_done_callback(lambda future: _settle(answer, self.name, self._log_path, future))
        return answer


def _settle(answer: Future[Any], name: str, log_path: str, received: Future[Any]) -> None:
    """Set the result that Ray received on ``answer``, or the failure as one of our errors."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        try:
            value, failure = received.result()
        except RayTaskError as error:  # of ``Host`` itself, which returns the failures of its object
            answer.set_exception(RolloutError(f"{name}: {error}"))
        except (RayError, concurrent.futures.CancelledError) as error:
            lost = "its node or the process itself has ended" if isinstance(error, RayActorError) else type(error).__name__
            answer.set_exception(LostProcessError(f"{name} was lost ({lost}); its log is {log_path}"))
        except Exception as error:  # the answer cannot be deserialised
            answer.set_exception(RolloutError(f"{name}: {type(error).__name__}: {error}"))
        else:
            if failure is None:
                answer.set_result(value)
            else:
                answer.set_exception(_error_of(*failure))


def _error_of(kind: str, message: str, trace: str) -> RollwrightError:
    """Rebuild the error that a process reported: with its own class if that is one of ours, else as a ``RolloutError``."""
    known = getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, RollwrightError)
    error: RollwrightError = known(message) if is_ours and known else RolloutError(f"{kind}: {message}")
    error.add_note(trace)
    return error


def _own_paths() -> list[str]:
    """Return the directories of ``sys.path`` that are not ``site-packages``."""
    return [path for path in sys.path if path and os.path.isdir(path) and "site-packages" not in path and path != sys.prefix]
