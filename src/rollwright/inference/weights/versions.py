"""Servers that join, leave and come back while weights change: none is asked before it holds the version that the client says.

Invariants:

* every server in service holds the current version;
* what a server calls its weights proves nothing after a failed update, nor after a restart: such a server is given the weights again;
* where another client publishes (``publisher``), a server is asked when that client says that it holds the version.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.remote import CHECK_SECONDS
from rollwright.inference.router import Router, Server
from rollwright.inference.weights.pauses import RemotePauses


class RemoteVersions(RemotePauses):
    """A client that knows which weights its servers hold.

    Attributes:
        are_replaced: servers that are lost are started again, so this client can do without some of them: it begins with those that
            answer, and takes the others in later.
        publisher: says what another client has published: the version, and the addresses of the servers that hold it; others are
            not asked. None: this client publishes.
        only_asks: another client gives these servers their weights, pauses and resumes them; this one asks for tokens alone, and
            none before ``follow``.
    """

    are_replaced = False
    publisher: Callable[[], tuple[int, Collection[str]]] | None = None
    only_asks = False

    @abstractmethod
    def read_version(self, server: Server) -> str | None:
        """The server's label of its weights."""

    def label_version(self, server: Server, version: int) -> None:
        """Give the weights that the server holds a version number; needed where it starts with another label."""
        raise EngineError(f"The {self.kind} server at {server.address} has no number for its weights, and takes none.")

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        super().__init__(config, addresses=addresses)
        self._restore: Callable[[Server], None] | None = None  # gives one server the current weights; None: they are on no disk

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

    # -- the first servers -----------------------------------------------------------------------------------------------

    def _connect(self, router: Router) -> None:
        """See ``RemoteServers._connect``; servers that are replaced when they are lost are not all waited for.

        Servers that were just started are given a number for their weights; one that they have is taken over.
        """
        if self.are_replaced or self.only_asks:
            for server in router.servers:
                server.in_service, server.reason = False, "it has just joined"
        if self.only_asks:
            self.publisher = lambda: (0, [])
            return
        if not self.are_replaced:
            super()._connect(router)
            labels = list(zip(router.servers, self.each(self.read_version, router.servers), strict=True))
        else:
            labels = self._first_labels(router)
        numbers = {server.address: self._numbered(server, label) for server, label in labels}
        if not self.are_replaced and len(set(numbers.values())) > 1:
            raise WeightUpdateError(
                f"The {self.kind} servers hold different weights (versions {numbers}). Publish weights to all, or restart them."
            )
        self._version = max(numbers.values())
        for server, _ in labels:
            if (number := numbers[server.address]) == self._version:
                router.put_back(server)
            else:
                server.reason = f"it holds version {number}, and another one version {self._version}"

    def _first_labels(self, router: Router) -> list[tuple[Server, str | None]]:
        """What the servers that answer call their weights, as soon as one does."""

        def label(server: Server) -> str | None:
            self.ask(server, "GET", "/health", timeout=CHECK_SECONDS)
            self.on_connected(server)
            return self.read_version(server)

        deadline = time.monotonic() + self.config.setup_timeout
        while not (labels := self.settled(label, router.servers)[0]):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"No {self.kind} server was healthy within {self.config.setup_timeout:g} s: {router.describe()}."
                )
            time.sleep(0.2)
        return labels

    def _numbered(self, server: Server, label: str | None) -> int:
        """The number of a server's weights, which it is given where it has none."""
        if label is None or not str(label).lstrip("-").isdigit():
            self.label_version(server, self._version)
            return self._version
        return int(label)

    # -- servers that come back, or join later -----------------------------------------------------------------------------

    def _bring_back(self, server: Server) -> None:
        """See that a server that answers again holds the current weights, pause it where this client is paused, and put it back.

        Raises:
            EngineError: it cannot be given the current weights; it stays out.
        """
        with self._update_lock:
            self.on_connected(server)
            if self.publisher is None:
                self._give_current(server)
                (self.pause_server if self.is_paused else self.resume_server)(server)
            else:
                version, holders = self.publisher()
                label = self.read_version(server)
                if server.address not in holders or str(label) != str(version):
                    raise WeightUpdateError(
                        f"it holds version {label!r}, and has not been given version {version}, the current one"
                    )
                self._version = version
                # While weights change, who publishes pauses and resumes its servers, and asks them for what it compares: one paused
                # here would never answer it, and nobody would go on.
                if not self.only_asks and not self.is_paused:
                    self.resume_server(server)
            self.router.put_back(server)

    def _give_current(self, server: Server) -> None:
        """Give the current weights to a server that is not proven to hold them."""
        label, doubtful = str(self.read_version(server)), server.has_doubtful_weights
        # A server that was started again may call its first weights 0, too.
        if label == str(self._version) and not doubtful and not (label == "0" and self._restore is not None):
            return
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

    # -- another client publishes --------------------------------------------------------------------------------------------

    def adopt_version(self) -> None:
        """Go by what ``publisher`` says now: servers that did not take what was published are taken out until they hold it."""
        assert self.publisher is not None
        version, holders = self.publisher()
        with self._update_lock:
            if version != self._version:
                self._version, self._restore = version, None
            for server in self.router.in_service():
                if server.address not in holders:
                    self.router.take_out(server, f"it was not given version {version}")
                    self.router.give_up(server)  # what it was asked before the update stays unanswered

    def follow(self, addresses: Iterable[str], version: int) -> None:
        """Ask these servers from now on, which hold this version, as the client says that watches them; ends ``hold``."""
        told = version, list(addresses)
        self.publisher = lambda: told
        self.use_servers(told[1])
        self.adopt_version()
        self.settled(self._bring_back, [server for server in self.router.servers if not server.in_service])
        self._holding = False
