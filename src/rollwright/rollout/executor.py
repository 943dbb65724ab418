"""The executor: thousands of samples on one event loop of its own, and plain functions to wait for them.

All methods are synchronous, may be called from any thread, and work while the caller's own event loop runs (in a notebook):
samples run on the executor's loop, in a thread that the executor owns.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, DatasetEnded, RolloutError
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.writing import Journal
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.compute_threads import release_workers
from rollwright.inference.engine import InferenceEngine
from rollwright.rollout.event_loop import LoopThread
from rollwright.rollout.failure_budget import Failure, with_cause
from rollwright.rollout.resume import PastEpisodes, load_state, recall, state_of
from rollwright.rollout.runner import Elsewhere, Runner
from rollwright.rollout.task_group import AcceptFunction, Batch, Group, GroupFactory, GroupState, TaskSource, Waiter
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

MAX_UNDELIVERED_TASKS = 65_536
PAUSED_WARNING_SECONDS = 30.0
EPOCHS_WITHOUT_ACCEPTANCE = 2


class RolloutExecutor:
    """Runs workflows on tasks, many at a time, and hands back trajectories.

    Args:
        engine: serves the model calls of all samples.
        config: limits and policies of rollout.
        seed: the run's seed; every request's seed derives from it.
        deterministic: batches leave in the order of their ordinals (docs/determinism.md).
        batch_size: groups in a training batch, for the admission rule; None: learnt from ``prepare_batch``.
        journal: what episodes are asked and answered is written there; None: nowhere.
        elsewhere: runs the episodes in other processes; None: they run on the loop of this one.

    Raises:
        ConfigError: ``over_sampling`` in deterministic mode: what it cuts is for the clock to decide.
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
        elsewhere: Elsewhere | None = None,
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
        self._runner = Runner(engine, self.config, self._thread.loop, seed, deterministic, journal, elsewhere)
        self._delivery = self._runner.delivery
        self._delivery.staleness.batch = batch_size
        self._delivery.staleness.version = engine.get_version()
        self._factory = GroupFactory()
        self._sources: dict[int, TaskSource] = {}  # by the id of the dataloader, which they keep alive
        self._restored: deque[dict[str, Any]] = deque()  # tasks that a checkpoint had drawn and not trained
        self._past = PastEpisodes()  # of earlier processes of the run
        self._prepare_lock = threading.Lock()

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
        """Queue a task; it runs when the admission rule and the concurrency limit let it.

        Args:
            data: the task. Its ``ordinal``, where it has one, names the draw: seeds derive from it.
            workflow: class, instance, registered name or import path.
            workflow_kwargs: arguments of the workflow's constructor.
            should_accept_fn: function or import path; given the group's trajectory, says whether it is used.
            group_size: samples of the task; a workflow that makes its own group is run with 1.
            is_eval: not counted by the admission rule, not filtered, and waited for with ``wait(…, is_eval=True)``.
            past: of its samples by index, as ``rollout.resume.read_past`` gives them: they go on from there.

        Returns:
            The task's id, for ``wait_for_task``.

        Raises:
            RolloutError: too many tasks were submitted and not taken, or rollout has stopped.
        """
        self._start()
        if len(self._runner.tasks) >= MAX_UNDELIVERED_TASKS:
            raise RolloutError(
                f"{MAX_UNDELIVERED_TASKS} tasks are queued, running or ready already: take results with wait() before submitting more."
            )
        group = self._factory.make(data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        group.past = dict(past or {})
        self._runner.tasks[group.task_id] = group  # counted here: the loop may be far behind
        self._thread.loop.call_soon_threadsafe(self._runner.enqueue, [group])
        return group.task_id

    def wait(self, count: int, timeout: float | None = None, is_eval: bool = False) -> Trajectory:
        """Take ``count`` complete groups of the tasks that were submitted.

        Args:
            count: groups.
            timeout: seconds; None: as long as tasks run that can bring the groups.
            is_eval: take groups submitted with ``is_eval``.

        Returns:
            All their rows, as one trajectory.

        Raises:
            TimeoutError: not complete in time; what is complete stays for the next call.
            RolloutError: without a timeout, where no queued or running task can bring the groups; or rollout has stopped.
        """
        if count < 1:
            raise RolloutError(f"wait({count}): wait for at least one group.")
        runner, caller = self._runner, threading.get_ident()

        def take() -> list[Group] | None:
            groups = self._delivery.take_evaluation(count) if is_eval else self._delivery.take(count)
            if groups is not None:
                return groups
            if not is_eval:
                runner.refuse_if_stuck(caller, f"{count} groups are asked for, but")
                may_come = bool(runner.stream) or self._delivery.staleness.running > 0
            else:
                may_come = any(group.is_eval for group in list(runner.tasks.values()) if not group.is_over)
            if timeout is None and not runner.is_paused and not may_come:
                ready = sum(group.is_eval == is_eval for group in self._delivery.ready)
                raise with_cause(
                    f"wait({count}): only {ready} groups are ready, and no task is queued or running that could bring more "
                    f"({runner.describe()}). Submit more tasks, or wait with a timeout for those of another thread.",
                    runner.failures.first,
                )
            return None

        return self._await(Waiter(take, caller), timeout, f"wait({count})")

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Trajectory:
        """Take the group of one submitted task.

        Raises:
            TimeoutError: not complete in time.
            RolloutError: the task was rejected, dropped, failed, delivered already or never submitted.
        """
        runner, caller = self._runner, threading.get_ident()
        group = self._call(lambda: runner.tasks.get(task_id))
        if group is None:
            reason = self._call(lambda: runner.ends.get(task_id))
            raise RolloutError(
                f"task {task_id} gives no trajectory: {reason}."
                if reason
                else f"task {task_id} was delivered already, or never submitted: a group is delivered once."
            )

        def take() -> list[Group] | None:
            if group in self._delivery.ready:
                self._delivery.deliver([group])
                return [group]
            if group.state in (GroupState.DROPPED, GroupState.FAILED):
                raise RolloutError(f"{group} gives no trajectory: {group.reason}.")
            if group.state is GroupState.DELIVERED:
                raise RolloutError(f"{group} was delivered already; a group is delivered once.")
            if group.state is GroupState.QUEUED and not group.is_eval:
                runner.refuse_if_stuck(caller, f"{group} cannot start:")
            return None

        return self._await(Waiter(take, caller), timeout, f"wait_for_task({task_id})")

    def wait_for_any(self, timeout: float | None = None) -> dict[int, Trajectory | str]:
        """Take every submitted task that has ended, as soon as there is one.

        Args:
            timeout: seconds to wait. None waits until a task ends.

        Returns:
            By task id the rows of the task's group, or the reason why it has none.

        Raises:
            TimeoutError: no task ended in time.
            RolloutError: rollout has stopped.
        """
        failed: dict[int, Trajectory | str] = {}

        def take() -> list[Group] | None:
            failed.update(self._runner.ends)
            self._runner.ends.clear()
            ready = [group for group in self._delivery.ready if not group.is_eval]
            self._delivery.deliver(ready)
            return ready if ready or failed else None

        groups = self._wait_for_groups(Waiter(take), timeout, "wait_for_any")
        return failed | {group.task_id: group.join() for group in groups}

    def abandon(self, task_ids: Iterable[int]) -> None:
        """Drop submitted tasks whose groups nobody will take; samples that run are cancelled."""
        runner = self._runner

        def drop() -> None:
            groups = [runner.tasks[task_id] for task_id in task_ids if task_id in runner.tasks]
            runner.forget(Waiter(lambda: None, own_groups=groups))

        self._call(drop)

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
        """Run these tasks and return when each has ended, one way or another.

        They start at once, whatever the admission rule says. Tasks that are rejected or given up are left out; nothing is
        drawn in their place (``prepare_batch`` does that).

        Returns:
            The rows of the accepted groups, in the order of ``data_list``.

        Raises:
            RolloutError: no group was accepted; the message counts the reasons and names the first failure.
        """
        tasks = list(data_list)
        if not tasks:
            raise RolloutError("rollout_batch was given no tasks: give at least one.")
        self._start()
        groups = [
            self._factory.make(data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval, place=place)
            for place, data in enumerate(tasks)
        ]
        batch = Batch(len(groups))
        for group in groups:
            group.batch = batch

        def take() -> list[Group] | None:
            if batch.missing:
                return None
            accepted = [group for group in groups if group.state is GroupState.READY]
            self._delivery.deliver(accepted)
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
        """The next training batch, while enough work is kept in flight for the ones after it.

        Tasks are drawn as the admission rule gives slots, and anew for every group that is rejected, filtered, dropped or given
        up. A dataloader goes on with its next epoch; an iterator ends, and its last batch may be smaller.

        Args:
            dataloader: gives rows or lists of rows; the same object in every call.
            workflow, workflow_kwargs, should_accept_fn, group_size: as for ``submit``.
            batch_size: groups in the batch; None: the dataloader's.

        Returns:
            The rows of a batch of groups, in the order of their tasks.

        Raises:
            DatasetEnded: an iterator ended, and no group is left.
            RolloutError: nothing was accepted in two epochs, earlier batches were not published, or rollout has stopped.
            DataError: the dataset is empty or gives what is no task.
        """
        self._start()
        runner, delivery, caller = self._runner, self._delivery, threading.get_ident()
        with self._prepare_lock:
            source = self._sources.setdefault(id(dataloader), TaskSource(dataloader, self._restored))
            count = batch_size or source.batch_size
            if count < 1:
                raise DatasetEnded("prepare_batch: the dataloader has ended and no group is left.")
            is_over = False

            def take() -> list[Group] | None:
                """A batch; no group at all where more tasks should be drawn, or where the dataset ended."""
                if is_over and not runner.stream and not delivery.staleness.running:
                    return delivery.take(count, final=True) or []
                groups = delivery.take(count)
                if groups is None and not is_over and runner.wanted() > 0:
                    return []
                if groups is None:
                    runner.refuse_if_stuck(caller, f"{count} groups are asked for, but")
                return groups and sorted(groups, key=lambda group: group.ordinal)  # so that minibatches do not go by arrival

            self._call(setattr, delivery.staleness, "batch", count)
            epochs, accepted = source.epochs, runner.groups["accepted"]
            while True:
                wanted, is_again = self._call(lambda: (runner.wanted(), bool(delivery.again)))
                drawn = self._past.draw(source, wanted, is_again)
                groups = [
                    self._past.give(self._factory.make(row, workflow, workflow_kwargs, should_accept_fn, group_size))
                    for row in drawn
                ]
                is_over = source.is_over and not self._past.later
                taken = self._await(Waiter(take, caller), None, "prepare_batch", groups)
                if taken:
                    return taken
                if is_over:
                    raise DatasetEnded(f"prepare_batch: the dataloader has ended and no group is left ({runner.describe()}).")
                if runner.groups["accepted"] != accepted:
                    epochs, accepted = source.epochs, runner.groups["accepted"]
                elif source.epochs - epochs > EPOCHS_WITHOUT_ACCEPTANCE:
                    raise with_cause(
                        f"prepare_batch: no group was accepted in {EPOCHS_WITHOUT_ACCEPTANCE} whole epochs "
                        f"({runner.describe()}). Look at the workflow (None rejects a sample), should_accept_fn and dynamic_filter.",
                        runner.failures.first,
                    )

    # -- between batches -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more samples; those that run go on."""
        self._call(setattr, self._runner, "is_paused", True)

    def resume(self) -> None:
        """Start samples again."""
        self._call(lambda: (setattr(self._runner, "is_paused", False), self._runner.pump()))

    def settle(self) -> None:
        """Wait until every admitted group has ended. Called before each change of weights, it fixes which version samples what: no
        episode spans two versions, and how far sampling is ahead does not go by the clock."""
        runner = self._runner
        self._await(Waiter(lambda: [] if runner.is_settled else None), None, "the change of weights")

    def set_version(self, version: int) -> None:
        """Weights were published: groups in training release their places. The current version again is a no-op."""
        self._call(self._delivery.publish, version)

    @property
    def version(self) -> int:
        """The version that was last published."""
        return self._delivery.staleness.version

    @property
    def frontier(self) -> int:
        """Every task with a lower ordinal is done: trained, rejected, dropped or given up."""
        return self._delivery.frontier.frontier

    def release_batch(self) -> None:
        """The batches that were taken are done with, though no version was published (a skipped step)."""
        self._call(self._delivery.finish_training)

    def counters(self) -> dict[str, float]:
        """How samples and groups ended so far (``samples/…``, ``groups/…``), and how many there are in each state."""
        runner, staleness = self._runner, self._delivery.staleness
        groups = {"accepted": 0, "rejected": 0, "failed": 0, **runner.groups}
        return {
            **{f"samples/{name}": runner.samples[name] for name in ("accepted", "rejected", "failed", "retried", "cut")},
            **{f"groups/{name}": count for name, count in groups.items()},
            "running_samples": runner.running_samples,
            "abandoned_samples": runner.abandoned_samples,
            "queued": len(runner.stream),
            "running": staleness.running,
            "ready": staleness.ready,
            "in_training": staleness.in_training,
            "slow_loop_reports": self._thread.monitor.reports,
        }

    @property
    def stopped_by(self) -> BaseException | None:
        """What stopped rollout for good (too many failures, a fault of ours); None while it can go on."""
        return self._runner.fatal

    def hurry(self) -> None:
        """The run will end after the current batch: give up sooner if nothing succeeds. Safe to call in a signal handler."""
        self._runner.failures.is_hurried = True

    @property
    def failures(self) -> list[Failure]:
        """The latest failures, each with task, cause and traceback."""
        return list(self._runner.failures.recent)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A consistent cut, to be taken after the batch's weights were published.

        Returns:
            ``version``; ``failed_lately`` (for the failure budget); ``next_ordinal``; ``next_task_id``; ``frontier`` and ``beyond``
            (ordinals that are done); ``pending`` (tasks drawn and not done, in order) and ``finished`` (complete groups that no
            batch has taken), by which the dataloader is ahead.
        """
        drawn = [*self._restored, *self._past.later, *(row for source in self._sources.values() for row in source.rows)]
        return self._call(state_of, self._runner, self._factory, drawn)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another executor stood: its pending tasks run before the dataloader's next ones."""
        self._restored.clear()
        self._restored.extend(self._call(load_state, self._runner, self._factory, state))

    def recall(self, directories: Iterable[str | Path]) -> PastEpisodes:
        """Go on with what earlier processes of the run had sampled beyond its checkpoint: see ``rollout.resume``.

        To be called after ``load_state_dict``, or without where there is no checkpoint, and before the first task.

        Args:
            directories: of their journals.
        """
        self._past = recall(self._runner, directories)
        return self._past

    # -- the end -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Cancel what runs and stop the thread; callers that wait get a ``RolloutError``. Idempotent."""
        self._thread.stop(lambda: self._runner.stop(RolloutError("the rollout executor was destroyed while this call waited.")))

    def __enter__(self) -> RolloutExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread.start()
        if self._runner.fatal is not None:
            raise self._runner.fatal
        version = self.engine.get_version()
        if version != self._delivery.staleness.version:  # published by whoever holds the engine itself
            self._call(self._delivery.publish, version)

    def _await(self, waiter: Waiter, timeout: float | None, what: str, groups: Sequence[Group] = ()) -> Trajectory:
        """Queue ``groups``, wait until ``waiter`` is answered, and join the rows. No keys if the answer has no group."""
        taken = self._wait_for_groups(waiter, timeout, what, groups)
        samples = [rows for group in taken for rows in group.rows]
        for group in taken:
            group.rows = []
        return concat_padded_tensors(samples) if samples else {}

    def _wait_for_groups(self, waiter: Waiter, timeout: float | None, what: str, groups: Sequence[Group] = ()) -> list[Group]:
        """Queue ``groups`` and wait until ``waiter`` is answered."""
        self._start()
        self._call(self._runner.add_waiter, waiter, groups)
        release_workers()  # this thread trains; while it waits the engine in this process has the cores
        left = math.inf if timeout is None else timeout
        try:
            while not waiter.future.done() and left > 0:
                step = min(left, PAUSED_WARNING_SECONDS)
                concurrent.futures.wait([waiter.future], step)
                left -= step
                if self._runner.is_paused and not waiter.future.done() and left > 0:
                    logger.warning("%s waits while rollout is paused (%s): call resume().", what, self._runner.describe())
        finally:
            if not waiter.future.done() and not self._thread.is_stopped:
                self._call(self._runner.forget, waiter)
        if not waiter.future.done():
            raise TimeoutError(f"{what}: not complete after {timeout:g} s ({self._runner.describe()}).")
        return waiter.future.result()
