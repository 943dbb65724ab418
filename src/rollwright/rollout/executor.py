"""The executor: thousands of samples on one event loop of its own, and plain functions to wait for them.

All methods are synchronous, may be called from any thread, and work while the caller's own event loop runs (in a notebook):
samples run on the executor's loop, in a thread that the executor owns.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, DatasetEnded, RolloutError
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.engine import InferenceEngine
from rollwright.rollout.failures import Failure
from rollwright.rollout.group import AcceptFunction, Group
from rollwright.rollout.loop import LoopThread
from rollwright.rollout.runner import Runner
from rollwright.rollout.source import Draws
from rollwright.rollout.state import read_state
from rollwright.rollout.tasks import GroupFactory
from rollwright.rollout.waiter import Waiter
from rollwright.rollout.waiting import BatchWaiter, PrepareWaiter, StreamWaiter, TaskWaiter, describe, wanted
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
        deterministic: model requests go out in waves, batches leave in the order of their ordinals, and no limit is by the
            clock (docs/determinism.md).
        batch_size: groups in a training batch, for the admission rule; None: learnt from ``prepare_batch``, and until then
            ``submit`` is not limited by it.

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
    ) -> None:
        self.config = config or RolloutConfig()
        if deterministic and self.config.over_sampling > 0:
            raise ConfigError(
                f"rollout.over_sampling={self.config.over_sampling} cuts whichever samples are slowest, so a run cannot repeat: "
                "set it to 0, or deterministic to false."
            )
        self.engine = engine
        self.seed = seed
        self.deterministic = deterministic
        self._thread = LoopThread(at_exit=self.destroy)
        self._call = self._thread.call
        self._runner = Runner(engine, self.config, self._thread.loop, seed, deterministic)
        self._delivery = self._runner.delivery
        self._delivery.staleness.batch = batch_size
        self._delivery.staleness.version = engine.get_version()
        self._factory = GroupFactory()
        self._draws = Draws()
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
    ) -> int:
        """Queue a task; it runs when the admission rule and the concurrency limit let it.

        Args:
            data: the task. Its ``ordinal``, where it has one, names the draw: seeds derive from it.
            workflow: class, instance, registered name or import path.
            workflow_kwargs: arguments of the workflow's constructor.
            should_accept_fn: function or import path; given the group's trajectory, says whether it is used.
            group_size: samples of the task; a workflow that makes its own group is run with 1.
            is_eval: not counted by the admission rule, not filtered, and waited for with ``wait(…, is_eval=True)``.

        Returns:
            The task's id, for ``wait_for_task``.

        Raises:
            RolloutError: too many tasks were submitted and not taken, the executor was destroyed, or rollout has stopped for its failures.
        """
        self._start()
        if len(self._runner.tasks) >= MAX_UNDELIVERED_TASKS:
            raise RolloutError(
                f"{MAX_UNDELIVERED_TASKS} tasks are queued, running or ready already: take results with wait() before submitting more."
            )
        group = self._factory.make(data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
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
            RolloutError: without a timeout, where no queued or running task can bring the groups any more; the message
                counts how the tasks ended. Also where rollout has stopped for its failures.
        """
        if count < 1:
            raise RolloutError(f"wait({count}): wait for at least one group.")
        waiter = StreamWaiter(self._runner, count, threading.get_ident(), may_give_up=timeout is None, is_eval=is_eval)
        return _joined(self._await(waiter, timeout, f"wait({count})"))

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Trajectory:
        """Take the group of one submitted task.

        Raises:
            TimeoutError: not complete in time.
            RolloutError: the task was rejected, dropped, failed, delivered already or never submitted.
        """
        group = self._call(lambda: self._runner.tasks.get(task_id))
        if group is None:
            reason = self._call(lambda: self._runner.end_of(task_id))
            raise RolloutError(
                f"task {task_id} gives no trajectory: {reason}."
                if reason
                else f"task {task_id} was delivered already, or never submitted: a group is delivered once."
            )
        return _joined(
            self._await(TaskWaiter(self._runner, group, threading.get_ident()), timeout, f"wait_for_task({task_id})")
        )

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

        The tasks are started at once, whatever the admission rule says: their caller waits for them, so nothing else is
        trained meanwhile. Tasks that are rejected or given up are left out; nothing is drawn in their place
        (``prepare_batch`` does that).

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
        waiter = BatchWaiter(self._runner, groups)
        for group in groups:
            group.batch = waiter
        accepted = self._await(waiter, None, "rollout_batch", before=lambda: self._runner.enqueue(groups))
        if not accepted:
            reasons = "; ".join(sorted({group.reason for group in groups})[:4])
            first = next((group.failure.describe() for group in groups if group.failure is not None), "")
            raise RolloutError(f"rollout_batch: none of {len(tasks)} tasks was accepted ({reasons}). {first}")
        return _joined(accepted)

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

        Tasks are drawn from the dataloader as the admission rule gives places, and anew for every group that is rejected,
        filtered, dropped or given up. A dataloader that can be iterated anew goes on with its next epoch; an iterator ends,
        and its last batch may be smaller.

        Args:
            dataloader: gives rows or lists of rows; the same object in every call.
            workflow, workflow_kwargs, should_accept_fn, group_size: as for ``submit``.
            batch_size: groups in the batch; None: the dataloader's.

        Returns:
            The rows of a batch of groups.

        Raises:
            DatasetEnded: an iterator ended, and no group is left.
            RolloutError: nothing was accepted in two whole epochs, the batches before were not published, or rollout has
                stopped for its failures.
            DataError: the dataset is empty or gives what is no task.
        """
        self._start()
        with self._prepare_lock:
            source = self._draws.source(dataloader)
            count = batch_size or source.batch_size
            if count < 1:
                raise DatasetEnded("prepare_batch: the dataloader has ended and no group is left.")
            self._call(self._set_batch, count)
            epochs, accepted = source.epochs, self._runner.groups["accepted"]
            while True:
                missing = self._call(lambda: wanted(self._runner))
                groups = [
                    self._factory.make(row, workflow, workflow_kwargs, should_accept_fn, group_size, False)
                    for row in self._draws.take(source, missing)
                ]
                waiter = PrepareWaiter(self._runner, count, threading.get_ident(), source_is_over=self._draws.is_over(source))
                taken = self._await(waiter, None, "prepare_batch", before=lambda groups=groups: self._runner.enqueue(groups))
                if taken:
                    return _joined(taken)
                if waiter.source_is_over:
                    raise DatasetEnded(
                        f"prepare_batch: the dataloader has ended and no group is left ({describe(self._runner)})."
                    )
                if self._runner.groups["accepted"] != accepted:
                    epochs, accepted = source.epochs, self._runner.groups["accepted"]
                elif source.epochs - epochs > EPOCHS_WITHOUT_ACCEPTANCE:
                    raise RolloutError(
                        f"prepare_batch: no group was accepted in {EPOCHS_WITHOUT_ACCEPTANCE} whole epochs "
                        f"({describe(self._runner)}). Look at the workflow, should_accept_fn and dynamic_filter. "
                        + self._runner.failures.describe_first()
                    )

    # -- between batches -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more samples; those that run go on."""
        self._call(self._set_paused, True)

    def resume(self) -> None:
        """Start samples again."""
        self._call(self._set_paused, False)

    def set_version(self, version: int) -> None:
        """Weights were published: groups in training give their places back. The current version again is a no-op."""
        self._call(self._delivery.publish, version)

    @property
    def version(self) -> int:
        """The version that was last published."""
        return self._delivery.staleness.version

    def release_batch(self) -> None:
        """The batches that were taken are done with, though no version was published (a skipped step)."""
        self._call(self._delivery.finish_training)

    def counters(self) -> dict[str, float]:
        """How samples and groups ended so far (``samples/…``, ``groups/…``), and how many there are in each state."""
        runner, staleness = self._runner, self._delivery.staleness
        counts: dict[str, float] = {f"samples/{name}": runner.samples[name] for name in _SAMPLE_ENDS}
        counts |= {f"groups/{name}": runner.groups[name] for name in _GROUP_ENDS}
        counts |= {f"groups/{name}": count for name, count in list(runner.groups.items())}
        return counts | {
            "running_samples": runner.running_samples,
            "abandoned_samples": runner.abandoned_samples,
            "queued": runner.queued,
            "running": staleness.running,
            "ready": staleness.ready,
            "in_training": staleness.in_training,
            "slow_loop_reports": self._thread.watch.reports,
        }

    @property
    def stopped_by(self) -> BaseException | None:
        """What stopped rollout for good (too many failures, a fault of ours); None while it can go on."""
        return self._runner.fatal

    @property
    def failures(self) -> list[Failure]:
        """The latest failures, each with task, cause and traceback."""
        return list(self._runner.failures.recent)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A consistent cut, to be taken after the batch's weights were published.

        Returns:
            ``version``; ``next_ordinal``; ``frontier`` and ``beyond`` (ordinals that are done); ``pending`` (tasks that were
            drawn from the dataloader and are not done, in order, with their ordinals); ``finished`` (complete groups that no
            batch has taken: task, trajectory, version of admission). The dataloader's own state is ahead by exactly these.
        """
        return self._call(read_state, self._runner, self._factory.next_ordinal, self._draws.left)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another executor stood: its pending tasks run before the dataloader's next ones."""
        if self._call(lambda: self._runner.unfinished + len(self._delivery.ready)):
            raise RolloutError("load_state_dict: tasks are in flight already; load the state before the first one.")
        self._draws.restored = deque(dict(row) for row in state["pending"])
        self._factory.next_ordinal = state["next_ordinal"]
        finished = [self._factory.restored(entry) for entry in state["finished"]]
        self._call(self._delivery.restore, state["version"], state["frontier"], state["beyond"], finished)

    # -- the end -------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Cancel what runs and stop the thread; callers that wait get a ``RolloutError``. Twice is the same as once."""
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

    def _await(self, waiter: Waiter, timeout: float | None, what: str, before: Callable[[], None] | None = None) -> list[Group]:
        self._start()

        def add() -> None:
            if before is not None:
                before()
            self._runner.add_waiter(waiter)

        self._call(add)
        deadline_left = timeout
        try:
            while True:
                step = PAUSED_WARNING_SECONDS if deadline_left is None else min(deadline_left, PAUSED_WARNING_SECONDS)
                concurrent.futures.wait([waiter.future], step)
                if waiter.future.done():
                    return waiter.future.result()
                if deadline_left is not None:
                    deadline_left -= step
                    if deadline_left <= 0:
                        self._call(self._runner.forget, waiter)
                        if waiter.future.done():
                            return waiter.future.result()
                        raise TimeoutError(f"{what}: not complete after {timeout:g} s ({describe(self._runner)}).")
                if self._runner.is_paused:
                    logger.warning("%s waits while rollout is paused (%s): call resume().", what, describe(self._runner))
        except BaseException:
            if not waiter.future.done() and not self._thread.is_stopped:
                self._call(self._runner.forget, waiter)
            raise

    def _set_batch(self, count: int) -> None:
        self._delivery.staleness.batch = count

    def _set_paused(self, is_paused: bool) -> None:
        self._runner.is_paused = is_paused
        if not is_paused:
            self._runner.pump()


_SAMPLE_ENDS = ("accepted", "rejected", "failed", "retried", "cut")
_GROUP_ENDS = ("accepted", "rejected", "failed")


def _joined(groups: list[Group]) -> Trajectory:
    trajectories = [group.trajectory for group in groups]
    for group in groups:
        group.trajectory = None
    return concat_padded_tensors([trajectory for trajectory in trajectories if trajectory is not None])
