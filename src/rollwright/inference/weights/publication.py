"""Publication of weights to the servers of a remote engine: through files, shared memory, or a broadcast (``broadcast.py``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rollwright.errors import WeightUpdateError
from rollwright.inference.backends.server_backend import BroadcastBackend, ServerBackend
from rollwright.inference.network import is_loopback
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.adapter import module_weight
from rollwright.inference.weights.broadcast import WeightBroadcast
from rollwright.inference.weights.files import keep_newest, remove_later, write_weights
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import MappedWeights, WeightUpdateMeta, shared_directory
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteWeights")

#: How to choose a transport, for messages.
_MADE_BY = {
    "shared": "WeightUpdateMeta.shared()",
    "disk": "WeightUpdateMeta.from_disk(path)",
    "xccl": "WeightUpdateMeta.from_fsdp_xccl(allocation)",
}


class WeightPublication:
    """Transfers new weights to every server of an engine."""

    def __init__(self, backend: ServerBackend, servers: ServerSet, weights: ServerWeights) -> None:
        """Args:
        backend: the servers' protocol.
        servers: the servers.
        weights: applies updates and knows the current version.
        """
        self.backend = backend
        self.servers = servers
        self.weights = weights
        self.config = servers.config
        self.broadcast = WeightBroadcast(backend, servers, weights) if isinstance(backend, BroadcastBackend) else None
        self._mapped: MappedWeights | None = None

    def close(self) -> None:
        """Leave the distributed group and remove what was shared with the servers."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        if self.broadcast is not None:
            self.broadcast.leave()

    def update(self, meta: WeightUpdateMeta | None, version: int, weights: WeightStream, config: Any = None) -> None:
        """Publish weights to all servers; see ``WeightReceiver.update_weights``. ``meta`` defaults to ``default_meta``."""
        started = time.perf_counter()
        with self.weights.lock:  # a returning server must not read files that are being written
            meta = meta or self.default_meta()
            self._check_transport(meta, weights)
            self._check_names(weights)
            if weights.adapter is not None:
                confirmed = self._publish_adapter(meta, weights, version)
            elif meta.type == "disk":
                root = Path(str(meta.path)).resolve()
                remove_later(root, "v", version)  # of a run that went back to a checkpoint; else kept instead of these
                digested = any(map(self.backend.checks_digest, self.servers.router.servers))
                digest = write_weights(root / f"v{version}", weights, version, config, digested=digested)
                confirmed = self.update_from_disk(str(root / f"v{version}"), version, digest)
                keep_newest(root, "v", meta.keep)
            elif meta.type == "shared":
                mapped = self.mapped_weights(meta.path)
                mapped.write(weights, version, config)
                confirmed = self.update_from_disk(str(mapped.directory), version)
            else:
                assert self.broadcast is not None
                confirmed = self.broadcast.send(weights, version, meta)
        size, seconds, names = weights.nbytes / 1e6, time.perf_counter() - started, ", ".join(confirmed)
        logger.info("published version %d (%.1f MB) to %s by %s in %.2f s", version, size, names, meta.type, seconds)

    def _check_transport(self, meta: WeightUpdateMeta, weights: WeightStream) -> None:
        """Check that the servers take these weights in this way.

        Raises:
            WeightUpdateError: they do not, or the weights are a whole model's although the servers hold adapters of this engine.
        """
        kind, transports = self.backend.kind, self.backend.transports
        if weights.adapter is not None:
            transports = tuple(name for name in transports if name != "xccl")
            if meta.type == "xccl":
                raise WeightUpdateError(
                    f"The {kind} servers read adapters from files, not from a distributed group: use "
                    f"{' or '.join(_MADE_BY[name] for name in transports)} (rollout.weight_update: shared or disk)."
                )
        elif self.weights.adapters.current is not None:
            raise WeightUpdateError(
                f"The {kind} servers hold adapters of this engine, and a whole model would change the base below them: publish "
                "adapters, or use another engine."
            )
        if meta.type not in transports:
            memory = f"The engine of the {kind} servers is not in this process"
            wrong = memory if meta.type == "memory" else f"The {kind} servers take no weights by {meta.type}"
            raise WeightUpdateError(f"{wrong}: use {' or '.join(_MADE_BY[name] for name in transports)}.")

    def _publish_adapter(self, meta: WeightUpdateMeta, weights: WeightStream, version: int) -> list[str]:
        """Load an adapter on every server, under a name of its own; see ``ServerAdapters``.

        Returns:
            Addresses of the servers that hold it.
        """
        adapters = self.weights.adapters
        adapters.begin(self.weights.version)
        root = Path(str(meta.path)).resolve() if meta.type == "disk" else self.mapped_weights(meta.path).directory
        adapter = adapters.write(root, weights, version)

        def update(server: Server) -> None:
            adapters.load(server, adapter)

        confirmed = self.weights.retry_lost(
            version, lambda: self.weights.apply_update(version, update, restore=adapters.restore)
        )
        adapters.published(adapter)
        return confirmed

    def _check_names(self, weights: WeightStream) -> None:
        """Check that servers know the names of the weights, if their checkpoints are on this machine.

        Raises:
            WeightUpdateError: a server's checkpoint lacks a weight under its name both with and without the model's prefix.
        """
        sent = {name if weights.adapter is None else module_weight(name) for name, _ in weights.described}
        for server in self.servers.router.servers:
            facts = self.backend.facts.get(server.address)
            if facts is None or (known := facts.checkpoint_names) is None:
                continue
            unknown = sorted(name for name in sent if name not in known and name.partition(".")[2] not in known)
            if unknown:
                raise WeightUpdateError(
                    f"The {self.backend.kind} server at {server.address} would ignore {len(unknown)} of {len(sent)} weights, such as "
                    f"{unknown[0]}: none of the {len(known)} weights in the checkpoint that it was started with has that name. Start "
                    "it with a checkpoint of the trained model (rollwright writes one with the names that it publishes)."
                )

    def update_from_disk(self, directory: str, version: int, digest: str | None = None) -> list[str]:
        """Have every server load safetensors from a directory; see ``load_from_disk`` and ``apply_update``.

        If no server takes the weights because servers were lost meanwhile, try again with restarted servers.
        """

        def update(server: Server) -> None:
            self.backend.load_from_disk(server, directory, version, digest)
            self.weights.confirm(server, version)

        return self.weights.retry_lost(version, lambda: self.weights.apply_update(version, update, restore=update))

    def default_meta(self) -> WeightUpdateMeta:
        """Return the transfer that ``rollout.weight_update`` selects. ``auto`` selects shared memory and needs every server on this host.

        Raises:
            WeightUpdateError: a server is on another host, so the transport has to be named; or ``disk`` has no path.
        """
        transport, path = self.config.weight_update, self.config.weight_update_path
        if transport == "xccl":
            return WeightUpdateMeta("xccl")  # each server reports its number of ranks
        if transport == "disk":
            if path is None:
                raise WeightUpdateError("rollout.weight_update is disk: set rollout.weight_update_path to a shared directory.")
            return WeightUpdateMeta.from_disk(path)
        if "shared" not in self.backend.transports:
            raise WeightUpdateError(
                f"The {self.backend.kind} servers take weights by {' or '.join(self.backend.transports)}: set rollout.weight_update to "
                "that, or give a WeightUpdateMeta to connect_engine or update_weights."
            )
        remote = [server.address for server in self.servers.router.servers if not is_loopback(server.url)]
        if remote:
            raise WeightUpdateError(
                f"Servers on other hosts ({', '.join(remote)}) share no memory with the trainer: set rollout.weight_update to disk "
                "or xccl, or give a WeightUpdateMeta to connect_engine or update_weights."
            )
        return WeightUpdateMeta.shared()

    def mapped_weights(self, path: str | None) -> MappedWeights:
        """Return the files that weights are shared through, for the caller to write; created on the first call."""
        self.weights.restore = None  # it may read these files, whose next content no server has confirmed
        if self._mapped is None:
            roots = self.backend.weights_roots([str(launched.weights_root) for launched in self.servers.launched])
            self._mapped = MappedWeights(Path(path) if path else shared_directory(roots))
        return self._mapped
