"""New weights for the servers of a client, by files that they read; ``broadcast.py`` adds distributed groups.

Invariants:

* no server samples while its weights change (``pauses.py``);
* a server that did not take a publication is out of service until it is proven to hold the current version (``versions.py``).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.connections import UpdateRefusedError
from rollwright.inference.network import is_loopback
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Server
from rollwright.inference.weights.files import checkpoint_names, keep_newest, remove_later, write_weights
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.versions import RemoteVersions
from rollwright.inference.weights.ways import MappedWeights, WeightUpdateMeta, shared_directory
from rollwright.tracking.logging import getLogger

if TYPE_CHECKING:
    from rollwright.inference.backends import ServerLaunch

logger = getLogger("RemoteWeights")

#: How a way is chosen, for messages.
_MADE_BY = {
    "shared": "WeightUpdateMeta.shared()",
    "disk": "WeightUpdateMeta.from_disk(path)",
    "xccl": "WeightUpdateMeta.from_fsdp_xccl(allocation)",
}


class RemoteClient(RemoteVersions):
    """A client of HTTP servers of one kind, and so a backend (``rollwright.inference.backends``).

    Attributes:
        ways: ways by which the servers take weights (``WeightUpdateMeta.type``).
        needs_gpu: a server computes on ``rollout.tensor_parallel`` GPUs.
        finds_servers: servers that run already are used; else every run starts its own.
    """

    ways: tuple[str, ...] = ("shared", "disk")
    needs_gpu = True
    finds_servers = True

    @classmethod
    def command(cls, launch: ServerLaunch) -> list[str]:
        """The command line of one server.

        Raises:
            ConfigError: these servers cannot be started here.
        """
        raise ConfigError(
            f"rollout.backend {launch.rollout.backend!r} has no servers to start: {cls.__name__} has no command. Start servers and "
            "name them in rollout.addresses."
        )

    @abstractmethod
    def load_from_disk(self, server: Server, directory: str, version: int, digest: str | None) -> None:
        """Have one server load safetensors from a directory; on return it says that it holds ``version``.

        Args:
            server: is paused, and answers to ``read_version`` with the version that it says.
            directory: a model directory with ``*.safetensors``.
            version: of these weights.
            digest: of their content (``weights.files.content_digest``). ``rollwright serve-model`` refuses another; where a server
                does not know it, only the audit compares.

        Raises:
            EngineError: it did not load them.
        """

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._mapped: MappedWeights | None = None
        self._names_of_servers: dict[str, frozenset[str]] = {}

    def destroy(self) -> None:
        """See ``RemoteServers.destroy``; what was shared with the servers is removed."""
        super().destroy()
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def update_weights(
        self,
        meta: WeightUpdateMeta | None = None,
        *,
        version: int,
        weights: WeightStream | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Any = None,
    ) -> None:
        """Publish weights to all servers; see ``WeightReceiver.update_weights``. Without ``meta``: by ``default_meta``."""
        started, named = time.perf_counter(), WeightStream.of(weights)
        with self._update_lock:  # files that a server may just be brought back with are written, too
            meta = meta or self.default_meta()
            if meta.type not in self.ways:
                memory = f"{type(self).__name__} is not in this process"
                wrong = memory if meta.type == "memory" else f"The {self.kind} servers take no weights by {meta.type}"
                raise WeightUpdateError(f"{wrong}: use {' or '.join(_MADE_BY[way] for way in self.ways)}.")
            self._check_names(named)
            if meta.type == "disk":
                root = Path(str(meta.path)).resolve()
                remove_later(root, "v", version)  # left by a run that went back to a checkpoint; kept instead of these
                digest = write_weights(root / f"v{version}", named, version, config)
                engines = self.update_weights_from_disk(str(root / f"v{version}"), version, digest)
                keep_newest(root, "v", meta.keep)
            elif meta.type == "shared":
                mapped = self.mapped_weights(meta.path)
                mapped.write(named, version, config)
                engines = self.update_weights_from_disk(str(mapped.directory), version)
            else:
                engines = self.broadcast_weights(named, version, meta)
        size, seconds = named.nbytes / 1e6, time.perf_counter() - started
        names = ", ".join(engines)
        logger.info("published version %d (%.1f MB) to %s by %s in %.2f s", version, size, names, meta.type, seconds)

    def note_checkpoint(self, server: Server, directory: str | None) -> None:
        """Record the names in a server's initial checkpoint, because some servers report success for unknown names."""
        names = None if directory is None or not Path(directory).is_dir() else checkpoint_names(directory)
        if names is not None:
            self._names_of_servers[server.address] = names

    def _check_names(self, named: WeightStream) -> None:
        """Check that servers know the names of the weights, if their checkpoints are on this machine.

        Raises:
            WeightUpdateError: a server's checkpoint lacks a weight, with and without the model's prefix.
        """
        sent = {name for name, _ in named.described}
        for server in self.router.servers:
            known = self._names_of_servers.get(server.address)
            if known is None:
                continue
            unknown = sorted(name for name in sent if name not in known and name.partition(".")[2] not in known)
            if unknown:
                raise WeightUpdateError(
                    f"The {self.kind} server at {server.address} would ignore {len(unknown)} of {len(sent)} weights, such as "
                    f"{unknown[0]}: none of the {len(known)} weights in the checkpoint that it was started with has that name. Start "
                    "it with a checkpoint of the trained model (rollwright writes one with the names that it publishes)."
                )

    def update_weights_from_disk(self, directory: str, version: int, digest: str | None = None) -> list[str]:
        """Have every server load safetensors from a directory; see ``load_from_disk`` and ``apply_update``."""

        def update(server: Server) -> None:
            self.load_from_disk(server, directory, version, digest)
            self.confirm(server, version)

        return self.apply_update(version, update, restore=update)

    def confirm(self, server: Server, version: int) -> None:
        """See that a server says that it holds ``version`` after an update.

        Raises:
            WeightUpdateError: it says another.
        """
        held = self.read_version(server)
        if str(held) != str(version):
            raise WeightUpdateError(
                f"The {self.kind} server at {server.address} says it holds version {held!r} after an update to {version}."
            )

    def broadcast_weights(self, named: WeightStream, version: int, meta: WeightUpdateMeta) -> list[str]:
        """Send weights to every server over a distributed group; for backends with the way ``xccl``.

        Returns:
            Addresses of the servers that confirmed.
        """
        raise NotImplementedError

    def default_meta(self) -> WeightUpdateMeta:
        """The way that ``rollout.weight_update`` names; ``auto`` is shared memory, where every server is on this host.

        Raises:
            WeightUpdateError: a server is elsewhere, so the way has to be named; or disk has no path.
        """
        way, path = self.config.weight_update, self.config.weight_update_path
        if way == "xccl":
            return WeightUpdateMeta("xccl")  # each server says how many ranks it has
        if way == "disk":
            if path is None:
                raise WeightUpdateError("rollout.weight_update is disk: set rollout.weight_update_path to a shared directory.")
            return WeightUpdateMeta.from_disk(path)
        if "shared" not in self.ways:
            raise WeightUpdateError(
                f"The {self.kind} servers take weights by {' or '.join(self.ways)}: set rollout.weight_update to that, or give a "
                "WeightUpdateMeta to connect_engine or update_weights."
            )
        elsewhere = [server.address for server in self.router.servers if not is_loopback(server.url)]
        if elsewhere:
            raise WeightUpdateError(
                f"Servers on other hosts ({', '.join(elsewhere)}) share no memory with the trainer: set rollout.weight_update to disk "
                "or xccl, or give a WeightUpdateMeta to connect_engine or update_weights."
            )
        return WeightUpdateMeta.shared()

    @property
    def weight_way(self) -> str:
        """See ``default_meta``."""
        return self.default_meta().type

    @property
    def weight_holders(self) -> list[str]:
        """Addresses of the servers in service."""
        return [server.address for server in self.router.in_service()]

    def mapped_weights(self, path: str | None) -> MappedWeights:
        """The file that this client shares weights through, about to be written; made once."""
        self._restore = None  # may read that file, which from now on holds weights that no server has confirmed
        if self._mapped is None:
            directory = Path(path) if path else shared_directory(self._weights_roots())
            self._mapped = MappedWeights(directory)
        return self._mapped

    def _weights_roots(self) -> list[str]:
        """Directories that every server may read; empty: any."""
        return [str(servers.weights_root) for servers in self._owned]

    def probe(self, request: ModelRequest) -> dict[str, ModelResponse] | None:
        """What every server in service samples for one request, by the server's name in messages; None while paused."""
        if self.is_paused:
            return None

        def ask(server: Server) -> ModelResponse:
            payload = self.payload(request, self.router.new_wire_id("audit-probe"), server)
            data = self.ask(server, "POST", self.generate_path, payload, timeout=self.config.request_timeout)
            return self.read_answer(request, data, self._version)

        answers = self._each_in_service(ask, "answer the audit's probe")
        if not answers:
            logger.warning("No server is in service that could be compared with the trainer after version %d.", self._version)
        return {f"The {self.kind} server at {server.address}": answer for server, answer in answers}

    def apply_update(
        self,
        version: int,
        update: Callable[[Server], None],
        *,
        restore: Callable[[Server], None] | None,
        servers: list[Server] | None = None,
        alongside: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Give every server that answers new weights, between pause and resume, and make ``version`` the current one.

        A server that fails is taken out; one that was out and takes the weights is put back.

        Args:
            version: of the new weights.
            update: gives them to one server, and raises where the server does not confirm them.
            restore: the same for a server that comes back later; None: it stays out until the next publication.
            servers: that take part; None: all that answer.
            alongside: runs in this thread while the servers update (the sending half of a broadcast).

        Returns:
            Addresses of the servers that confirmed.

        Raises:
            WeightUpdateError: no server took the weights.
        """
        with self._update_lock:
            chosen = self.answering_servers() if servers is None else servers

            def give(server: Server) -> None:
                if not server.in_service:  # it was not paused with the others, and may still run what it was asked before
                    self.pause_server(server)
                update(server)

            with self.paused():
                failures = self._update_each(chosen, version, give, alongside)
                confirmed = [server for server in chosen if server.address not in failures]
                if not confirmed:
                    raise WeightUpdateError(
                        f"No {self.kind} server took version {version}: {' '.join(dict.fromkeys(map(str, failures.values()))) or self.router.describe()}."
                    )
                self._version, self._restore = version, restore
                for server in confirmed:
                    server.has_doubtful_weights = False
                    self.router.put_back(server)
            return [server.address for server in confirmed]

    def answering_servers(self) -> list[Server]:
        """Servers that answer their health check, in service or not; those in service that do not are taken out.

        Where none does, it waits for one, at most ``setup_timeout``: the only server may be busy, or be started again.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        servers, deadline = self.router.servers, time.monotonic() + self.config.setup_timeout
        while not any(healthy := self.each(self._is_healthy, servers)) and time.monotonic() < deadline:
            self._raise_if_all_ended()
            time.sleep(0.2)
            servers = self.router.servers  # others may have come
        for server, answers in zip(servers, healthy, strict=True):
            if not answers:
                self.router.take_out(server, "it did not answer when weights were published")
        answering = [server for server, answers in zip(servers, healthy, strict=True) if answers]
        # One that is out may be a new one, which this client knows nothing of.
        _, failed = self.settled(self.on_connected, [server for server in answering if not server.in_service])
        return [server for server in answering if all(server is not other for other, _ in failed)]

    def _update_each(
        self, servers: list[Server], version: int, update: Callable[[Server], None], alongside: Callable[[], object]
    ) -> dict[str, EngineError]:
        """Why servers did not take the weights, by their addresses; these are out of service, unless all refused unread."""
        failures: dict[str, EngineError] = {}

        def send() -> None:
            try:
                alongside()
            except EngineError as error:
                failures.update({server.address: error for server in servers})

        _, failed = self.settled(update, servers, send)
        failures |= {server.address: error for server, error in failed}
        if servers and all(isinstance(failures.get(server.address), UpdateRefusedError) for server in servers):
            return failures  # all of them compute with what they had
        for server in servers:
            if server.address in failures:
                # Whatever its label says: some of them may have been changed.
                server.has_doubtful_weights |= not isinstance(failures[server.address], UpdateRefusedError)
                if not server.in_service:
                    logger.error("The server at %s stays out of service: %s", server.address, failures[server.address])
                self.router.take_out(server, f"it did not take version {version}: {failures[server.address]}")
                self.router.give_up(server)  # it stays paused with what it was asked
        return failures

    @property
    def logprob_tolerance(self) -> float | None:
        """``rollout.logprob_tolerance``."""
        return self.config.logprob_tolerance

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """``rollout.weight_dtype``; for ``auto`` what every server holds, as far as they say it."""
        if self.config.weight_dtype != "auto":
            return getattr(torch, self.config.weight_dtype)
        held = {self.held_dtype(server) for server in self.router.in_service()}
        return held.pop() if len(held) == 1 else None

    def held_dtype(self, server: Server) -> torch.dtype | None:
        """The type of a server's weights; None: it does not say."""
        return None
