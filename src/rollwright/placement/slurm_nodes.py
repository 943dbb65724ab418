"""Runs Ray on all nodes of a Slurm job: the head on the job's first node, which is this one, and a Ray node on each of the others.

The other Ray nodes are started with ``srun``. Each Ray node gets the job's CPUs on its machine, and listens on the address by which Slurm
reaches that machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollwright.errors import ClusterError
from rollwright.tracking.logging import getLogger

logger = getLogger("Slurm")

#: Longest wait for all nodes to join Ray. They may be slow, because all load Python and Ray from one file system at the same time.
START_SECONDS = 300.0
_END_SECONDS = 20.0
#: Attempts to start Ray on a node. Ray waits less than 30 s for its own processes, and a busy machine may need more.
START_TRIES = 3


def nodes() -> int:
    """Return the number of nodes of the Slurm job that this process runs in, or 1 if it does not run on a job's node."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if "SLURMD_NODENAME" in os.environ else 1


def resources() -> dict[str, Any]:
    """Return the job's resources on this node, as arguments of ``ray.init``. By default Ray would use all cores of the machine."""
    own: dict[str, Any] = {}
    if "SLURMD_NODENAME" in os.environ:
        own["num_cpus"] = int(os.environ["SLURM_CPUS_ON_NODE"])
        if nodes() > 1:
            own["_node_ip_address"] = _address()
    return own


class OtherNodes:
    """Ray nodes on all nodes of the job except this one.

    Args:
        head: ``host:port`` of Ray's head.
        logs: directory for the nodes' logs.
    """

    def __init__(self, head: str, logs: str | os.PathLike[str]) -> None:
        self._logs, count = Path(logs), nodes() - 1
        self._logs.mkdir(parents=True, exist_ok=True)
        named = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True).stdout.split()
        others = [name for name in named if name != os.environ["SLURMD_NODENAME"]]
        if len(others) != count:
            raise ClusterError(
                f"the job has {count + 1} nodes, and scontrol names {', '.join(named) or 'none'}: its Slurm does not answer."
            )
        places = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(others)}"]
        # By default a step gets one CPU, and the job's other resources only with --overlap.
        shares = ["--overlap", f"--cpus-per-task={os.environ['SLURM_CPUS_ON_NODE']}", "--kill-on-bad-exit=0"]
        said = [f"--output={self._logs.absolute()}/ray-%N.log", "--open-mode=append"]
        program = [sys.executable, "-P", "-m", "rollwright.placement.slurm_nodes", head]
        with (self._logs / "ray-srun.log").open("ab") as log:
            self._step = subprocess.Popen(
                ["srun", *places, *shares, *said, *program], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        logger.info("Ray is started on %s, too", ", ".join(others))

    def wait(self, joined_nodes: Callable[[], int]) -> None:
        """Wait until all nodes of the job have joined.

        Args:
            joined_nodes: returns the current number of Ray nodes.

        Raises:
            ClusterError: ``srun`` has ended, or the nodes were too slow.
        """
        said, deadline = f"what the others say is in {self._logs}/ray-*.log", time.monotonic() + START_SECONDS
        while (joined := joined_nodes()) < nodes():
            if (status := self._step.poll()) is not None:
                raise ClusterError(f"Ray has ended on the other nodes of the job (srun: status {status}); {said}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{joined} of the job's {nodes()} nodes have joined Ray within {START_SECONDS:g} s; {said}")
            time.sleep(0.5)

    def close(self) -> None:
        """End the Ray nodes. Idempotent."""
        if self._step.poll() is None:
            self._step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(_END_SECONDS)
            self._step.kill()


def _address() -> str | None:
    """Return the IP address by which Slurm reaches this node, or None if Slurm uses a host name. Ray then chooses the address, because
    the name may resolve to the loopback interface here."""
    asked = ["scontrol", "show", "node", os.environ["SLURMD_NODENAME"], "--oneliner"]
    words = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    address = next((word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr=")), "")
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return None


def main() -> None:
    """On one of the other nodes, join the Ray head that the command line names."""
    own = resources()
    options = [f"--address={sys.argv[1]}", f"--num-cpus={own['num_cpus']}", "--block"]
    if own["_node_ip_address"] is not None:
        options.append(f"--node-ip-address={own['_node_ip_address']}")
    for _ in range(START_TRIES):  # it returns when Ray ends, or early if the machine was too slow for Ray's own limits
        if (status := subprocess.call([sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options])) == 0:
            return
    raise SystemExit(status)


if __name__ == "__main__":
    main()
