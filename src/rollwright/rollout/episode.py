"""Runs episodes: ``run`` executes one and returns its rows; ``EpisodeRunner`` runs many concurrently, each within its limits.

Invariants:

* every episode that was started is reported once: when it ends, or a grace period after it was cancelled;
* limits, cancellation and abandonment are decided here and nowhere else;
* a fault in a callback stops rollout, so that nobody waits for a result that will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import JournalError, RolloutError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.durable import EPISODE
from rollwright.experience.journal.writing import Journal
from rollwright.experience.normaliser import normalise
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.processes.child import UNCOUNTED
from rollwright.processes.pool import START_SECONDS
from rollwright.processes.sandbox import sandboxed
from rollwright.rollout.event_loop import place_of
from rollwright.rollout.failure_budget import Failure, FailureLog
from rollwright.rollout.sample_engine import CURRENT_SAMPLE, SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Group
from rollwright.rollout.teachers import Teachers
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import FIGURES, get_tracker

logger = getLogger("rollout")

TRACEBACK_KEPT = 8_000  # characters of a failure's traceback in the journal
GRACE_SECONDS = 10.0  # for a cancelled episode to end

Outcome = Trajectory | BaseException | None  #: Rows, the exception of a failed episode, or None if the workflow rejected it.


async def run(
    sample: SampleEngine,
    workflow: Any,
    data: Mapping[str, Any],
    *,
    sandbox: str,
    check: bool = True,
    teachers: Teachers | None = None,
) -> Trajectory | None:
    """Run an episode in the current asyncio task.

    Args:
        sample: the engine bound to the episode's sample.
        workflow: an instance with ``arun_episode``.
        data: the task.
        sandbox: where Python code written by the model runs.
        check: check the rows against the data contract.
        teachers: score the rows. None adds no scores.

    Returns:
        The normalised rows, or None if the workflow rejected the sample.
    """
    CURRENT_SAMPLE.set(sample)
    EPISODE.set(sample.episode)
    FIGURES.set(sample.episode.figures)
    UNCOUNTED.set(sample.uncounted)
    with sandboxed(sandbox):
        result = await workflow.arun_episode(sample, dict(data))
    rows = normalise(result, sample.recorder, workflow=sample.workflow, task=sample.name)
    if rows is not None and sample.sample_of_row is not None:
        rows["sample_ids"] = torch.tensor(sample.sample_of_row)
    if rows is not None and teachers is not None:
        await teachers.score(rows, sample.engine, data, sample.name)
    if rows is not None and check:
        check_trajectory(rows, workflow=sample.workflow, task=sample.name)
    return rows


def record_end(
    sample: SampleEngine, outcome: Outcome, failures: FailureLog, task: Mapping[str, Any], *, is_final: bool = False
) -> Trajectory | Failure | None:
    """Write the end of an episode to its journal; return its rows, its failure, or None if it was rejected or diverged."""
    if sample.episode.diverged is not None:  # the workflow may have caught the error
        sample.episode.end("diverged", str(sample.episode.diverged)[:2000])
        return None
    if isinstance(outcome, BaseException):
        failure = failures.record(outcome, sample=str(sample.name), task=task, workflow=sample.workflow, is_final=is_final)
        reason = f"{type(outcome).__name__}: {outcome}"[:2000]
        sample.episode.end("failed", reason, traceback=failure.traceback[-TRACEBACK_KEPT:])
        return failure
    sample.episode.end("rejected" if outcome is None else "accepted", rows=outcome)
    return outcome


class EpisodeWorkers(Protocol):
    """Runs episodes in other processes."""

    async def run(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        """Run an episode in another process.

        Returns:
            The normalised and checked rows, or None if the workflow rejected the sample.

        Raises:
            Exception: the episode failed. If it did not run as recorded, ``sample.episode.diverged`` is set as well.
        """
        ...


class EpisodeRunner:
    """Runs episodes on one event loop, each with a time limit.

    Args:
        engine: the engine of the run.
        config: limits of episodes.
        loop: the event loop.
        seed: the run's seed.
        ended: called on the loop once for each episode, as ``ended(group, sample, outcome, is_cut)``. ``is_cut`` is True if the
            episode's group or the whole rollout was over before the episode ended.
        stopped: called when rollout stops for good, with the error.
        journal: records the episodes. None disables recording.
        workers: run the episodes, and record them, in other processes. None runs them on this loop.
        teachers: score the rows of training samples that run on this loop. None adds no scores.

    Attributes:
        stopped_by: the error that stopped rollout for good, or None while it runs.
        abandoned: number of episodes that did not end after their cancellation.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig,
        loop: asyncio.AbstractEventLoop,
        seed: int,
        *,
        ended: Callable[[Group, SampleEngine, Outcome, bool], None],
        stopped: Callable[[BaseException], None],
        journal: Journal | None = None,
        workers: EpisodeWorkers | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self.journal = journal
        self._teachers = teachers
        self.workers = workers
        self.stopped_by: BaseException | None = None
        self.abandoned = 0
        self._engine = engine
        self._config = config
        self._loop = loop
        self._seed = seed
        self._ended = ended
        self._stopped = stopped
        self._running: dict[Group, dict[asyncio.Task[Outcome], SampleEngine]] = {}

    def start(self, group: Group, index: int, attempt: int, version: int) -> None:
        """Start an episode of a group; ``version`` is the current weight version."""
        name = SampleName(group.ordinal, index, attempt, group.is_eval)
        sample = SampleEngine(
            self._engine,
            name,
            run_seed=self._seed,
            loop=self._loop,
            workflow=group.workflow_name,
            episode=group.begin_episode(self.journal if self.workers is None else None, name, version),
        )
        sample.samples_asked = group.runs[index]
        context = contextvars.Context()
        if group.is_eval:  # keeps its metrics apart from those of training
            context.run(get_tracker().enter_scope, "eval")
        task = context.run(self._loop.create_task, self._run(group, sample))
        self._running.setdefault(group, {})[task] = sample
        # Not at the end of the coroutine: a task that is cancelled before its first step never runs any of it.
        task.add_done_callback(functools.partial(self._leave, group), context=contextvars.Context())

    def cancel(self, group: Group, because: str) -> None:
        """Cancel a group's episodes. A workflow that ignores the cancellation gets no further answers."""
        if tasks := dict(self._running.get(group, {})):
            for task, sample in tasks.items():
                sample.close(because)
                task.cancel()
            self._loop.call_later(GRACE_SECONDS, self._abandon, group, list(tasks))

    def stop(self, error: BaseException) -> None:
        """Stop for good: cancel every episode."""
        self.stopped_by = self.stopped_by or error
        for group in list(self._running):
            for task, sample in self._running[group].items():
                sample.close("belongs to a rollout that was stopped")
                task.cancel()
        self._stopped(error)

    @contextlib.contextmanager
    def faults_stop(self) -> Iterator[None]:
        """Stop rollout if the block raises: the event loop would only log the exception, and callers would wait forever."""
        try:
            yield
        except JournalError as error:  # its message is complete
            self.stop(error)
        except Exception as error:  # of any type, because it is a bug
            logger.exception("rollout stops for a fault of its own")
            self.stop(error)

    async def _run(self, group: Group, sample: SampleEngine) -> Outcome:
        """Run one episode within its time limit. An exception of the workflow is returned, not raised."""
        limit, began, task = self._config.sample_timeout, self._loop.time(), asyncio.current_task()
        timer: asyncio.TimerHandle | None = None

        def look(allowed: float) -> None:
            nonlocal timer
            left = allowed + sample.uncounted.seconds - (self._loop.time() - began)
            if left > 0:
                timer = self._loop.call_later(max(left, 0.01), look, allowed)
                return
            # Closed before it is cancelled, so that a workflow that catches the cancellation can make no more model calls.
            sample.close(f"ran out of its {limit:g} s")
            if task is not None:
                task.cancel()
                self._loop.call_later(GRACE_SECONDS, self._abandon, group, [task])

        if limit is not None:  # a worker process enforces its own limit and knows the uncounted time
            look(limit + (START_SECONDS if self.workers is not None else 0.0))
        try:
            if self.workers is not None:
                return await self.workers.run(group, sample)
            config = self._config
            return await run(
                sample,
                group.workflow,
                group.data,
                sandbox=config.sandbox,
                check=config.check_trajectories,
                teachers=None if group.is_eval else self._teachers,
            )
        except asyncio.CancelledError as error:
            if sample.closed_because is None:
                return RolloutError("the workflow ended by a CancelledError of its own; a cancelled part must be caught there.")
            late = RolloutError(
                f"{sample.name} took longer than rollout.sample_timeout={limit or 0:g} s (it had made {len(sample.recorder)} "
                "model calls); raise the limit, or look for a tool that hangs."
            )
            late.__cause__ = error
            return late
        except (Exception, SystemExit) as error:  # a failed workflow is data: it is retried, counted and reported
            return error
        finally:
            if timer is not None:
                timer.cancel()

    def _leave(self, group: Group, task: asyncio.Task[Outcome], abandoned: RolloutError | None = None) -> None:
        """Report an episode that ended or is abandoned."""
        running = self._running.get(group, {})
        sample = running.pop(task, None)
        if sample is None:
            return  # abandoned earlier
        if not running:
            del self._running[group]
        sample.close("has ended")
        if abandoned is not None or task.cancelled():
            outcome: Outcome = abandoned or RolloutError("somebody else cancelled the sample's task.")
        else:
            outcome = task.exception() or task.result()
        with self.faults_stop():
            failure = outcome if isinstance(outcome, JournalError) else None if self.journal is None else self.journal.failure
            if failure is not None and self.stopped_by is None:  # even if the workflow's code swallowed the error
                self.stop(failure)
            is_cut = group.is_over or self.stopped_by is not None
            if is_cut and not isinstance(self.stopped_by, JournalError):  # the journal would raise again
                sample.episode.end("cut", group.reason or "its group is over")
            self._ended(group, sample, outcome, is_cut)

    def _abandon(self, group: Group, tasks: list[asyncio.Task[Outcome]]) -> None:
        """Abandon the episodes that did not end within the grace period after their cancellation."""
        for task in tasks:
            sample = self._running.get(group, {}).get(task)
            if sample is None or self.stopped_by is not None:
                continue
            place = place_of(task)
            self.abandoned += 1
            logger.error(
                "%s of %s goes on %.0f s after it was cancelled (%s), and is abandoned: what it asks is refused, and its place is "
                "given to another. Let CancelledError pass: catch Exception, not everything.",
                sample.name,
                group.workflow_name,
                GRACE_SECONDS,
                place,
            )
            self._leave(group, task, RolloutError(f"{sample.name} did not end when it was cancelled; it waits at {place}."))
            if self.abandoned > self._config.max_concurrent_samples:
                self.stop(
                    RolloutError(
                        f"{self.abandoned} samples did not end when they were cancelled, more than may run at once "
                        f"(rollout.max_concurrent_samples): {group.workflow_name} keeps CancelledError to itself at {place}. Let it "
                        "pass: catch Exception, not everything."
                    )
                )
