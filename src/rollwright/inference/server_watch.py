"""Restarts the lost inference servers of a run, and reports the addresses of the running servers.

A restarted server has a new address. It gets requests again once the client has given it the current weights (``ServerWeights``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollwright.errors import RolloutError, RollwrightError
from rollwright.processes.supervisor import Process, Supervisor
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

LOOK_SECONDS = 0.5  # between two checks of the servers


class ServerWatch:
    """Restarts lost servers.

    A server that is lost several times in a row before it comes into service is given up; when no server is left, the run fails.

    Args:
        processes: processes of the servers, already started. The object in each has ``address()``, and ``check()``, which raises if the
            server has ended.
        addresses: address of each server.
        changed: called with the addresses of all running servers whenever they change.
        in_service: returns the addresses that requests may go to, and the weight version of these servers.
        serve: called with what ``in_service`` returned whenever its addresses change.
        failed: called with the cause when no server is left.
        timeout: seconds that a server may take to start.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        addresses: Sequence[str],
        *,
        changed: Callable[[list[str]], object],
        failed: Callable[[RollwrightError], object],
        timeout: float,
        in_service: Callable[[], tuple[list[str], int]] | None = None,
        serve: Callable[[list[str], int], object] = lambda addresses, version: None,
    ) -> None:
        self._address_of = dict(zip([process.name for process in processes], addresses, strict=True))
        self._changed, self._serve = changed, serve
        self._in_service = in_service or (lambda: (self.addresses, 0))
        self._failed, self._timeout = failed, timeout
        self._known, self._served = list(addresses), sorted(addresses)  # as last reported to ``changed`` and ``serve``
        self._supervisor = Supervisor(
            processes, purpose="coming into service", timeout=timeout, failed=self._fail, take_in=self._take_in
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that run."""
        return [self._address_of[process.name] for process in self._supervisor.running]

    def add(self, process: Process) -> None:
        """Add a server, which gets requests once it has started, however long it has to wait for resources."""
        self._supervisor.add(process)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stop.set()
        self._supervisor.close()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # this thread must continue: without it no server would come back
                if not self._stop.is_set():
                    logger.warning("Could not send the list of servers to every worker; trying again: %s", error)

    def _look(self) -> None:
        for process in self._supervisor.running:
            self._check(process)
        if (running := self.addresses) and running != self._known:  # never empty: it would name no server to use
            self._changed(running)
            self._known = running
        addresses, version = self._in_service()
        if (present := sorted(addresses)) and present != self._served:
            self._serve(present, version)
            self._served = present
        for process in self._supervisor.running:
            if self._address_of[process.name] in present:
                self._supervisor.proven(process)

    def _check(self, process: Any) -> None:
        start = process.started
        try:
            process.call("check").result(self._timeout)
        except RollwrightError as error:
            cause = str(error).splitlines()[0].replace(". The end of ", "; its log is ").removesuffix(":")
            logger.error("%s was lost and is started again: %s", process.name, cause)
            self._supervisor.lost(process, start, error)

    def _take_in(self, process: Any) -> str:
        address = self._address_of[process.name] = process.call("address").result(self._timeout)
        self._supervisor.admit(process)
        return f", at {address}"

    def _fail(self, cause: RolloutError) -> None:
        self._stop.set()
        self._failed(RolloutError(f"No inference server is left: {cause}"))
