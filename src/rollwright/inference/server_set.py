"""The set of servers behind a remote engine: found, watched, called together, and taken out of service when they fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError
from rollwright.inference.connections import Connections
from rollwright.inference.launcher import ended_child
from rollwright.inference.network import find_server_addresses
from rollwright.inference.router import Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("RemoteEngine")

Result = TypeVar("Result")

#: Longest wait for a health check.
CHECK_SECONDS = 10.0
#: Seconds between two checks of the servers that are out of service.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class _Open:
    """State of a server set between ``open`` and ``close``."""

    router: Router
    connections: Connections
    threads: ThreadPoolExecutor


class ServerSet:
    """Servers of one kind, with their connections, their load and the threads that call several of them at once.

    Attributes:
        config: addresses, key and time limits.
        kind: name of the servers in messages.
        launched: servers that were started for this engine, and end with it.
        check_interval: seconds between two health checks of a server in service.
        strikes: number of failed checks in a row after which a server is taken out of service.
    """

    def __init__(self, config: RolloutConfig, kind: str, addresses: Iterable[str] | None = None) -> None:
        """Args:
        config: addresses, key and time limits.
        kind: name of the servers in messages.
        addresses: addresses of the servers. None reads them from the config, then from the environment.
        """
        self.config = config
        self.kind = kind
        self.launched: list[Any] = []
        self.check_interval = 15.0
        self.strikes = 3
        self._given_addresses = None if addresses is None else list(addresses)
        self._open: _Open | None = None
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()

    # -- from start to end ---------------------------------------------------------------------------------------------

    def open(self, addresses: Iterable[str] | None = None) -> Router:
        """Find the servers and prepare the connections, without calling any server.

        Args:
            addresses: overrides the addresses given on construction.

        Raises:
            ConfigError: an address is malformed.
            EngineError: no server is known.
        """
        found = self._given_addresses if addresses is None else list(addresses)
        router = Router(find_server_addresses(self.config.addresses) if found is None else found)
        api_key = self.config.api_key or os.environ.get("ROLLWRIGHT_API_KEY")
        connections = Connections(api_key=api_key, timeout=self.config.request_timeout)
        threads = ThreadPoolExecutor(max(4, len(router.servers)), thread_name_prefix=f"{self.kind}-control")
        self._open = _Open(router, connections, threads)
        return router

    def close(self) -> None:
        """Stop watching and close every connection. Servers keep running unless this engine launched them."""
        self.stop_watching()
        closed, self._open = self._open, None
        if closed is not None:
            closed.threads.shutdown(wait=False, cancel_futures=True)
            closed.connections.close()
        while self.launched:
            self.launched.pop().close()

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise EngineError(f"The client of the {self.kind} servers is not connected: call initialize() first.")
        return self._open

    @property
    def is_open(self) -> bool:
        """True between ``open`` and ``close``."""
        return self._open is not None

    @property
    def connections(self) -> Connections:
        """HTTP connections to the servers."""
        return self._opened.connections

    @property
    def router(self) -> Router:
        """The servers and their load."""
        return self._opened.router

    # -- health --------------------------------------------------------------------------------------------------------

    def is_healthy(self, server: Server) -> bool:
        """Check once whether a server answers ``/health``."""
        try:
            self.ask(server, "GET", "/health", timeout=CHECK_SECONDS)
        except EngineError:
            return False
        return True

    def wait_healthy(self) -> None:
        """Wait until every server answers ``/health``.

        Raises:
            EngineError: a server has ended, or is not healthy within ``setup_timeout``.
        """
        deadline = time.monotonic() + self.config.setup_timeout
        self.each(lambda server: self._wait_healthy(server, deadline), self.router.servers)

    def _wait_healthy(self, server: Server, deadline: float) -> None:
        started = time.monotonic()
        while not self.is_healthy(server):
            for launched in self.launched:
                launched.check(server.address)
            if not self.launched and (command := ended_child(server.address)):
                raise EngineError(
                    f"The server at {server.address} ended before it was healthy: no child of this process runs the command that "
                    f"build_cmd gave for it. Look at its output, and start it again ({command}); if it was started elsewhere, call "
                    "initialize() again when it is healthy."
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The server at {server.address} was not healthy within {deadline - started:.0f} s. Look at its log; raise "
                    "rollout.setup_timeout if its model takes longer to load."
                )
            time.sleep(0.2)

    def watch(self, bring_back: Callable[[Server], None], is_paused: Callable[[], bool]) -> None:
        """Start a thread that takes out servers that stop answering, and brings them back when they can serve again.

        Args:
            bring_back: prepares a server that answers again and puts it back in service, or raises an ``EngineError``.
            is_paused: while true, servers in service are not checked, because a paused server may not answer a check that generates.
        """
        self._closed = threading.Event()
        arguments = self.router, self._closed, bring_back, is_paused
        self._watch = threading.Thread(target=self._run_watch, args=arguments, name="health-monitor", daemon=True)
        self._watch.start()

    def stop_watching(self) -> None:
        """End the health checks, waiting briefly for one that is running."""
        self._closed.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(timeout=2.0)

    def suspect(self, server: Server, reason: str) -> None:
        """After a failed request, check the server at once and take it out unless it answers. A burst of failures causes one check."""
        opened = self._open
        with server.suspicion:
            if opened is None or not server.in_service or time.monotonic() - server.suspected_at < 0.5:
                return
            healthy = self.is_healthy(server)
            server.suspected_at = time.monotonic()
        if healthy:
            logger.warning("%s The server answers its health check; the request is sent again.", reason)
        else:
            opened.router.take_out(server, f"it does not answer: {reason}")

    def _run_watch(
        self, router: Router, closed: threading.Event, bring_back: Callable[[Server], None], is_paused: Callable[[], bool]
    ) -> None:
        last_check = time.monotonic()
        while not closed.wait(_LOOK_SECONDS):
            is_due = time.monotonic() - last_check >= self.check_interval and not is_paused()
            last_check = time.monotonic() if is_due else last_check
            try:
                for server in router.servers:
                    if closed.is_set():
                        return
                    if not server.in_service:
                        self._try_back(server, bring_back)
                    elif is_due:
                        self.check(server)
            except Exception:  # without this thread no server would ever come back
                if not closed.is_set():
                    logger.exception("Watching the servers failed, and goes on.")

    def _try_back(self, server: Server, bring_back: Callable[[Server], None]) -> None:
        if not self.is_healthy(server):
            return
        try:
            bring_back(server)
        except EngineError as error:
            if server.reason != str(error):
                logger.warning("The server at %s answers again and stays out of service: %s", server.address, error)
            server.reason = str(error)
            return
        server.failed_checks = 0
        logger.info("The server at %s is back in service.", server.address)

    def check(self, server: Server) -> None:
        """Check a server in service, and take it out after too many failures in a row."""
        server.failed_checks = 0 if self.is_healthy(server) else server.failed_checks + 1
        if server.failed_checks >= self.strikes:
            self.router.take_out(server, f"it failed {server.failed_checks} health checks in a row")

    def answering(self) -> list[Server]:
        """Return the servers that answer a health check, in service or not, and take the others out of service.

        If none answers, wait up to ``setup_timeout`` for one: the only server may be busy or restarting.

        Raises:
            EngineError: all servers that were started for this engine have ended.
        """
        servers, deadline = self.router.servers, time.monotonic() + self.config.setup_timeout
        while not any(healthy := self.each(self.is_healthy, servers)) and time.monotonic() < deadline:
            self.raise_if_all_ended()
            time.sleep(0.2)
            servers = self.router.servers  # servers may have joined
        answering = [server for server, answers in zip(servers, healthy, strict=True) if answers]
        for server in servers:
            if server not in answering:
                self.router.take_out(server, "it did not answer when weights were published")
        return answering

    def raise_if_all_ended(self) -> None:
        """Raise an ``EngineError`` if all servers that were started for this engine have ended."""
        for launched in self.launched:
            launched.check()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def ask(self, server: Server, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Make one synchronous call to a server.

        Args:
            server: the server.
            method, path: HTTP method and path.
            body: sent as JSON.
            timeout: seconds. None uses ``setup_timeout``, so a server that hangs does not block the others forever.

        Raises:
            EngineError: see ``Connections.request``.
        """
        limit = self.config.setup_timeout if timeout is None else timeout
        return self.connections.request(method, f"{server.url}{path}", body, timeout=limit)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Start one call in a thread of this engine."""
        return self._opened.threads.submit(function, *arguments)

    def settled(
        self, action: Callable[[Server], Result], servers: Iterable[Server], alongside: Callable[[], object] = lambda: None
    ) -> tuple[dict[Server, Result], dict[Server, EngineError]]:
        """Run ``action`` on all servers at once and wait for all of them.

        Args:
            action: called with each server.
            servers: servers to act on.
            alongside: called in this thread while the servers work.

        Returns:
            The results of the servers that succeeded, and the errors of the others.
        """
        done: dict[Server, Result] = {}
        failed: dict[Server, EngineError] = {}
        running = [(server, self.submit(action, server)) for server in servers]
        alongside()
        for server, future in running:
            try:
                done[server] = future.result()
            except EngineError as error:
                failed[server] = error
        return done, failed

    def each(self, action: Callable[[Server], Result], servers: Iterable[Server]) -> list[Result]:
        """Run ``action`` on all servers at once, and raise the first failure after all are done."""
        done, failed = self.settled(action, servers)
        if failed:
            raise next(iter(failed.values()))
        return list(done.values())

    def each_in_service(self, action: Callable[[Server], Result], what: str) -> dict[Server, Result]:
        """Run ``action`` on all servers in service at once, and take out those that raise an ``EngineError``.

        Args:
            action: called with each server.
            what: completes "it could not …" in the log.

        Raises:
            EngineError: all servers that were started for this engine have ended.
        """
        return self.each_of(self.router.in_service(), action, what)

    def each_of(self, servers: Iterable[Server], action: Callable[[Server], Result], what: str) -> dict[Server, Result]:
        """Do the same as ``each_in_service`` with other servers."""
        done, failed = self.settled(action, servers)
        for server, error in failed.items():
            self.router.take_out(server, f"it could not {what}: {error}")
        if failed and not done:
            self.raise_if_all_ended()
        return done
