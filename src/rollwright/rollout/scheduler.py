"""Which group starts, ends and leaves for training: a rule over slots and versions, without threads or an event loop.

A group is admitted while

    running + ready + in_training < (max_head_offpolicyness + 1) * batch        (and the extra groups of over-sampling)

A group in training releases its slot when the next version is published. Nothing counts over the life of the run, so a
rejection, a drop or a resume can neither starve nor flood it. Each batch in training counts as a version to come.

A group admitted at version ``s`` must be trained at version ``s + max_head_offpolicyness`` at the latest. Batches take the
oldest ready groups first. Under ``on_stale: wait`` a batch leaves only if the groups that stay behind can still all meet their
deadline (earliest deadline first). The admission rule makes that possible, so "wait" drops nothing for its age. Evaluation and
``rollout_batch`` are not counted.

``Staleness`` is the rule; ``GroupScheduler`` applies it to groups. It calls nobody: its owner starts the samples that
``next_sample`` returns, reports how they ended, and cancels the samples of the groups in ``pop_ended``. Invariants:

* a group is delivered once, and no group that is older than ``max_head_offpolicyness`` allows;
* a group reaches exactly one end (delivered, dropped, failed), and releases its slot at that moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import RolloutError
from rollwright.experience.trajectory import Trajectory
from rollwright.rollout.failure_budget import Failure, FailureLog
from rollwright.rollout.resume import ReplayOrder
from rollwright.rollout.sample_engine import SampleName
from rollwright.rollout.task_group import Group, GroupState
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

RESULTS_KEPT = 65_536  # reasons of dropped tasks, kept for wait_for_task


class Staleness:
    """Counts groups by state, and decides on admission and on departure.

    Args:
        max_head_offpolicyness: most versions between a group's admission and its training.
        batch: groups in a training batch; None: not known yet, and admission is not limited.
        over_sampling: share of extra groups that are started and cut when their batch is complete.
    """

    def __init__(self, max_head_offpolicyness: int, batch: int | None = None, over_sampling: float = 0.0) -> None:
        self.limit = max_head_offpolicyness
        self.batch = batch
        self.over_sampling = over_sampling
        self.version = 0  # that was last published
        self.running = 0
        self.ready = 0
        self.in_training = 0
        self._living: Counter[int] = Counter()  # version of admission -> groups that run or are ready

    @property
    def head(self) -> int:
        """Version of the weights that the next batch will be trained from, those in training being trained by then."""
        return self.version if not self.batch else self.version + self.in_training // self.batch

    @property
    def oldest(self) -> int:
        """Version of the oldest tokens that may be trained."""
        return self.head - self.limit

    @property
    def places(self) -> float:
        """Groups that may live at once; infinite while the batch is not known."""
        if self.batch is None:
            return math.inf
        return (self.limit + 1) * self.batch + math.ceil(self.over_sampling * self.batch)

    @property
    def capacity(self) -> float:
        """Groups that may be admitted now; 0 or less: none."""
        return self.places - self.running - self.ready - self.in_training

    @property
    def surplus(self) -> int:
        """Living groups beyond the rule without over-sampling's extras: what is cut when a batch leaves."""
        if self.batch is None:
            return 0
        return max(0, self.running + self.ready + self.in_training - (self.limit + 1) * self.batch)

    def admit(self, version: int | None = None) -> int:
        """A group begins to run; returns the version that it is admitted at: an earlier one where it began before a stop."""
        version = self.version if version is None else min(version, self.version)
        self.running += 1
        self._living[version] += 1
        return version

    def finish(self) -> None:
        """A running group is complete and accepted."""
        self.running -= 1
        self.ready += 1

    def restore(self, admitted: int) -> None:
        """A complete group came with a checkpoint."""
        self.ready += 1
        self._living[admitted] += 1

    def drop_running(self, admitted: int) -> None:
        """A running group was rejected, failed, filtered or cut."""
        self.running -= 1
        self._living[admitted] -= 1

    def drop_ready(self, admitted: int) -> None:
        """A complete group was found stale or cut."""
        self.ready -= 1
        self._living[admitted] -= 1

    def train(self, admitted: Iterable[int]) -> None:
        """Complete groups, named by the versions they were admitted at, leave for training."""
        for version in admitted:
            self.ready -= 1
            self.in_training += 1
            self._living[version] -= 1

    def publish(self, version: int) -> None:
        """A version was published: what was in training is trained."""
        self.version = version
        self._living = +self._living  # without the versions of which no group lives
        self.in_training = 0

    def must_wait(self, leaving: Iterable[int], batch: int) -> bool:
        """True where a batch would leave groups behind that can no longer all be trained in time.

        All are in time if at most ``batch * (d - head)`` of them have a deadline up to ``d``, for every ``d``.

        Args:
            leaving: versions of admission of the groups that are in the batch, or are cut when it leaves.
            batch: groups in a batch.
        """
        left = self._living.copy()
        left.subtract(leaving)
        behind = 0
        for admitted in sorted(left):
            behind += left[admitted]
            rounds = max(0, admitted + self.limit - self.head)
            if behind > batch * rounds:
                return True
        return False


class GroupScheduler:
    """Groups from their arrival to their end.

    Args:
        config: limits and policies.
        deterministic: batches leave in the order of their ordinals.
        batch_size: groups in a training batch. None: not known yet.
        version: version of the weights.

    Attributes:
        tasks: groups of ``submit`` and ``prepare_batch`` that were not taken yet, by task id; ``submit`` adds to it from its own thread.
        reasons: task id -> why its group never became ready.
        taken_by: the thread that took the groups in training.
        samples: number of samples that were accepted, rejected, failed, retried and cut.
        groups: number of groups that were accepted, rejected and failed, and ``dropped/<policy>``.
    """

    def __init__(
        self, config: RolloutConfig, deterministic: bool = False, batch_size: int | None = None, version: int = 0
    ) -> None:
        self.replay = ReplayOrder()
        self.failures = FailureLog(config.max_failed_share)
        self.samples: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.tasks: dict[int, Group] = {}
        self.reasons: dict[int, str] = {}
        self.taken_by: int | None = None
        self.is_paused = False
        self._config = config
        self._deterministic = deterministic
        self._waits_for_old = config.on_stale == "wait"
        self._staleness = Staleness(config.max_head_offpolicyness, batch_size, config.over_sampling)
        self._staleness.version = version
        self._frontier = Frontier()
        self._stream: deque[Group] = deque()  # groups of submit and prepare_batch that are not admitted yet
        self._direct: deque[Group] = deque()  # groups of rollout_batch and evaluation: not subject to admission
        self._waiting: deque[tuple[Group, int, int]] = deque()  # samples of admitted groups: index and attempt
        self._held: list[tuple[Group, int, int]] = []  # waiting samples that the replay holds back
        self._running: set[Group] = set()  # groups of the stream
        self._ready: dict[Group, None] = {}  # in order of completion; includes submitted evaluation tasks
        self._in_training: list[Group] = []
        self._running_samples = 0
        self._ended: list[tuple[Group, str]] = []
        self._may_start_more = False

    # -- groups in -----------------------------------------------------------------------------------------------------

    def enqueue(self, groups: Iterable[Group]) -> None:
        """Add groups. One that was rejected or filtered before a restart ends at once."""
        for group in groups:
            if group.batch is None:
                self.tasks[group.task_id] = group
            (self._stream if group.in_stream else self._direct).append(group)
            if group.in_stream and (end := self.replay.rejected.pop(group.ordinal, None)) is not None:
                self._end(group, GroupState.DROPPED, end.state, end.reason)

    def next_sample(self) -> tuple[Group, int, int] | None:
        """The group, index and attempt of the sample to start now. Groups are admitted in order of arrival.

        Returns:
            None if there is no room or nothing to start.
        """
        while not self.is_paused and self._running_samples < self._config.max_concurrent_samples:
            if self._waiting:
                sample = group, index, _ = self._waiting.popleft()
                if not self._deterministic and self.replay.holds(group, index, self.version):
                    self._held.append(sample)
                elif not group.is_over:
                    self._running_samples += 1
                    return sample
                continue
            if self._direct:
                group = self._direct.popleft()
            elif self._stream and self._staleness.capacity >= 1:
                group = self._stream.popleft()
            else:
                break
            if not group.is_over:
                self._admit(group)
        self._waiting.extendleft(reversed(self._held))
        self._held = []
        self._may_start_more = False
        return None

    def _admit(self, group: Group) -> None:
        group.state = GroupState.RUNNING
        group.admitted = self.version
        if group.in_stream:
            group.admitted = self._staleness.admit(min((past.begin.version for past in group.past.values()), default=None))
            self._running.add(group)
        self._waiting.extend((group, index, group.first_attempt(index)) for index in range(len(group.runs)))

    # -- samples out ---------------------------------------------------------------------------------------------------

    def leave(self, is_cut: bool) -> None:
        """A sample has ended and releases its place; ``is_cut`` is True if its group was over before."""
        self._running_samples -= 1
        self.samples["cut"] += is_cut

    def is_last_attempt(self, name: SampleName) -> bool:
        """True if the group is given up when this attempt fails."""
        return name.attempt >= self._config.max_sample_retries

    def repeat(self, group: Group, name: SampleName) -> None:
        """Run a sample again from the beginning, as the same attempt."""
        group.past.pop(name.index, None)  # a lost worker's record is not in it
        self._waiting.appendleft((group, name.index, name.attempt))

    def end_sample(self, group: Group, name: SampleName, ended: Trajectory | Failure | None) -> None:
        """A sample ended with rows, with a failure, or with None if its workflow rejected it.

        A failed sample is retried, or its group is given up. A rejected one ends its group.
        """
        if isinstance(ended, Failure):
            if ended.is_final:
                self.samples["failed"] += 1
                self._give_up(group, ended, f"sample {name.index} failed: {ended.cause}")
            else:
                self.samples["retried"] += 1
                self._waiting.appendleft((group, name.index, name.attempt + 1))
            return
        self.failures.note(failed=False)
        if ended is None:
            self.samples["rejected"] += 1
            reason = f"sample {name.index} was rejected by its workflow (it returned None)"
            self._end(group, GroupState.DROPPED, "rejected", reason)
            return
        self.samples["accepted"] += 1
        further = group.add(name.index, ended)
        self._waiting.extendleft((group, index, group.first_attempt(index)) for index in reversed(further))
        if group.samples >= group.size:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        try:
            group.complete()
            policy = group.refused_by(self._config.dynamic_filter)
        except Exception as error:  # of a should_accept_fn, or rows of a workflow that cannot be joined
            name = f"{'evaluation task' if group.is_eval else 'task'} {group.ordinal}"
            failure = self.failures.record(error, sample=name, task=group.data, workflow=group.workflow_name, is_final=True)
            self._give_up(group, failure, f"its group could not be completed: {error}")
            return
        if policy is not None:
            self.drop(group, policy, f"refused by {policy}")
            return
        group.state = GroupState.READY
        self.groups["accepted"] += 1
        if group.batch is not None:
            group.batch.missing -= 1
            return
        if group.in_stream:
            self._running.discard(group)
            self._staleness.finish()
        self._ready[group] = None

    # -- the end of a group --------------------------------------------------------------------------------------------

    def drop(self, group: Group, policy: str, reason: str) -> None:
        """End a group that a policy does not want."""
        self._end(group, GroupState.DROPPED, f"dropped/{policy}", reason)

    def _give_up(self, group: Group, failure: Failure, reason: str) -> None:
        self.failures.note(failed=True)
        group.failure = group.failure or failure
        self._end(group, GroupState.FAILED, "failed", reason)

    def _end(self, group: Group, state: GroupState, count: str, reason: str) -> None:
        if group.in_stream:
            if group.state is GroupState.READY:
                self._staleness.drop_ready(group.admitted)
            elif group.state is GroupState.RUNNING:
                self._staleness.drop_running(group.admitted)
            self._running.discard(group)
        if not group.is_eval:
            self._frontier.done(group.ordinal)
        self._ready.pop(group, None)
        group.state, group.reason = state, reason
        group.rows = []
        self.groups[count] += 1
        if group.batch is not None:
            group.batch.missing -= 1
        else:
            self.tasks.pop(group.task_id, None)
            self.reasons[group.task_id] = reason
            if len(self.reasons) > RESULTS_KEPT:
                del self.reasons[next(iter(self.reasons))]
        self._ended.append((group, count))
        self._may_start_more = True

    def pop_ended(self) -> list[tuple[Group, str]]:
        """The groups that ended without being delivered since the last call, each with the name it is counted by."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def may_start_more(self) -> bool:
        """True if something changed since ``next_sample`` last returned None, so that it may now return a sample."""
        return self._may_start_more

    # -- groups out ----------------------------------------------------------------------------------------------------

    def take(self, count: int, final: bool = False) -> list[Group] | None:
        """Take a batch for training.

        Args:
            count: groups in the batch.
            final: no more groups will come, so that the batch may be smaller.

        Returns:
            None if the groups are not ready, or must not leave yet (``on_stale: wait``).
        """
        if self.replay.is_active:
            return self._take_replayed(count, final)
        if self.replay.release():  # a further batch is asked for before the version of the last one
            self._may_start_more = True
        return self._take_next(count, final)

    def _take_replayed(self, count: int, final: bool) -> list[Group] | None:
        """The batch that was delivered next before the restart; if it cannot be formed any more, a new one."""
        ready = {group.ordinal: group for group in self._ready if not group.is_eval}
        living = ready.keys() | {group.ordinal for group in self._running}
        no_more = final or self._staleness.capacity < 1
        ordinals = self.replay.next_batch(count, ready.keys(), living, self._frontier.is_done, no_more)
        if ordinals is not None:
            picked = [ready[ordinal] for ordinal in ordinals]
            self._deliver_and_cut(picked, self._surplus(picked))
            return picked
        if self.replay.is_active:
            return None
        self._may_start_more = True
        return self._take_next(count, final)

    def _take_next(self, count: int, final: bool) -> list[Group] | None:
        state = self._staleness
        if state.ready < count and not final:
            return None
        self._drop_stale()
        ready = [group for group in self._ready if not group.is_eval]
        if self._deterministic:
            first_running = min((group.ordinal for group in self._running), default=None)
            if first_running is not None:
                ready = [group for group in ready if group.ordinal < first_running]
            ready.sort(key=lambda group: group.ordinal)
        elif self._waits_for_old:
            ready.sort(key=lambda group: group.admitted)  # stable: then in order of completion
        picked = ready[:count]
        if not picked or (len(picked) < count and not final):
            return None
        cut = self._surplus(picked)
        if self._waits_for_old and state.batch is not None:
            youngest = max(group.admitted for group in picked)
            older_runs = any(group.admitted < youngest for group in self._running.difference(cut))
            if older_runs and state.must_wait([group.admitted for group in (*picked, *cut)], state.batch):
                return None
        self._deliver_and_cut(picked, cut)
        return picked

    def take_evaluation(self, count: int) -> list[Group] | None:
        """Take ``count`` groups of evaluation, of any age. None if they are not ready."""
        picked = [group for group in self._ready if group.is_eval][:count]
        if len(picked) < count:
            return None
        self.deliver(picked)
        return picked

    def take_one(self, group: Group) -> list[Group] | None:
        """Take one submitted group. None if it is not ready."""
        if group not in self._ready:
            return None
        self.deliver([group])
        return [group]

    def take_all(self) -> list[Group]:
        """Take every group that is ready; evaluation is left."""
        picked = [group for group in self._ready if not group.is_eval]
        self.deliver(picked)
        return picked

    def deliver(self, groups: list[Group]) -> None:
        """Hand over groups that are ready."""
        for group in groups:
            self._ready.pop(group, None)  # those of rollout_batch were never in it
            self.tasks.pop(group.task_id, None)
            group.state = GroupState.DELIVERED
        self._staleness.train(group.admitted for group in groups if group.in_stream)
        self._in_training.extend(group for group in groups if not group.is_eval)

    def _deliver_and_cut(self, picked: list[Group], cut: list[Group]) -> None:
        self.deliver(picked)
        for group in cut:
            self.drop(group, "over_sampling", "cut: its batch was complete")

    def _surplus(self, picked: list[Group]) -> list[Group]:
        """The groups that over-sampling started in excess: those that run longest, then the youngest that are ready."""
        if not self._staleness.over_sampling:
            return []
        kept = {group.ordinal for group in picked} | self.replay.ordinals
        running = [group for group in self._running if group.ordinal not in kept]
        spare = [group for group in self._ready if group.ordinal not in kept and not group.is_eval]
        cut = sorted(running, key=lambda group: (group.admitted, group.task_id)) + spare[::-1]
        return cut[: self._staleness.surplus]

    def _drop_stale(self) -> None:
        state = self._staleness
        for group in [group for group in self._ready if not group.is_eval]:
            oldest = group.admitted if group.head_version is None else group.head_version
            if oldest < state.oldest:
                if self._waits_for_old:
                    logger.warning(
                        "%s was sampled at version %d and cannot be trained at version %d (max_head_offpolicyness=%d): versions "
                        "were published without taking the batches between. It is dropped.",
                        group,
                        oldest,
                        state.head,
                        state.limit,
                    )
                self.drop(group, "stale", "older than max_head_offpolicyness allows")

    # -- versions ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that was published last."""
        return self._staleness.version

    def publish(self, version: int) -> None:
        """A version was published: groups in training release their slots. The current version again is a no-op."""
        state = self._staleness
        if version == state.version:
            return
        state.publish(version)
        if not self._waits_for_old:
            for group in list(self._running):
                if group.admitted < state.oldest:
                    self.drop(group, "stale", "still running when it became too old")
            self._drop_stale()
        self.finish_training()

    def finish_training(self) -> None:
        """Groups in training are done and release their slots."""
        for group in self._in_training:
            self._frontier.done(group.ordinal)
        self._in_training = []
        self.taken_by = None
        self.replay.release()
        self._staleness.in_training = 0

    def use_batch_size(self, groups: int) -> None:
        """Set how many groups a training batch has."""
        self._staleness.batch = groups

    # -- what callers ask ----------------------------------------------------------------------------------------------

    @property
    def frontier(self) -> int:
        """Every task with a lower ordinal is done: trained, rejected, dropped or given up."""
        return self._frontier.frontier

    def is_done(self, ordinal: int) -> bool:
        """True if the task was trained, rejected, dropped or given up."""
        return self._frontier.is_done(ordinal)

    @property
    def is_settled(self) -> bool:
        """True if every admitted group has ended, and no queued one can be admitted before the next version."""
        state = self._staleness
        return state.running == 0 and (not self._stream or state.capacity < 1)

    @property
    def has_work(self) -> bool:
        """True while a group of the stream is queued or runs."""
        return bool(self._stream) or self._staleness.running > 0

    @property
    def is_idle(self) -> bool:
        """True if no group is queued, runs or is ready."""
        return not self.has_work and not self._ready

    def ready(self, is_eval: bool) -> int:
        """Number of groups that are ready: of evaluation, or the others."""
        return sum(group.is_eval == is_eval for group in self._ready)

    def wanted(self) -> int:
        """Number of tasks to draw now, to fill every slot and, if sampling runs ahead, to have the next batch queued."""
        state = self._staleness
        if state.batch is None or self.is_paused:
            return 0
        ahead = state.batch if state.limit > 0 else 0
        return max(0, int(state.capacity) + ahead - len(self._stream))

    def refuse_if_stuck(self, caller: int, what: str) -> None:
        """Raise if no slot is free and only this caller, who is about to wait, could free one.

        Raises:
            RolloutError: waiting would never end; ``what`` begins the message.
        """
        state = self._staleness
        if self.is_paused or state.running > 0 or state.capacity >= 1:
            return
        if state.in_training and self.taken_by != caller:
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
        state = self._staleness
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.groups.items())) or "no task has ended"
        return f"{ends}; {state.running} running, {len(self._stream)} queued, {state.in_training} in training"

    def counters(self) -> dict[str, float]:
        """How samples and groups ended, and the number of groups in each state."""
        state = self._staleness
        return {
            **{f"samples/{name}": self.samples[name] for name in ("accepted", "rejected", "failed", "retried", "cut")},
            **{f"groups/{name}": count for name, count in {"accepted": 0, "rejected": 0, "failed": 0, **self.groups}.items()},
            "running_samples": self._running_samples,
            "queued": len(self._stream),
            "running": state.running,
            "ready": state.ready,
            "in_training": state.in_training,
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_rows: bool) -> dict[str, Any]:
        """A consistent cut; see ``RolloutExecutor.state_dict``.

        Args:
            with_rows: save the rows of complete groups. If False, their tasks are pending and run again from the journal.
        """
        complete = [group for group in self._ready if not group.is_eval]
        finished = complete if with_rows else []
        untrained = {*self._running, *self._stream, *self._in_training, *complete}.difference(finished)
        return {
            "version": self.version,
            "failed_lately": list(self.failures.outcomes),
            "frontier": self.frontier,
            "beyond": self._frontier.beyond,
            "pending": [group.task for group in sorted(untrained, key=lambda group: group.ordinal)],
            "finished": [
                {"task": group.task, "trajectory": group.join(), "admitted": group.admitted, "size": group.size}
                for group in finished
            ],
        }

    def load_state_dict(self, state: dict[str, Any], finished: Sequence[Group]) -> None:
        """Continue from ``state_dict``; ``finished`` are its complete groups."""
        self.failures.outcomes.extend(state.get("failed_lately", ()))
        self._staleness.publish(state["version"])
        self._frontier = Frontier(state["frontier"], state["beyond"])
        for group in finished:
            group.state = GroupState.READY
            group.complete()
            self._ready[group] = None
            self._staleness.restore(group.admitted)

    def complete_ordinals(self) -> list[int]:
        """Ordinals of the groups that are ready."""
        return [group.ordinal for group in self._ready]


class Frontier:
    """Which ordinals are done: a frontier and the few beyond it, so that a resumed run trains each task once.

    An ordinal is done when its group was trained, rejected, dropped or given up.
    """

    def __init__(self, frontier: int = 0, beyond: Iterable[int] = ()) -> None:
        self.frontier = frontier  # every ordinal below it is done
        self._beyond = set(beyond)

    @property
    def beyond(self) -> list[int]:
        """Ordinals at or above the frontier that are done, ascending."""
        return sorted(self._beyond)

    def is_done(self, ordinal: int) -> bool:
        """True where the ordinal was marked as done."""
        return ordinal < self.frontier or ordinal in self._beyond

    def done(self, ordinal: int) -> None:
        """Mark an ordinal as done. Idempotent."""
        if ordinal >= self.frontier:
            self._beyond.add(ordinal)
            while self.frontier in self._beyond:
                self._beyond.remove(self.frontier)
                self.frontier += 1
