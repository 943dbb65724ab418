"""Episodes of a run on a cluster: they run in worker processes, which may be lost or join later.

Invariants:

* an episode is leased to one worker at a time; if the worker is lost, the episode is leased again as the same attempt, and continues from
  what the lost worker wrote to the journal;
* its rows come back packed and stay in this process, so losing the worker later loses no rows;
* workers send requests only to servers that this process has in service, and none while weights change.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import JournalError, LostProcessError, ReplayError, RolloutError, RollwrightError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.reading import TaskFiles
from rollwright.experience.journal.records import pack_value
from rollwright.experience.packed import packed_batch
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.processes.supervisor import Process, Supervisor, wait_running
from rollwright.rollout.engines import RemoteEngine
from rollwright.rollout.resume import PastEpisodes, read_past
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Group
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.task_runner import TaskRunner

logger = getLogger("rollout")


class RolloutWorkers:
    """The workers of a run, each a ``RolloutWorker`` in a process of its own.

    Args:
        processes: processes of the workers; they may still be starting.
        timeout: seconds that a worker may take to start.
        drain_timeout: seconds that requests in flight may take to be answered.
        journal: directory of the workers' journals. Without it, an episode that is leased again starts from the beginning.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        timeout: float,
        drain_timeout: float = 3600.0,
        journal: str | Path | None = None,
    ) -> None:
        self._processes = list(processes)
        self._timeout, self._drain_timeout = timeout, timeout + drain_timeout
        self.supervisor = Supervisor(
            processes, purpose="running an episode", timeout=timeout, failed=self.fail, take_in=self._take_in
        )
        self._lock = self.supervisor.lock
        self._sending = threading.Lock()  # so that workers get instructions in the order in which they were given
        self._serving: tuple[list[str], int] = [], 0  # servers in service, and their version
        self._is_held = False
        self._leases: set[Future[Any]] = set()  # answers of the episodes that workers run
        self._failure: RollwrightError | None = None
        self._journal, self._task_files, self._file_lock = journal, TaskFiles(), threading.Lock()
        self._wanted: set[int] = set()  # ordinals of lost episodes that the next reading of the journal has to find
        self._recovered = PastEpisodes()  # found by the latest reading
        self._reading = asyncio.Lock()

    def wait_started(self) -> None:
        """Wait until all workers run; see ``wait_running``."""
        for process in self._processes:
            wait_running(process, self._timeout)

    async def run(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        """See ``EpisodeWorkers``. All samples of a task go to one worker; tasks are distributed round-robin."""
        name = sample.name
        try:
            task = pack_value(group.data)
        except (TypeError, OverflowError) as error:
            raise RolloutError(
                f"the row of {name} cannot travel to a worker: {error}; give numbers, text, lists and dicts."
            ) from error
        lease, past = (tuple(name), task, group.runs[name.index]), group.past.get(name.index)
        while True:
            process = await self._process_of(name.ordinal)
            start, answer = process.started, process.call("run", *lease, past)
            self._leases.add(answer)
            if self._failure is not None:  # the failure came while this lease was made
                self.fail(self._failure)
            try:
                data, metrics = await asyncio.wrap_future(answer)
            except LostProcessError as error:
                logger.warning("%s; %s is leased again", error, name)
                self._lose(process, start)
                past = await self._recorded(name) or past
                continue
            except ReplayError as error:
                sample.episode.diverged = error
                raise
            except asyncio.CancelledError:
                process.call("cancel", tuple(name))
                raise
            finally:
                self._leases.discard(answer)
            self.supervisor.proven(process)
            get_tracker().merge(metrics)
            rows = None if data is None else packed_batch(data)
            if rows is not None and isinstance(group.workflow, TaskRunner):
                group.workflow.ran_elsewhere(group.data, group.runs[name.index], rows)
            return rows

    async def _recorded(self, name: SampleName) -> RecordedEpisode | None:
        """Return what the journal has of an episode, if anything. One reading serves all episodes that were lost together."""
        if self._journal is None or name.is_eval:  # an evaluation starts from the beginning
            return None
        self._wanted.add(name.ordinal)
        async with self._reading:  # acquired in the order of the calls, so the latest reading includes this episode
            if name.ordinal in self._wanted:
                wanted, self._wanted = self._wanted, set()
                try:
                    self._recovered = await asyncio.to_thread(self._read_past, wanted)
                except (JournalError, OSError) as error:
                    self._recovered = PastEpisodes()
                    logger.warning("episodes of a lost worker begin anew: %s", error)
                except asyncio.CancelledError:
                    self._wanted |= wanted  # others wait for this reading, too
                    raise
            past = self._recovered.episodes.get(name.ordinal, {}).get(name.index)
        return past if past is not None and past.begin.attempt == name.attempt else None

    def _read_past(self, ordinals: set[int]) -> PastEpisodes:
        assert self._journal is not None
        with self._file_lock:  # a cancelled call leaves a thread behind that reads on
            return read_past([self._journal], ordinals.__contains__, None, self._task_files)

    async def _process_of(self, ordinal: int) -> Process:
        while self._failure is None:
            if running := self.supervisor.running:
                return running[ordinal % len(running)]
            await asyncio.sleep(0.1)
        raise self._failure

    def add(self, process: Process) -> None:
        """Add a worker. It runs episodes once it has started, however long it waits for resources."""
        self.supervisor.add(process)

    def _lose(self, process: Process, start: Future[None]) -> None:
        self.supervisor.lost(process, start, "lost before it had run an episode")

    def fail(self, failure: RollwrightError) -> None:
        """Run no more episodes: the running ones, and later ones, fail with this error."""
        self._failure, self.supervisor.running = failure, []
        for answer in list(self._leases):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_exception(failure)

    def close(self) -> None:
        """Stop restarting workers. Whoever placed them is responsible for ending them."""
        self.supervisor.close()

    # -- all workers -----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Stop requests because weights are about to change; see ``RolloutWorker.hold``."""
        with self._lock:
            self._is_held = True
        self._send_to_all()

    def release(self, addresses: Sequence[str], version: int) -> None:
        """Resume requests, to the servers at ``addresses``, which hold ``version``."""
        with self._lock:
            self._is_held, self._serving = False, (list(addresses), version)
        self._send_to_all()

    def use_servers(self, addresses: Sequence[str], version: int) -> None:
        """Send requests to these servers from now on; ignored if ``version`` is older than the latest publication."""
        with self._lock:
            if version < self._serving[1]:
                return
            self._serving = list(addresses), version
            if self._is_held:
                return  # workers get the addresses when they are released
        self._send_to_all()

    def _take_in(self, process: Process) -> None:
        """Send the current instruction to a worker that has started, and admit the worker; repeat if the instruction changed meanwhile."""
        is_current = False
        while not is_current:
            with self._lock:
                instruction = self._is_held, self._serving
            for _, error in self._send([process], *instruction):
                raise error
            with self._lock:
                if is_current := instruction == (self._is_held, self._serving):
                    self.supervisor.admit(process)

    def _send_to_all(self) -> None:
        with self._sending:
            with self._lock:
                running, is_held, serving = self.supervisor.running, self._is_held, self._serving
            starts = {process.name: process.started for process in running}
            for process, error in self._send(running, is_held, serving):
                logger.warning("%s", error)
                self._lose(process, starts[process.name])

    def _send(
        self, processes: Sequence[Process], is_held: bool, serving: tuple[list[str], int]
    ) -> list[tuple[Process, LostProcessError]]:
        """Make workers either stop requests or use these servers; return the workers that were lost."""
        method, timeout = ("hold", self._drain_timeout) if is_held else ("release", self._timeout)
        arguments = () if is_held else serving
        lost = list[tuple[Process, LostProcessError]]()
        for process, answer in [(process, process.call(method, *arguments)) for process in processes]:
            try:
                answer.result(timeout)
            except LostProcessError as error:
                lost.append((process, error))
            except TimeoutError as error:
                raise RolloutError(
                    f"{process.name} did not {method} within {timeout:g} s; its log says what it does."
                ) from error
        return lost


class DistributedRolloutEngine(RemoteEngine):
    """A rollout engine that schedules episodes in this process and has workers run them.

    Args:
        config: the ``rollout`` section.
        client: client of the servers; it pauses and resumes them, and adopts the versions that the first rank publishes.
        pool: the workers.
        publisher: returns what the first rank has published (``ServerWeights.publisher``).
        seed: the run's seed.

    Attributes:
        grow: called when the first servers and workers run; places the servers and workers that may join later, and returns both.
    """

    grow: Callable[[], tuple[list[Process], list[Process]]] | None = None

    def __init__(
        self,
        config: RolloutConfig,
        client: RemoteInferenceEngine,
        pool: RolloutWorkers,
        *,
        publisher: Callable[[], tuple[int, Collection[str]]],
        seed: int,
    ) -> None:
        super().__init__(config, client=client, seed=seed)
        self.workers = self.pool = pool
        self._publisher = publisher
        self._workers_run = False

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """See ``RolloutEngine.initialize``; returns when the workers run."""
        super().initialize(*args, **kwargs)
        self._servers.weights.publisher = self._publisher
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
        """See ``RolloutEngine.destroy``. The processes are ended by whoever placed them."""
        self.pool.close()
        super().destroy()

    def pause(self) -> None:
        """See ``RolloutEngine.pause``. Workers stop sending requests as well."""
        self.pool.hold()
        super().pause()

    def resume(self) -> None:
        """See ``RolloutEngine.resume``. Adopts the version of the servers, because a rank may have published."""
        if self._pauses == 1:
            self._servers.weights.adopt_version()
        super().resume()
        if not self._pauses:
            self.pool.release(*self.in_service())

    def set_version(self, version: int) -> None:
        """See ``RolloutEngine.set_version``."""
        is_new = version != self._servers.get_version()
        if is_new and not self._pauses:
            self._servers.weights.adopt_version()
        super().set_version(version)
        if is_new and not self._pauses:
            self.pool.release(*self.in_service())

    def in_service(self) -> tuple[list[str], int]:
        """See ``RemoteEngine``; empty until the workers run, because they are the ones notified."""
        return super().in_service() if self._workers_run else ([], 0)
