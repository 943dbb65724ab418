"""A Ray cluster: joined or started, asked what it has, and processes on it, which it places.

What runs in a process is named by an import path; this module knows nothing of it. Ray is the control plane alone: tokens go over
HTTP, gradients and weights over ``torch.distributed``.
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
from rollwright.tracking.logging import getLogger

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rollwright.placement.ray_process import SPARE_SECONDS, PlacedProcess
except ModuleNotFoundError as error:
    raise ConfigError(
        f"cluster.kind ray needs the package {error.name}, which is not installed: pip install 'rollwright[ray]'."
    ) from error

logger = getLogger("ray")

#: Where a Ray of one machine listens. In place of 127.0.0.1 Ray takes the machine's address, which other machines reach.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
#: Longest wait for a place on the cluster, for a process or a gang of them.
PLACE_SECONDS = 120.0
#: Longest wait for what another run holds on the cluster, which may be one that was killed and is started again.
ROOM_SECONDS = 60.0
#: Seconds without an answer of Ray's head after which the cluster is lost. Ray itself ends the process after 60, wherever it is.
HEAD_SECONDS = 20.0
#: Seconds in which a Ray that is joined has to take a connection. Ray itself tries for 60.
ANSWER_SECONDS = 10.0
#: Seconds that the run then has to end by itself: what waits for Ray cannot be woken.
END_SECONDS = 15.0


class RayCluster:
    """A connection to a Ray cluster, and the processes that were placed by it, which end with it.

    Args:
        config: where Ray is; where it names none and ``RAY_ADDRESS`` is not set, Ray is started on this machine, on its loopback
            interface, and ends with this object; in a job of Slurm on all nodes of that.
        logs: directory of the processes' logs.
    """

    def __init__(self, config: ClusterConfig, logs: str | os.PathLike[str]) -> None:
        self._logs = os.fspath(logs)
        self._processes: list[PlacedProcess] = []
        self._spare: list[PlacedProcess] = []
        self._groups: list[Any] = []
        self._closed = threading.Event()
        self._lost: ClusterError | None = None  # with its head
        self._others: slurm_nodes.OtherNodes | None = None
        self._began, address = not ray.is_initialized(), ""
        if self._began:
            address = config.address or os.environ.get("RAY_ADDRESS") or "local"
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here tells its makers nothing
            here: dict[str, Any] = {}
            if address == "local":
                here = {"include_dashboard": False, "_node_ip_address": _LOOPBACK, **slurm_nodes.resources()}
            _refuse_silence(address)
            for tries_left in reversed(range(slurm_nodes.START_TRIES)):
                try:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
                    break
                except (ConnectionError, RuntimeError, ValueError) as error:
                    raise ConfigError(f"cluster.address: there is no Ray at {address!r}: {error}") from error
                except Exception as error:  # a plain one, of a machine that was too slow for Ray's own limits
                    if not tries_left or address != "local":
                        raise ClusterError(f"Ray could not be started on this machine: {error}") from error
                    logger.warning("Ray could not be started on this machine, and is started once more: %s", error)
        ray._private.worker.print_worker_logs = _to_the_run_s_log  # type: ignore[attr-defined]
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
        """End the run where Ray's head has ended: what the processes were asked fails with the cause."""
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
            "same command: it goes on from the newest recover checkpoint."
        )
        logger.error("%s", self._lost)
        for process in list(self._processes):
            process.lose(self._lost)
        if not self._closed.wait(END_SECONDS):
            print(f"error: {self._lost}", file=sys.stderr)
            self._leave()

    def _leave(self) -> None:
        """The last that this process does: with a lost head, Ray would wait for it, and then abort."""
        if self._lost is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that live, and what is free on each."""
        free = ray._private.state.available_resources_per_node()  # type: ignore[attr-defined]
        return self._nodes(lambda node: free.get(node["NodeID"], {}))

    def _nodes(self, resources: Callable[[dict[str, Any]], dict[str, float]]) -> list[Node]:
        living = [node for node in ray.nodes() if node["Alive"]]
        found = [(node["NodeManagerAddress"], resources(node)) for node in living]
        return [Node(address, has.get("CPU", 0.0), int(has.get("GPU", 0))) for address, has in found]

    def fit(self, demands: Sequence[Demand], least_nodes: int, *, is_waited_for: bool = False) -> list[tuple[str, str]]:
        """The node that each process fits on (``place``); what a run that has just ended still holds there is waited for.

        Args:
            demands: of the run.
            least_nodes: that have to be there.
            is_waited_for: nodes are waited for, too: the run had them before, and one may just be lost.

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
            except ConfigError:
                if not could_wait or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

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
    ) -> PlacedProcess:
        """Place one process; it starts in the background.

        Args:
            name: in messages, and of its log.
            path: import path of what makes the object that it holds, called with its ``Place`` and the arguments.
            arguments: gives these; asked again when the process is restarted.
            cpus, gpus: that it is placed with.
            concurrency: calls that it answers at once.
            strategy: Ray's scheduling strategy.
            is_spare: it gives up its place, for good, where another process finds none.
        """
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": concurrency,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        log_path = os.path.join(self._logs, f"{name.replace(' ', '-')}.log")
        process = PlacedProcess(name, path, arguments, options, log_path, None if is_spare else self._make_room)
        if is_spare:
            self._spare.append(process)
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
        """End what is spare."""
        spare, self._spare = self._spare, []
        if spare:
            logger.warning("%s end: their places are needed", ", ".join(process.name for process in spare))
            self.remove(spare)

    def remove(self, processes: Sequence[PlacedProcess]) -> None:
        """End processes, and give back the place of a gang that they were."""
        if self._lost is not None:
            raise self._lost
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
        self._closed.set()
        if ray.is_initialized() and self._lost is None:
            self.remove(list(self._processes))
        if self._others is not None:
            self._others.close()
        if ray.is_initialized() and self._lost is None and self._began:
            ray.shutdown()


def _to_the_run_s_log(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
    """What Ray would print, in a paragraph for each process that ends; the run says what was lost in its own words."""
    for line in data.get("lines", ()):
        logger.debug("Ray says: %s", line)


def _refuse_silence(address: str) -> None:
    """Wait until ``host:port`` takes a connection; other kinds of addresses are Ray's own matter.

    Raises:
        ConfigError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    host = host.strip("[]")
    hosts = [host, ray.util.get_node_ip_address()] if host in ("localhost", "127.0.0.1", "::1") else [host]  # as Ray reads it
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
