"""A process that runs episodes for another one, with a client of the servers, asked for one episode at a time.

The other process names the episode (ordinal, index, attempt) and decides on retries; it gets the episode's rows, packed. Nothing here
knows how the two processes reach each other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from concurrent.futures import Future
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import BrokenRewardError, RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.records import unpack_value
from rollwright.experience.journal.writing import Journal
from rollwright.experience.packed import pack_rows
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.rollout.episode import EpisodeRunner, Outcome, record_end
from rollwright.rollout.event_loop import LoopThread
from rollwright.rollout.failure_budget import Failure, FailureLog
from rollwright.rollout.sample_engine import SampleEngine, SampleName
from rollwright.rollout.task_group import Group, GroupFactory, GroupState
from rollwright.tracking.metrics import get_tracker

#: An episode's rows, packed (None if it was rejected), and the metrics reported since the last answer.
Answer = tuple[bytes | None, list[Any]]


class RolloutWorker:
    """Runs episodes of one workflow with one engine, and those of held-out tasks.

    Args:
        engine: an engine, connected; it is destroyed with the worker.
        config: limits of episodes (``rollout``).
        workflow: class, instance, registered name or import path.
        workflow_kwargs: arguments of its constructor.
        group_size: samples of a task, which a workflow must not make by itself.
        seed: the run's.
        journal: what episodes are asked and answered is written there.
        evaluation: the workflow of held-out tasks, and arguments of its constructor; None: the same.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig,
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        group_size: int = 1,
        seed: int = 1,
        journal: Journal | None = None,
        evaluation: tuple[Any, dict[str, Any] | None] | None = None,
    ) -> None:
        self.engine = engine
        self._workflow, self._evaluation = (workflow, workflow_kwargs), evaluation
        self._group_size = group_size
        self._factory = GroupFactory()
        self._thread = LoopThread(at_exit=self.close)
        self._episodes = EpisodeRunner(
            engine, config, self._thread.loop, seed, ended=self._ended, stopped=self._stopped, journal=journal
        )
        self._failures = FailureLog(config.max_failed_share)
        self._callers: dict[Group, tuple[SampleName, Future[Trajectory | None]]] = {}
        self._journal = journal
        self._drains = config.on_weight_update == "wait"
        self._thread.start()

    async def run(self, name: tuple[Any, ...], task: bytes, samples_asked: int, past: RecordedEpisode | None = None) -> Answer:
        """Run one episode to its end.

        Args:
            name: the fields of its ``SampleName``.
            task: the row, by ``pack_value``.
            samples_asked: samples that the workflow is asked for.
            past: of the episode, where it goes on.

        Raises:
            ReplayError: it does not run as its past did.
            RolloutError: it failed; the message is the cause in one line, and the traceback is a note.
        """
        sample = SampleName(*name)
        workflow = (self._evaluation if sample.is_eval else None) or self._workflow
        group = self._factory.make(unpack_value(task), *workflow, group_size=self._group_size, is_eval=sample.is_eval)
        group.ordinal, group.runs = sample.ordinal, [samples_asked] * (sample.index + 1)
        if past is not None:
            group.past = {sample.index: past.rewind()}
        ended: Future[Trajectory | None] = Future()
        self._thread.loop.call_soon_threadsafe(self._begin, group, sample, ended)
        rows = await asyncio.wrap_future(ended)
        return None if rows is None else pack_rows(rows), get_tracker().take()

    def cancel(self, name: tuple[Any, ...]) -> None:
        """End an episode whose rows are not wanted any more."""
        self._thread.loop.call_soon_threadsafe(self._cut, SampleName(*name))

    def hold(self) -> None:
        """Weights are about to change: nothing more is asked. With ``on_weight_update: wait``, return when all is answered."""
        if isinstance(self.engine, RemoteInferenceEngine):
            self.engine.weights.hold(drained=self._drains)

    def release(self, addresses: list[str], version: int) -> None:
        """Go on, with the servers at these addresses, which hold this version."""
        if isinstance(self.engine, RemoteInferenceEngine):
            self.engine.weights.follow(addresses, version)

    def close(self) -> None:
        """Cancel what runs, and end the engine. Idempotent."""
        self._thread.stop(lambda: self._episodes.stop(RolloutError("the worker was closed.")))
        self.engine.destroy()
        if self._journal is not None:
            self._journal.close()

    def _begin(self, group: Group, name: SampleName, ended: Future[Trajectory | None]) -> None:
        if self._episodes.stopped_by is not None:
            ended.set_exception(self._episodes.stopped_by)
            return
        group.state = GroupState.RUNNING
        self._callers[group] = name, ended
        with self._episodes.faults_stop():
            self._episodes.start(group, name.index, name.attempt, self.engine.get_version())

    def _cut(self, name: SampleName) -> None:
        for group, (running, _) in self._callers.items():
            if running == name:
                self._episodes.cancel(group, "is not wanted any more")

    def _ended(self, group: Group, sample: SampleEngine, outcome: Outcome, is_cut: bool) -> None:
        if is_cut:
            return
        _, caller = self._callers[group]  # stays there until the end is written, so that ``_stopped`` can tell it
        ended = record_end(sample, outcome, self._failures, group.data)
        error = sample.episode.diverged
        if isinstance(ended, Failure):
            is_broken = isinstance(outcome, BrokenRewardError)  # stops the run, wherever the episode ran
            error = (BrokenRewardError if is_broken else RolloutError)(ended.cause)
            error.add_note(ended.traceback)
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is not None:
                caller.set_exception(error)
            elif not isinstance(ended, Failure):
                caller.set_result(ended)
        del self._callers[group]

    def _stopped(self, error: BaseException) -> None:
        callers, self._callers = self._callers, {}
        for _, caller in callers.values():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                caller.set_exception(error)
