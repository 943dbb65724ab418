"""Runs episodes for the controller in a process of its own, with a client of the servers.

The controller requests one episode at a time by ordinal, index and attempt, decides on retries, and gets the episode's rows packed.
This module does not depend on how the two processes communicate.
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
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Group, GroupFactory, GroupState
from rollwright.rollout.teachers import Teachers
from rollwright.tracking.metrics import get_tracker

#: An episode's rows, packed (None if it was rejected), and the metrics reported since the last answer.
Answer = tuple[bytes | None, list[Any]]


class RolloutWorker:
    """Runs the episodes of a run's workflow, and those of its evaluation, with one engine.

    Args:
        engine: a connected engine; it is destroyed with the worker.
        config: limits of episodes (the ``rollout`` section).
        workflow: class, instance, registered name or import path.
        workflow_kwargs: arguments of the workflow's constructor.
        group_size: samples of a task; if more than 1, the workflow runs with ``n_samples=1``.
        seed: the run's seed.
        journal: records the episodes. None disables recording.
        evaluation: workflow of the evaluation and its constructor's arguments. If None, ``workflow`` is evaluated.
        teachers: score the rows of training samples; they are closed with the worker. None adds no scores.
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
        teachers: Teachers | None = None,
    ) -> None:
        self.engine = engine
        self._teachers = teachers
        self._workflow, self._evaluation = (workflow, workflow_kwargs), evaluation
        self._group_size = group_size
        self._factory = GroupFactory()
        self._thread = LoopThread(at_exit=self.close)
        self._episodes = EpisodeRunner(
            engine,
            config,
            self._thread.loop,
            seed,
            ended=self._ended,
            stopped=self._stopped,
            journal=journal,
            teachers=teachers,
        )
        self._failures = FailureLog(config.max_failed_share)
        self._callers: dict[Group, tuple[SampleName, Future[Trajectory | None]]] = {}
        self._journal = journal
        self._drains = config.on_weight_update == "wait"
        self._thread.start()

    async def run(self, name: tuple[Any, ...], task: bytes, samples_asked: int, past: RecordedEpisode | None = None) -> Answer:
        """Run one episode to its end.

        Args:
            name: fields of its ``SampleName``.
            task: the row, packed by ``pack_value``.
            samples_asked: number of samples requested from the workflow.
            past: earlier run of the episode, to continue from.

        Raises:
            ReplayError: the episode does not run as its past did.
            RolloutError: the episode failed; the message is the cause in one line, and the traceback is a note.
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
        """Cancel an episode whose rows are no longer wanted."""
        self._thread.loop.call_soon_threadsafe(self._cut, SampleName(*name))

    def hold(self) -> None:
        """Send no requests from now on, because weights are about to change.

        With ``on_weight_update: wait``, return when the requests in flight are answered.
        """
        if isinstance(self.engine, RemoteInferenceEngine):
            self.engine.weights.hold(drained=self._drains)

    def release(self, addresses: list[str], version: int) -> None:
        """Resume requests, to the servers at ``addresses``, which hold ``version``."""
        if isinstance(self.engine, RemoteInferenceEngine):
            self.engine.weights.follow(addresses, version)

    def close(self) -> None:
        """Cancel running episodes, and destroy the engine. Idempotent."""
        self._thread.stop(lambda: self._episodes.stop(RolloutError("the worker was closed.")))
        self.engine.destroy()
        if self._teachers is not None:
            self._teachers.close()
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
        _, caller = self._callers[group]  # removed after the end is written, so that ``_stopped`` can answer it
        ended = record_end(sample, outcome, self._failures, group.data)
        error = sample.episode.diverged
        if isinstance(ended, Failure):
            is_broken = isinstance(outcome, BrokenRewardError)  # it stops the run, wherever the episode ran
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
