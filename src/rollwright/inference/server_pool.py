"""The servers of a client: found, connected, watched, taken out, put back, and left.

Invariants:

* a server that stops answering is taken out, whoever notices it, and the others go on;
* it is put back only after the client has made it fit to serve again (``_bring_back``);
* what a server was asked that is taken out is asked elsewhere, where there is another.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError
from rollwright.inference.connections import Connections
from rollwright.inference.fan_out import FanOut
from rollwright.inference.health import HealthMonitor, is_healthy, wait_healthy
from rollwright.inference.in_flight import InFlight
from rollwright.inference.network import find_server_addresses, parse_addresses
from rollwright.inference.router import Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

Result = TypeVar("Result")

#: Pools of this process that are connected; see ``connected_clients``.
_CONNECTED: weakref.WeakValueDictionary[int, ServerPool] = weakref.WeakValueDictionary()
_connections_made = itertools.count()
#: Arguments of ``initialize`` in programs written for AReaL that say nothing about servers.
_NOT_USED = {"engine_id", "train_data_parallel_size", "ft_spec"}


def connected_clients() -> list[Any]:
    """The clients of this process that are connected to servers, in the order in which they connected.

    Here a trainer finds the rollout engine that it was not given.
    """
    return [client for _, client in sorted(_CONNECTED.items())]


class ServerPool(ABC):
    """HTTP servers of one kind."""

    kind = "remote"

    def __init__(self, config: RolloutConfig | None = None, *, addresses: Iterable[str] | None = None) -> None:
        """Args:
        config: addresses, key and time limits.
        addresses: servers; None: those of the config, else of the environment.
        """
        self.config = config or RolloutConfig()
        self._given_addresses = list(addresses) if addresses is not None else None
        self._connections: Connections | None = None
        self._router: Router | None = None
        self._monitor: HealthMonitor | None = None
        self._fan_out: FanOut | None = None
        self._in_flight = InFlight()
        self._owned: list[Any] = []
        self.is_paused = False  # between ``pause`` and ``resume`` of this client

    # -- what a client adds --------------------------------------------------------------------------------------------

    @abstractmethod
    def _bring_back(self, server: Server) -> None:
        """Make a server that answers again fit to serve, and put it back."""

    @abstractmethod
    def _on_all_connected(self, servers: list[Server]) -> None:
        """All servers are healthy for the first time."""

    @abstractmethod
    def _on_connected(self, server: Server) -> None:
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
            kwargs: what AReaL's engines are told of the trainer besides (``engine_id``, ``train_data_parallel_size``,
                ``ft_spec``); not used.

        Raises:
            ConfigError: an argument has no meaning, or an address is malformed.
            EngineError: no server is known, or one is not healthy within ``setup_timeout``.
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
        self._fan_out = FanOut(f"{self.kind}-control", len(router.servers))
        self._router = router
        try:
            deadline = time.monotonic() + self.config.setup_timeout
            self._fan_out.each(lambda server: wait_healthy(self.connections, server, deadline), router.servers)
            self._fan_out.each(self._on_connected, router.servers)
            self._on_all_connected(router.servers)
        except BaseException:
            self.destroy()
            raise
        self._monitor = HealthMonitor(
            router, self._is_healthy, self._take_out, self._bring_back, skip_in_service=lambda: self.is_paused
        )
        self._monitor.start()
        _CONNECTED[next(_connections_made)] = self
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def destroy(self) -> None:
        """Stop watching the servers and close every connection. Servers run on unless they were handed over with ``own``."""
        for number in [number for number, client in _CONNECTED.items() if client is self]:
            del _CONNECTED[number]
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if self._fan_out is not None:
            self._fan_out.close()
            self._fan_out = None
        if self._connections is not None:
            self._connections.close()
        self._router = None
        while self._owned:
            self._owned.pop().close()

    def own(self, resource: Any) -> None:
        """Close ``resource`` (servers that were started for this client) when this client is destroyed.

        Args:
            resource: has ``close()``, ``check()`` that raises when no server of it is left, and ``weights_root``, a directory
                that is shared with them.
        """
        self._owned.append(resource)

    def _is_healthy(self, server: Server) -> bool:
        return is_healthy(self.connections, server)

    @property
    def connections(self) -> Connections:
        """The HTTP connections of this client."""
        if self._connections is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return self._connections

    @property
    def fan_out(self) -> FanOut:
        """Calls to all servers at once."""
        if self._fan_out is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return self._fan_out

    @property
    def router(self) -> Router:
        """The servers and their load."""
        if self._router is None:
            raise EngineError(f"{type(self).__name__} is not connected: call initialize() first.")
        return self._router

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, in service or not."""
        return [server.address for server in self.router.servers]

    # -- in service and out ---------------------------------------------------------------------------------------------

    def _suspect(self, server: Server, reason: str) -> None:
        """Take ``server`` out unless it answers: one check for a burst of failures."""
        if self._monitor is not None:
            self._monitor.suspect(server, reason)

    def _take_out(self, server: Server, reason: str) -> bool:
        """Send nothing more to ``server``, and ask others what it was asked; True where it was in service until now.

        Where it is the last one, its requests stay with it: it may answer yet, and nobody else can.
        """
        was_in_service = self.router.take_out(server, reason)
        if was_in_service and self.router.in_service():
            self._in_flight.give_up(server)
        return was_in_service

    def _each_in_service(self, action: Callable[[Server], Result], what: str) -> list[tuple[Server, Result]]:
        """``action`` on all servers in service at once; those that fail are taken out.

        Args:
            action: what is done, and raises an ``EngineError`` where a server does not do it.
            what: a server could not do, for the log.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        done, failed = self.fan_out.settled(action, self.router.in_service())
        for server, error in failed:
            if self._take_out(server, f"could not {what}: {error}"):
                logger.error("The server at %s could not %s and is out of service: %s", server.address, what, error)
        if failed and not done:
            self._raise_if_all_ended()
        return done

    def _raise_if_all_ended(self) -> None:
        for servers in self._owned:
            servers.check()
