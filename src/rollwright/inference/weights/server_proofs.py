"""Which servers were shown to compute with the weights that they are given, by the trainer's canary (``training.canary``).

Invariants:

* after the first proof, no server comes into service before it is proven, too. A server that has to be given its weights again, because it
  was started again or an update failed, is not proven any more;
* during a proof, publications and probes reach only servers that are not proven. The others sample on, with the true weights.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollwright.errors import WeightUpdateError
from rollwright.inference.router import Server


class ServerProofs:
    """The proven servers of one engine.

    Attributes:
        are_required: True after the first proof has begun.
        is_running: True during a proof.
        updated: during a proof, the servers that took its last publication and have answered every probe since.
    """

    def __init__(self) -> None:
        self.are_required = False
        self.is_running = False
        self.updated: list[Server] = []
        self._proven: set[Server] = set()

    def begin(self, servers: Iterable[Server]) -> None:
        """Begin a proof of those servers that are not proven."""
        self.are_required = self.is_running = True
        self.updated = []
        for server in servers:
            server.awaits_proof = False

    def end(self, *, succeeded: bool) -> list[Server]:
        """End a proof. Returns the servers that it has proven."""
        self.is_running = False
        proven = self.updated if succeeded else []
        self._proven.update(proven)
        return proven

    def concern(self, servers: Iterable[Server]) -> list[Server]:
        """Return those of ``servers`` that a publication reaches now: during a proof, those that are not proven."""
        return [server for server in servers if not (self.is_running and server in self._proven)]

    def admit(self, server: Server) -> bool:
        """Return whether a server may come into service. If not, it waits for the trainer."""
        server.awaits_proof = self.are_required and server not in self._proven
        return not server.awaits_proof

    def require(self, server: Server) -> None:
        """Reject a server that is not proven.

        Raises:
            WeightUpdateError: see above.
        """
        if not self.admit(server):
            raise WeightUpdateError("it holds the current weights, and waits for the trainer's canary (rollout.canary)")

    def doubt(self, server: Server) -> None:
        """Record that a server has to be given its weights again."""
        self._proven.discard(server)
