"""The rollout engine of a run on a cluster, and its servers, which come and go.

A server that was lost is started again, and asked when its weights are proven (``RemoteClient``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import LostProcessError, RolloutError, RollwrightError
from rollwright.inference.weights.publication import RemoteClient
from rollwright.rollout.engines import RemoteEngine
from rollwright.rollout.workers import RESTARTS, Process, WorkerPool
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

LOOK_SECONDS = 0.5  # between two looks at the servers


class PlacedRollout(RemoteEngine):
    """The rollout engine of a run on a cluster: this process decides, workers run the episodes of training.

    Args:
        config: the ``rollout`` section.
        client: of the servers; it pauses and resumes them, and follows what a rank publishes.
        pool: the workers.
        publisher: says what a rank has published (``RemoteClient.publisher``).
        seed: the run's.

    Attributes:
        grow: places what may join beyond the least number, when that runs: servers, and workers.
    """

    grow: Callable[[], tuple[list[Process], list[Process]]] | None = None

    def __init__(
        self,
        config: RolloutConfig,
        client: RemoteClient,
        pool: WorkerPool,
        *,
        publisher: Callable[[], tuple[int, Collection[str]]],
        seed: int,
    ) -> None:
        super().__init__(config, client=client, seed=seed)
        self.elsewhere = self.pool = pool
        self.watch: ServerWatch | None = None
        self._publisher = publisher
        self._workers_run = False

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``; returns when the workers run."""
        if self.watch is not None:
            self.watch.start()  # a server may be lost while others are waited for
        super().initialize(*args, **kwargs)
        self._servers.publisher = self._publisher
        self.pool.wait_started()
        self._workers_run = True
        self.pool.release(*self.in_service())
        servers, workers = ([], []) if self.grow is None else self.grow()
        for process in workers:
            self.pool.add(process)
        if self.watch is not None:
            for process in servers:
                self.watch.add(process)

    def destroy(self) -> None:
        """See ``RolloutEngine.destroy``; the processes are ended by whoever placed them."""
        self.pool.close()
        if self.watch is not None:
            self.watch.close()
        super().destroy()

    def pause(self) -> None:
        """See ``RolloutEngine.pause``; workers ask for nothing, either."""
        self.pool.hold()
        super().pause()

    def resume(self) -> None:
        """See ``RolloutEngine.resume``; the version is that which the servers hold now, as a rank may have published."""
        if self._pauses == 1:
            self._servers.adopt_version()
        super().resume()
        if not self._pauses:
            self.pool.release(*self.in_service())

    def set_version(self, version: int) -> None:
        """See ``RolloutEngine.set_version``."""
        is_new = version != self._servers.get_version()
        if is_new and not self._pauses:
            self._servers.adopt_version()
        super().set_version(version)
        if is_new and not self._pauses:
            self.pool.release(*self.in_service())

    @property
    def _servers(self) -> RemoteClient:
        assert isinstance(self.client, RemoteClient)
        return self.client

    def in_service(self) -> tuple[list[str], int]:
        """Addresses of the servers that requests may go to, and the version that they hold; none before workers run, which are told."""
        if not self._workers_run:
            return [], 0
        return [server.address for server in self._servers.router.in_service()], self._servers.get_version()


class ServerWatch:
    """Starts servers again that are lost, and tells the clients which there are.

    A server that is lost several times in a row before it was in service is given up; when none is left, the run fails.

    Args:
        processes: of the servers, which have started; each holds an object with ``address()`` and ``check()``, which raises where the
            server has ended.
        changed: told all addresses when one has changed.
        in_service: the addresses that requests may go to, and the version that these servers hold.
        tell: told these when they change.
        failed: told why no server is left.
        timeout: seconds that the start of a server may take.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        addresses: Sequence[str],
        *,
        changed: Callable[[list[str]], None],
        in_service: Callable[[], tuple[list[str], int]],
        tell: Callable[[list[str], int], None],
        failed: Callable[[RollwrightError], None],
        timeout: float,
    ) -> None:
        self._addresses: list[str | None] = list(addresses)  # of each process; None: it is lost
        self._processes = list(processes)
        self._changed, self._in_service, self._tell, self._failed = changed, in_service, tell, failed
        self._timeout = timeout
        self._told_all, self._told_workers = list(addresses), sorted(addresses)
        self._lost = [0] * len(self._processes)  # times in a row
        self._given_up: set[int] = set()
        self._answered_at = time.monotonic()  # when one ran
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)

    @property
    def addresses(self) -> list[str]:
        """Of the servers that run."""
        return [address for address in self._addresses if address is not None]

    def add(self, process: Process) -> None:
        """Take in another server, which is asked when it has started, however long it waits for room."""
        self._addresses.append(None)
        self._lost.append(0)
        self._processes.append(process)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self._look()
            except (
                Exception
            ) as error:  # without this thread no server would come back; what was not told is told at the next look
                if not self._stop.is_set():
                    logger.warning("Not all could be told which servers there are, and are told again: %s", error)

    def _look(self) -> None:
        for index, process in enumerate(self._processes):
            if index not in self._given_up:
                self._look_at(index, process)
        # Where all are lost, there is nothing to ask instead.
        if (running := self.addresses) and running != self._told_all:
            self._changed(running)
            self._told_all = running
        addresses, version = self._in_service()
        if (present := sorted(addresses)) and present != self._told_workers:
            self._tell(present, version)
            self._told_workers = present
        for index, address in enumerate(self._addresses):
            if address in present:
                self._lost[index] = 0
        if running:
            self._answered_at = time.monotonic()
        elif time.monotonic() - self._answered_at > self._timeout and not self._stop.is_set():
            self._fail(f"no server could be started again within {self._timeout:g} s: nothing on the cluster has room for one")

    def _look_at(self, index: int, process: Process) -> None:
        if self._addresses[index] is not None:
            try:
                process.call("check").result(self._timeout)
            except RollwrightError as error:
                cause = str(error).splitlines()[0].replace(". The end of ", "; its log is ").removesuffix(":")
                logger.error("%s was lost and is started again: %s", process.name, cause)
                self._addresses[index] = None
                self._start_again(index, process, error)
            return
        if not process.started.done():
            return
        try:
            process.started.result()
            self._addresses[index] = process.call("address").result(self._timeout)
        except RollwrightError as error:
            logger.error("%s could not be started again: %s", process.name, error)
            self._start_again(index, process, error)
        else:
            logger.info("%s runs again, at %s", process.name, self._addresses[index])

    def _start_again(self, index: int, process: Process, cause: RollwrightError) -> None:
        self._lost[index] += 1
        words = f"{process.name} was started {RESTARTS + 1} times without coming into service, and is not started again; the last time: {cause}"
        if self._lost[index] <= RESTARTS:
            try:
                process.restart()
                return
            except LostProcessError as error:  # it was ended for good
                words = str(error)
        self._given_up.add(index)
        logger.error("%s", words)
        if len(self._given_up) == len(self._processes):
            self._fail(words)

    def _fail(self, words: str) -> None:
        self._stop.set()
        self._failed(RolloutError(f"No inference server is left: {words}"))
