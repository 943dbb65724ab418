"""Which weights the servers of a remote engine hold: pauses, versions, and servers that join, leave or come back.

Invariants:

* no server samples while its weights change; publications of adapters change no weights, and pause no server;
* every server in service holds the current version. A server that did not take a publication stays out of service until it is proven
  to hold the current version;
* a server's own label proves nothing after a failed update or a restart: such a server is given the weights again;
* if another engine publishes (``publisher``), a server is used once that engine reports that it holds the version;
* a pause, a publication and the return of a server never overlap (``lock``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.connections import ConnectionLostError, LostServersError, UpdateRefusedError
from rollwright.inference.router import Server
from rollwright.inference.server_set import ServerSet
from rollwright.inference.weights.server_adapters import ServerAdapters
from rollwright.inference.weights.server_memory import ServerMemory
from rollwright.inference.weights.server_proofs import ServerProofs
from rollwright.processes.supervisor import retry_lost
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteWeights")


class ServerWeights:
    """Keeps a set of servers on one version of the weights.

    Attributes:
        version: the version that servers in service hold.
        is_paused: True between ``pause`` and ``resume``, while no server samples, or with adapters, while no new request is sent.
        is_holding: True while new requests wait in this process.
        publisher: returns the version that another engine has published and the addresses of the servers that hold it; other servers
            are not used. None means that this engine publishes.
        restore: gives the current weights to one server. None if the current weights are not on disk.
        lock: held during a publication, ``pause``, ``resume``, a proof and the return of a server.
        proofs: which servers the trainer has proven.
    """

    def __init__(
        self,
        backend: ServerBackend,
        servers: ServerSet,
        adapters: ServerAdapters,
        *,
        servers_are_replaced: bool = False,
        only_asks: bool = False,
    ) -> None:
        """Args:
        backend: the servers' protocol.
        servers: the servers.
        adapters: the adapters that the servers hold.
        servers_are_replaced: lost servers are started again, so this engine starts with the servers that answer and takes in the
            others later.
        only_asks: another engine publishes to these servers, pauses and resumes them. This engine only sends requests, and only
            after ``follow``.
        """
        self.backend = backend
        self.servers = servers
        self.adapters = adapters
        self.memory = ServerMemory(backend, servers, keeps_weights=adapters.are_used)
        self.config = servers.config
        self.version = 0
        self.is_paused = False
        self.is_holding = False
        self.publisher: Callable[[], tuple[int, Collection[str]]] | None = None
        self.restore: Callable[[Server], None] | None = None
        self.lock = threading.RLock()
        self.proofs = ServerProofs()
        self._servers_are_replaced = servers_are_replaced
        self._only_asks = only_asks
        self._servers_are_paused = False
        self._when_resumed: Callable[[], object] | None = None

    # -- pauses --------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop sampling on every server; a server that cannot be paused is taken out.

        With ``on_weight_update: wait``, running requests end first. With adapters, only new requests wait: those that run keep the
        adapter that they began with, and the servers may have other users.

        Raises:
            EngineError: all servers that were started for this engine have ended.
        """
        if self.adapters.are_used and not self.config.colocate:
            self.is_paused = self.is_holding = True
            return
        if self.backend.pauses_running_requests and self.config.on_weight_update == "wait":
            self.hold(drained=True)
        with self.lock:
            self.is_paused = self._servers_are_paused = True
            try:
                self.servers.each_in_service(self.backend.pause_server, "be paused")
            except BaseException:
                self.is_paused = self.is_holding = self._servers_are_paused = False
                raise

    def resume(self) -> None:
        """Continue after ``pause`` and call the action given to ``when_resumed``; a server that cannot continue is taken out.

        Raises:
            EngineError: all servers that were started for this engine have ended.
        """
        with self.lock:
            try:
                if self._servers_are_paused or not self.adapters.are_used:
                    self.servers.each_in_service(self._resume, "go on")
            finally:
                self.is_paused = self.is_holding = self._servers_are_paused = False
        action, self._when_resumed = self._when_resumed, None
        if action is not None:
            action()

    def _resume(self, server: Server) -> None:
        self.memory.restore(server)
        self.backend.resume_server(server)

    def release_memory(self) -> None:
        """Have the paused servers give back memory, until ``resume``; see ``rollout.colocate``.

        Raises:
            EngineError: all servers that were started for this engine have ended.
        """
        with self.lock:
            self.memory.release()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause inside the block; an engine that was already paused stays paused afterwards."""
        if self.is_paused:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def when_resumed(self, action: Callable[[], object]) -> None:
        """See ``WeightReceiver.when_resumed``; only the last of several actions is called."""
        if self.is_paused:
            self._when_resumed = action
        else:
            action()

    def hold(self, *, drained: bool) -> None:
        """Send no new requests until ``resume``, or until ``follow`` if another engine pauses the servers.

        Args:
            drained: wait until running requests are answered. Do not call this on the event loop that awaits them.

        Raises:
            WeightUpdateError: running requests were not answered within ``request_timeout``.
        """
        self.is_holding = True
        deadline = time.monotonic() + self.config.request_timeout
        while drained and any(server.load for server in self.servers.router.in_service()):
            if time.monotonic() > deadline:
                self.is_holding = False
                raise WeightUpdateError(
                    f"Requests in flight did not end within {self.config.request_timeout:g} s (rollout.on_weight_update=wait): "
                    "use recompute, or call from another thread than the one that awaits them."
                )
            time.sleep(0.01)

    # -- the first version ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Wait for the servers and read their weight versions; a server without one is labelled with the current version.

        Raises:
            EngineError: a server has ended, or is not healthy within ``setup_timeout``.
            WeightUpdateError: the servers hold different weights.
        """
        router = self.servers.router
        if self._servers_are_replaced or self._only_asks:
            for server in router.servers:
                server.in_service, server.reason = False, "it has just joined"
        if self._only_asks:
            self.publisher = lambda: (0, [])
            return
        if self._servers_are_replaced:
            labels = self._labels_of_answering()
        else:
            self.servers.wait_healthy()
            self.servers.each(self.backend.on_connected, router.servers)
            labels = dict(zip(router.servers, self.servers.each(self.backend.read_version, router.servers), strict=True))
        numbers = {server.address: self._numbered(server, label) for server, label in labels.items()}
        if self.adapters.are_used:
            self.adapters.connect(numbers)
        if not self._servers_are_replaced and len(set(numbers.values())) > 1:
            raise WeightUpdateError(
                f"The {self.backend.kind} servers hold different weights (versions {numbers}). Publish weights to all, or restart them."
            )
        newest = max(numbers.values())
        self.version = 0 if self.adapters.are_used else newest  # no adapter is published, and the base is version 0
        for server in labels:
            if (number := numbers[server.address]) == newest:
                router.put_back(server)
            else:
                server.reason = f"it holds version {number}, and another one version {newest}"

    def _labels_of_answering(self) -> dict[Server, str | None]:
        """Return the version labels of the servers that answer, as soon as at least one does."""
        deadline = time.monotonic() + self.config.setup_timeout
        while not (labels := self.servers.settled(self.backend.read_version, self.answering_servers())[0]):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"No {self.backend.kind} server was healthy within {self.config.setup_timeout:g} s: "
                    f"{self.servers.router.describe()}."
                )
            time.sleep(0.2)
        return labels

    def _numbered(self, server: Server, label: str | None) -> int:
        """Return a server's weight version as a number; a server without one is labelled with the current version."""
        if label is None or not str(label).lstrip("-").isdigit():
            version = self.adapters.base_label if self.adapters.are_used else self.version
            self.backend.label_version(server, version)
            return version
        return int(label)

    # -- the next version ----------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Confirm a published version, possibly one that another engine published.

        Raises:
            WeightUpdateError: the servers hold another version.
        """
        with self.lock:
            if version == self.version:
                return
            read = (lambda server: self._held(server, version)) if self.adapters.are_used else self.backend.read_version
            labels = self.servers.each_in_service(read, "say its version")
            held = {server.address: label for server, label in labels.items()}
            if not held or any(str(label) != str(version) for label in held.values()):
                raise WeightUpdateError(
                    f"set_version({version}) does not match what the {self.backend.kind} servers hold: {held}. Versions are set by "
                    "publishing weights (actor.update_weights); set_version only confirms them."
                )
            self.version, self.restore = version, None  # another engine published, so the weights on disk are older

    def _held(self, server: Server, version: int) -> str:
        """Return what a server holds: ``version`` if it can sample with it, else the server's label or its adapters."""
        if not self.adapters.are_used:
            return str(self.backend.read_version(server))
        if self.adapters.holds(server, version):
            return str(version)
        return f"adapters {', '.join(self.backend.loaded_adapters(server)) or 'none'}"

    def confirm(self, server: Server, version: int) -> None:
        """Check that a server reports ``version`` after an update.

        Raises:
            WeightUpdateError: it reports another version.
        """
        held = self.backend.read_version(server)
        if str(held) != str(version):
            raise WeightUpdateError(
                f"The {self.backend.kind} server at {server.address} says it holds version {held!r} after an update to {version}."
            )

    def answering_servers(self) -> list[Server]:
        """Return the servers that can take part in an update; see ``ServerSet.answering``."""
        answering = self.servers.answering()
        # A server that is out of service may be new, and the backend knows nothing about it yet.
        _, failed = self.servers.settled(self.backend.on_connected, [server for server in answering if not server.in_service])
        return self._concerned(server for server in answering if server not in failed)

    def retry_lost(self, version: int, publish: Callable[[], list[str]]) -> list[str]:
        """Return what ``publish`` returns. If no server took the version because servers were lost, try again with restarted ones."""
        words = f"The {self.backend.kind} servers were lost {{}} times while version {version} was published"
        return retry_lost(publish, lambda: None, words, errors=(LostServersError,))

    def failure(self, message: str, failures: Mapping[Server, EngineError]) -> WeightUpdateError:
        """Build the error for an update that no server took: a ``LostServersError`` if one of the servers was lost."""
        was_lost = any(
            isinstance(error, ConnectionLostError) or not self.servers.is_healthy(server) for server, error in failures.items()
        )
        return (LostServersError if was_lost else WeightUpdateError)(message)

    def apply_update(
        self,
        version: int,
        update: Callable[[Server], None],
        *,
        restore: Callable[[Server], None] | None,
        servers: list[Server] | None = None,
        alongside: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Pause, give new weights to every server that answers, make ``version`` the current one, and resume.

        With adapters, nothing is paused. A server that fails is taken out. A server that was out of service and takes the weights is put back.

        Args:
            version: version of the new weights.
            update: gives the weights to one server; raises if the server does not confirm them.
            restore: does the same for a server that comes back later. None keeps such a server out until the next publication.
            servers: servers that take part. None means all that answer.
            alongside: runs in this thread while the servers update (the sending half of a broadcast).

        Returns:
            Addresses of the servers that confirmed.

        Raises:
            WeightUpdateError: no server took the weights; a ``LostServersError`` if one of them was lost.
        """
        with self.lock:
            chosen, is_proof = self.answering_servers() if servers is None else servers, self.proofs.is_running
            pauses_each = is_proof and not self.adapters.are_used

            def give(server: Server) -> None:
                if not server.in_service and self.adapters.are_used:
                    self._numbered(server, self.backend.read_version(server))
                elif pauses_each or not server.in_service:  # not paused with the others, and may still run old requests
                    self.backend.pause_server(server)
                self.memory.restore_for_update(server)
                update(server)

            with contextlib.nullcontext() if is_proof or self.adapters.are_used else self.paused():
                failures = self._update_each(chosen, version, give, alongside)
                confirmed = [server for server in chosen if server not in failures]
                if not confirmed and self.others_sample_on:
                    return []
                if not confirmed:
                    causes = " ".join(dict.fromkeys(map(str, failures.values()))).rstrip(".") or self.servers.router.describe()
                    raise self.failure(f"No {self.backend.kind} server took version {version}: {causes}.", failures)
                self.version, self.restore = version, restore
                for server in confirmed:
                    server.has_doubtful_weights = False
                    if pauses_each:
                        self.backend.resume_server(server)
                    if not is_proof and self.proofs.admit(server):
                        self.servers.router.put_back(server)
                    else:
                        server.lacks_weights = False
                self.proofs.updated = confirmed
            return [server.address for server in confirmed]

    def _update_each(
        self, servers: list[Server], version: int, update: Callable[[Server], None], alongside: Callable[[], object]
    ) -> dict[Server, EngineError]:
        """Return the errors of servers that did not take the weights, and take them out unless all rejected them before reading any."""
        failures: dict[Server, EngineError] = {}

        def send() -> None:
            try:
                alongside()
            except EngineError as error:
                failures.update(dict.fromkeys(servers, error))

        failures |= self.servers.settled(update, servers, send)[1]
        if len(failures) == len(servers) and all(isinstance(error, UpdateRefusedError) for error in failures.values()):
            return failures  # all of them still compute with the old weights
        for server, failure in failures.items():
            # Some of its weights may have changed, whatever its label says.
            server.has_doubtful_weights |= not isinstance(failure, UpdateRefusedError)
            if not server.in_service:
                logger.error("The server at %s stays out of service: %s", server.address, failure)
            self.servers.router.take_out(server, f"it did not take version {version}: {failure}")
            self.servers.router.give_up(server)  # it stays paused, with its requests unanswered
        return failures

    # -- proofs (``server_proofs``) ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def proof(self) -> Iterator[None]:
        """Let publications and probes reach only servers that are not proven, and put those into service at the end.

        Adapters reach every server, because requests name the one that was published last. Only new requests wait for the proof.
        """
        with self.lock:
            self.proofs.begin(self.servers.router.servers)
            was_holding, succeeded = self.is_holding, False
            self.is_holding |= self.adapters.are_used
            try:
                yield
                succeeded = True
            finally:
                self.is_holding = was_holding
                for server in self.proofs.end(succeeded=succeeded):
                    self.servers.router.put_back(server)

    def awaits_proof(self, version: int) -> bool:
        """Return whether a server waits for a proof that can begin now, with weights of this version."""
        is_waiting = any(server.awaits_proof for server in self.servers.router.servers)
        return is_waiting and not self.is_paused and (version == self.version or not self.servers.router.in_service())

    @property
    def others_sample_on(self) -> bool:
        """True during a proof that does not concern every server in service: the run goes on if the others are lost."""
        in_service = self.servers.router.in_service()
        return len(self._concerned(in_service)) < len(in_service)

    def _concerned(self, servers: Iterable[Server]) -> list[Server]:
        """Return those of ``servers`` that a publication reaches now."""
        return list(servers) if self.adapters.are_used else self.proofs.concern(servers)

    # -- servers that come back or join later --------------------------------------------------------------------------

    def bring_back(self, server: Server) -> None:
        """Put a server that answers again back in service, once it holds the current weights.

        Raises:
            EngineError: it cannot be given the current weights; it stays out of service.
        """
        with self.lock:
            self.backend.on_connected(server)
            if self.publisher is None and self.adapters.are_used:
                self._numbered(server, self.backend.read_version(server))
                self.memory.restore_for_update(server)
                self.adapters.restore(server)
                self.proofs.require(server)
            elif self.publisher is None:
                self._give_current(server)
                self.proofs.require(server)
                (self.backend.pause_server if self.is_paused else self._resume)(server)
            else:
                version, holders = self.publisher()
                held = self._held(server, version)
                if server.address not in holders or held != str(version):
                    raise WeightUpdateError(
                        f"it holds version {held!r}, and has not been given version {version}, the current one"
                    )
                self.version = version
                # The publisher pauses and resumes its servers while weights change, and probes them. A server that this engine paused
                # would never answer the probe.
                if not (self._only_asks or self.is_paused or self.adapters.are_used):
                    self.backend.resume_server(server)
            self.servers.router.put_back(server)

    def _give_current(self, server: Server) -> None:
        """Give the current weights to a server that is not proven to hold them."""
        label, doubtful = str(self.backend.read_version(server)), server.has_doubtful_weights
        # A restarted server may label its initial weights 0, too.
        is_initial = label == "0" and self.restore is not None and not server.awaits_proof
        if label == str(self.version) and not doubtful and not is_initial:
            return
        self.proofs.doubt(server)
        if self.restore is not None:
            self.backend.pause_server(server)  # its running requests must not see its weights change
            self.memory.restore_for_update(server)
            self.restore(server)
            server.has_doubtful_weights = False
        elif self.version == 0 and not label.isdigit() and not doubtful:
            self.backend.label_version(server, 0)
        else:
            server.lacks_weights = True
            raise WeightUpdateError(
                f"it holds version {label!r}{', which may be incomplete,' if doubtful else ''} and version {self.version} is "
                "not on disk; it comes back with the next publication"
            )

    @property
    def are_lacking(self) -> bool:
        """True if no server is in service, and at least one waits only for the next publication."""
        return not self.servers.router.in_service() and any(server.lacks_weights for server in self.servers.router.servers)

    # -- another engine publishes --------------------------------------------------------------------------------------

    def adopt_version(self) -> None:
        """Take over the version that ``publisher`` reports, and take out servers that do not hold it yet."""
        assert self.publisher is not None
        version, holders = self.publisher()
        with self.lock:
            if version != self.version:
                self.version, self.restore = version, None
            if self.adapters.are_used:  # a version that was published again has another name
                held = self.servers.each_in_service(lambda server: self._held(server, version), "say its adapters")
                holders = [server.address for server in held if server.address in holders and held[server] == str(version)]
            for server in self.servers.router.in_service():
                if server.address not in holders:
                    self.servers.router.take_out(server, f"it was not given version {version}")
                    self.servers.router.give_up(server)  # its older requests stay unanswered

    def follow(self, addresses: Iterable[str], version: int) -> None:
        """Use these servers, which hold this version according to the engine that watches them; ends ``hold``."""
        holders = list(addresses)
        self.publisher = lambda: (version, holders)
        self.servers.router.replace(holders)
        self.adopt_version()
        waiting = [server for server in self.servers.router.servers if not server.in_service]
        self.servers.settled(self.bring_back, waiting)
        self.is_holding = False
