"""A connection to a Ray cluster: joins or starts Ray, reports its nodes, and places processes.

The code of a process is given as an import path; this module does not depend on it. Ray carries calls and their arguments; requests to
inference servers use HTTP, and the ranks' collectives use ``torch.distributed``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollwright.config.sections import ClusterConfig
from rollwright.errors import ClusterError, ConfigError
from rollwright.placement import slurm_nodes
from rollwright.placement.capacity import Demand, Node, place
from rollwright.processes.pool import processor_count
from rollwright.tracking.logging import getLogger

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rollwright.placement.ray_process import SPARE_SECONDS, RayProcess
except ModuleNotFoundError as error:
    raise ConfigError(
        f"cluster.kind ray needs the package {error.name}, which is not installed: pip install 'rollwright[ray]'."
    ) from error

logger = getLogger("ray")

#: Address that Ray listens on if it only serves this machine. Ray would replace 127.0.0.1 with an address that other machines can reach.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
#: Longest wait for room on the cluster, for a process or a gang.
PLACE_SECONDS = 120.0
#: Longest wait for resources that another run holds, because it may be an attempt of this run that has just ended.
ROOM_SECONDS = 60.0
#: The cluster counts as lost when Ray's head has not answered for this long. After 60 s Ray itself would end this process.
HEAD_SECONDS = 20.0
#: Longest wait for a connection to an existing Ray. Ray itself tries for 60 s.
ANSWER_SECONDS = 10.0
#: Once the cluster is lost, time for the run to end by itself before its process exits: threads that wait for Ray cannot be woken.
END_SECONDS = 15.0


class RayCluster:
    """A connection to a Ray cluster and the processes that it places, which end with it.

    Args:
        config: names the cluster. If neither it nor ``RAY_ADDRESS`` does, Ray is started on the loopback interface of this machine, or on
            all nodes of the Slurm job, and ends with this object.
        logs: directory for the processes' logs.
    """

    def __init__(self, config: ClusterConfig, logs: str | os.PathLike[str]) -> None:
        self._logs = os.fspath(logs)
        self._processes: list[RayProcess] = []
        self._spare: list[RayProcess] = []
        self._groups: list[Any] = []
        self._closed = threading.Event()
        self._lost: ClusterError | None = None  # set when its head is lost
        self._others: slurm_nodes.OtherNodes | None = None
        self._began, address = not ray.is_initialized(), ""
        if self._began:
            address = config.address or os.environ.get("RAY_ADDRESS") or "local"
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here reports no usage
            settings: dict[str, Any] = {}
            if address == "local":
                settings = {"include_dashboard": False, "_node_ip_address": _LOOPBACK, **slurm_nodes.resources()}
            _refuse_silence(address)
            for tries_left in reversed(range(slurm_nodes.START_TRIES)):
                try:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
                    break
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise ConfigError(f"cluster.address: there is no Ray at {address!r}: {error}") from error
                except Exception as error:  # Ray raises a plain Exception if a slow machine exceeds its limits
                    if not tries_left or address != "local":
                        raise ClusterError(f"Ray could not be started on this machine: {error}") from error
                    logger.warning("Ray could not be started on this machine, and is started once more: %s", error)
        ray_private("worker").print_worker_logs = _to_the_run_s_log
        atexit.register(self._leave)
        head = ray.get_runtime_context().gcs_address
        threading.Thread(target=self._watch_head, args=(head,), name="head-watch", daemon=True).start()
        if address == "local" and slurm_nodes.nodes() > 1:
            try:
                self._others = slurm_nodes.OtherNodes(head, self._logs)
                self._others.wait(lambda: len(self.nodes))
            except BaseException:
                self.close()
                raise

    def _watch_head(self, address: str) -> None:
        """Watch Ray's head. If it is lost, fail all calls with that cause, and end this process unless the run soon ends by itself."""
        host, _, port = address.rpartition(":")
        answered = time.monotonic()
        while not self._closed.wait(2.0):
            with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), 2.0):
                answered = time.monotonic()
            if time.monotonic() - answered > HEAD_SECONDS:
                break
        else:
            return
        self._lost = ClusterError(
            f"Ray's head at {address} has not answered for {HEAD_SECONDS:g} s, and the cluster is lost with it. Start Ray again and run the "
            "same command: it goes on from the newest recovery checkpoint."
        )
        logger.error("%s", self._lost)
        for process in list(self._processes):
            process.lose(self._lost)
        if not self._closed.wait(END_SECONDS):
            print(f"error: {self._lost}", file=sys.stderr)
            self._leave()

    def _leave(self) -> None:
        """If the head is lost, end this process at once; otherwise Ray would wait for the head and then abort."""
        if self._lost is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are alive, with their free resources."""
        free = ray_private("state").available_resources_per_node()
        return self._nodes(lambda node: free.get(node["NodeID"], {}))

    def _nodes(self, resources: Callable[[dict[str, Any]], dict[str, float]]) -> list[Node]:
        living = [node for node in ray.nodes() if node["Alive"]]
        found = [(node["NodeManagerAddress"], resources(node)) for node in living]
        return [Node(address, has.get("CPU", 0.0), int(has.get("GPU", 0))) for address, has in found]

    def fit(self, demands: Sequence[Demand], least_nodes: int, *, is_waited_for: bool = False) -> list[tuple[str, str]]:
        """Choose a node for each process, as ``place`` does, but wait for resources that another run still holds.

        Args:
            demands: the run's demands.
            least_nodes: minimum number of nodes.
            is_waited_for: also wait for missing nodes. A resumed run had enough of them before, and may have just lost one. If a node is
                still missing after ``ROOM_SECONDS``, the run continues without it, provided that the others have room.

        Raises:
            ConfigError: there is no room, or there are too few nodes.
        """
        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            could_wait = is_waited_for
            try:
                place(demands, self._nodes(lambda node: node["Resources"]), least_nodes)
                could_wait = True
                return place(demands, self.nodes, least_nodes)
            except ConfigError as error:
                is_late = time.monotonic() > deadline
                if not could_wait or (is_late and least_nodes == 1):
                    raise
                if is_late:
                    logger.warning("%s After %g s the run goes on with the nodes that are there.", error, ROOM_SECONDS)
                    least_nodes = 1
            time.sleep(0.5)

    @classmethod
    def look(cls, config: ClusterConfig) -> list[Node]:
        """Return the nodes that a run would find: those of the existing Ray, or this machine if the run would start Ray."""
        if not (config.address or os.environ.get("RAY_ADDRESS")):
            import torch

            return [Node("this machine", float(processor_count()), torch.cuda.device_count())]
        cluster = cls(config, os.curdir)
        try:
            return cluster.nodes
        finally:
            cluster.close()

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
        is_spare: bool = False,
        output: str | None = None,
    ) -> RayProcess:
        """Place one process, which starts in the background.

        Args:
            name: name of the process in messages, and of its log.
            path: import path of the function or class that makes the process's object; called with the ``Place`` and the arguments.
            arguments: called at every start; returns the arguments.
            cpus, gpus: resources of the process.
            concurrency: maximum number of concurrent calls.
            strategy: Ray's scheduling strategy.
            is_spare: whether to end the process for good if another one finds no room.
            output: see ``RayProcess``.
        """
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": concurrency,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        log_path = os.path.join(self._logs, f"{name.replace(' ', '-')}.log")
        process = RayProcess(name, path, arguments, options, log_path, None if is_spare else self._make_room, output)
        if is_spare:
            self._spare.append(process)
        self._processes.append(process)
        return process

    def gang(self, role: str, path: str, count: int, *, cpus: float, gpus: int) -> list[RayProcess]:
        """Place a group of processes close together, either all of them or none; see ``process``.

        Returns:
            The processes, in the order of their nodes' addresses and their GPUs, because Ray's order is arbitrary.

        Raises:
            ConfigError: there is no room for all.
        """
        bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        group = placement_group([bundle if any(bundle.values()) else {"CPU": 0.001}] * count, strategy="PACK")
        self._groups.append(group)
        if not group.wait(SPARE_SECONDS):
            self._make_room()
        if not group.wait(PLACE_SECONDS - SPARE_SECONDS):
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

    def _make_room(self) -> None:
        """End the spare processes."""
        spare, self._spare = self._spare, []
        if spare:
            logger.warning("%s end: their resources are needed", ", ".join(process.name for process in spare))
            self.remove(spare)

    def remove(self, processes: Sequence[RayProcess]) -> None:
        """End processes, and release the placement groups of their gangs."""
        if self._lost is not None:
            raise self._lost
        for process in processes:
            process.end()
            if process in self._processes:  # ``gang`` removes processes that it could not place
                self._processes.remove(process)
        for group in [group for group in self._groups if any(process.is_in(group) for process in processes)]:
            self._remove(group)

    def _remove(self, group: Any) -> None:
        self._groups.remove(group)
        with contextlib.suppress(RayError):
            remove_placement_group(group)

    def close(self) -> None:
        """End all processes, and Ray if it was started here. Idempotent."""
        self._closed.set()
        if ray.is_initialized() and self._lost is None:
            self.remove(list(self._processes))
        if self._others is not None:
            self._others.close()
        if ray.is_initialized() and self._lost is None and self._began:
            ray.shutdown()


def ray_private(module: str) -> Any:
    """Return a private module of Ray. All access to Ray's internals goes through here; two things have no public API:

    * ``worker.print_worker_logs`` prints a paragraph for each process that ends, and ``log_to_driver=False`` does not stop it;
    * ``state.available_resources_per_node``: ``ray.available_resources`` only returns the sum over all nodes.

    Raises:
        ClusterError: this version of Ray has no such module.
    """
    names = {"worker": "print_worker_logs", "state": "available_resources_per_node"}
    found = getattr(getattr(ray, "_private", None), module, None)
    if not hasattr(found, names[module]):
        raise ClusterError(
            f"Ray {ray.__version__} has no ray._private.{module}.{names[module]}: install the version that rollwright[ray] asks for."
        )
    return found


def _to_the_run_s_log(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
    """Log what Ray would print; the run reports lost processes in its own words."""
    for line in data.get("lines", ()):
        logger.debug("Ray says: %s", line)


def _refuse_silence(address: str) -> None:
    """Wait until ``host:port`` accepts a connection. Addresses of other forms are not checked.

    Raises:
        ConfigError: nothing listens at the address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    host = host.strip("[]")
    hosts = (
        [host, ray.util.get_node_ip_address()] if host in ("localhost", "127.0.0.1", "::1") else [host]
    )  # as Ray interprets it
    deadline = time.monotonic() + ANSWER_SECONDS
    cause: Exception | None = None
    while True:
        for each in hosts:
            try:
                socket.create_connection((each, int(port)), ANSWER_SECONDS).close()
                return
            except (OSError, OverflowError) as error:
                cause = error
        if time.monotonic() > deadline or not isinstance(cause, ConnectionError):
            raise ConfigError(
                f"cluster.address: there is no Ray at {address} ({getattr(cause, 'strerror', None) or cause}): start it there (ray start "
                f"--head --port={port}), or take the address out for a Ray of this machine alone."
            ) from cause
        time.sleep(0.5)


def _numbers(address: str) -> tuple[Any, ...]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else (address,)
