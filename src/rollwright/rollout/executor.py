"""The executor: runs thousands of samples on one event loop, and lets callers wait for them with blocking calls.

All methods are synchronous and may be called from any thread, even one that runs its own event loop (as in a notebook), because samples
run on the executor's own loop and thread.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import BrokenRewardError, ConfigError, DatasetEnded, ReplayError, RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.writing import Journal
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.compute_threads import release_workers
from rollwright.inference.engine import InferenceEngine
from rollwright.rollout.episode import EpisodeRunner, EpisodeWorkers, Outcome, record_end
from rollwright.rollout.event_loop import LoopThread
from rollwright.rollout.failure_budget import Failure, with_cause
from rollwright.rollout.lessons import Lessons
from rollwright.rollout.resume import PastEpisodes, ReplayOrder, read_past
from rollwright.rollout.sample_engine import SampleEngine
from rollwright.rollout.scheduler import GroupScheduler
from rollwright.rollout.task_group import AcceptFunction, Batch, Group, GroupFactory, GroupState, TaskSource
from rollwright.rollout.teachers import Teachers
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

MAX_UNDELIVERED_TASKS = 65_536
PAUSED_WARNING_SECONDS = 30.0
EPOCHS_WITHOUT_ACCEPTANCE = 2
_TURN_SECONDS = 1.0  # between two calls of ``while_waiting``


@dataclass(eq=False)
class Waiter:
    """A caller whose thread waits for ``future``.

    Args:
        take: called on the loop after each change. Returns the groups, or None if they are not ready; may raise ``RolloutError``.
        caller: id of the calling thread, if it takes groups for training and must release them later.
        own_groups: groups that only this caller waits for; they are dropped if the caller gives up.
    """

    take: Callable[[], list[Group] | None]
    caller: int | None = None
    own_groups: Sequence[Group] = ()
    future: concurrent.futures.Future[list[Group]] = field(default_factory=concurrent.futures.Future)

    def fail(self, error: BaseException) -> None:
        """Answer the caller with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class RolloutExecutor:
    """Runs workflows on many tasks at a time and returns their trajectories.

    Args:
        engine: serves the model calls of all samples.
        config: limits and policies of rollout.
        seed: the run's seed, from which the seeds of all requests derive.
        deterministic: batches leave in the order of their ordinals (docs/determinism.md).
        batch_size: groups in a training batch, for the admission rule. If None, ``prepare_batch`` sets it.
        journal: records the episodes. None disables recording.
        workers: run the episodes in other processes. None runs them on this executor's loop.
        teachers: score the rows of training samples. None adds no scores.

    Raises:
        ConfigError: ``over_sampling`` is set in deterministic mode, but which samples it cuts depends on timing.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig | None = None,
        *,
        seed: int = 1,
        deterministic: bool = False,
        batch_size: int | None = None,
        journal: Journal | None = None,
        workers: EpisodeWorkers | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self.config = config or RolloutConfig()
        if deterministic and self.config.over_sampling > 0:
            raise ConfigError(
                f"rollout.over_sampling={self.config.over_sampling} cuts whichever samples are slowest, so a run cannot repeat: "
                "set it to 0, or deterministic to false."
            )
        self.engine = engine
        self._thread = LoopThread(at_exit=self.destroy)
        self._call = self._thread.call
        self._episodes = EpisodeRunner(
            engine,
            self.config,
            self._thread.loop,
            seed,
            ended=self._sample_ended,
            stopped=self._fail_waiters,
            journal=journal,
            workers=workers,
            teachers=teachers,
        )
        self._scheduler = GroupScheduler(self.config, deterministic, batch_size, engine.get_version())
        self._waiters: list[Waiter] = []
        self._reaction_is_due = False
        self._lessons = Lessons(engine.get_version)
        self._factory = GroupFactory(self._lessons)
        self._sources: dict[int, TaskSource] = {}  # by the id of the dataloader, which they keep alive
        self._restored: deque[dict[str, Any]] = deque()  # tasks drawn but not trained before the checkpoint
        self._past = PastEpisodes()  # recorded by earlier processes of the run
        self._prepare_lock = threading.Lock()
        #: Called about once a second in a thread that waits for groups.
        self.while_waiting: Callable[[], object] = lambda: None

    # -- one task at a time --------------------------------------------------------------------------------------------

    def submit(
        self,
        data: dict[str, Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFunction | str | None = None,
        group_size: int = 1,
        is_eval: bool = False,
        past: Mapping[int, RecordedEpisode] | None = None,
    ) -> int:
        """Queue a task. It runs when the admission rule and the concurrency limit allow it.

        Args:
            data: the task. Its ``ordinal``, if it has one, identifies the draw; seeds derive from it.
            workflow: class, instance, registered name or import path.
            workflow_kwargs: arguments of the workflow's constructor.
            should_accept_fn: a function, or its import path, that gets the group's trajectory and returns whether to use it.
            group_size: samples of the task; use 1 for a workflow that makes its own group.
            is_eval: the task is for evaluation. It is not counted by the admission rule and not subject to ``dynamic_filter``; take it
                with ``wait(…, is_eval=True)``.
            past: recorded episodes by sample index (see ``rollout.resume.read_past``); the samples continue from them.

        Returns:
            Id of the task, for ``wait_for_task``.

        Raises:
            RolloutError: too many submitted tasks have not been taken yet, or rollout has stopped.
        """
        self._start()
        if len(self._scheduler.tasks) >= MAX_UNDELIVERED_TASKS:
            raise RolloutError(
                f"{MAX_UNDELIVERED_TASKS} tasks are queued, running or ready already: take results with wait() before submitting more."
            )
        group = self._factory.make(data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        group.past = dict(past or {})
        self._scheduler.tasks[group.task_id] = group  # added here because the loop may be far behind
        self._thread.loop.call_soon_threadsafe(self._enqueue, [group])
        return group.task_id

    def wait(self, count: int, timeout: float | None = None, is_eval: bool = False) -> Trajectory:
        """Take ``count`` complete groups of the submitted tasks.

        Args:
            count: number of groups.
            timeout: seconds to wait. None waits as long as queued or running tasks can complete the groups.
            is_eval: take groups that were submitted with ``is_eval``.

        Returns:
            The rows of these groups as one trajectory.

        Raises:
            TimeoutError: the groups are not complete in time; those that are complete stay for the next call.
            RolloutError: no timeout was given and no queued or running task can complete the groups; or rollout has stopped.
        """
        if count < 1:
            raise RolloutError(f"wait({count}): wait for at least one group.")
        scheduler, caller = self._scheduler, threading.get_ident()

        def take() -> list[Group] | None:
            groups = scheduler.take_ready(count, is_eval=True) if is_eval else scheduler.take(count)
            if groups is not None:
                return groups
            if not is_eval:
                scheduler.refuse_if_stuck(caller, f"{count} groups are asked for, but")
                may_come = scheduler.has_work
            else:
                may_come = any(group.is_eval for group in list(scheduler.tasks.values()) if not group.is_over)
            if timeout is None and not scheduler.is_paused and not may_come:
                raise with_cause(
                    f"wait({count}): only {scheduler.ready(is_eval)} groups are ready, and no task is queued or running that could "
                    f"bring more ({scheduler.describe()}). Submit more tasks, or wait with a timeout for those of another thread.",
                    scheduler.failures.first,
                )
            return None

        return self._await(Waiter(take, caller), timeout, f"wait({count})")

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Trajectory:
        """Take the group of one submitted task.

        Raises:
            TimeoutError: the group is not complete in time.
            RolloutError: the task was rejected, dropped, failed, delivered already or never submitted.
        """
        scheduler, caller = self._scheduler, threading.get_ident()
        group, reason = self._call(lambda: (scheduler.tasks.get(task_id), scheduler.reasons.get(task_id)))
        if group is None:
            raise RolloutError(
                f"task {task_id} gives no trajectory: {reason}."
                if reason
                else f"task {task_id} was delivered already, or never submitted: a group is delivered once."
            )

        def take() -> list[Group] | None:
            if group.state in (GroupState.DROPPED, GroupState.FAILED):
                raise RolloutError(f"{group} gives no trajectory: {group.reason}.")
            if group.state is GroupState.DELIVERED:
                raise RolloutError(f"{group} was delivered already; a group is delivered once.")
            if group.state is GroupState.QUEUED and not group.is_eval:
                scheduler.refuse_if_stuck(caller, f"{group} cannot start:")
            return scheduler.take_one(group)

        return self._await(Waiter(take, caller), timeout, f"wait_for_task({task_id})")

    def wait_for_any(self, timeout: float | None = None) -> dict[int, Trajectory | str]:
        """Wait until a submitted task has ended, and take all submitted tasks that have ended by then.

        Args:
            timeout: seconds to wait. None waits until a task ends.

        Returns:
            For each task id, the rows of its group or the reason why there are none.

        Raises:
            TimeoutError: no task ended in time.
            RolloutError: rollout has stopped.
        """
        failed: dict[int, Trajectory | str] = {}

        def take() -> list[Group] | None:
            failed.update(self._scheduler.reasons)
            self._scheduler.reasons.clear()
            ready = self._scheduler.take_ready()
            return ready if ready or failed else None

        groups = self._wait_for_groups(Waiter(take), timeout, "wait_for_any")
        return failed | {group.task_id: group.join() for group in groups}

    def abandon(self, task_ids: Iterable[int]) -> None:
        """Drop submitted tasks whose groups nobody will take; running samples are cancelled."""
        tasks = self._scheduler.tasks
        self._call(lambda: self._drop_abandoned([tasks[task_id] for task_id in task_ids if task_id in tasks]))

    # -- many tasks ----------------------------------------------------------------------------------------------------

    def rollout_batch(
        self,
        data_list: Sequence[dict[str, Any]],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFunction | str | None = None,
        group_size: int = 1,
        is_eval: bool = False,
    ) -> Trajectory:
        """Run these tasks and return when all of them have ended.

        They start at once, regardless of the admission rule. Tasks that are rejected or given up are left out and not replaced
        (``prepare_batch`` replaces them).

        Returns:
            The rows of the accepted groups, in the order of ``data_list``.

        Raises:
            RolloutError: no group was accepted; the message gives the reasons and the first failure.
        """
        tasks = list(data_list)
        if not tasks:
            raise RolloutError("rollout_batch was given no tasks: give at least one.")
        self._start()
        batch = Batch(len(tasks))
        groups = [
            self._factory.make(data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval, place, batch)
            for place, data in enumerate(tasks)
        ]

        def take() -> list[Group] | None:
            if batch.missing:
                return None
            accepted = [group for group in groups if group.state is GroupState.READY]
            self._scheduler.deliver(accepted)
            return accepted

        trajectory = self._await(Waiter(take, own_groups=groups), None, "rollout_batch", groups)
        if not trajectory:
            reasons = "; ".join(sorted({group.reason for group in groups})[:4])
            first = next((group.failure for group in groups if group.failure is not None), None)
            raise with_cause(f"rollout_batch: none of {len(tasks)} tasks was accepted ({reasons}).", first)
        return trajectory

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFunction | str | None = None,
        group_size: int = 1,
        batch_size: int | None = None,
    ) -> Trajectory:
        """Return the next training batch, and keep enough work in flight for the following ones.

        Tasks are drawn as the admission rule frees slots; a group that is rejected, filtered, dropped or given up is replaced. A
        dataloader continues with its next epoch. An iterator ends instead, so the last batch may be smaller.

        Args:
            dataloader: yields rows or lists of rows; pass the same object in every call.
            workflow, workflow_kwargs, should_accept_fn, group_size: as for ``submit``.
            batch_size: groups in the batch. None uses the dataloader's batch size.

        Returns:
            The rows of a batch of groups, in the order of their tasks.

        Raises:
            DatasetEnded: an iterator ended, and no group is left.
            RolloutError: no group was accepted in two epochs, earlier batches are not published yet, or rollout has stopped.
            DataError: the dataset is empty or yields values that are not tasks.
        """
        self._start()
        scheduler, caller = self._scheduler, threading.get_ident()
        with self._prepare_lock:
            source = self._sources.get(id(dataloader))
            if source is None:
                source = self._sources[id(dataloader)] = TaskSource(dataloader, self._restored)
            count = batch_size or source.batch_size
            if count < 1:
                raise DatasetEnded("prepare_batch: the dataloader has ended and no group is left.")
            is_over = False

            def take() -> list[Group] | None:
                """Return a batch, None if it is not ready, or an empty list if more tasks should be drawn or the dataset ended."""
                if is_over and not scheduler.has_work:
                    return scheduler.take(count, final=True) or []
                groups = scheduler.take(count)
                if groups is None and not is_over and scheduler.wanted() > 0:
                    return []
                if groups is None:
                    scheduler.refuse_if_stuck(caller, f"{count} groups are asked for, but")
                return groups and sorted(
                    groups, key=lambda group: group.ordinal
                )  # so that minibatches do not depend on arrival

            self._call(scheduler.use_batch_size, count)
            epochs, accepted = source.epochs, scheduler.groups["accepted"]
            while True:
                rows = scheduler.replay.draw(source, self._call(scheduler.wanted))
                rows = [self._past.row(self._factory.completed(row, workflow, workflow_kwargs)) for row in rows]
                groups = [self._factory.make(row, workflow, workflow_kwargs, should_accept_fn, group_size) for row in rows]
                for group in groups:
                    group.past = self._past.episodes.pop(group.ordinal, {})
                is_over = source.is_over and not scheduler.replay.deferred
                taken = self._await(Waiter(take, caller), None, "prepare_batch", groups)
                if taken:
                    return taken
                if is_over:
                    raise DatasetEnded(
                        f"prepare_batch: the dataloader has ended and no group is left ({scheduler.describe()})."
                    )
                if scheduler.groups["accepted"] != accepted:
                    epochs, accepted = source.epochs, scheduler.groups["accepted"]
                elif source.epochs - epochs > EPOCHS_WITHOUT_ACCEPTANCE:
                    raise with_cause(
                        f"prepare_batch: no group was accepted in {EPOCHS_WITHOUT_ACCEPTANCE} whole epochs "
                        f"({scheduler.describe()}). Look at the workflow (None rejects a sample), should_accept_fn and dynamic_filter.",
                        scheduler.failures.first,
                    )

    # -- between batches -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more samples; running ones continue."""
        self._call(setattr, self._scheduler, "is_paused", True)

    def resume(self) -> None:
        """Start samples again."""
        self._change(setattr, self._scheduler, "is_paused", False)

    def settle(self) -> None:
        """Wait until every admitted group has ended.

        In deterministic mode it is called before each weight update, so that no episode spans two versions and the lead of sampling does
        not depend on timing.
        """
        scheduler = self._scheduler
        self._await(Waiter(lambda: [] if scheduler.is_settled else None), None, "the change of weights")

    def set_version(self, version: int) -> None:
        """Adopt a published version; groups in training release their slots. A no-op if it is already the current version."""
        self._change(self._scheduler.publish, version)

    @property
    def frontier(self) -> int:
        """The lowest ordinal that is not done; all tasks below it were trained, rejected, dropped or given up."""
        return self._scheduler.frontier.first_open

    def release_batch(self) -> None:
        """Release the slots of the delivered batches although no version was published, as after a skipped step."""
        self._change(self._scheduler.finish_training)

    def counters(self) -> dict[str, float]:
        """Count how samples and groups have ended so far (``samples/…``, ``groups/…``) and how many are in each state."""
        return {
            **self._scheduler.counters(),
            "abandoned_samples": self._episodes.abandoned,
            "slow_loop_reports": self._thread.monitor.reports,
        }

    def training_counts(self) -> dict[str, int]:
        """Count how samples and groups of training tasks have ended so far: ``samples/<end>`` and ``groups/<end>`` (docs/rollout.md)."""
        counts = dict(self._scheduler.of_training)  # a copy, because the event loop goes on counting
        ends = [f"samples/{end}" for end in ("accepted", "rejected", "failed", "retried", "cut")]
        ends += [f"groups/{end}" for end in ("accepted", "rejected", "failed")]
        return {**dict.fromkeys(ends, 0), **counts}

    @property
    def stopped_by(self) -> BaseException | None:
        """The error that stopped rollout for good (too many failures, or an internal fault), or None if rollout can continue."""
        return self._episodes.stopped_by

    def hurry(self) -> None:
        """Tolerate fewer consecutive failures, because the run ends after the current batch. Safe to call in a signal handler."""
        self._scheduler.failures.is_hurried = True

    @property
    def failures(self) -> list[Failure]:
        """The latest failures, each with task, cause and traceback."""
        return list(self._scheduler.failures.recent)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot for a checkpoint; call this after the batch's weights were published.

        Returns:
            ``version``; ``failed_lately`` (for the failure budget); ``next_ordinal``; ``next_task_id``; ``frontier`` and ``beyond``
            (the ordinals that are done); ``lessons`` (what the draws of workflows have learned); ``pending`` (tasks that were drawn and
            are not done, in order); ``finished`` (complete groups that no batch has taken). The dataloader is ahead by the pending and
            finished tasks.
        """
        drawn = [
            *self._restored,
            *self._scheduler.replay.deferred,
            *(row for source in self._sources.values() for row in source.rows),
        ]
        with_rows = self._episodes.workers is None
        state = self._call(lambda: {**self._scheduler.state_dict(with_rows), "lessons": self._lessons.state_dict()})
        numbers = {"next_ordinal": self._factory.next_ordinal, "next_task_id": self._factory.next_task_id}
        return {**state, **numbers, "pending": [*state["pending"], *map(dict, drawn)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another executor's state. The state's pending tasks run before the dataloader's next ones.

        Raises:
            RolloutError: tasks are in flight.
        """
        finished, pending = state["finished"], state["pending"]
        if self._episodes.workers is not None:  # complete tasks run again, answered from the journal
            again = sorted((entry["task"] for entry in finished), key=lambda task: task["ordinal"])
            finished, pending = [], [*again, *pending]

        def load() -> None:
            if not self._scheduler.is_idle:
                raise RolloutError("load_state_dict: tasks are in flight already; load the state before the first one.")
            self._factory.next_ordinal, self._factory.next_task_id = state["next_ordinal"], state["next_task_id"]
            if "lessons" in state:  # a checkpoint of an earlier release has none
                self._lessons.load_state_dict(state["lessons"])
            self._scheduler.load_state_dict(state, [self._factory.restored(entry) for entry in finished])

        self._call(load)
        self._restored.clear()
        self._restored.extend(map(dict, pending))

    def recall(self, directories: Iterable[str | Path]) -> PastEpisodes:
        """Reuse what earlier processes of the run sampled after its last checkpoint; see ``rollout.resume``.

        Call this before the first task and, if there is a checkpoint, after ``load_state_dict``.

        Args:
            directories: journal directories of these processes.
        """
        scheduler, journal = self._scheduler, self._episodes.journal
        past = read_past(directories, lambda ordinal: not scheduler.frontier.is_done(ordinal), journal)
        if journal is not None:
            journal.goes_on_to = max([*past.episodes, *past.order, *past.rejected, *past.failed], default=-1)
        for ordinal in scheduler.complete_ordinals():  # the checkpoint has their rows
            past.episodes.pop(ordinal, None)
        scheduler.replay = ReplayOrder(past.order, past.failed, past.rejected)
        if past.episodes or past.order:
            logger.info(
                "going on from the journal: %d episodes have a past, of %d tokens; %d groups were taken after the checkpoint, and are again",
                past.count,
                past.tokens,
                len(past.order),
            )
        self._past = past
        return past

    # -- the end -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Cancel running samples and stop the thread; waiting callers get a ``RolloutError``. Idempotent."""
        self._thread.stop(
            lambda: self._episodes.stop(RolloutError("the rollout executor was destroyed while this call waited."))
        )

    def __enter__(self) -> RolloutExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    # -- inside: callers' threads -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()
        if self._episodes.stopped_by is not None:
            raise self._episodes.stopped_by
        version = self.engine.get_version()
        if version != self._scheduler.version:  # published directly through the engine
            self.set_version(version)

    def _change(self, change: Callable[..., None], *arguments: Any) -> None:
        """Apply a change to the scheduler on the loop, and carry out the scheduler's decisions."""
        self._call(lambda: (change(*arguments), self._react()))

    def _await(self, waiter: Waiter, timeout: float | None, what: str, groups: Sequence[Group] = ()) -> Trajectory:
        """Queue ``groups``, wait until ``waiter`` is answered, and join the rows; return an empty dict if there are none."""
        taken = self._wait_for_groups(waiter, timeout, what, groups)
        samples = [rows for group in taken for rows in group.rows]
        for group in taken:
            group.rows = []
        return concat_padded_tensors(samples) if samples else {}

    def _wait_for_groups(self, waiter: Waiter, timeout: float | None, what: str, groups: Sequence[Group] = ()) -> list[Group]:
        """Queue ``groups`` and wait until ``waiter`` is answered."""
        self._start()
        self._call(self._enqueue, groups, waiter)
        release_workers()  # this thread trains; while it waits, the engine in this process may use all cores
        left, warned = math.inf if timeout is None else timeout, time.monotonic()
        try:
            while not waiter.future.done() and left > 0:
                step = min(left, _TURN_SECONDS)
                concurrent.futures.wait([waiter.future], step)
                left -= step
                if waiter.future.done() or left <= 0:
                    break
                self.while_waiting()
                if self._scheduler.is_paused and time.monotonic() - warned > PAUSED_WARNING_SECONDS:
                    warned = time.monotonic()
                    logger.warning("%s waits while rollout is paused (%s): call resume().", what, self._scheduler.describe())
        finally:
            if not waiter.future.done() and not self._thread.is_stopped:
                self._call(self._forget, waiter)
        if not waiter.future.done():
            raise TimeoutError(f"{what}: not complete after {timeout:g} s ({self._scheduler.describe()}).")
        return waiter.future.result()

    # -- inside: the loop --------------------------------------------------------------------------------------------------

    def _enqueue(self, groups: Sequence[Group], waiter: Waiter | None = None) -> None:
        stopped_by = self._episodes.stopped_by
        if waiter is not None and stopped_by is None:
            self._waiters.append(waiter)
        elif waiter is not None and stopped_by is not None:
            waiter.fail(stopped_by)
        self._scheduler.enqueue(groups)
        self._react()

    def _forget(self, waiter: Waiter) -> None:
        """Remove a waiter whose caller gave up, and drop the groups that only it waited for."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._drop_abandoned(waiter.own_groups)

    def _drop_abandoned(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if not group.is_over or group.state is GroupState.READY:
                self._scheduler.drop(group, "abandoned", "its caller stopped waiting")
        self._react()

    def _fail_waiters(self, error: BaseException) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fail(error)

    def _sample_ended(self, group: Group, sample: SampleEngine, outcome: Outcome, is_cut: bool) -> None:
        scheduler, name, diverged = self._scheduler, sample.name, sample.episode.diverged
        scheduler.leave(group, is_cut)
        journal = self._episodes.journal
        if not is_cut and diverged is not None and journal is not None and journal.config.on_divergence == "fail":
            sample.episode.end("cut", str(diverged)[:2000])
            self._episodes.stop(
                ReplayError(
                    f"{diverged} Change it back, or set journal.on_divergence to restart: such episodes then begin anew."
                )
            )
        elif not is_cut:
            is_final = name.attempt >= self.config.max_sample_retries
            ended = record_end(sample, outcome, scheduler.failures, group.data, is_final=is_final)
            if diverged is not None:
                logger.warning("%s It begins anew.", diverged)
                scheduler.repeat(group, name)
            elif isinstance(ended, Failure) and isinstance(outcome, BrokenRewardError):
                self._episodes.stop(with_cause("rollout stops, because further samples cannot be scored either.", ended))
            else:
                scheduler.end_sample(group, name, ended)
                self._after_group(group)
        if not self._reaction_is_due:  # once for all samples that end in the same step of the loop
            self._reaction_is_due = True
            self._thread.loop.call_soon(self._react, context=contextvars.Context())

    def _after_group(self, group: Group) -> None:
        """Act at once if a group is over, before other samples of this step of the loop are reported."""
        if group.state is GroupState.READY:
            self._episodes.cancel(group, "belongs to a group that is full")
        if group.is_over:
            self._end_groups()
            self._answer()
        if group.state is GroupState.FAILED and (error := self._scheduler.failures.too_many()):
            self._episodes.stop(error)

    def _react(self) -> None:
        """Carry out the scheduler's decisions: cancel groups that are over, start samples, and answer callers."""
        self._reaction_is_due = False
        with self._episodes.faults_stop():
            scheduler, episodes, may_start_more = self._scheduler, self._episodes, True
            while may_start_more:
                self._end_groups()
                while episodes.stopped_by is None and (sample := scheduler.next_sample()) is not None:
                    episodes.start(*sample, scheduler.version)
                self._answer()
                may_start_more = scheduler.may_start_more and episodes.stopped_by is None

    def _end_groups(self) -> None:
        while self._scheduler.ended:
            group, state = self._scheduler.ended.popleft()
            group.note_end(self._episodes.journal, state)
            if group.result is not None:
                self._lessons.ended(group.lesson)
            self._episodes.cancel(group, f"belongs to a group that has come to its end ({group.reason})")

    def _answer(self) -> None:
        """Answer the waiters whose groups are ready."""
        waiting = []
        for waiter in self._waiters:
            try:
                groups = waiter.take()
            except RolloutError as error:
                waiter.fail(error)
                continue
            if groups is None:
                waiting.append(waiter)
                continue
            for group in groups:
                group.note_end(self._episodes.journal, "delivered")
            self._lessons.delivered(group.lesson for group in groups if not group.is_eval)
            if waiter.caller is not None and not all(group.is_eval for group in groups):
                self._scheduler.taken_by = waiter.caller
            if not waiter.future.done():
                waiter.future.set_result(groups)
        self._waiters = waiting
