"""The loop's side of rollout: starts samples, retries them, completes groups and answers callers that wait.

Everything here runs on the executor's event loop, so nothing is locked. Invariants:

* a group reaches exactly one end (delivered, dropped, failed), and what it counted for is released at that moment;
* a sample releases its place when it ends, or a grace after it was cancelled, whatever its workflow does about that;
* a fault in here stops rollout: nobody waits for what will not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import BrokenRewardError, JournalError, ReplayError, RolloutError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.durable import EPISODE
from rollwright.experience.journal.records import GroupEnd
from rollwright.experience.journal.writing import Journal
from rollwright.experience.normaliser import normalise
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.engine import InferenceEngine
from rollwright.processes.child import UNCOUNTED
from rollwright.processes.pool import START_SECONDS
from rollwright.processes.sandbox import sandboxed
from rollwright.rollout.event_loop import place_of
from rollwright.rollout.failure_budget import Failure, FailureLog, with_cause
from rollwright.rollout.sample_engine import CURRENT_SAMPLE, SampleEngine
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.staleness import Delivery
from rollwright.rollout.task_group import Group, GroupState, Waiter
from rollwright.tracking.logging import getLogger
from rollwright.tracking.metrics import get_tracker

logger = getLogger("rollout")

RESULTS_KEPT = 65_536  # outcomes of dropped tasks that wait_for_task can still tell
TRACEBACK_KEPT = 8_000  # characters of a failure's, in the journal
GRACE_SECONDS = 10.0  # that a cancelled sample gets to end


class Elsewhere(Protocol):
    """Runs episodes in other processes."""

    async def run(self, group: Group, sample: SampleEngine) -> Trajectory | None:
        """The rows of an episode, normalised and checked; None where it was rejected. Raises why it failed; where it did not run as
        its past did, ``sample.episode.diverged`` is set, too."""
        ...


class Runner:
    """Runs groups of samples on one event loop.

    Args:
        engine: the engine of the run.
        config: limits and policies.
        loop: the loop that all of this runs on.
        seed: the run's seed.
        deterministic: batches leave in the order of their ordinals.
        journal: of what episodes are answered; None: they are not written down.
        elsewhere: runs the episodes, and writes their journal; None: they run here.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: RolloutConfig,
        loop: asyncio.AbstractEventLoop,
        seed: int,
        deterministic: bool,
        journal: Journal | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.engine = engine
        self.journal = journal
        self.elsewhere = elsewhere
        self.config = config
        self.loop = loop
        self.seed = seed
        self.delivery = Delivery(config, deterministic, self._drop, self.pump)
        self.failures = FailureLog(config.max_failed_share)
        self.samples: Counter[str] = Counter()  # accepted, rejected, failed, retried, cut
        self.groups: Counter[str] = Counter()  # accepted, rejected, failed, and dropped/<policy>
        self.is_paused = False
        self.fatal: BaseException | None = None
        self.running_samples = 0
        self.abandoned_samples = 0  # that did not end when they were cancelled
        self.stream: deque[Group] = deque()  # groups of submit and prepare_batch that are not admitted yet
        self.tasks: dict[int, Group] = {}  # that wait and wait_for_task can ask for; submit adds to it from its own thread
        self.ends: dict[int, str] = {}  # task id -> why it never became ready
        self._direct: deque[Group] = deque()  # groups of rollout_batch and evaluation: not subject to admission
        self._members: deque[tuple[Group, int, int]] = deque()  # samples of admitted groups that wait for a place
        self._held: list[tuple[Group, int, int]] = []  # of them, those that wait for the version that they had come to
        self.given_up: dict[int, GroupEnd] = {}  # tasks that were rejected or filtered before the run was stopped
        self._waiters: list[Waiter] = []
        self._is_settling = False
        self._pump_asked = False

    # -- groups in -----------------------------------------------------------------------------------------------------

    def enqueue(self, groups: Sequence[Group]) -> None:
        """Take groups in; they start as soon as there is room."""
        for group in groups:
            if group.batch is None:
                self.tasks[group.task_id] = group
            (self.stream if group.in_stream else self._direct).append(group)
        with self._faults_stop():
            for group in groups:
                if group.in_stream and (end := self.given_up.pop(group.ordinal, None)) is not None:
                    self._end(group, GroupState.DROPPED, end.state, end.reason)
            self.pump()

    def pump(self) -> None:
        """Start as many samples as there is room for; groups are admitted in the order in which they came."""
        state = self.delivery.staleness
        self._members.extendleft(reversed(self._held))
        self._held = []
        while not self.is_paused and self.fatal is None and self.running_samples < self.config.max_concurrent_samples:
            if self._members:
                group, index, attempt = self._members.popleft()
                if self.delivery.waits_for_version(group, index):
                    self._held.append((group, index, attempt))
                elif not group.is_over:
                    self._start(group, index, attempt)
                continue
            if self._direct:
                group = self._direct.popleft()
            elif self.stream and state.capacity >= 1:
                group = self.stream.popleft()
            else:
                break
            if not group.is_over:
                group.state = GroupState.RUNNING
                self.delivery.admit(group)
                self._members.extend((group, index, group.first_attempt(index)) for index in range(len(group.runs)))
        self._settle()

    def _pump_soon(self) -> None:
        if not self._pump_asked:
            self._pump_asked = True
            self.loop.call_soon(self._pump_now, context=contextvars.Context())

    def _pump_now(self) -> None:
        self._pump_asked = False
        with self._faults_stop():
            self.pump()

    # -- samples -------------------------------------------------------------------------------------------------------

    def _start(self, group: Group, index: int, attempt: int) -> None:
        name = SampleName(group.ordinal, index, attempt, group.is_eval)
        journal = self.journal if self.elsewhere is None else None
        sample = SampleEngine(
            self.engine,
            name,
            run_seed=self.seed,
            loop=self.loop,
            workflow=group.workflow_name,
            episode=group.begin_episode(journal, name, self.delivery.staleness.version),
        )
        sample.samples_asked = group.runs[index]
        self.running_samples += 1
        context = contextvars.Context()
        context.run(CURRENT_SAMPLE.set, sample)
        context.run(EPISODE.set, sample.episode)
        context.run(UNCOUNTED.set, sample.uncounted)
        if group.is_eval:  # what it reports is no metric of training
            context.run(get_tracker().enter_scope, "eval")
        task = context.run(self.loop.create_task, self._run(group, sample))
        group.running[task] = sample
        # Not at the end of the coroutine: a task that is cancelled before its first step never runs any of it.
        task.add_done_callback(functools.partial(self._leave, group), context=contextvars.Context())

    async def _run(self, group: Group, sample: SampleEngine) -> Trajectory | BaseException | None:
        """One episode, its rows normalised and checked; an exception of the workflow is returned, not raised."""
        limit, began = self.config.sample_timeout, self.loop.time()
        timer: asyncio.TimerHandle | None = None

        def look(allowed: float) -> None:
            nonlocal timer
            left = allowed + sample.uncounted.seconds - (self.loop.time() - began)
            if left > 0:
                timer = self.loop.call_later(max(left, 0.01), look, allowed)
            else:
                self._cancel_late(group, sample)

        if limit is not None:  # a worker process enforces its own limit and knows the uncounted time
            look(limit + (START_SECONDS if self.elsewhere is not None else 0.0))
        try:
            if self.elsewhere is not None:
                return await self.elsewhere.run(group, sample)
            with sandboxed(self.config.sandbox):
                result = await group.workflow.arun_episode(sample, dict(group.data))
            name = str(sample.name)
            trajectory = normalise(result, sample.recorder, workflow=group.workflow_name, task=name)
            if trajectory is not None and sample.sample_of_row is not None:
                trajectory["sample_ids"] = torch.tensor(sample.sample_of_row)
            if trajectory is not None and self.config.check_trajectories:
                check_trajectory(trajectory, workflow=group.workflow_name, task=name)
            return trajectory
        except asyncio.CancelledError as error:
            if sample.closed_because is None:
                return RolloutError("the workflow ended by a CancelledError of its own; a cancelled part must be caught there.")
            late = RolloutError(
                f"{sample.name} took longer than rollout.sample_timeout={limit or 0:g} s (it had made {len(sample.recorder)} "
                "model calls); raise the limit, or look for a tool that hangs."
            )
            late.__cause__ = error
            return late
        except (Exception, SystemExit) as error:  # a workflow that fails is data: it is retried, counted and reported
            return error
        finally:
            if timer is not None:
                timer.cancel()

    def _cancel_late(self, group: Group, sample: SampleEngine) -> None:
        # First: a workflow that catches its cancellation finds its model calls refused already.
        sample.close(f"ran out of its {self.config.sample_timeout:g} s")
        tasks = [task for task, running in group.running.items() if running is sample]
        for task in tasks:
            task.cancel()
        self._abandon_later(group, tasks)

    def _leave(self, group: Group, task: asyncio.Task[Any], abandoned: RolloutError | None = None) -> None:
        """A sample ended, or is abandoned: it releases its place, and its group hears how it ended."""
        sample = group.running.pop(task, None)
        if sample is None:
            return  # it was abandoned before
        sample.close("has ended")
        self.running_samples -= 1
        with self._faults_stop():
            is_unknown = abandoned is not None or task.cancelled() or task.exception() is not None
            self._stop_without_journal(None if is_unknown else task.result())
            if group.is_over or self.fatal is not None:
                self.samples["cut"] += 1
                if not isinstance(self.fatal, JournalError):  # the journal would raise again
                    sample.episode.end("cut", group.reason or "its group is over")
            elif abandoned is not None or task.cancelled():
                self._sample_ended(group, sample, abandoned or RolloutError("somebody else cancelled the sample's task."))
            else:
                self._sample_ended(group, sample, task.exception() or task.result())
            self._pump_soon()

    def _stop_without_journal(self, outcome: Any) -> None:
        """Stop the run if the journal could not be written, even if the caller's code swallowed the error."""
        failure = outcome if isinstance(outcome, JournalError) else None if self.journal is None else self.journal.failure
        if failure is not None and self.fatal is None:
            self.stop(failure)

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

    def _sample_ended(self, group: Group, sample: SampleEngine, outcome: Trajectory | BaseException | None) -> None:
        name = sample.name
        if sample.episode.diverged is not None:  # also where the workflow made something else of it
            self._diverged(group, sample, sample.episode.diverged)
            return
        if isinstance(outcome, BaseException):
            is_final = name.attempt >= self.config.max_sample_retries
            failure = self._failed(group, outcome, str(name), is_final)
            reason = f"{type(outcome).__name__}: {outcome}"[:2000]
            sample.episode.end("failed", reason, traceback=failure.traceback[-TRACEBACK_KEPT:])
            if isinstance(outcome, BrokenRewardError):
                self.stop(with_cause("rollout stops, because further samples cannot be scored either.", failure))
            elif is_final:
                self.samples["failed"] += 1
                self._give_up(group, failure, f"sample {name.index} failed: {failure.cause}")
            else:
                self.samples["retried"] += 1
                self._members.appendleft((group, name.index, name.attempt + 1))
            return
        self.failures.note(failed=False)
        sample.episode.end("rejected" if outcome is None else "accepted", rows=outcome)
        if outcome is None:
            self.samples["rejected"] += 1
            reason = f"sample {name.index} was rejected by its workflow (it returned None)"
            self._end(group, GroupState.DROPPED, "rejected", reason)
            return
        self.samples["accepted"] += 1
        further = group.add(name.index, outcome)
        self._members.extendleft((group, index, group.first_attempt(index)) for index in reversed(further))
        if group.samples >= group.size:
            if group.running:
                self._abandon_later(group, group.cancel("belongs to a group that is full"))
            self._complete(group)

    def _diverged(self, group: Group, sample: SampleEngine, error: Exception) -> None:
        """A sample asked for something else than before the stop: it begins anew, as the same attempt, or the run stops."""
        if self.journal is not None and self.journal.config.on_divergence == "fail":
            sample.episode.end("cut", str(error)[:2000])
            self.stop(
                ReplayError(f"{error} Change it back, or set journal.on_divergence to restart: such episodes then begin anew.")
            )
            return
        logger.warning("%s It begins anew.", error)
        sample.episode.end("diverged", str(error)[:2000])
        group.past.pop(sample.name.index, None)  # one that a lost worker left is not in it
        self._members.appendleft((group, sample.name.index, sample.name.attempt))

    def _complete(self, group: Group) -> None:
        try:
            group.complete()
            policy = group.refused_by(self.config.dynamic_filter)
        except Exception as error:  # of a should_accept_fn, or rows of a workflow that cannot be joined
            name = f"{'evaluation task' if group.is_eval else 'task'} {group.ordinal}"
            failure = self._failed(group, error, name, is_final=True)
            self._give_up(group, failure, f"its group could not be completed: {error}")
            return
        if policy is not None:
            self._drop(group, policy, f"refused by {policy}")
            return
        group.state = GroupState.READY
        self.groups["accepted"] += 1
        if group.batch is not None:
            group.batch.missing -= 1
        else:
            self.delivery.complete(group)
        self._settle()

    # -- groups out ----------------------------------------------------------------------------------------------------

    def _failed(self, group: Group, error: BaseException, sample: str, is_final: bool) -> Failure:
        return self.failures.record(error, sample=sample, task=group.data, workflow=group.workflow_name, is_final=is_final)

    def _give_up(self, group: Group, failure: Failure, reason: str) -> None:
        self.failures.note(failed=True)
        group.failure = group.failure or failure
        self._end(group, GroupState.FAILED, "failed", reason)
        if error := self.failures.too_many():
            self.stop(error)

    def _drop(self, group: Group, policy: str, reason: str) -> None:
        self._end(group, GroupState.DROPPED, f"dropped/{policy}", reason)

    def _end(self, group: Group, state: GroupState, count: str, reason: str) -> None:
        """A group that will not be used: release what it counted for, and stop its samples."""
        self.delivery.remove(group)
        group.state, group.reason = state, reason
        group.note_end(self.journal, count)
        group.rows = []
        self.groups[count] += 1
        self._abandon_later(group, group.cancel(f"belongs to a group that has come to its end ({reason})"))
        if group.batch is not None:
            group.batch.missing -= 1
        else:
            self.tasks.pop(group.task_id, None)
            self.ends[group.task_id] = reason
            if len(self.ends) > RESULTS_KEPT:
                del self.ends[next(iter(self.ends))]
        self._settle()
        self._pump_soon()

    # -- callers that wait ---------------------------------------------------------------------------------------------

    def add_waiter(self, waiter: Waiter, groups: Sequence[Group] = ()) -> None:
        """Somebody waits, and brings groups; the waiter is answered on this loop."""
        if self.fatal is None:
            self._waiters.append(waiter)
        else:
            waiter.fail(self.fatal)
        self.enqueue(groups)

    def forget(self, waiter: Waiter) -> None:
        """A caller gave up waiting."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        for group in waiter.own_groups:
            if not group.is_over or group.state is GroupState.READY:
                self._drop(group, "abandoned", "its caller stopped waiting")

    def _settle(self) -> None:
        """Answer the waiters that can be."""
        if self._is_settling or not self._waiters:
            return
        self._is_settling = True
        try:
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
                    self.tasks.pop(group.task_id, None)
                    group.note_end(self.journal, "delivered")
                if waiter.caller is not None and not all(group.is_eval for group in groups):
                    self.delivery.taken_by = waiter.caller
                if not waiter.future.done():
                    waiter.future.set_result(groups)
            self._waiters = waiting
        finally:
            self._is_settling = False

    @property
    def is_settled(self) -> bool:
        """True where every admitted group has ended, and none that is queued may be admitted before the next version."""
        state = self.delivery.staleness
        return state.running == 0 and (not self.stream or state.capacity < 1)

    def wanted(self) -> int:
        """Tasks to draw now, so that every place is taken and, where sampling runs ahead, the next batch is at hand."""
        state = self.delivery.staleness
        if state.batch is None or self.is_paused:
            return 0
        ahead = state.batch if state.limit > 0 else 0
        return max(0, int(state.capacity) + ahead - len(self.stream))

    def refuse_if_stuck(self, caller: int, what: str) -> None:
        """Raise where no place is free and only this caller, who is about to wait, could free one."""
        state = self.delivery.staleness
        if self.is_paused or state.running > 0 or state.capacity >= 1:
            return
        if state.in_training and self.delivery.taken_by != caller:
            return
        rule = f"max_head_offpolicyness={state.limit} and batches of {state.batch} groups let {state.places:.0f} groups live at once"
        if state.in_training:
            raise RolloutError(
                f"{what} {state.in_training} are still in training: {rule}, and places are released when the next version is "
                "published. Call update_weights (or set_version) first, or release_batch() for a batch that is not trained."
            )
        raise RolloutError(
            f"{what} {state.ready} complete groups hold all places: {rule}. Take them with wait or prepare_batch, in batches of "
            "that size."
        )

    def describe(self) -> str:
        """How the tasks so far ended, in words."""
        state = self.delivery.staleness
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.groups.items())) or "no task has ended"
        return f"{ends}; {state.running} running, {len(self.stream)} queued, {state.in_training} in training"

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self, error: BaseException) -> None:
        """Stop for good: every caller gets ``error``, every sample is cancelled."""
        self.fatal = self.fatal or error
        waiters, self._waiters = self._waiters, []
        for group in [*self.tasks.copy().values(), *(group for waiter in waiters for group in waiter.own_groups)]:
            group.cancel("belongs to a rollout that was stopped")
        for waiter in waiters:
            waiter.fail(error)

    @contextlib.contextmanager
    def _faults_stop(self) -> Iterator[None]:
        """A fault of ours in a callback of the loop would only be logged there, and callers would wait for ever."""
        try:
            yield
        except JournalError as error:  # its message is complete
            self.stop(error)
        except Exception as error:  # unforeseen by definition
            logger.exception("rollout stops for a fault of its own")
            self.stop(error)
