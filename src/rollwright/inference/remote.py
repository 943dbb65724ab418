"""The servers of a client: found, watched, called several at once, and taken out when they fail."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError
from rollwright.inference.connections import Connections
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.launcher import ended_child
from rollwright.inference.network import find_server_addresses, parse_addresses
from rollwright.inference.router import HealthMonitor, Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

Result = TypeVar("Result")
Part = TypeVar("Part")

#: Longest wait for a health check.
CHECK_SECONDS = 10.0

#: The clients of this process that are connected to servers, in the order in which they connected: here a trainer finds the
#: rollout engine that it was not given.
CONNECTED_CLIENTS: list[Any] = []
#: Arguments of ``initialize`` in programs written for AReaL that say nothing about servers.
_NOT_USED = {"engine_id", "train_data_parallel_size", "ft_spec"}


class RemoteServers(InferenceEngine):
    """The first part of a client. On it stand those that ask for tokens (``remote_requests.py``), and in ``inference.weights`` pauses,
    versions and publication, which is ``RemoteClient``.

    Attributes:
        kind: the servers' name in messages.
    """

    kind = "remote"

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        """Args:
        config: addresses, key, time limits and what happens to running requests on a weight update.
        addresses: servers; None: those of the config, else of the environment.
        """
        self.config = config or RolloutConfig()
        self._given_addresses = list(addresses) if addresses is not None else None
        self._connections: Connections | None = None
        self._router: Router | None = None
        self._monitor: HealthMonitor | None = None
        self._threads: ThreadPoolExecutor | None = None  # for calls to several servers at once
        self._owned: list[Any] = []
        self.is_paused = False  # between ``pause`` and ``resume`` of this client

    def ask(self, server: Server, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """One call to a server, synchronously.

        Args:
            server: that is asked.
            method, path, body: of the call; the body is sent as JSON.
            timeout: seconds; None: ``setup_timeout``, so that a server that hangs does not hold the others up for ever.

        Raises:
            EngineError: as ``Connections.request``.
        """
        limit = self.config.setup_timeout if timeout is None else timeout
        return self.connections.request(method, f"{server.url}{path}", body, timeout=limit)

    @abstractmethod
    def _bring_back(self, server: Server) -> None:
        """Make a server that answers again fit to serve, and put it back."""

    def on_connected(self, server: Server) -> None:
        """Look at a server that just became healthy, for the first time or again."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def initialize(
        self,
        *args: Any,
        addresses: str | Iterable[str] | None = None,
        addr: str | Iterable[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the servers, wait until each is healthy, and read the version of their weights.

        Args:
            args: not used.
            addresses: servers, as a list or in one text with commas; None: those given on construction, in the config or in
                the environment.
            addr: AReaL's name of ``addresses``.
            kwargs: AReaL's arguments about the trainer (``engine_id``, ``train_data_parallel_size``,
                ``ft_spec``); not used.

        Raises:
            ConfigError: an argument has no meaning, or an address is malformed.
            EngineError: no server is known, one has ended, or one is not healthy within ``setup_timeout``.
        """
        if unknown := sorted(set(kwargs) - _NOT_USED):
            raise ConfigError(f"initialize() has no argument {unknown[0]!r}; give addresses, or set rollout.addresses.")
        if addresses is not None and addr is not None:
            raise ConfigError("initialize() was given two lists of servers: give one of addresses and addr.")
        if self._router is not None:
            return
        named = addr if addresses is None else addresses
        named = parse_addresses(named) if isinstance(named, str) else named
        found = list(named) if named is not None else self._given_addresses
        router = Router(found if found is not None else find_server_addresses(self.config.addresses))
        api_key = self.config.api_key or os.environ.get("ROLLWRIGHT_API_KEY")
        self._connections = Connections(api_key=api_key, timeout=self.config.request_timeout)
        self._threads = ThreadPoolExecutor(max(4, len(router.servers)), thread_name_prefix=f"{self.kind}-control")
        self._router = router
        try:
            self._connect(router)
        except BaseException:
            self.destroy()
            raise
        self._monitor = HealthMonitor(self)
        CONNECTED_CLIENTS.append(self)
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def _connect(self, router: Router) -> None:
        """Wait until every server is healthy, and look at each."""
        deadline = time.monotonic() + self.config.setup_timeout
        self.each(lambda server: self._wait_healthy(server, deadline), router.servers)
        self.each(self.on_connected, router.servers)

    def destroy(self) -> None:
        """Stop watching the servers and close every connection. Servers run on, except those that it owns (``own``)."""
        if self in CONNECTED_CLIENTS:
            CONNECTED_CLIENTS.remove(self)
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
        if self._connections is not None:
            self._connections.close()
        self._router = None
        while self._owned:
            self._owned.pop().close()

    def own(self, resource: Any) -> None:
        """Close ``resource`` (servers that were started for this client) when this client is destroyed.

        Args:
            resource: has ``close()``, ``check(address)`` that raises when that server, or all of it, has ended, and ``weights_root``, a directory
                that is shared with them.
        """
        self._owned.append(resource)

    def _is_healthy(self, server: Server) -> bool:
        """One check: True where the server answers ``/health``."""
        try:
            self.connections.request("GET", f"{server.url}/health", timeout=CHECK_SECONDS)
        except EngineError:
            return False
        return True

    def _wait_healthy(self, server: Server, deadline: float) -> None:
        """Return when the server answers ``/health``; it is an error where it has ended, or does not until the deadline."""
        started = time.monotonic()
        while not self._is_healthy(server):
            for launched in self._owned:
                launched.check(server.address)
            if not self._owned and (command := ended_child(server.address)):
                raise EngineError(
                    f"The server at {server.address} ended before it was healthy: no child of this process runs the command that "
                    f"build_cmd gave for it. Look at its output, and start it again ({command}); where it was started elsewhere, call "
                    "initialize() again when it is healthy."
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The server at {server.address} was not healthy within {deadline - started:.0f} s. Look at its log; raise "
                    "rollout.setup_timeout if its model takes longer to load."
                )
            time.sleep(0.2)

    def _connected(self, part: Part | None) -> Part:
        if part is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return part

    @property
    def connections(self) -> Connections:
        """The HTTP connections of this client."""
        return self._connected(self._connections)

    @property
    def router(self) -> Router:
        """The servers and their load."""
        return self._connected(self._router)

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.router.servers]

    def use_servers(self, addresses: Iterable[str]) -> None:
        """Use the servers at these addresses from now on: what is with others is asked again, new ones join when they are fit to serve."""
        self.router.replace(addresses)

    # -- several servers at once ----------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin one call in a thread of this client."""
        return self._connected(self._threads).submit(function, *arguments)

    def settled(
        self, action: Callable[[Server], Result], servers: Iterable[Server], alongside: Callable[[], object] = lambda: None
    ) -> tuple[list[tuple[Server, Result]], list[tuple[Server, EngineError]]]:
        """``action`` on all servers at once: what those returned that did it, and why the others did not.

        ``alongside`` runs in this thread meanwhile.
        """
        done: list[tuple[Server, Result]] = []
        failed: list[tuple[Server, EngineError]] = []
        running = [(server, self.submit(action, server)) for server in servers]
        alongside()
        for server, future in running:
            error = future.exception()
            if error is None:
                done.append((server, future.result()))
            elif isinstance(error, EngineError):
                failed.append((server, error))
            else:
                raise error
        return done, failed

    def each(self, action: Callable[[Server], Result], servers: Iterable[Server]) -> list[Result]:
        """``action`` on all servers at once; the first failure is raised after all are done."""
        done, failed = self.settled(action, servers)
        if failed:
            raise failed[0][1]
        return [result for _, result in done]

    # -- in service and out ---------------------------------------------------------------------------------------------

    def _each_in_service(self, action: Callable[[Server], Result], what: str) -> list[tuple[Server, Result]]:
        """``action`` on all servers in service at once; those that raise an ``EngineError`` are taken out.

        Args:
            action: what is done.
            what: a server could not do, for the log.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        done, failed = self.settled(action, self.router.in_service())
        for server, error in failed:
            self.router.take_out(server, f"it could not {what}: {error}")
        if failed and not done:
            self._raise_if_all_ended()
        return done

    def _raise_if_all_ended(self) -> None:
        for servers in self._owned:
            servers.check()
