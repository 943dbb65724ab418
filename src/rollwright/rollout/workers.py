"""Rollout on a cluster: a pool of workers that run episodes, servers that come and go, and the engine that holds both.

Invariants:

* an episode is with one worker at a time; where that is lost, the episode is leased again, as the same attempt;
* workers ask only servers that this process has in service, and nothing while weights change;
* a server that was lost is started again, and asked when its weights are proven (``RemoteClient``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
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
#: How often in a row a worker may be lost before it has run an episode, and a server before it was in service.
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
        self._given_up = 0
        self._told: tuple[list[str], int] = [], 0  # servers in service, and the version that they hold
        self._is_held = False
        self._asked: set[Future[Any]] = set()  # episodes that are with workers
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
            start, asked = process.started, process.call("run", *lease)
            self._asked.add(asked)
            try:
                packed, metrics = await asyncio.wrap_future(asked)
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
            finally:
                self._asked.discard(asked)
            self._lost.pop(process.name, None)
            get_tracker().merge(metrics)
            rows = None if packed is None else unpack_rows(packed)
            if rows is not None and isinstance(group.workflow, TaskRunner):
                group.workflow.ran_elsewhere(group.data, group.runs[name.index], rows)
            return rows

    async def _process_of(self, ordinal: int) -> Process:
        while self._failure is None:
            if living := self._living:
                return living[ordinal % len(living)]
            await asyncio.sleep(0.1)
        raise self._failure

    def add(self, process: Process) -> None:
        """Take in another worker, which runs episodes when it has started, however long it waits for room."""
        with self._lock:
            self._processes.append(process)
        self._start_thread(process, is_new=True)

    # -- lost workers ----------------------------------------------------------------------------------------------------

    def _start_thread(self, process: Process, is_new: bool = False) -> None:
        name = f"start {process.name}"
        threading.Thread(target=self._bring_in, args=(process, is_new), name=name, daemon=True).start()

    def _lose(self, process: Process, start: Future[None]) -> None:
        """A call failed that a process was given after this start; where it was started again since, it is not lost."""
        with self._lock:
            if process not in self._living or process.started is not start or self._is_closed:
                return
            self._living = [other for other in self._living if other is not process]
        if not self._is_given_up(process, "lost before it had run an episode"):
            self._start_thread(process)

    def _is_given_up(self, process: Process, cause: object) -> bool:
        """Count a start that came to nothing; True where there were too many in a row."""
        self._lost[process.name] = self._lost.get(process.name, 0) + 1
        if self._lost[process.name] <= RESTARTS:
            return False
        failure = RolloutError(
            f"{process.name} was started {RESTARTS + 1} times without running an episode, and is not started again; the last time: {cause}"
        )
        logger.error("%s", failure)
        with self._lock:
            self._given_up += 1
            none_is_left = self._given_up == len(self._processes)
        if none_is_left:
            self.fail(failure)
        return True

    def fail(self, failure: RollwrightError) -> None:
        """Run no more episodes: those that are with workers, and those to come, fail with this cause."""
        self._failure, self._living = failure, []
        for asked in list(self._asked):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                asked.set_exception(failure)

    def _bring_in(self, process: Process, is_new: bool) -> None:
        starts = is_new
        while True:
            try:
                if not starts:
                    process.restart()
                starts = False
                self._wait_for(process)
                with self._lock:
                    is_held, told = self._is_held, self._told
                for _, error in self._tell_to([process], is_held, told):
                    raise error
                break
            except (RollwrightError, TimeoutError) as error:
                if self._is_closed or self._is_given_up(process, error):
                    return
                logger.warning("%s could not be started again, and is started once more: %s", process.name, error)
        with self._lock:
            self._living = [other for other in self._processes if other in self._living or other is process]
            missed = (is_held, told) != (self._is_held, self._told)
        logger.info("%s runs%s", process.name, "" if is_new else " again")
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

    def release(self, addresses: Sequence[str], version: int) -> None:
        """Go on with the servers at these addresses, which hold this version."""
        with self._lock:
            self._is_held, self._told = False, (list(addresses), version)
        self._tell()

    def use_servers(self, addresses: Sequence[str], version: int) -> None:
        """Other servers are in service now."""
        with self._lock:
            self._told = list(addresses), version
            if self._is_held:
                return  # they are told when it ends
        self._tell()

    def _tell(self) -> None:
        with self._telling:
            with self._lock:
                living, is_held, told = self._living, self._is_held, self._told
            starts = {process.name: process.started for process in living}
            for process, error in self._tell_to(living, is_held, told):
                logger.warning("%s", error)
                self._lose(process, starts[process.name])

    def _tell_to(
        self, processes: Sequence[Process], is_held: bool, told: tuple[list[str], int]
    ) -> list[tuple[Process, LostProcessError]]:
        """Have workers ask nothing, or these servers; returns those that were lost."""
        word, timeout = ("hold", self._drain_timeout) if is_held else ("release", self._timeout)
        arguments = () if is_held else told
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
        elif not self._given_up and time.monotonic() - self._answered_at > self._timeout:
            self._fail(f"no server could be started again within {self._timeout:g} s: nothing on the cluster has room for one")

    def _look_at(self, index: int, process: Process) -> None:
        if self._addresses[index] is not None:
            try:
                process.call("check").result(self._timeout)
            except RollwrightError as error:
                logger.error("%s was lost and is started again: %s", process.name, str(error).splitlines()[0])
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
        if self._lost[index] <= RESTARTS:
            process.restart()
            return
        self._given_up.add(index)
        words = f"{process.name} was started {RESTARTS + 1} times without coming into service, and is not started again; the last time: {cause}"
        logger.error("%s", words)
        if len(self._given_up) == len(self._processes):
            self._fail(words)

    def _fail(self, words: str) -> None:
        self._stop.set()
        self._failed(RolloutError(f"No inference server is left: {words}"))


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

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``; returns when the workers run."""
        super().initialize(*args, **kwargs)
        self._servers.publisher = self._publisher
        self.pool.wait_started()
        self.pool.release(*self.in_service())
        servers, workers = ([], []) if self.grow is None else self.grow()
        for process in workers:
            self.pool.add(process)
        if self.watch is not None:
            for process in servers:
                self.watch.add(process)
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
        """Addresses of the servers that requests may go to, and the version that they hold."""
        return [server.address for server in self._servers.router.in_service()], self._servers.get_version()
