"""The loop's side of rollout: starts samples, retries them, completes groups and hands batches over.

Everything here runs on the executor's event loop, so nothing is locked. Invariants:

* a group reaches exactly one end (delivered, dropped, failed), and what it counted for is given back at that moment;
* a sample gives its place back when it ends, or a grace after it was cancelled, whatever its workflow does about that;
* a fault in here stops rollout: nobody waits for what will not come;
* a batch is taken, and the demand for waves withdrawn, in the same step of the loop in which it became complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import RolloutError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.rollout.delivery import Delivery
from rollwright.rollout.failures import FailureLog
from rollwright.rollout.group import Group, GroupState, policy_against
from rollwright.rollout.sample import CURRENT_SAMPLE, SampleEngine, SampleName
from rollwright.rollout.waiter import Waiter
from rollwright.rollout.waves import WaveGate, place_of
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker

logger = getLogger("rollout")

RESULTS_KEPT = 65_536  # outcomes of dropped tasks that wait_for_task can still tell
GRACE_SECONDS = 10.0  # that a cancelled sample gets to end


class Runner:
    """Runs groups of samples on one event loop.

    Args:
        engine: the engine of the run.
        config: limits and policies.
        loop: the loop that all of this runs on.
        seed: the run's seed.
        deterministic: requests go out in waves and batches leave in the order of their ordinals.
    """

    def __init__(
        self, engine: InferenceEngine, config: RolloutConfig, loop: asyncio.AbstractEventLoop, seed: int, deterministic: bool
    ) -> None:
        self.engine = engine
        self.config = config
        self.loop = loop
        self.seed = seed
        self.deterministic = deterministic
        self.delivery = Delivery(config, deterministic, self._drop, self.pump)
        self.failures = FailureLog(config.max_failed_share)
        self.samples: Counter[str] = Counter()  # accepted, rejected, failed, retried, cut
        self.groups: Counter[str] = Counter()  # accepted, rejected, failed, and dropped/<policy>
        self.is_paused = False
        self.fatal: BaseException | None = None
        self.running_samples = 0
        self.abandoned_samples = 0  # that did not end when they were cancelled
        self._direct: deque[Group] = deque()  # groups of rollout_batch and evaluation: not subject to admission
        self._stream: deque[Group] = deque()  # groups of submit and prepare_batch
        self._members: deque[tuple[Group, int, int]] = deque()  # samples of admitted groups that wait for a place
        self._active: set[Group] = set()  # admitted and not at an end, of every kind
        self.tasks: dict[int, Group] = {}  # that wait and wait_for_task can ask for; submit adds to it from its own thread
        self._settling = False
        self._waiters: list[Waiter] = []
        self._ends: dict[int, str] = {}  # task id -> why it never became ready
        self._pump_asked = False
        self._gate = WaveGate(engine, loop, self._wants_wave) if deterministic else None

    # -- groups in -----------------------------------------------------------------------------------------------------

    def enqueue(self, groups: list[Group]) -> None:
        """Take groups in; they start as soon as there is room."""
        for group in groups:
            if group.batch is None:
                self.tasks[group.task_id] = group
            (self._stream if group.in_stream else self._direct).append(group)
        self.pump()

    @property
    def queued(self) -> int:
        """Groups of the stream that are not admitted yet."""
        return len(self._stream)

    @property
    def unfinished(self) -> int:
        """Groups of the stream that may still become ready."""
        return len(self._stream) + self.delivery.staleness.running

    def may_bring_more(self, is_eval: bool) -> bool:
        """True where a queued or running task may still become ready for ``wait``."""
        return (
            any(group.is_eval for group in list(self.tasks.values()) if not group.is_over) if is_eval else self.unfinished > 0
        )

    def count_ready(self, is_eval: bool) -> int:
        """Complete groups that ``wait`` could take."""
        return sum(group.is_eval for group in self.delivery.ready) if is_eval else self.delivery.staleness.ready

    def pump(self) -> None:
        """Start as many samples as there is room for; groups are admitted in the order in which they came."""
        while not self.is_paused and self.fatal is None and self.running_samples < self.config.max_concurrent_samples:
            if self._members:
                group, index, attempt = self._members.popleft()
                if not group.is_over:
                    self._start(group, index, attempt)
            elif self._direct:
                self._admit(self._direct.popleft())
            elif self._stream and self.delivery.staleness.capacity >= 1:
                group = self._stream.popleft()
                if not group.is_over:
                    self._admit(group)
            else:
                break
        self._settle()

    def _pump_soon(self) -> None:
        if not self._pump_asked:
            self._pump_asked = True
            self.loop.call_soon(self._pump_now, context=contextvars.Context())

    def _pump_now(self) -> None:
        self._pump_asked = False
        with self._stopping_at_faults():
            self.pump()
            if self._gate is not None:
                self._gate.look()

    @contextlib.contextmanager
    def _stopping_at_faults(self) -> Iterator[None]:
        """A fault of ours in a callback of the loop would only be logged there, and callers would wait for ever."""
        try:
            yield
        except Exception as error:  # unforeseen by definition
            logger.exception("rollout stops for a fault of its own")
            self.stop(error)

    def _wants_wave(self) -> bool:
        return bool(self._waiters) and not self._pump_asked

    def _admit(self, group: Group) -> None:
        if group.is_over:
            return
        group.state = GroupState.RUNNING
        self._active.add(group)
        self.delivery.admit(group)
        self._members.extend((group, index, 0) for index in range(group.size))

    # -- samples -------------------------------------------------------------------------------------------------------

    def _start(self, group: Group, index: int, attempt: int) -> None:
        name = SampleName(group.ordinal, index, attempt, group.is_eval)
        sample = SampleEngine(
            self.engine, name, run_seed=self.seed, loop=self.loop, gate=self._gate, workflow=group.workflow_name
        )
        self.running_samples += 1
        context = contextvars.Context()
        context.run(CURRENT_SAMPLE.set, sample)
        if group.is_eval:  # what it reports is no metric of training
            context.run(get_tracker().enter_scope, "eval")
        task = context.run(self.loop.create_task, self._run(group, sample))
        group.running[task] = sample
        # Not at the end of the coroutine: a task that is cancelled before its first step never runs any of it.
        task.add_done_callback(functools.partial(self._ended, group), context=contextvars.Context())
        if self._gate is not None:
            self._gate.enter(sample, task)

    async def _run(self, group: Group, sample: SampleEngine) -> Trajectory | BaseException | None:
        try:
            return await self._episode(group, sample)
        except asyncio.CancelledError:
            return RolloutError("the workflow ended by a CancelledError of its own; a cancelled part must be caught there.")
        except (Exception, SystemExit) as error:  # a workflow that fails is data: it is retried, counted and reported
            return error

    def _ended(self, group: Group, task: asyncio.Task[Trajectory | BaseException | None]) -> None:
        if task not in group.running:
            return  # it was abandoned before
        cancelled = "somebody else cancelled the sample's task."
        self._leave(group, task, RolloutError(cancelled) if task.cancelled() else task.result())

    def _leave(self, group: Group, task: asyncio.Task[Any], outcome: Trajectory | BaseException | None) -> None:
        """A sample gives its place back, and its group hears how it ended."""
        sample = group.running.pop(task)
        sample.close("has ended")
        self.running_samples -= 1
        with self._stopping_at_faults():
            if group.is_over or self.fatal is not None:
                self.samples["cut"] += 1
            else:
                self._sample_ended(group, sample, outcome)
        self._pump_soon()  # before the gate looks: a wave must not go out without the samples that start now
        if self._gate is not None:
            with self._stopping_at_faults():
                self._gate.leave(sample)

    def _abandon_later(self, group: Group, tasks: list[asyncio.Task[Any]]) -> None:
        """These were cancelled: those that have not ended after a grace are waited for no longer."""
        if tasks:
            self.loop.call_later(GRACE_SECONDS, self._abandon, group, tasks)

    def _abandon(self, group: Group, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            if task not in group.running or self.fatal is not None:
                continue
            name, place = group.running[task].name, place_of(task)
            self.abandoned_samples += 1
            logger.error(
                "%s of %s goes on %.0f s after it was cancelled (%s), and is abandoned: what it asks is refused, and its place is "
                "given to another. Let CancelledError pass: catch Exception, not everything.",
                name,
                group.workflow_name,
                GRACE_SECONDS,
                place,
            )
            self._leave(group, task, RolloutError(f"{name} did not end when it was cancelled; it waits at {place}."))
            if self.abandoned_samples > self.config.max_concurrent_samples:
                self.stop(
                    RolloutError(
                        f"{self.abandoned_samples} samples did not end when they were cancelled, more than may run at once "
                        f"(rollout.max_concurrent_samples): {group.workflow_name} keeps CancelledError to itself at {place}. Let it "
                        "pass: catch Exception, not everything."
                    )
                )

    async def _episode(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        limit = None if self.deterministic else self.config.sample_timeout
        # The timer that refuses model calls fires before the one that cancels: a workflow that catches its cancellation
        # finds them refused already.
        closing = None
        if limit is not None:
            closing = self.loop.call_later(limit, self._out_of_time, group, sample, asyncio.current_task(), limit)
        try:
            async with asyncio.timeout(limit) as scope:
                result = await group.workflow.arun_episode(sample, dict(group.data))
        except TimeoutError as error:
            if scope.expired():
                raise RolloutError(
                    f"{sample.name} took longer than rollout.sample_timeout={limit:g} s (it had made {len(sample.recorder)} "
                    "model calls); raise the limit, or look for a tool that hangs."
                ) from error
            raise
        finally:
            if closing is not None:
                closing.cancel()
        name = str(sample.name)
        trajectory = normalise(result, sample.recorder, workflow=group.workflow_name, task=name)
        if trajectory is not None and self.config.check_trajectories:
            check_trajectory(trajectory, workflow=group.workflow_name, task=name)
        return trajectory

    def _out_of_time(self, group: Group, sample: SampleEngine, task: asyncio.Task[Any] | None, limit: float) -> None:
        sample.close(f"ran out of its {limit:g} s")
        if task is not None:
            self._abandon_later(group, [task])

    def _sample_ended(self, group: Group, sample: SampleEngine, outcome: Trajectory | BaseException | None) -> None:
        name = sample.name
        if isinstance(outcome, BaseException):
            is_final = name.attempt >= self.config.max_sample_retries
            failure = self.failures.record(
                outcome, sample=str(name), task=str(group), workflow=group.workflow_name, is_final=is_final
            )
            if not is_final:
                self.samples["retried"] += 1
                self._members.appendleft((group, name.index, name.attempt + 1))
                return
            self.samples["failed"] += 1
            self.failures.count(True)
            group.failure = group.failure or failure
            self._end(group, GroupState.FAILED, "failed", f"sample {name.index} failed: {failure.cause}")
            if self.failures.too_many:
                self.stop(self.failures.error())
            return
        self.failures.count(False)
        if outcome is None:
            self.samples["rejected"] += 1
            self._end(
                group, GroupState.DROPPED, "rejected", f"sample {name.index} was rejected by its workflow (it returned None)"
            )
            return
        self.samples["accepted"] += 1
        group.rows[name.index] = outcome
        group.missing -= 1
        if group.missing == 0:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        try:
            group.trajectory = group.assemble()
            policy = policy_against(group, self.config.dynamic_filter)
        except Exception as error:  # of a should_accept_fn, or rows of a workflow that cannot be joined
            group.failure = self.failures.record(
                error, sample=str(group), task=str(group), workflow=group.workflow_name, is_final=True
            )
            self.failures.count(True)
            self._end(group, GroupState.FAILED, "failed", f"its group could not be completed: {error}")
            if self.failures.too_many:
                self.stop(self.failures.error())
            return
        if policy is not None:
            self._drop(group, policy, f"refused by {policy}")
            return
        group.state = GroupState.READY
        self._active.discard(group)
        self.groups["accepted"] += 1
        if group.batch is not None:
            group.batch.group_ended(group)
        else:
            self.delivery.complete(group)
        self._settle()

    def _drop(self, group: Group, policy: str, reason: str) -> None:
        self._end(group, GroupState.DROPPED, f"dropped/{policy}", reason)

    def _end(self, group: Group, state: GroupState, count: str, reason: str) -> None:
        """A group that will not be used: give back what it counted for, and stop its samples."""
        self.delivery.remove(group)
        group.state, group.reason = state, reason
        group.trajectory, group.rows = None, []
        self.groups[count] += 1
        self._abandon_later(group, group.cancel(f"belongs to a group that has come to its end ({reason})"))
        self._active.discard(group)
        if group.batch is not None:
            group.batch.group_ended(group)
        else:
            self.tasks.pop(group.task_id, None)
            self._ends[group.task_id] = reason
            if len(self._ends) > RESULTS_KEPT:
                del self._ends[next(iter(self._ends))]
        self._settle()
        self._pump_soon()

    # -- callers that wait ---------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter) -> None:
        """Somebody waits; the waiter is resolved on this loop."""
        if self.fatal is not None:
            waiter.fail(self.fatal)
            return
        self._waiters.append(waiter)
        self.pump()
        if self._gate is not None:
            self._gate.look()

    def forget(self, waiter: Waiter) -> None:
        """A caller gave up waiting."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        for group in waiter.groups:
            if not group.is_over or group.state is GroupState.READY:
                self._drop(group, "abandoned", "its caller stopped waiting")

    def end_of(self, task_id: int) -> str | None:
        """Why a task never became ready; None where it did, or still may."""
        return self._ends.get(task_id)

    def _settle(self) -> None:
        """Resolve the waiters that can be; each is withdrawn before anything else happens."""
        if not self._waiters or self._settling:
            return
        self._settling = True
        try:
            self._waiters = [waiter for waiter in self._waiters if not waiter.is_settled()]
        finally:
            self._settling = False

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, error: BaseException) -> None:
        """Stop for good: every caller gets ``error``, every sample is cancelled."""
        if self.fatal is None:
            self.fatal = error
        for group in self._active:
            group.cancel("belongs to a rollout that was stopped")
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fail(error)

    def unfinished_groups(self) -> list[Group]:
        """Groups of the stream that were drawn and not trained, in order of their ordinals, without the ready ones."""
        members = {*self.delivery.running, *self._stream, *self.delivery.in_training}
        return sorted((group for group in members if not group.is_eval), key=lambda group: group.ordinal)
