"""A Ray cluster: joined or started, asked what it has, and processes on it, which it places and this module restarts.

What runs in a process is named by an import path; this module knows nothing of it. Ray is the control plane alone: tokens go over
HTTP, gradients and weights over ``torch.distributed``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollwright import errors
from rollwright.cluster.placement import Node
from rollwright.config.sections import ClusterConfig
from rollwright.errors import ClusterError, ConfigError, LostProcessError, RolloutError, RollwrightError
from rollwright.tracking.logging import getLogger

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ConfigError(
        f"cluster.kind ray needs the package {error.name}, which is not installed: pip install 'rollwright[ray]'."
    ) from error

logger = getLogger("ray")

#: Variables of this process that placed processes are given; a node has its own for the rest.
_PASSED_ON = ("ROLLWRIGHT_", "HF_", "OMP_", "NCCL_", "GLOO_", "TOKENIZERS_", "PYTHONPATH")
#: Where a Ray of one machine listens. In place of 127.0.0.1 Ray takes the machine's address, which other machines reach.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
#: Longest wait for a place on the cluster, for a process or a gang of them.
PLACE_SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    """Where a process was put.

    Attributes:
        address: of its node, by which the other nodes reach it.
        gpus: that it was given, as Ray numbers them on the node.
    """

    address: str
    gpus: tuple[int, ...]


class RayCluster:
    """A connection to a Ray cluster, and the processes that were placed by it, which end with it.

    Args:
        config: where Ray is; where it names none and ``RAY_ADDRESS`` is not set, Ray is started on this machine, on its loopback
            interface, and ends with this object.
        logs: directory of the processes' logs.
    """

    def __init__(self, config: ClusterConfig, logs: str | os.PathLike[str]) -> None:
        self._logs = os.fspath(logs)
        self._processes: list[PlacedProcess] = []
        self._groups: list[Any] = []
        self._began = not ray.is_initialized()
        if self._began:
            address = config.address or os.environ.get("RAY_ADDRESS") or "local"
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here tells its makers nothing
            here = {"include_dashboard": False, "_node_ip_address": _LOOPBACK} if address == "local" else {}
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"cluster.address: there is no Ray at {address!r}: {error}") from error

    @property
    def nodes(self) -> list[Node]:
        """The nodes that live, and what is free on each."""
        free = ray._private.state.available_resources_per_node()  # type: ignore[attr-defined]
        return [
            Node(
                node["NodeManagerAddress"],
                free.get(node["NodeID"], {}).get("CPU", 0.0),
                int(free.get(node["NodeID"], {}).get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    @classmethod
    def look(cls, config: ClusterConfig) -> list[Node]:
        """What a run would find: the nodes of the Ray that runs, or this machine where one would be started."""
        if not (config.address or os.environ.get("RAY_ADDRESS")):
            import torch

            return [Node("this machine", float(len(os.sched_getaffinity(0))), torch.cuda.device_count())]
        cluster = cls(config, os.curdir)
        try:
            return cluster.nodes
        finally:
            cluster.close()

    def put(self, data: bytes) -> Any:
        """Keep bytes in the cluster's object store, which may move them to disk; returns a reference, by which processes fetch them."""
        return ray.put(data)

    def process(
        self,
        name: str,
        path: str,
        arguments: Callable[[], Sequence[Any]],
        *,
        cpus: float,
        gpus: int,
        concurrency: int = 8,
        strategy: Any = "SPREAD",
    ) -> PlacedProcess:
        """Place one process; it starts in the background.

        Args:
            name: in messages, and of its log.
            path: import path of what makes the object that it holds, called with its ``Place`` and the arguments.
            arguments: gives these; asked again when the process is restarted.
            cpus, gpus: that it is placed with.
            concurrency: calls that it answers at once.
            strategy: Ray's scheduling strategy.
        """
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": concurrency,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        process = PlacedProcess(name, path, arguments, options, os.path.join(self._logs, f"{name.replace(' ', '-')}.log"))
        self._processes.append(process)
        return process

    def gang(self, role: str, path: str, count: int, *, cpus: float, gpus: int) -> list[PlacedProcess]:
        """Place processes that work together, all or none, as close together as they fit; see ``process``.

        Returns:
            The processes, in the order of their nodes' addresses and their GPUs: Ray's own order is not that of the nodes.

        Raises:
            ConfigError: there is no room for all.
        """
        bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        group = placement_group([bundle if any(bundle.values()) else {"CPU": 0.001}] * count, strategy="PACK")
        self._groups.append(group)
        if not group.wait(PLACE_SECONDS):
            self._remove(group)
            raise ConfigError(
                f"The cluster has no room for {count} processes with {cpus:g} CPUs and {gpus} GPUs each after {PLACE_SECONDS:.0f} s: "
                "end what else runs there, or lower cluster.processes."
            )
        processes = [
            self.process(
                f"{role} {index}",
                path,
                lambda: (),
                cpus=cpus,
                gpus=gpus,
                strategy=PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index),
            )
            for index in range(count)
        ]
        try:
            places = [process.answer(process.place, PLACE_SECONDS, "begin") for process in processes]
        except BaseException:
            self.remove(processes)
            raise
        order = sorted(range(count), key=lambda index: (_numbers(places[index].address), places[index].gpus, index))
        return [processes[index] for index in order]

    def remove(self, processes: Sequence[PlacedProcess]) -> None:
        """End processes, and give back the place of a gang that they were."""
        for process in processes:
            process.end()
            if process in self._processes:  # a gang that could not be placed was removed before
                self._processes.remove(process)
        for group in [group for group in self._groups if any(process.is_in(group) for process in processes)]:
            self._remove(group)

    def _remove(self, group: Any) -> None:
        self._groups.remove(group)
        with contextlib.suppress(RayError):
            remove_placement_group(group)

    def close(self) -> None:
        """End all processes, and Ray where it was started here. Idempotent."""
        if ray.is_initialized():
            self.remove(list(self._processes))
            if self._began:
                ray.shutdown()


def _numbers(address: str) -> tuple[Any, ...]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else (address,)


class PlacedProcess:
    """A process on the cluster, and the object in it; ``call`` calls that object's methods.

    Attributes:
        name: in messages.
        place: where it is, when it has started.
        started: done when its object was made.
    """

    def __init__(
        self, name: str, path: str, arguments: Callable[[], Sequence[Any]], options: dict[str, Any], log_path: str
    ) -> None:
        self.name = name
        self._path, self._arguments, self._options, self._log_path = path, arguments, options, log_path
        self._lock = threading.Lock()
        self._is_ended = False
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        make = ray.remote(_Host).options(**self._options)
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
        """Call a method of the object, a coroutine or not. An argument that is a reference (``RayCluster.put``) is fetched there.

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
            if self._is_ended:
                raise LostProcessError(f"{self.name} has been ended; its log is {self._log_path}")
            self._kill()
            self._start()

    def end(self) -> None:
        """End the process and what it started, for good. Idempotent."""
        with self._lock:
            self._is_ended = True
            self._kill()

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
        got = getattr(self._actor, word).remote(*arguments).future()
        got.add_done_callback(lambda future: _settle(answer, self.name, self._log_path, future))
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


class _Host:
    """In the placed process: holds the object and answers calls, with its failures as values: no exception is pickled."""

    def __init__(self, log_path: str, environment: dict[str, str], paths: list[str]) -> None:
        os.environ.update(environment)
        sys.path += [path for path in paths if path not in sys.path]
        with contextlib.suppress(OSError):
            os.chdir(paths[0])
        from rollwright.tracking.logging import attach_file

        attach_file(log_path)
        logger.info("this is process %d", os.getpid())
        self._held: Any = None

    async def place(self) -> tuple[Any, Any]:
        gpus = tuple(sorted(int(number) for number in ray.get_gpu_ids()))
        here = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        return Place(address, gpus), None

    async def start(self, path: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        async def make() -> None:
            (place, _) = await self.place()
            self._held = await asyncio.to_thread(lambda: pkgutil.resolve_name(path)(place, *arguments))

        return await _answered(make())

    async def call(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        async def make() -> Any:
            function = getattr(self._held, method)
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await asyncio.to_thread(function, *arguments)

        return await _answered(make())


async def _answered(work: Any) -> tuple[Any, Any]:
    try:
        return await work, None
    except Exception as error:  # whatever it is: the caller is told
        return None, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
