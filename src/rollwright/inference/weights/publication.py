"""The other half of a client: the versions of its servers, pauses, and new weights, also for servers that come back.

Invariants:

* no server samples while its weights change, and every server in service holds the current version;
* a publication and the return of a server never overlap.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError, WeightUpdateError
from rollwright.inference.connections import UpdateRefusedError
from rollwright.inference.network import is_loopback
from rollwright.inference.remote import CHECK_SECONDS, RemoteRequests
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.router import Router, Server
from rollwright.inference.weights.files import keep_newest, remove_later, write_weights
from rollwright.inference.weights.stream import WeightStream
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


class RemoteClient(RemoteRequests):
    """A client of HTTP servers of one kind, and so a backend (``rollwright.inference.backends``).

    Attributes:
        ways: ways by which the servers take weights (``WeightUpdateMeta.type``).
        only_asks: another client gives these servers their weights, pauses and resumes them; this one asks for tokens alone.
        are_replaced: servers that are lost are started again, so this client can do without some of them: it begins with those that
            answer, and takes the others in later.
        publisher: says what another client has published: the version, and the addresses of the servers that hold it; others are
            not asked. None: this client publishes.
        needs_gpu: a server computes on ``rollout.tensor_parallel`` GPUs.
        finds_servers: servers that run already are used; else every run starts its own.
    """

    ways: tuple[str, ...] = ("shared", "disk")
    needs_gpu = True
    finds_servers = True
    only_asks = False
    are_replaced = False
    publisher: Callable[[], tuple[int, Collection[str]]] | None = None

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

    @abstractmethod
    def pause_server(self, server: Server) -> None:
        """Stop sampling; what runs keeps its tokens."""

    @abstractmethod
    def resume_server(self, server: Server) -> None:
        """Go on after ``pause_server``."""

    @abstractmethod
    def read_version(self, server: Server) -> str | None:
        """The server's label of its weights."""

    def label_version(self, server: Server, version: int) -> None:
        """Give the weights that the server holds a version number; needed where it starts with another label."""
        raise EngineError(f"The {self.kind} server at {server.address} has no number for its weights, and takes none.")

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._mapped: MappedWeights | None = None
        self._restore: Callable[[Server], None] | None = None  # gives one server the current weights
        self._when_resumed: Callable[[], object] | None = None
        # Held by a publication, by pause and resume, and while a server is brought back: none of them sees half of another.
        self._update_lock = threading.RLock()

    def destroy(self) -> None:
        """See ``RemoteRequests.destroy``; what was shared with the servers is removed."""
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
            was_paused = self.is_paused
            if not was_paused:
                self.pause()

            def give(server: Server) -> None:
                if not server.in_service:  # it was not paused with the others, and may still run what it was asked before
                    self.pause_server(server)
                update(server)

            try:
                failures = self._update_each(chosen, give, alongside)
                confirmed = [server for server in chosen if server.address not in failures]
                for address, reason in failures.items():
                    logger.error("The server at %s did not take version %d: %s", address, version, reason)
                if not confirmed:
                    raise WeightUpdateError(
                        f"No {self.kind} server took version {version}: {' '.join(dict.fromkeys(map(str, failures.values()))) or self.router.describe()}."
                    )
                self._version, self._restore = version, restore
                for server in confirmed:
                    server.has_doubtful_weights = False
                    self.router.put_back(server)
            finally:
                if not was_paused:
                    self.resume()
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
            if not answers and self.router.take_out(server, "did not answer when weights were published"):
                logger.error("The server at %s does not answer and is out of service.", server.address)
        answering = [server for server, answers in zip(servers, healthy, strict=True) if answers]
        _, failed = self.settled(
            self.on_connected, [server for server in answering if not server.in_service]
        )  # it may be a new one
        return [server for server in answering if all(server is not other for other, _ in failed)]

    def _update_each(
        self, servers: list[Server], update: Callable[[Server], None], alongside: Callable[[], object]
    ) -> dict[str, EngineError]:
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
                self.router.take_out(server, f"did not take the published weights: {failures[server.address]}")
                self.router.give_up(server)  # it stays paused with what it was asked
        return failures

    def _bring_back(self, server: Server) -> None:
        """See that a server that answers again holds the current weights, pause it where this client is paused, and put it back.

        Raises:
            EngineError: it cannot be given the current weights; it stays out.
        """
        with self._update_lock:
            self.on_connected(server)
            if self.publisher is not None:
                self._take_in(server, *self.publisher())
                return
            label, doubtful = str(self.read_version(server)), server.has_doubtful_weights
            # A server that was started again may call its first weights 0, too.
            if label != str(self._version) or doubtful or (label == "0" and self._restore is not None):
                if self._restore is not None:
                    self.pause_server(server)  # what it may still run must not see its weights change
                    self._restore(server)
                    server.has_doubtful_weights = False
                elif self._version == 0 and not label.isdigit() and not doubtful:
                    self.label_version(server, 0)
                else:
                    raise WeightUpdateError(
                        f"it holds version {label!r}{', which may be incomplete,' if doubtful else ''} and version {self._version} is "
                        "not on disk; it comes back with the next publication"
                    )
            (self.pause_server if self.is_paused else self.resume_server)(server)
            self.router.put_back(server)

    def _take_in(self, server: Server, version: int, holders: Collection[str]) -> None:
        label = self.read_version(server)
        if server.address not in holders or str(label) != str(version):
            raise WeightUpdateError(f"it holds version {label!r}, and has not been given version {version}, the current one")
        self._version = version
        # While weights change, who publishes pauses and resumes its servers, and asks them for what it compares: one paused here would
        # never answer it, and nobody would go on.
        if not self.only_asks and not self.is_paused:
            self.resume_server(server)
        self.router.put_back(server)

    # -- versions ------------------------------------------------------------------------------------------------------

    def _connect(self, router: Router) -> None:
        """See ``RemoteRequests.initialize``; servers that are replaced when they are lost are not all waited for."""
        if not self.are_replaced:
            super()._connect(router)
            return
        for server in router.servers:
            router.take_out(server, "it has just joined")
        if self.only_asks:  # it is told which of them it may ask (``follow``)
            self.publisher = lambda: (self._version, [])
            return
        deadline = time.monotonic() + self.config.setup_timeout
        while not (connected := self.settled(self._connected_label, router.servers)[0]):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"No {self.kind} server was healthy within {self.config.setup_timeout:g} s: {router.describe()}."
                )
            time.sleep(0.2)
        numbers = [(server, self._numbered(server, label)) for server, label in connected]
        self._version = max(number for _, number in numbers)
        for server, number in numbers:
            if number == self._version:
                router.put_back(server)
            else:
                server.reason = f"it holds version {number}, and another one version {self._version}"

    def _connected_label(self, server: Server) -> str | None:
        """What a server calls its weights; an ``EngineError`` where it does not answer yet."""
        self.ask(server, "GET", "/health", timeout=CHECK_SECONDS)
        self.on_connected(server)
        return self.read_version(server)

    def _on_all_connected(self, servers: list[Server]) -> None:
        """Number the weights of servers that were just started; take over the number where they already have one."""
        labels = zip(servers, self.each(self.read_version, servers), strict=True)
        numbers = {server.address: self._numbered(server, label) for server, label in labels}
        if len(set(numbers.values())) > 1:
            raise WeightUpdateError(
                f"The {self.kind} servers hold different weights (versions {numbers}). Publish weights to all, or restart them."
            )
        (self._version,) = set(numbers.values())

    def _numbered(self, server: Server, label: str | None) -> int:
        """The number of a server's weights, which it is given where it has none."""
        if label is None or not str(label).lstrip("-").isdigit():
            self.label_version(server, self._version)
            return self._version
        return int(label)

    def get_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._version

    def set_version(self, version: int) -> None:
        """Confirm a published version, which another client may have published; another version is a ``WeightUpdateError``."""
        with self._update_lock:
            if version == self._version:
                return
            held = {server.address: label for server, label in self._each_in_service(self.read_version, "say its version")}
            if not held or any(str(label) != str(version) for label in held.values()):
                raise WeightUpdateError(
                    f"set_version({version}) does not match what the {self.kind} servers hold: {held}. Versions are set by "
                    "publishing weights (actor.update_weights); set_version only confirms them."
                )
            self._version, self._restore = version, None  # another client published: what this one has is older

    def adopt_version(self) -> None:
        """Go by what ``publisher`` says now: servers that did not take what was published are taken out until they hold it."""
        assert self.publisher is not None
        version, holders = self.publisher()
        with self._update_lock:
            if version != self._version:
                self._version, self._restore = version, None
            for server in self.router.in_service():
                if server.address not in holders:
                    self.router.take_out(server, f"was not given version {version}")
                    self.router.give_up(server)  # what it was asked before the update stays unanswered
                    logger.error("The server at %s was not given version %d and is out of service.", server.address, version)

    def follow(self, addresses: Iterable[str], version: int) -> None:
        """Ask these servers from now on, which hold this version, as the client says that watches them."""
        told = version, list(addresses)
        self.publisher = lambda: told
        self.use_servers(told[1])
        self.adopt_version()
        self.settled(self._bring_back, [server for server in self.router.servers if not server.in_service])

    # -- control -------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop sampling on every server; a server that cannot be paused is taken out.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        with self._update_lock:
            self.is_paused = True
            try:
                self._each_in_service(self.pause_server, "be paused")
            except BaseException:
                self.is_paused = self._holding = False
                raise

    def resume(self) -> None:
        """Go on after ``pause``, and call what ``when_resumed`` was given; a server that cannot go on is taken out.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        with self._update_lock:
            try:
                self._each_in_service(self.resume_server, "go on")
            finally:
                self.is_paused = self._holding = False
        action, self._when_resumed = self._when_resumed, None
        if action is not None:
            action()

    def when_resumed(self, action: Callable[[], object]) -> None:
        """See ``WeightReceiver.when_resumed``; of several actions the last is called."""
        if self.is_paused:
            self._when_resumed = action
        else:
            action()

    def hold(self, *, drained: bool) -> None:
        """Ask for nothing more until ``resume_asking``, where another client pauses the servers.

        Args:
            drained: return when what was asked is answered.
        """
        self._holding = True
        if drained:
            self.drain()

    def resume_asking(self) -> None:
        """Go on after ``hold``."""
        self._holding = False

    def drain(self) -> None:
        """Hold new requests back and wait until those in flight have ended; ``resume`` lets them go on.

        Not to be called on the event loop that awaits them.

        Raises:
            WeightUpdateError: they did not end within ``request_timeout``.
        """
        self._holding = True
        deadline = time.monotonic() + self.config.request_timeout
        while any(server.load for server in self.router.in_service()):
            if time.monotonic() > deadline:
                self._holding = False
                raise WeightUpdateError(
                    f"Requests in flight did not end within {self.config.request_timeout:g} s (rollout.on_weight_update=wait): "
                    "use recompute, or call from another thread than the one that awaits them."
                )
            time.sleep(0.01)

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
