"""Rollout on a cluster: a pool of workers that run episodes, servers that come and go, and the engine that holds both.

Invariants:

* an episode is with one worker at a time; where that is lost, the episode is leased again, as the same attempt;
* workers ask only servers that this process has in service, and nothing while weights change;
* a server that was lost is started again, and asked when its weights are proven (``RemoteClient``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rollwright.config.sections import RolloutConfig
from rollwright.errors import LostProcessError, ReplayError, RolloutError, RollwrightError
from rollwright.experience.journal.records import pack_value
from rollwright.experience.packed import unpack_rows
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.weights.publication import RemoteClient
from rollwright.rollout.engines import RemoteEngine
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.task_group import Group
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.task_runner import TaskRunner

logger = getLogger("rollout")

LOOK_SECONDS = 0.5  # between two looks at the servers
#: How often in a row a process may be lost before it has answered.
RESTARTS = 3


class Process(Protocol):
    """A process elsewhere, as ``cluster`` places them."""

    name: str

    @property
    def started(self) -> Future[None]: ...

    def wait_started(self, timeout: float) -> None: ...

    def call(self, method: str, *arguments: Any) -> Future[Any]: ...

    def restart(self) -> None: ...


class WorkerPool:
    """The workers of a run, each a ``RolloutWorker`` in a process of its own.

    Args:
        processes: of the workers; they may be starting yet.
        timeout: seconds that the start of a worker may take.
        drain_timeout: seconds that what workers have asked may take to be answered.
    """

    def __init__(self, processes: Sequence[Process], timeout: float, drain_timeout: float = 3600.0) -> None:
        self._processes = list(processes)
        self._timeout, self._drain_timeout = timeout, timeout + drain_timeout
        self._living = list(processes)
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # so that the last word that workers hear is the last that was said
        self._lost: dict[str, int] = {}  # by name: times in a row
        self._addresses: list[str] = []
        self._is_held = False
        self._failure: RollwrightError | None = None
        self._is_closed = False

    def wait_started(self) -> None:
        """Return when all workers run.

        Raises:
            RollwrightError: one could not start.
        """
        for process in self._processes:
            process.wait_started(self._timeout)

    async def run(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        """See ``Elsewhere``: the samples of a task go to one worker, tasks to one after the other."""
        name = sample.name
        try:
            task = pack_value(group.data)
        except (TypeError, OverflowError) as error:
            raise RolloutError(
                f"the row of {name} cannot travel to a worker: {error}; give numbers, text, lists and dicts."
            ) from error
        lease = tuple(name), task, group.runs[name.index], group.past.get(name.index)
        while True:
            process = await self._process_of(name.ordinal)
            start = process.started
            try:
                packed, metrics = await asyncio.wrap_future(process.call("run", *lease))
            except LostProcessError as error:
                logger.warning("%s; %s is leased again", error, name)
                self._lose(process, start)
                continue
            except ReplayError as error:
                sample.episode.diverged = error
                raise
            except asyncio.CancelledError:
                process.call("cancel", tuple(name))
                raise
            self._lost.pop(process.name, None)
            get_tracker().merge(metrics)
            rows = None if packed is None else unpack_rows(packed)
            if rows is not None and isinstance(group.workflow, TaskRunner):
                group.workflow.ran_elsewhere(group.data, group.runs[name.index], rows)
            return rows

    async def _process_of(self, ordinal: int) -> Process:
        while not (living := self._living):
            if self._failure is not None:
                raise self._failure
            await asyncio.sleep(0.1)
        return living[ordinal % len(living)]

    # -- lost workers ----------------------------------------------------------------------------------------------------

    def _lose(self, process: Process, start: Future[None]) -> None:
        """A call failed that a process was given after this start; where it was started again since, it is not lost."""
        with self._lock:
            if process not in self._living or process.started is not start or self._is_closed:
                return
            self._living = [other for other in self._living if other is not process]
            self._lost[process.name] = self._lost.get(process.name, 0) + 1
            if self._lost[process.name] > RESTARTS:
                self._failure = RolloutError(f"{process.name} was lost {RESTARTS + 1} times before it had run an episode.")
                logger.error("%s It is not started again.", self._failure)
                return
        threading.Thread(target=self._bring_back, args=(process,), name=f"restart {process.name}", daemon=True).start()

    def _bring_back(self, process: Process) -> None:
        try:
            process.restart()
            self._wait_for(process)
            with self._lock:
                held, addresses = self._is_held, self._addresses
            for _, error in self._tell_to([process], held, addresses):
                raise error
        except (RollwrightError, TimeoutError) as error:
            if not self._is_closed:
                self._failure = RolloutError(f"{process.name} could not be started again: {error}")
                logger.error("%s", self._failure)
            return
        with self._lock:
            self._living = [other for other in self._processes if other in self._living or other is process]
            missed = (held, addresses) != (self._is_held, self._addresses)
        logger.info("%s runs again", process.name)
        if missed:
            self._tell()

    def _wait_for(self, process: Process) -> None:
        """Return when it runs: while others do, however long it takes until a node has room for it."""
        deadline = time.monotonic() + self._timeout
        while not self._is_closed:
            try:
                return process.started.result(1.0)
            except TimeoutError:
                if not self._living and time.monotonic() > deadline:
                    raise

    def close(self) -> None:
        """Bring no worker back from now on; they are ended by whoever placed them."""
        self._is_closed = True

    # -- all workers -----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Weights are about to change; see ``RolloutWorker.hold``."""
        with self._lock:
            self._is_held = True
        self._tell()

    def release(self, addresses: Sequence[str]) -> None:
        """Go on with the servers at these addresses."""
        with self._lock:
            self._is_held, self._addresses = False, list(addresses)
        self._tell()

    def use_servers(self, addresses: Sequence[str]) -> None:
        """Other servers are in service now."""
        with self._lock:
            self._addresses = list(addresses)
            if self._is_held:
                return  # they are told when it ends
        self._tell()

    def _tell(self) -> None:
        with self._telling:
            with self._lock:
                told = self._living, self._is_held, self._addresses
            starts = {process.name: process.started for process in told[0]}
            for process, error in self._tell_to(*told):
                logger.warning("%s", error)
                self._lose(process, starts[process.name])

    def _tell_to(
        self, processes: Sequence[Process], is_held: bool, addresses: list[str]
    ) -> list[tuple[Process, LostProcessError]]:
        """Have workers ask nothing, or these servers; returns those that were lost."""
        word, timeout = ("hold", self._drain_timeout) if is_held else ("release", self._timeout)
        arguments = [] if is_held else [addresses]
        lost = list[tuple[Process, LostProcessError]]()
        for process, answer in [(process, process.call(word, *arguments)) for process in processes]:
            try:
                answer.result(timeout)
            except LostProcessError as error:
                lost.append((process, error))
            except TimeoutError as error:
                raise RolloutError(f"{process.name} did not {word} within {timeout:g} s; its log says what it does.") from error
        return lost


class ServerWatch:
    """Starts servers again that are lost, and tells the clients which there are.

    Args:
        processes: of the servers, which have started; each holds an object with ``address()`` and ``check()``, which raises where the
            server has ended.
        changed: told all addresses when one has changed.
        in_service: the addresses that requests may go to.
        tell: told these when they change.
        timeout: seconds that the start of a server may take.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        addresses: Sequence[str],
        *,
        changed: Callable[[list[str]], None],
        in_service: Callable[[], list[str]],
        tell: Callable[[list[str]], None],
        timeout: float,
    ) -> None:
        self._addresses: list[str | None] = list(addresses)  # of each process; None: it is lost
        self._processes = list(processes)
        self._changed, self._in_service, self._tell = changed, in_service, tell
        self._timeout = timeout
        self._told_all, self._told_workers = list(addresses), sorted(addresses)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)

    @property
    def addresses(self) -> list[str]:
        """Of the servers that run."""
        return [address for address in self._addresses if address is not None]

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
                for index, process in enumerate(self._processes):
                    self._look(index, process)
                if (
                    running := self.addresses
                ) and running != self._told_all:  # where all are lost, there is nothing to ask instead
                    self._changed(running)
                    self._told_all = running
                if (present := sorted(self._in_service())) and present != self._told_workers:
                    self._tell(present)
                    self._told_workers = present
            except (
                Exception
            ) as error:  # without this thread no server would come back; what was not told is told at the next look
                if not self._stop.is_set():
                    logger.warning("Not all could be told which servers there are, and are told again: %s", error)

    def _look(self, index: int, process: Process) -> None:
        if self._addresses[index] is None:
            if not process.started.done():
                return
            if (error := process.started.exception()) is not None:
                logger.error("%s could not be started again, and is started once more: %s", process.name, error)
                process.restart()
                return
            self._addresses[index] = process.call("address").result(self._timeout)
            logger.info("%s runs again, at %s", process.name, self._addresses[index])
            return
        try:
            process.call("check").result(self._timeout)
        except RollwrightError as error:
            logger.error("%s was lost and is started again: %s", process.name, str(error).splitlines()[0])
            self._addresses[index] = None
            process.restart()


class PlacedRollout(RemoteEngine):
    """The rollout engine of a run on a cluster: this process decides, workers run the episodes of training.

    Args:
        config: the ``rollout`` section.
        client: of the servers; it pauses and resumes them, and confirms versions, which a rank publishes.
        pool: the workers.
        seed: the run's.
    """

    def __init__(self, config: RolloutConfig, client: RemoteClient, pool: WorkerPool, *, seed: int) -> None:
        super().__init__(config, client=client, seed=seed)
        self.elsewhere = self.pool = pool
        self.watch: ServerWatch | None = None

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``; returns when the workers run."""
        super().initialize(*args, **kwargs)
        self.pool.wait_started()
        if self.watch is not None:
            self.watch.start()

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
            self.pool.release(self.in_service())

    def set_version(self, version: int) -> None:
        """See ``RolloutEngine.set_version``."""
        is_new = version != self._servers.get_version()
        super().set_version(version)
        if is_new and not self._pauses:
            self.pool.release(self.in_service())

    @property
    def _servers(self) -> RemoteClient:
        assert isinstance(self.client, RemoteClient)
        return self.client

    def in_service(self) -> list[str]:
        """Addresses of the servers that requests may go to."""
        return [server.address for server in self._servers.router.in_service()]
