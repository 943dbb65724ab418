"""GPU memory that servers give back while the model trains on the same GPUs (``rollout.colocate``)."""

from __future__ import annotations

from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet


class ServerMemory:
    """What each server has given back: its cache, and the weights unless adapters are published over them.

    A server that is started again has given back nothing, and has another address.
    """

    def __init__(self, backend: ServerBackend, servers: ServerSet, *, keeps_weights: bool) -> None:
        """Args:
        backend: the servers' protocol.
        servers: the servers.
        keeps_weights: whether the weights are still needed after the release, because no publication replaces them.
        """
        self.backend = backend
        self.servers = servers
        self.keeps_weights = keeps_weights
        self._lacking: dict[str, list[str]] = {}  # parts that a server has given back, by address

    def release(self) -> None:
        """Have every server in service give back its memory; they must be paused. A server that does not is taken out."""
        self.servers.each_in_service(self._release, "give back its memory")

    def _release(self, server: Server) -> None:
        self.backend.release_memory(server, keep_weights=self.keeps_weights)
        self._lacking[server.address] = ["weights", "kv_cache"]

    def restore_for_update(self, server: Server) -> None:
        """Give a server again what it needs to take a publication: the memory of its weights, or everything if it loads an adapter."""
        self._restore(server, ["weights", "kv_cache"] if self.keeps_weights else ["weights"])

    def restore(self, server: Server) -> None:
        """Give a server again what it still lacks; a no-op if it lacks nothing."""
        self._restore(server, ["weights", "kv_cache"])

    def _restore(self, server: Server, parts: list[str]) -> None:
        lacking = self._lacking.get(server.address, [])
        if given := [part for part in lacking if part in parts]:
            self.backend.restore_memory(server, given, kept_weights=self.keeps_weights)
            self._lacking[server.address] = [part for part in lacking if part not in given]
