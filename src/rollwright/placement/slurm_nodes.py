"""The nodes of a Slurm job as one Ray: its head is started here, on the job's first node, and `srun` starts a node of Ray on each other.

Each has the CPUs that the job was given on its node, and listens on the address by which Slurm reaches it.
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

#: Longest wait for the nodes of a job: interpreters and Ray, from a file system that all of them read at once.
START_SECONDS = 300.0
_END_SECONDS = 20.0
#: How often Ray is started on a node before that is given up: it waits less than 30 s for its programs, which a busy machine may take.
START_TRIES = 3


def nodes() -> int:
    """How many nodes the job has that this process is in; 1 where there is no job, or this process is not on a node of it."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if "SLURMD_NODENAME" in os.environ else 1


def resources() -> dict[str, Any]:
    """What the job was given on this node, as ``ray.init`` takes it; Ray itself would take all cores of the machine."""
    own: dict[str, Any] = {}
    if "SLURMD_NODENAME" in os.environ:
        own["num_cpus"] = int(os.environ["SLURM_CPUS_ON_NODE"])
        if nodes() > 1:
            own["_node_ip_address"] = _address()
    return own


class OtherNodes:
    """A node of Ray on every node of the job but this one.

    Args:
        head: ``host:port`` of Ray's head, which they join.
        logs: directory of what they say.
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
        # A step is given one CPU unless told, and all that the job has besides only where it shares.
        shares = ["--overlap", f"--cpus-per-task={os.environ['SLURM_CPUS_ON_NODE']}", "--kill-on-bad-exit=0"]
        said = [f"--output={self._logs.absolute()}/ray-%N.log", "--open-mode=append"]
        program = [sys.executable, "-P", "-m", "rollwright.placement.slurm_nodes", head]
        with (self._logs / "ray-srun.log").open("ab") as log:
            self._step = subprocess.Popen(
                ["srun", *places, *shares, *said, *program], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        logger.info("Ray is started on %s, too", ", ".join(others))

    def wait(self, there: Callable[[], int]) -> None:
        """Return when all nodes of the job have joined; ``there`` counts those of Ray.

        Raises:
            ClusterError: they have not, in time or for good.
        """
        said, deadline = f"what the others say is in {self._logs}/ray-*.log", time.monotonic() + START_SECONDS
        while (joined := there()) < nodes():
            if (status := self._step.poll()) is not None:
                raise ClusterError(f"Ray has ended on the other nodes of the job (srun: status {status}); {said}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{joined} of the job's {nodes()} nodes have joined Ray within {START_SECONDS:g} s; {said}")
            time.sleep(0.5)

    def close(self) -> None:
        """End them. Idempotent."""
        if self._step.poll() is None:
            self._step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(_END_SECONDS)
            self._step.kill()


def _address() -> str | None:
    """The address by which Slurm reaches this node, where it is told as one: a name may stand for the loopback interface here. None:
    the one that Ray finds."""
    asked = ["scontrol", "show", "node", os.environ["SLURMD_NODENAME"], "--oneliner"]
    words = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    told = next((word.removeprefix("NodeAddr=") for word in words if word.startswith("NodeAddr=")), "")
    try:
        return str(ipaddress.ip_address(told))
    except ValueError:
        return None


def main() -> None:
    """On another node: become a node of the Ray whose head is named."""
    own = resources()
    options = [f"--address={sys.argv[1]}", f"--num-cpus={own['num_cpus']}", "--block"]
    if own["_node_ip_address"] is not None:
        options.append(f"--node-ip-address={own['_node_ip_address']}")
    for _ in range(START_TRIES):  # until the end, or where the machine was too slow for Ray's own limits
        if (status := subprocess.call([sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options])) == 0:
            return
    raise SystemExit(status)


if __name__ == "__main__":
    main()
