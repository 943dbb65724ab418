"""Decides which group starts, ends and leaves for training: a rule over slots and versions, without threads or an event loop.

A group is admitted while

    running + ready + in_training < (max_head_offpolicyness + 1) * batch        (plus the extra groups of over-sampling)

A group in training releases its slot when the next version is published. Nothing is counted over the life of the run, so a rejection, a
drop or a resume can neither starve nor flood it. Each batch in training counts as one future version.

A group admitted at version ``s`` must be trained at version ``s + max_head_offpolicyness`` at the latest. Batches take the oldest ready
groups first. With ``on_stale: wait`` a batch leaves only if all groups that stay behind can still meet their deadlines (earliest deadline
first). The admission rule makes that possible, so ``wait`` drops no group for its age. Groups of evaluation and ``rollout_batch`` are not
counted.

``Staleness`` implements the rule, and ``GroupScheduler`` applies it to groups. The scheduler calls nobody: its owner starts the samples
that ``next_sample`` returns, reports how they ended, and cancels the samples of the groups in ``ended``. Invariants:

* a group is delivered once, and never if it is older than ``max_head_offpolicyness`` allows;
* a group reaches exactly one end (delivered, dropped, failed), and releases its slot at that moment.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from rollwright.config.sections import RolloutConfig
from rollwright.errors import RolloutError
from rollwright.experience.journal.records import unpack_value
from rollwright.experience.trajectory import Trajectory
from rollwright.rollout.failure_budget import Failure, FailureLog
from rollwright.rollout.resume import ReplayOrder
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Group, GroupState
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

RESULTS_KEPT = 65_536  # reasons of dropped tasks, kept for wait_for_task


class Staleness:
    """Counts groups by state, and decides how many may be admitted and when a batch may leave.

    Args:
        max_head_offpolicyness: maximum number of versions between a group's admission and its training.
        batch: groups in a training batch. If None, admission is not limited.
        over_sampling: share of extra groups that are started, and cut when their batch is complete.

    Attributes:
        version: the version that was published last.
        groups: number of groups that are running, ready, or delivered and in training.
    """

    def __init__(self, max_head_offpolicyness: int, batch: int | None = None, over_sampling: float = 0.0) -> None:
        self.limit = max_head_offpolicyness
        self.batch = batch
        self.over_sampling = over_sampling
        self.version = 0
        self.groups: Counter[GroupState] = Counter()
        self._living: Counter[int] = Counter()  # version of admission -> number of running and ready groups

    def move(self, admitted: int, before: GroupState, after: GroupState) -> None:
        """Count a change of state of a group that was admitted at version ``admitted``."""
        for state, change in ((before, -1), (after, 1)):
            self.groups[state] += change
            if state is GroupState.RUNNING or state is GroupState.READY:
                self._living[admitted] += change

    def publish(self, version: int) -> None:
        """Adopt a published version: the groups in training are done and release their slots."""
        self.version = version
        self._living = +self._living  # removes versions without living groups
        self.groups[GroupState.DELIVERED] = 0

    @property
    def head(self) -> int:
        """Version that the weights will have when the next batch is trained, after all batches that are in training now."""
        return self.version if not self.batch else self.version + self.groups[GroupState.DELIVERED] // self.batch

    @property
    def oldest(self) -> int:
        """Oldest version whose tokens may be trained."""
        return self.head - self.limit

    @property
    def places(self) -> float:
        """Groups that may be alive at once; infinite while the batch size is unknown."""
        if self.batch is None:
            return math.inf
        return (self.limit + 1) * self.batch + math.ceil(self.over_sampling * self.batch)

    @property
    def capacity(self) -> float:
        """Groups that may be admitted now. Zero or less admits none."""
        groups = self.groups
        return self.places - groups[GroupState.RUNNING] - groups[GroupState.READY] - groups[GroupState.DELIVERED]

    @property
    def surplus(self) -> int:
        """Number of groups that over-sampling admitted beyond the plain rule; as many are cut when a batch leaves."""
        if self.batch is None:
            return 0
        return max(0, math.ceil(self.over_sampling * self.batch) - int(self.capacity))

    def must_wait(self, leaving: Iterable[int], batch: int) -> bool:
        """Return whether a batch would leave groups behind that cannot all be trained in time.

        The remaining groups can be trained in time if, for every version ``d``, at most ``batch * (d - head)`` have a deadline up to ``d``.

        Args:
            leaving: admission versions of the groups in the batch and of the groups that are cut when it leaves.
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
    """Manages groups from their arrival to their end.

    Args:
        config: limits and policies.
        deterministic: batches leave in the order of their ordinals.
        batch_size: groups in a training batch, or None if not known yet.
        version: version of the weights.

    Attributes:
        tasks: groups of ``submit`` and ``prepare_batch`` that were not taken yet, by task id; ``submit`` adds to it from its own thread.
        reasons: task id -> why its group never became ready.
        ended: groups that ended without being delivered, each with the name of its counter in ``groups``; the owner empties this queue.
        may_start_more: True if something changed since ``next_sample`` last returned None, so that it may return a sample now.
        frontier: the ordinals that are done.
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
        #: Both without evaluation, under names such as ``samples/failed`` and ``groups/dropped/stale``.
        self.of_training: Counter[str] = Counter()
        self.tasks: dict[int, Group] = {}
        self.reasons: dict[int, str] = {}
        self.ended: deque[tuple[Group, str]] = deque()
        self.may_start_more = False
        self.frontier = Frontier()
        self.taken_by: int | None = None
        self.is_paused = False
        self._config = config
        self._deterministic = deterministic
        self._waits_for_old = config.on_stale == "wait"
        self._staleness = Staleness(config.max_head_offpolicyness, batch_size, config.over_sampling)
        self._staleness.version = version
        self._stream: deque[Group] = deque()  # groups of submit and prepare_batch that are not admitted yet
        self._direct: deque[Group] = deque()  # groups of rollout_batch and evaluation: not subject to admission
        self._waiting: deque[tuple[Group, int, int]] = deque()  # samples of admitted groups: index and attempt
        self._held: list[tuple[Group, int, int]] = []  # waiting samples that the replay holds back
        self._running: set[Group] = set()  # groups of the stream
        self._ready: dict[Group, None] = {}  # in order of completion; includes submitted evaluation tasks
        self._in_training: list[Group] = []
        self._running_samples = 0

    # -- groups in -----------------------------------------------------------------------------------------------------

    def enqueue(self, groups: Iterable[Group]) -> None:
        """Add groups. A group that was rejected or filtered before a restart ends at once."""
        for group in groups:
            if group.batch is None:
                self.tasks[group.task_id] = group
            (self._stream if group.in_stream else self._direct).append(group)
            if group.in_stream and (end := self.replay.rejected.pop(group.ordinal, None)) is not None:
                group.result = unpack_value(end.result) if end.result else None
                self._end(group, GroupState.DROPPED, end.state, end.reason)

    def next_sample(self) -> tuple[Group, int, int] | None:
        """Return the group, index and attempt of the sample to start now, or None if there is no room or nothing to start.

        Groups are admitted in order of arrival.
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
            if group.is_over:
                continue
            past = group.past if group.in_stream else {}  # a group that began before a restart is as old as its samples
            group.admitted = min([self.version, *(each.begin.version for each in past.values())])
            self._move(group, GroupState.RUNNING)
            self._waiting.extend((group, index, group.first_attempt(index)) for index in range(len(group.runs)))
        self._waiting.extendleft(reversed(self._held))
        self._held = []
        self.may_start_more = False
        return None

    def _move(self, group: Group, state: GroupState) -> None:
        """Change the state of a group and update the counts."""
        if group.in_stream:
            self._staleness.move(group.admitted, group.state, state)
            (self._running.add if state is GroupState.RUNNING else self._running.discard)(group)
        group.state = state

    # -- samples out ---------------------------------------------------------------------------------------------------

    def leave(self, group: Group, is_cut: bool) -> None:
        """Release the place of a sample that has ended; ``is_cut`` is True if its group was over before the sample ended."""
        self._running_samples -= 1
        if is_cut:
            self._count_sample("cut", group)

    def _count_sample(self, end: str, group: Group) -> None:
        self.samples[end] += 1
        self.of_training[f"samples/{end}"] += not group.is_eval

    def _count_group(self, end: str, group: Group) -> None:
        self.groups[end] += 1
        self.of_training[f"groups/{end}"] += not group.is_eval

    def repeat(self, group: Group, name: SampleName) -> None:
        """Run a sample again from the beginning, as the same attempt."""
        group.past.pop(name.index, None)  # may be absent: a past read for a lost worker is not stored here
        self._waiting.appendleft((group, name.index, name.attempt))

    def end_sample(self, group: Group, name: SampleName, ended: Trajectory | Failure | None) -> None:
        """Handle the end of a sample: its rows, its failure, or None if its workflow rejected it.

        A failed sample is retried, or its group is given up if no attempt is left. A rejected sample ends its group.
        """
        if isinstance(ended, Failure):
            if ended.is_final:
                self._count_sample("failed", group)
                self._give_up(group, ended, f"sample {name.index} failed: {ended.cause}")
            else:
                self._count_sample("retried", group)
                self._waiting.appendleft((group, name.index, name.attempt + 1))
            return
        self.failures.note(failed=False)
        if ended is None:
            self._count_sample("rejected", group)
            reason = f"sample {name.index} was rejected by its workflow (it returned None)"
            self._end(group, GroupState.DROPPED, "rejected", reason)
            return
        self._count_sample("accepted", group)
        further = group.add(name.index, ended)
        self._waiting.extendleft((group, index, group.first_attempt(index)) for index in reversed(further))
        if group.samples >= group.size:
            self._complete(group)

    def _complete(self, group: Group) -> None:
        try:
            group.complete()
            policy = group.refused_by(self._config.dynamic_filter)
        except Exception as error:  # raised by should_accept_fn, or because rows cannot be joined
            name = f"{'evaluation task' if group.is_eval else 'task'} {group.ordinal}"
            failure = self.failures.record(error, sample=name, task=group.data, workflow=group.workflow_name, is_final=True)
            self._give_up(group, failure, f"its group could not be completed: {error}")
            return
        if policy is not None:
            self.drop(group, policy, f"refused by {policy}")
            return
        self._move(group, GroupState.READY)
        self._count_group("accepted", group)
        if group.batch is not None:
            group.batch.missing -= 1
        else:
            self._ready[group] = None

    # -- the end of a group --------------------------------------------------------------------------------------------

    def drop(self, group: Group, policy: str, reason: str) -> None:
        """End a group and count it as dropped by ``policy``."""
        self._end(group, GroupState.DROPPED, f"dropped/{policy}", reason)

    def _give_up(self, group: Group, failure: Failure, reason: str) -> None:
        self.failures.note(failed=True)
        group.failure = group.failure or failure
        self._end(group, GroupState.FAILED, "failed", reason)

    def _end(self, group: Group, state: GroupState, count: str, reason: str) -> None:
        self._move(group, state)
        if not group.is_eval:
            self.frontier.done(group.ordinal)
        self._ready.pop(group, None)
        group.reason = reason
        group.rows = []
        self._count_group(count, group)
        if group.batch is not None:
            group.batch.missing -= 1
        else:
            self.tasks.pop(group.task_id, None)
            self.reasons[group.task_id] = reason
            if len(self.reasons) > RESULTS_KEPT:
                del self.reasons[next(iter(self.reasons))]
        self.ended.append((group, count))
        self.may_start_more = True

    # -- groups out ----------------------------------------------------------------------------------------------------

    def take(self, count: int, final: bool = False) -> list[Group] | None:
        """Take a batch for training.

        Args:
            count: groups in the batch.
            final: no more groups will come, so the batch may be smaller.

        Returns:
            The groups of the batch, or None if they are not ready or must not leave yet (``on_stale: wait``).
        """
        picked = None
        if self.replay.remaining:
            picked = self._next_replayed(count, final)
            if picked is None and self.replay.remaining:
                return None
            self.may_start_more |= picked is None
        else:  # a further batch is requested before the version of the last replayed one is published
            self.may_start_more |= self.replay.release()
        if picked is None:
            picked = self._next(count, final)
        if picked is None:
            return None
        cut = self._surplus(picked)
        self.deliver(picked)
        for group in cut:
            self.drop(group, "over_sampling", "cut: its batch was complete")
        return picked

    def _next_replayed(self, count: int, final: bool) -> list[Group] | None:
        """Return the batch that was delivered next before the restart, or None if it is not ready or can no longer be formed."""
        ready = {group.ordinal: group for group in self._ready if not group.is_eval}
        living = ready.keys() | {group.ordinal for group in self._running}
        no_more = final or self._staleness.capacity < 1
        ordinals = self.replay.next_batch(count, ready.keys(), living, self.frontier.is_done, no_more)
        return None if ordinals is None else [ready[ordinal] for ordinal in ordinals]

    def _next(self, count: int, final: bool) -> list[Group] | None:
        """Choose the next batch by the admission rule; return None if its groups are not ready or must not leave yet."""
        state = self._staleness
        if state.groups[GroupState.READY] < count and not final:
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
        if self._waits_for_old and state.batch is not None:
            cut = self._surplus(picked)
            youngest = max(group.admitted for group in picked)
            older_runs = any(group.admitted < youngest for group in self._running.difference(cut))
            if older_runs and state.must_wait([group.admitted for group in (*picked, *cut)], state.batch):
                return None
        return picked

    def take_ready(self, count: int | None = None, *, is_eval: bool = False) -> list[Group] | None:
        """Take ready groups of any age: all of them, or ``count``. Returns None if fewer than ``count`` are ready."""
        picked = [group for group in self._ready if group.is_eval == is_eval][:count]
        if len(picked) < (count or 0):
            return None
        self.deliver(picked)
        return picked

    def take_one(self, group: Group) -> list[Group] | None:
        """Take one submitted group. Returns None if it is not ready."""
        if group not in self._ready:
            return None
        self.deliver([group])
        return [group]

    def deliver(self, groups: list[Group]) -> None:
        """Mark ready groups as delivered."""
        for group in groups:
            self._ready.pop(group, None)  # groups of rollout_batch were never in it
            self.tasks.pop(group.task_id, None)
            self._move(group, GroupState.DELIVERED)
        self._in_training.extend(group for group in groups if not group.is_eval)

    def _surplus(self, picked: list[Group]) -> list[Group]:
        """Choose the extra groups of over-sampling to cut: those that have run longest, then the ready ones that completed last."""
        if not self._staleness.over_sampling:
            return []
        kept = {group.ordinal for group in picked} | self.replay.remaining.keys()
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
        """Adopt a published version; groups in training release their slots. A no-op if it is already the current version."""
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
        """Mark the groups in training as done and release their slots."""
        for group in self._in_training:
            self.frontier.done(group.ordinal)
        self._in_training = []
        self.taken_by = None
        self.replay.release()
        self._staleness.groups[GroupState.DELIVERED] = 0

    def use_batch_size(self, groups: int) -> None:
        """Set the number of groups in a training batch."""
        self._staleness.batch = groups

    # -- what callers ask ----------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """True if every admitted group has ended and no queued group can be admitted before the next version."""
        return not self._running and (not self._stream or self._staleness.capacity < 1)

    @property
    def has_work(self) -> bool:
        """True while a group of ``submit`` or ``prepare_batch`` is queued or running."""
        return bool(self._stream or self._running)

    @property
    def is_idle(self) -> bool:
        """True if no group is queued, running or ready."""
        return not self.has_work and not self._ready

    def ready(self, is_eval: bool) -> int:
        """Return the number of ready evaluation groups or, if ``is_eval`` is False, of all other ready groups."""
        return sum(group.is_eval == is_eval for group in self._ready)

    def wanted(self) -> int:
        """Return how many tasks to draw now to fill every slot and, if sampling runs ahead, to have the next batch queued."""
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
        in_training = state.groups[GroupState.DELIVERED]
        if self.is_paused or self._running or state.capacity >= 1 or (in_training and self.taken_by != caller):
            return
        rule = f"max_head_offpolicyness={state.limit} and batches of {state.batch} groups let {state.places:.0f} groups live at once"
        if in_training:
            raise RolloutError(
                f"{what} {in_training} are still in training: {rule}, and places are released when the next version is "
                "published. Call update_weights (or set_version) first, or release_batch() for a batch that is not trained."
            )
        raise RolloutError(
            f"{what} {state.groups[GroupState.READY]} complete groups hold all places: {rule}. Take them with wait or prepare_batch, in batches of "
            "that size."
        )

    def describe(self) -> str:
        """Describe in words how tasks have ended so far and how many are in flight."""
        in_training = self._staleness.groups[GroupState.DELIVERED]
        ends = ", ".join(f"{count} {name}" for name, count in sorted(self.groups.items())) or "no task has ended"
        return f"{ends}; {len(self._running)} running, {len(self._stream)} queued, {in_training} in training"

    def counters(self) -> dict[str, float]:
        """Count how samples and groups have ended, and the groups in each state."""
        in_state = self._staleness.groups
        return {
            **{f"samples/{name}": self.samples[name] for name in ("accepted", "rejected", "failed", "retried", "cut")},
            **{f"groups/{name}": count for name, count in {"accepted": 0, "rejected": 0, "failed": 0, **self.groups}.items()},
            "running_samples": self._running_samples,
            "queued": len(self._stream),
            "running": in_state[GroupState.RUNNING],
            "ready": in_state[GroupState.READY],
            "in_training": in_state[GroupState.DELIVERED],
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, with_rows: bool) -> dict[str, Any]:
        """Return a consistent snapshot; see ``RolloutExecutor.state_dict``.

        Args:
            with_rows: save the rows of complete groups. If False, their tasks count as pending and run again from the journal.
        """
        complete = [group for group in self._ready if not group.is_eval]
        finished = complete if with_rows else []
        untrained = {*self._running, *self._stream, *self._in_training, *complete}.difference(finished)
        return {
            "version": self.version,
            "failed_lately": list(self.failures.outcomes),
            "frontier": self.frontier.first_open,
            "beyond": self.frontier.beyond,
            "pending": [group.task for group in sorted(untrained, key=lambda group: group.ordinal)],
            "finished": [
                {
                    "task": group.task,
                    "trajectory": group.join(),
                    "admitted": group.admitted,
                    "size": group.size,
                    "workflow": group.workflow_name,
                    "result": group.result,
                }
                for group in finished
            ],
        }

    def load_state_dict(self, state: dict[str, Any], finished: Sequence[Group]) -> None:
        """Restore a snapshot of ``state_dict``; ``finished`` holds its complete groups."""
        self.failures.outcomes.extend(state.get("failed_lately", ()))
        self._staleness.publish(state["version"])
        self.frontier = Frontier(state["frontier"], state["beyond"])
        for group in finished:
            group.complete()
            self._move(group, GroupState.READY)
            self._ready[group] = None

    def complete_ordinals(self) -> list[int]:
        """Return the ordinals of the ready groups."""
        return [group.ordinal for group in self._ready]


class Frontier:
    """The ordinals that are done: all below ``first_open``, and a few beyond it.

    An ordinal is done when its group was trained, rejected, dropped or given up. A resumed run uses this to train each task only once.
    """

    def __init__(self, first_open: int = 0, beyond: Iterable[int] = ()) -> None:
        self.first_open = first_open
        self._beyond = set(beyond)

    @property
    def beyond(self) -> list[int]:
        """Ordinals above ``first_open`` that are done, ascending."""
        return sorted(self._beyond)

    def is_done(self, ordinal: int) -> bool:
        """Return whether the ordinal was marked as done."""
        return ordinal < self.first_open or ordinal in self._beyond

    def done(self, ordinal: int) -> None:
        """Mark an ordinal as done. Idempotent."""
        if ordinal >= self.first_open:
            self._beyond.add(ordinal)
            while self.first_open in self._beyond:
                self._beyond.remove(self.first_open)
                self.first_open += 1
