"""A Ray cluster of the tests' own: its nodes are processes of this machine."""

from __future__ import annotations

from typing import Any

from quiet_ports import quiet_ports

#: Of a node. It waits a few seconds for what is to tell it its ports, so on a busy machine it is given them.
_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def add_node(cluster: Any, address: str, cpus: int, **further: Any) -> Any:
    """Start a node at an address of this machine; returns it."""
    ports = dict(zip(_PORTS, quiet_ports(len(_PORTS)), strict=True))
    return cluster.add_node(num_cpus=cpus, include_dashboard=False, node_ip_address=address, **ports, **further)


def start_ray(first: int, attempts: int = 3, **settings: int) -> Any:
    """A head and two nodes, at 127.0.0.FIRST and the two addresses behind it; ``shutdown()`` ends them. ``settings`` are of the head.

    On a machine that is busy Ray's own processes are late for each other, and a node gives up; then all begin again.
    """
    from ray.cluster_utils import Cluster

    for attempt in range(1, attempts + 1):
        made = Cluster()
        try:
            for number, cpus in enumerate((2, 3, 3)):
                # Loopback, and not 127.0.0.1, in whose place Ray puts the machine's address where it joins a cluster.
                add_node(made, f"127.0.0.{first + number}", cpus, **({} if number else {"_system_config": settings}))
            return made
        except Exception:  # of no class that says more
            made.shutdown()
            if attempt == attempts:
                raise
    raise AssertionError("attempts is below 1")
