"""A process on a Ray cluster: started there, called, and started again; ``RayCluster`` places it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollwright import errors
from rollwright.errors import ClusterError, LostProcessError, RolloutError, RollwrightError
from rollwright.placement.ray_host import Host, Place

#: Variables of this process that placed processes are given; a node has its own for the rest.
_PASSED_ON = ("ROLLWRIGHT_", "HF_", "OMP_", "NCCL_", "GLOO_", "TOKENIZERS_", "PYTHONPATH")
#: Wait for a place after which what is spare gives up its own.
SPARE_SECONDS = 30.0


class PlacedProcess:
    """A process on the cluster, and the object in it; ``call`` calls that object's methods.

    Attributes:
        name: in messages.
        place: where it is, when it has started.
        started: done when its object was made.
    """

    def __init__(
        self,
        name: str,
        path: str,
        arguments: Callable[[], Sequence[Any]],
        options: dict[str, Any],
        log_path: str,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._make_room = make_room
        self._path, self._arguments, self._options, self._log_path = path, arguments, options, log_path
        self._lock = threading.Lock()
        self._is_ended = False
        self._lost: ClusterError | None = None
        self._answers = weakref.WeakSet[Future[Any]]()
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        make = ray.remote(Host).options(**self._options)
        self._actor: Any = make.remote(self._log_path, environment, [os.getcwd(), *_own_paths()])
        self.place: Future[Place] = self._asked("place")
        self.started: Future[None] = self._asked("start", self._path, tuple(self._arguments()))

    def wait_started(self, timeout: float) -> None:
        """Return when its object was made.

        Raises:
            ClusterError: it was not within ``timeout`` seconds.
        """
        self.answer(self.started, timeout, "start")

    def answer(self, asked: Future[Any], timeout: float, what: str) -> Any:
        """What it answers, or a ``ClusterError`` that says that it did not ``what`` within ``timeout`` seconds."""
        try:
            return asked.result(timeout)
        except TimeoutError as error:
            raise ClusterError(
                f"{self.name} did not {what} within {timeout:g} s: its node is busy, or something else took its place there; its log "
                f"is {self._log_path}"
            ) from error

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the object, a coroutine or not.

        The future raises a ``RollwrightError`` of the class that the method raised, with its message (any other exception is a
        ``RolloutError``), or ``LostProcessError``.
        """
        return self._asked("call", method, *arguments)

    def restart(self) -> None:
        """End the process and place another one, which begins anew.

        Raises:
            LostProcessError: it was ended for good: without a cluster, Ray would start one here.
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
        """End the process and what it started, for good. Idempotent."""
        with self._lock:
            self._is_ended = True
            self._kill()

    def lose(self, error: ClusterError) -> None:
        """The cluster is lost: what was asked, and what will be, fails with this."""
        self._lost = error
        for answer in list(self._answers):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(error)

    def _kill(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actor)

    def is_in(self, group: Any) -> bool:
        """Whether it is in a placement group."""
        strategy = self._options["scheduling_strategy"]
        return isinstance(strategy, PlacementGroupSchedulingStrategy) and strategy.placement_group is group

    def _asked(self, word: str, *arguments: Any) -> Future[Any]:
        """A future of what the process answers."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        self._answers.add(answer)
        if self._lost is not None:
            answer.set_exception(self._lost)
            return answer
        asked = getattr(self._actor, word).remote(*arguments)
        asked.future().add_done_callback(lambda future: _settle(answer, self.name, self._log_path, future))
        return answer


def _settle(answer: Future[Any], name: str, log_path: str, got: Future[Any]) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        try:
            value, failure = got.result()
        except RayTaskError as error:  # of what hosts the object: what it holds answers with its failures
            answer.set_exception(RolloutError(f"{name}: {error}"))
        except (RayError, concurrent.futures.CancelledError) as error:
            lost = "its node or the process itself has ended" if isinstance(error, RayActorError) else type(error).__name__
            answer.set_exception(LostProcessError(f"{name} was lost ({lost}); its log is {log_path}"))
        except Exception as error:  # what it answered cannot be read here
            answer.set_exception(RolloutError(f"{name}: {type(error).__name__}: {error}"))
        else:
            if failure is None:
                answer.set_result(value)
            else:
                answer.set_exception(_error_of(*failure))


def _error_of(kind: str, message: str, trace: str) -> RollwrightError:
    """The error that a process told: of our class where it is one of ours."""
    known = getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, RollwrightError)
    error: RollwrightError = known(message) if is_ours and known else RolloutError(f"{kind}: {message}")
    error.add_note(trace)
    return error


def _own_paths() -> list[str]:
    """Where this process finds modules besides what is installed."""
    return [path for path in sys.path if path and os.path.isdir(path) and "site-packages" not in path and path != sys.prefix]
