"""Watches servers: takes out those that stop answering, and brings them back when they are fit to serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollwright.errors import EngineError
from rollwright.inference.connections import Connections
from rollwright.inference.router import Router, Server
from rollwright.tracking.logging import getLogger

logger = getLogger("Health")

#: Longest wait for a health check.
CHECK_SECONDS = 10.0


def is_healthy(connections: Connections, server: Server) -> bool:
    """One check: True where the server answers ``/health``."""
    try:
        connections.request("GET", f"{server.url}/health", timeout=CHECK_SECONDS)
    except EngineError:
        return False
    return True


def wait_healthy(connections: Connections, server: Server, deadline: float) -> None:
    """Return when the server answers ``/health``.

    Args:
        connections: asks it.
        server: is loading, perhaps.
        deadline: ``time.monotonic()`` at which it is given up.

    Raises:
        EngineError: it did not answer in time.
    """
    started = time.monotonic()
    while not is_healthy(connections, server):
        if time.monotonic() > deadline:
            raise EngineError(
                f"The server at {server.address} was not healthy within {deadline - started:.0f} s. Look at its log; raise "
                "rollout.setup_timeout if its model takes longer to load."
            )
        time.sleep(0.2)


class HealthMonitor:
    """One thread over all servers of a client."""

    def __init__(
        self,
        router: Router,
        is_healthy: Callable[[Server], bool],
        take_out: Callable[[Server, str], bool],
        bring_back: Callable[[Server], None],
        *,
        skip_in_service: Callable[[], bool] = lambda: False,
        interval: float = 1.0,
        check_interval: float = 15.0,
        strikes: int = 3,
    ) -> None:
        """Args:
        router: the servers.
        is_healthy: one check of a server.
        take_out: takes a server out of service for a reason; True where it was in service until then.
        bring_back: makes a server that answers again fit to serve and puts it back, or raises why it is not fit.
        skip_in_service: True while a failed check says nothing (a paused server may not answer one that generates).
        interval: seconds between two looks at the servers that are out.
        check_interval: seconds between two checks of a server in service.
        strikes: failed checks in a row after which a server in service is taken out.
        """
        self._router = router
        self._is_healthy = is_healthy
        self._take_out = take_out
        self._bring_back = bring_back
        self._skip_in_service = skip_in_service
        self._interval = interval
        self._check_interval = check_interval
        self._strikes = strikes
        self._failed: dict[str, int] = {}
        self._last_suspicion: dict[str, float] = {}
        self._locks = {server.address: threading.Lock() for server in router.servers}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
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
            healthy = self._is_healthy(server)
            self._last_suspicion[server.address] = time.monotonic()
        if healthy:
            logger.warning("%s The server answers its health check; the request is sent again.", reason)
        elif self._take_out(server, reason):
            logger.error("The server at %s does not answer and is out of service: %s", server.address, reason)

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._stop.wait(self._interval):
            is_due = time.monotonic() - last_check >= self._check_interval and not self._skip_in_service()
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
        if self._stop.is_set() or not self._is_healthy(server):
            return
        try:
            self._bring_back(server)
        except EngineError as error:
            if server.reason != str(error):
                logger.warning("The server at %s answers again and stays out of service: %s", server.address, error)
            server.reason = str(error)
            return
        self._failed.pop(server.address, None)
        logger.info("The server at %s is back in service.", server.address)

    def _check(self, server: Server) -> None:
        if self._is_healthy(server):
            self._failed.pop(server.address, None)
            return
        self._failed[server.address] = self._failed.get(server.address, 0) + 1
        if self._failed[server.address] >= self._strikes and self._take_out(server, "failed its health checks"):
            logger.error("The server at %s failed %d health checks and is out of service.", server.address, self._strikes)
