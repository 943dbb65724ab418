"""The servers of a client: found, connected, watched, taken out, put back, and left.

Invariants:

* a server that stops answering is taken out, and the others go on;
* it is put back only after the client has made it fit to serve again (``bring_back``);
* what a server was asked that is taken out is asked elsewhere, where there is another.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, EngineError
from rollwright.inference.connections import Connections
from rollwright.inference.network import find_server_addresses, parse_addresses
from rollwright.inference.router import Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

Result = TypeVar("Result")
Part = TypeVar("Part")

#: Longest wait for a health check.
CHECK_SECONDS = 10.0

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
    """HTTP servers of one kind, which ``kind`` names in messages."""

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
        self._threads: ThreadPoolExecutor | None = None  # for calls to several servers at once
        self._owned: list[Any] = []
        self.is_paused = False  # between ``pause`` and ``resume`` of this client

    # -- what a client adds --------------------------------------------------------------------------------------------

    @abstractmethod
    def _bring_back(self, server: Server) -> None:
        """Make a server that answers again fit to serve, and put it back."""

    @abstractmethod
    def _on_all_connected(self, servers: list[Server]) -> None:
        """All servers are healthy for the first time."""

    def on_connected(self, server: Server) -> None:  # noqa: B027 - there may be nothing to look at
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
        self._threads = ThreadPoolExecutor(max(4, len(router.servers)), thread_name_prefix=f"{self.kind}-control")
        self._router = router
        try:
            deadline = time.monotonic() + self.config.setup_timeout
            self.each(lambda server: self._wait_healthy(server, deadline), router.servers)
            self.each(self.on_connected, router.servers)
            self._on_all_connected(router.servers)
        except BaseException:
            self.destroy()
            raise
        self._monitor = HealthMonitor(self)
        _CONNECTED[next(_connections_made)] = self
        logger.info("%s servers in use: %s", self.kind, ", ".join(server.address for server in router.servers))

    def destroy(self) -> None:
        """Stop watching the servers and close every connection. Servers run on, except those that it owns (``own``)."""
        for number in [number for number, client in _CONNECTED.items() if client is self]:
            del _CONNECTED[number]
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
            resource: has ``close()``, ``check()`` that raises when no server of it is left, and ``weights_root``, a directory
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
        """Return when the server answers ``/health``, at ``time.monotonic() == deadline`` the latest.

        Raises:
            EngineError: it did not answer in time.
        """
        started = time.monotonic()
        while not self._is_healthy(server):
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
        """``action`` on all servers in service at once; those that fail are taken out.

        Args:
            action: what is done, and raises an ``EngineError`` where a server does not do it.
            what: a server could not do, for the log.

        Raises:
            EngineError: all servers that were started for this client have ended.
        """
        done, failed = self.settled(action, self.router.in_service())
        for server, error in failed:
            if self.router.take_out(server, f"could not {what}: {error}"):
                logger.error("The server at %s could not %s and is out of service: %s", server.address, what, error)
        if failed and not done:
            self._raise_if_all_ended()
        return done

    def _raise_if_all_ended(self) -> None:
        for servers in self._owned:
            servers.check()


class HealthMonitor:
    """One thread that takes out servers that stop answering, and brings them back when they are fit to serve."""

    def __init__(self, pool: ServerPool, *, interval: float = 1.0, check_interval: float = 15.0, strikes: int = 3) -> None:
        """Args:
        pool: its servers are checked, taken out and brought back; those in service are not while it is paused (a paused
            server may not answer a check that generates).
        interval: seconds between two looks at the servers that are out.
        check_interval: seconds between two checks of a server in service.
        strikes: failed checks in a row after which a server in service is taken out.
        """
        self._pool = pool
        self._router = pool.router
        self._interval = interval
        self._check_interval = check_interval
        self._strikes = strikes
        self._failed: dict[str, int] = {}
        self._last_suspicion: dict[str, float] = {}
        self._locks = {server.address: threading.Lock() for server in self._router.servers}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a check that runs, at most a moment."""
        self._stop.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def suspect(self, server: Server, reason: str) -> None:
        """A request failed: check ``server`` now and take it out unless it answers. A burst of failures checks once."""
        with self._locks[server.address]:
            if not server.in_service or time.monotonic() - self._last_suspicion.get(server.address, -1e9) < 0.5:
                return
            healthy = self._pool._is_healthy(server)
            self._last_suspicion[server.address] = time.monotonic()
        if healthy:
            logger.warning("%s The server answers its health check; the request is sent again.", reason)
        elif self._router.take_out(server, reason):
            logger.error("The server at %s does not answer and is out of service: %s", server.address, reason)

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._stop.wait(self._interval):
            is_due = time.monotonic() - last_check >= self._check_interval and not self._pool.is_paused
            last_check = time.monotonic() if is_due else last_check
            try:
                for server in self._router.out_of_service():
                    self._try_back(server)
                for server in self._router.in_service() if is_due else ():
                    self._check(server)
            except Exception:  # unforeseen by definition; without this thread no server would ever come back
                if not self._stop.is_set():
                    logger.exception("Watching the servers failed, and goes on.")

    def _try_back(self, server: Server) -> None:
        if self._stop.is_set() or not self._pool._is_healthy(server):
            return
        try:
            self._pool._bring_back(server)
        except EngineError as error:
            if server.reason != str(error):
                logger.warning("The server at %s answers again and stays out of service: %s", server.address, error)
            server.reason = str(error)
            return
        self._failed.pop(server.address, None)
        logger.info("The server at %s is back in service.", server.address)

    def _check(self, server: Server) -> None:
        if self._pool._is_healthy(server):
            self._failed.pop(server.address, None)
            return
        self._failed[server.address] = self._failed.get(server.address, 0) + 1
        if self._failed[server.address] >= self._strikes and self._router.take_out(server, "failed its health checks"):
            logger.error("The server at %s failed %d health checks and is out of service.", server.address, self._strikes)
