"""Two ranks that train together, under faults: where one is killed, the other is ended, and both are started again, as Slurm does."""

from __future__ import annotations

import socket

from .both import BothAsync
from .parts import Part


class BothRanks(BothAsync):
    """Each rank is a part. The first one owns the run, samples and writes the journal."""

    settings = (*BothAsync.settings, "cluster.processes=2")

    def open(self) -> None:
        """Two parts of one command, which find each other by their environment."""
        super().open()
        self.parts = [Part(self.warm, f"rank-{rank}", ["run", "config.yaml", *self.settings], self.root) for rank in (0, 1)]
        self._meet()

    def restart(self, part: Part) -> None:
        """Both begin again, and meet elsewhere."""
        for each in self.parts:
            if each.runs:
                each.kill()
        self._excused.clear()
        self._meet()
        for each in self.parts:
            each.start()

    def bound_to(self, part: Part) -> set[Part]:
        """Both."""
        return set(self.parts)

    def _meet(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank, part in enumerate(self.parts):
            part.environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            part.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
