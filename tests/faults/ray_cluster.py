"""A run on a Ray cluster, under faults: its controller, workers, servers and ranks are killed, and nodes lost with all that is there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
from ray_machine import add_node, start_ray
from warm import Warm

from .both import Both
from .parts import LIMIT, Part
from .plan import Fault

#: The first address of the nodes; tests/cluster has those below.
FIRST_ADDRESS = 20
#: That a controller takes until it makes steps.
START_SECONDS = 9.0
#: So that Ray waits for its own processes where the machine is busy. A lost node is one after 8 checks, 3 s apart; only then does a
#: process start elsewhere that was just being placed there.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_worker_register_timeout_seconds": "400",
    "RAY_health_check_failure_threshold": "8",
}


class OnRay(Both):
    """Two ranks, two workers and two servers on a head and two nodes. One part: the controller.

    Args:
        cluster: of Ray.
    """

    kinds = ("kill", "early", "checkpoint", "stop")

    def __init__(self, *arguments: Any, cluster: Any) -> None:
        super().__init__(*arguments)
        self.cluster = cluster
        self._killed: list[tuple[str, str, float]] = []  # kind, what in words, and when, that no step came after yet
        self.settings = (
            "cluster.kind=ray",
            "cluster.processes=2",
            "cluster.workers=2",
            "cluster.nodes=3",
            f"cluster.address={cluster.address}",
            "rollout.backend=builtin_process",
            "rollout.servers=2",
        )

    @classmethod
    def prepare(cls, opened: contextlib.ExitStack, warm: Warm, root: Path, model: Path) -> dict[str, Any]:
        """Start Ray."""
        for name, value in PATIENT.items():
            os.environ.setdefault(name, value)
        cluster = start_ray(FIRST_ADDRESS)
        opened.callback(cluster.shutdown)
        return {"cluster": cluster}

    def placed(self) -> dict[str, psutil.Process]:
        """The processes of the run that Ray started and that live, by name."""
        found = {}
        for path in sorted((self.trial / "logs").glob("*-[0-9].log")):
            for number in re.findall(r"is process (\d+)", path.read_text(errors="replace")):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(int(number))
                    if "".join(process.cmdline()).startswith("ray::"):  # it lives, and no other has got its number
                        found[path.stem] = process
                        self.parts[0].family.add(process)
        return found

    def _make(self, fault: Fault) -> None:
        placed = self.placed()
        names = ["controller", "node", *placed]
        name = names[fault.part % len(names)]
        if fault.kind == "stop":
            super()._make(fault)
            return
        began = time.time()
        if fault.kind != "kill" or name == "controller":
            self._killed.append(("controller", f"the controller ({fault.kind})", began))
            super()._make(fault)
            if fault.kind != "early" or fault.part % 2:
                return
            time.sleep(START_SECONDS * fault.size)  # a node is lost while it starts again
            name, began, placed = "node", time.time(), self.placed()
        if name == "node":
            kind, words = "node", self._lose_node(placed)
        else:
            kind, words = name.rpartition("-")[0], name
            try:
                placed[name].send_signal(signal.SIGKILL)
            except psutil.Error:
                return
        self.counts["kill"] += 1
        self.counts[f"kill of a {kind}"] += 1
        self._killed.append((kind, words, began))

    def tend(self) -> None:
        """Note which kills a step came after."""
        super().tend()
        if not self._killed:
            return
        made = max((path.stat().st_mtime for path in self.trial.glob("rollouts/step-*.txt")), default=0.0)
        for kind, words, killed in [each for each in self._killed if each[2] < made]:
            self._killed.remove((kind, words, killed))
            self.recovered.append((kind, made - killed))
            self.said(f"  killed {words}: the next step {made - killed:.1f} s later")

    def _lose_node(self, placed: dict[str, psutil.Process]) -> str:
        """Kill a node with all that runs there; another one takes its address. That of the controller stays: Ray ends it at once.

        Returns:
            What it was, in words.
        """
        node = self.generator.choice(sorted(self.cluster.worker_nodes, key=lambda node: node.node_ip_address))
        (raylet,) = node.all_processes["raylet"]
        there = []
        for name, process in placed.items():
            with contextlib.suppress(psutil.Error):
                there += [name] if process.ppid() == raylet.process.pid else []
        self.cluster.remove_node(node, allow_graceful=False)
        add_node(self.cluster, node.node_ip_address, 3)
        return f"the node at {node.node_ip_address} with {', '.join(there) or 'nothing'}"

    def restart(self, part: Part) -> None:
        """Start the controller when what Ray ended with it has ended."""
        deadline = time.monotonic() + LIMIT
        while (left := self.placed()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"Ray has not ended {left} of a controller that was killed"
        super().restart(part)
