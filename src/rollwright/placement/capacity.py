"""The resources that a run needs on a cluster, and whether they fit, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollwright.config.experiment import PPOConfig, SFTConfig, section_of
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import servers_of


@dataclass(frozen=True)
class Demand:
    """Number of processes of one role, and the resources that each needs."""

    role: str  # rank, server, worker or auxiliary
    count: int
    cpus: float
    gpus: int


@dataclass(frozen=True)
class Node:
    """A machine of a cluster and the resources that processes may use there."""

    address: str
    cpus: float
    gpus: int


def demands_of(config: PPOConfig | SFTConfig, cluster_has_gpus: bool) -> list[Demand]:
    """Return the demands of a stage in the order in which to place them.

    Args:
        config: the stage's config.
        cluster_has_gpus: whether any node has GPUs.
    """
    cluster, rollout = config.cluster, config.rollout
    of_rank, of_server = cluster.gpus_per_rank, cluster.gpus_per_server
    if of_rank is None:
        of_rank = int(cluster_has_gpus and section_of(config).device != "cpu")
    ranks = Demand("rank", cluster.processes, cluster.cpus_per_rank, of_rank)
    if not isinstance(config, PPOConfig):  # such a stage does not sample, or samples in the controller
        return [ranks]
    if of_server is None:
        backend = servers_of(rollout.backend)
        of_server = rollout.tensor_parallel if backend is not None and backend.needs_gpu else 0
    served = [model for model in config.auxiliary_models if model.model_path]
    of_model = int(cluster_has_gpus and any(model.device != "cpu" for model in served))
    threads = max((model.threads or 1 for model in served), default=1)
    return [
        ranks,
        Demand("server", rollout.servers, cluster.cpus_per_server, of_server),
        *([Demand("auxiliary", len(served), float(threads), of_model)] if served else []),
        Demand("worker", cluster.workers, cluster.cpus_per_worker, cluster.gpus_per_worker),
    ]


def place(demands: Sequence[Demand], nodes: Sequence[Node], least_nodes: int = 1) -> list[tuple[str, str]]:
    """Choose a node for each process: ranks are packed together, servers and workers are spread out.

    Args:
        demands: the run's demands.
        nodes: the cluster's nodes.
        least_nodes: minimum number of nodes.

    Returns:
        Pairs ``(process, address)``, such as ``("rank 0", "10.0.0.1")``. The cluster may later choose another node.

    Raises:
        ConfigError: there are too few nodes, or a process fits nowhere.
    """
    if len(nodes) < least_nodes:
        raise ConfigError(
            f"cluster.nodes is {least_nodes}, and the cluster has {len(nodes)}: start Ray on the others, or lower cluster.nodes."
        )
    left = {number: [node.cpus, float(node.gpus)] for number, node in enumerate(nodes)}
    chosen_nodes: list[tuple[str, str]] = []
    for demand in demands:
        for index in range(demand.count):
            fitting = [number for number, (cpus, gpus) in left.items() if cpus >= demand.cpus and gpus >= demand.gpus]
            if not fitting:
                free = "; ".join(
                    f"{node.address}: {left[number][0]:g} of {node.cpus:g} CPUs and {left[number][1]:g} of {node.gpus} GPUs"
                    for number, node in enumerate(nodes)
                )
                raise ConfigError(
                    f"{demand.role} {index} needs {demand.cpus:g} CPUs and {demand.gpus} GPUs, and no node has them left ({free}). "
                    f"The run asks for {_sum_of(demands)}. Give the cluster more, or lower {_KEYS[demand.role]}."
                )
            most = -1 if demand.role != "rank" else 1
            chosen = min(fitting, key=lambda number: (most * left[number][bool(demand.gpus)], number))
            left[chosen][0] -= demand.cpus
            left[chosen][1] -= demand.gpus
            chosen_nodes.append((f"{demand.role} {index}", nodes[chosen].address))
    return chosen_nodes


def _sum_of(demands: Sequence[Demand]) -> str:
    cpus = sum(demand.count * demand.cpus for demand in demands)
    gpus = sum(demand.count * demand.gpus for demand in demands)
    processes = ", ".join(f"{demand.count} {demand.role}{'s' * (demand.count > 1)}" for demand in demands)
    return f"{cpus:g} CPUs and {gpus} GPUs in all ({processes})"


_KEYS = {
    "rank": "cluster.processes or cluster.cpus_per_rank (0.5: two share a CPU)",
    "server": "rollout.servers or cluster.cpus_per_server (0.5: two share a CPU)",
    "worker": "cluster.workers or cluster.cpus_per_worker (0.5: two share a CPU)",
    "auxiliary": "the threads of auxiliary_models, or serve them elsewhere (base_url)",
}
