"""Episodes on a cluster: a pool of workers that run them, which may be lost, and joined by others.

Invariants:

* an episode is with one worker at a time; where that is lost, the episode is leased again, as the same attempt, and goes on from what
  the lost worker wrote to the journal;
* its rows stay on the worker's node; where that is lost, the episode runs once more as it was recorded, without asking a model;
* workers ask only servers that this process has in service, and nothing while weights change.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rollwright.errors import JournalError, LostProcessError, ReplayError, RolloutError, RollwrightError
from rollwright.experience.contract import KEPT
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.reading import TaskFiles
from rollwright.experience.journal.records import pack_value
from rollwright.experience.kept_rows import KeptRows, ObjectStore, unpack_outline
from rollwright.experience.trajectory import Trajectory
from rollwright.rollout.resume import PastEpisodes, read_past
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Group
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.task_runner import TaskRunner

logger = getLogger("rollout")

#: How often in a row a worker may be lost before it has run an episode, and a server before it was in service.
RESTARTS = 3
#: Lost episodes that are run again at once.
_MADE_TOGETHER = 16


class Process(Protocol):
    """A process elsewhere, as ``cluster`` places them."""

    name: str

    @property
    def started(self) -> Future[None]: ...

    def wait_started(self, timeout: float) -> None: ...

    def call(self, method: str, *arguments: Any) -> Future[Any]: ...

    def call_keeping(self, method: str, *arguments: Any) -> Future[tuple[Any, Any]]:
        """As ``call``, of a method that answers with a pair: its second part stays there, and what comes is a reference."""
        ...

    def restart(self) -> None:
        """Start it again. Raises ``LostProcessError`` where it was ended for good."""
        ...


def wait_running(process: Process, timeout: float, ask: str | None = None) -> Any:
    """Wait for the first start of a process; one that is lost meanwhile is placed again.

    Args:
        process: starts already.
        timeout: seconds that each start may take.
        ask: a method of its object that it has to answer, too.

    Returns:
        What it answered.

    Raises:
        LostProcessError: it was lost ``RESTARTS + 1`` times; the message has the last cause.
        RollwrightError: it runs, and its object could not be made: another place would not help.
    """
    for lost in itertools.count(1):
        try:
            process.wait_started(timeout)
            return None if ask is None else process.call(ask).result(timeout)
        except LostProcessError as error:
            if lost > RESTARTS:
                raise LostProcessError(
                    f"{process.name} was lost {lost} times while it started; the last time: {error}"
                ) from error
            logger.warning("%s; it is placed again", error)
            process.restart()


class WorkerPool:
    """The workers of a run, each a ``RolloutWorker`` in a process of its own.

    Args:
        processes: of the workers; they may be starting yet.
        store: where the rows of their episodes stay.
        timeout: seconds that the start of a worker may take.
        drain_timeout: seconds that what workers have asked may take to be answered.
        journal: the directory of the workers' journals; None: an episode that is leased again begins anew.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        store: ObjectStore,
        timeout: float,
        drain_timeout: float = 3600.0,
        journal: str | Path | None = None,
    ) -> None:
        self._processes, self._store = list(processes), store
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
        self._journal, self._task_files, self._file_lock = journal, TaskFiles(), threading.Lock()
        self._sought: set[int] = set()  # ordinals of lost episodes, of which the journal is to be read
        self._found = PastEpisodes()  # when it was read last
        self._reading = asyncio.Lock()

    def wait_started(self) -> None:
        """Return when all workers run; see ``wait_running``."""
        for process in self._processes:
            wait_running(process, self._timeout)

    async def run(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        """See ``Elsewhere``: the samples of a task go to one worker, tasks to one after the other."""
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
            start, asked = process.started, process.call_keeping("run", *lease, past)
            self._asked.add(asked)
            if self._failure is not None:  # since then
                self.fail(self._failure)
            try:
                (outline, metrics), reference = await asyncio.wrap_future(asked)
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
                self._asked.discard(asked)
            self._lost.pop(process.name, None)
            get_tracker().merge(metrics)
            rows = None if outline is None else unpack_outline(outline, reference, self._store, lease)
            if rows is not None and isinstance(group.workflow, TaskRunner):
                group.workflow.ran_elsewhere(group.data, group.runs[name.index], rows)
            return rows

    def restore(self, lost: Sequence[KeptRows]) -> None:
        """Make rows again whose node was lost: their episodes run as they were recorded, and ask nothing.

        Raises:
            LostProcessError: the journal does not have an episode whole.
            RolloutError: an episode does not come to the same rows again.
        """
        if self._journal is None:
            raise LostProcessError(
                f"the rows of {len(lost)} episodes are lost with their node, and without a journal there is no copy"
            )
        names = [None if kept.lease is None else SampleName(*kept.lease[0]) for kept in lost]
        recorded = self._read_past({name.ordinal for name in names if name is not None}).episodes

        def made_again(kept: KeptRows, name: SampleName | None) -> Any:
            past = None if name is None else recorded.get(name.ordinal, {}).get(name.index)
            if past is None or name is None or past.begin.attempt != name.attempt or not past.is_finished:
                raise LostProcessError(
                    f"the rows of {name or 'a group'} are lost with their node, and the journal does not have them whole"
                )
            assert kept.lease is not None
            return self._made_again(name, (*kept.lease, past), kept.digest)

        with ThreadPoolExecutor(_MADE_TOGETHER) as threads:
            for kept, reference in zip(lost, threads.map(made_again, lost, names), strict=True):
                kept.reference = reference
        logger.info("the rows of %d episodes were lost with their node, and were made again from the journal", len(lost))

    def _made_again(self, name: SampleName, words: tuple[Any, ...], digest: str) -> Any:
        deadline = time.monotonic() + self._timeout
        while self._failure is None:
            for process in self._living:
                start = process.started
                try:
                    (outline, metrics), reference = process.call_keeping("run", *words).result(self._timeout)
                    get_tracker().merge(metrics)  # what others reported there meanwhile is with them
                except LostProcessError as error:
                    logger.warning("%s; %s is run again elsewhere", error, name)
                    self._lose(process, start)  # it may have nothing else to run that would tell
                    continue
                except TimeoutError:
                    raise RolloutError(
                        f"{name} did not end within {self._timeout:g} s as it was run again from the journal"
                    ) from None
                if outline is None or unpack_outline(outline, reference, self._store)[KEPT][0][0].digest != digest:
                    raise RolloutError(
                        f"the rows of {name} are lost with their node, and other ones came as it was run again: its workflow or its reward "
                        "depends on something that is neither seeded nor durable"
                    )
                return reference
            if time.monotonic() > deadline:
                raise LostProcessError(f"no worker ran for {self._timeout:g} s that could make the rows of {name} again")
            time.sleep(0.1)
        raise self._failure

    async def _recorded(self, name: SampleName) -> RecordedEpisode | None:
        """What the journal has of an episode; those that are lost together are looked for together."""
        if self._journal is None or name.is_eval:  # an evaluation begins anew
            return None
        self._sought.add(name.ordinal)
        async with self._reading:  # entered in the order in which they came, so the last that was found has this one
            if name.ordinal in self._sought:
                sought, self._sought = self._sought, set()
                try:
                    self._found = await asyncio.to_thread(self._read_past, sought)
                except (JournalError, OSError) as error:
                    self._found = PastEpisodes()
                    logger.warning("episodes of a lost worker begin anew: %s", error)
                except asyncio.CancelledError:
                    self._sought |= sought  # others wait for what was read for them, too
                    raise
            found = self._found.episodes.get(name.ordinal, {}).get(name.index)
        return found if found is not None and found.begin.attempt == name.attempt else None

    def _read_past(self, ordinals: set[int]) -> PastEpisodes:
        assert self._journal is not None
        with self._file_lock:  # who was cancelled leaves a thread behind that reads on
            return read_past([self._journal], ordinals.__contains__, None, self._task_files)

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
        self._give_up(
            f"{process.name} was started {RESTARTS + 1} times without running an episode, and is not started again; the last time: {cause}"
        )
        return True

    def _give_up(self, words: str) -> None:
        """A worker does not come back; the last one ends the run."""
        logger.error("%s", words)
        with self._lock:
            self._given_up += 1
            none_is_left = self._given_up == len(self._processes)
        if none_is_left:
            self.fail(RolloutError(words))

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
                if not starts and not self._is_restarted(process):
                    return
                starts = False
                self._wait_for(process)
                while not self._take_in(process):  # other words were said meanwhile
                    pass
                break
            except (RollwrightError, TimeoutError) as error:
                if self._is_closed or self._is_given_up(process, error):
                    return
                logger.warning("%s could not be started again, and is started once more: %s", process.name, error)
        logger.info("%s runs%s", process.name, "" if is_new else " again")

    def _is_restarted(self, process: Process) -> bool:
        """Start a process again; False where it was ended for good."""
        try:
            process.restart()
        except LostProcessError as error:
            if not self._is_closed:
                self._give_up(str(error))
            return False
        return True

    def _take_in(self, process: Process) -> bool:
        """Tell a process that runs what the others were told last. True where that is still so: it runs episodes from now on."""
        with self._lock:
            words = self._is_held, self._told
        for _, error in self._tell_to([process], *words):
            raise error
        with self._lock:
            if is_last := words == (self._is_held, self._told):
                self._living = [other for other in self._processes if other in self._living or other is process]
        return is_last

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
        """Other servers are in service now; what was seen before the last publication is not told after it."""
        with self._lock:
            if version < self._told[1]:
                return
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
