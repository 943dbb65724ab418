"""Groups and their delivery: which complete groups may leave together, which are too old, and what was trained.

Runs on the executor's loop. Invariants:

* a group is delivered once, and no group is delivered that is older than ``max_head_offpolicyness`` allows;
* places are counted here and nowhere else, and each is released exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from rollwright.config.sections import RolloutConfig
from rollwright.errors import WorkflowError
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.rollout.failures import Failure
from rollwright.rollout.sample import SampleEngine
from rollwright.rollout.staleness import Staleness
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")

AcceptFunction = Callable[[Trajectory], bool]

_SAMPLE_BITS = 20  # a sample's id is its group's id shifted by these, plus its number in the group


class GroupState(Enum):
    """A group leaves ``RUNNING`` once, and every group reaches one of the last three."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    DELIVERED = "delivered"
    DROPPED = "dropped"  # rejected, filtered, stale or cut
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class Group:
    """All samples of one task."""

    task_id: int
    ordinal: int
    data: dict[str, Any]
    workflow: Any
    workflow_name: str
    size: int
    is_eval: bool = False
    should_accept: AcceptFunction | None = None
    batch: Batch | None = None  # the rollout_batch call that it belongs to; None: submit, wait and prepare_batch
    state: GroupState = GroupState.QUEUED
    admitted: int = 0  # version at which it was admitted
    rows: list[Trajectory | None] = field(default_factory=list)  # of its samples
    missing: int = 0  # samples that are not at an end
    running: dict[asyncio.Task[Any], SampleEngine] = field(default_factory=dict)
    head_version: int | None = None  # of the oldest token
    trajectory: Trajectory | None = None
    reason: str = ""  # why it was dropped or given up
    failure: Failure | None = None  # of the sample that it was given up for

    @property
    def in_stream(self) -> bool:
        """True where the admission rule counts the group: not evaluation, and not of a ``rollout_batch`` call."""
        return self.batch is None and not self.is_eval

    @property
    def is_over(self) -> bool:
        """True where no sample of the group has anything left to do."""
        return self.state is not GroupState.QUEUED and self.state is not GroupState.RUNNING

    def __str__(self) -> str:
        text = repr(self.data)
        kind = "evaluation task" if self.is_eval else "task"
        return f"{kind} {self.ordinal} ({text if len(text) <= 160 else text[:157] + '…'})"

    def cancel(self, because: str) -> list[asyncio.Task[Any]]:
        """End the samples that run; a workflow that goes on all the same gets no answers.

        Returns:
            Their tasks.
        """
        for task, sample in self.running.items():
            sample.close(because)
            task.cancel()
        return list(self.running)

    def assemble(self) -> Trajectory:
        """Join the samples' rows, fill ``group_ids`` and ``sample_ids``, and find the oldest version."""
        samples = [rows for rows in self.rows if rows is not None]
        first_id = self.task_id << _SAMPLE_BITS
        for rows in samples:
            count = rows["input_ids"].shape[0]
            own = rows.get("sample_ids")
            if own is not None:
                local = torch.unique(own, return_inverse=True)[1].to(torch.int64)
            elif self.size == 1:
                local = torch.arange(count)  # the workflow makes its own group: a row is a sample
            else:
                local = torch.zeros(count, dtype=torch.int64)
            rows["sample_ids"] = local + first_id
            rows["group_ids"] = torch.full((count,), self.task_id, dtype=torch.int64)
            first_id += int(local.max()) + 1
        joined = samples[0] if len(samples) == 1 else concat_padded_tensors(samples)
        sampled = joined["versions"][joined["versions"] >= 0]
        self.head_version = int(sampled.min()) if sampled.numel() else None
        self.rows = []
        return joined

    def refused_by(self, dynamic_filter: str | None) -> str | None:
        """The name of the policy that refuses the complete group; None where it is accepted.

        Raises:
            WorkflowError: ``should_accept_fn`` returned something that is no truth value.
        """
        assert self.trajectory is not None
        if self.should_accept is not None:
            verdict = self.should_accept(self.trajectory)
            if not isinstance(verdict, bool | int) and not hasattr(verdict, "__bool__"):
                raise WorkflowError(
                    f"should_accept_fn returned {verdict!r} for {self}; it is given the group's trajectory and returns True or False."
                )
            if not verdict:
                return "should_accept_fn"
        if dynamic_filter == "no_variance" and not self.is_eval:
            rewards = self.trajectory["rewards"]  # all equal: no advantage tells the samples apart
            if self.trajectory["sample_ids"].unique().numel() > 1 and bool((rewards == rewards[0]).all()):
                return "no_variance"
        return None


class Batch:
    """The groups of one ``rollout_batch`` call."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.missing = len(groups)  # that are not at an end
        for group in groups:
            group.batch = self


class Delivery:
    """Groups of the stream (``submit``, ``prepare_batch``) from their admission to the end of their training.

    Args:
        config: staleness, over-sampling and what is done about old groups.
        deterministic: batches leave in the order of their ordinals.
        drop: ends a group: ``(group, policy, reason)``.
        on_free: called when places were released.
    """

    def __init__(
        self,
        config: RolloutConfig,
        deterministic: bool,
        drop: Callable[[Group, str, str], None],
        on_free: Callable[[], None],
    ) -> None:
        self.staleness = Staleness(config.max_head_offpolicyness, over_sampling=config.over_sampling)
        self.frontier = Frontier()
        self.running: set[Group] = set()
        self.ready: dict[Group, None] = {}  # in order of completion; also evaluation that was submitted
        self.in_training: list[Group] = []
        self.taken_by: int | None = None  # thread that took what is in training
        self._waits_for_old = config.on_stale == "wait"
        self._deterministic = deterministic
        self._drop = drop
        self._on_free = on_free

    # -- in ------------------------------------------------------------------------------------------------------------

    def admit(self, group: Group) -> None:
        """A group begins to run."""
        group.admitted = self.staleness.version
        if group.in_stream:
            self.staleness.admit()
            self.running.add(group)

    def complete(self, group: Group) -> None:
        """A group is complete and accepted; it waits to be taken."""
        if group.in_stream:
            self.running.discard(group)
            self.staleness.finish()
        self.ready[group] = None

    def remove(self, group: Group) -> None:
        """A group came to an end before it was taken; called while it still has the state that it had."""
        if group.in_stream:
            if group.state is GroupState.READY:
                self.staleness.drop_ready(group.admitted)
            elif group.state is GroupState.RUNNING:
                self.staleness.drop_running(group.admitted)
            self.running.discard(group)
        if not group.is_eval:
            self.frontier.done(group.ordinal)
        self.ready.pop(group, None)

    # -- out -----------------------------------------------------------------------------------------------------------

    def take(self, count: int, final: bool = False) -> list[Group] | None:
        """``count`` groups for training, or None where they are not there yet or must not leave yet.

        Where ``on_stale`` is "wait", a batch waits if somebody left behind could not be trained in time, and an older group
        that still runs could be in it instead.

        Args:
            count: groups in the batch.
            final: no more groups will come: fewer are taken where there are fewer.
        """
        state = self.staleness
        if state.ready < count and not final:
            return None
        self._drop_stale()
        ready = [group for group in self.ready if not group.is_eval]
        if self._deterministic:
            first_running = min((group.ordinal for group in self.running), default=None)
            if first_running is not None:
                ready = [group for group in ready if group.ordinal < first_running]
            ready.sort(key=lambda group: group.ordinal)
        elif self._waits_for_old:
            ready.sort(key=lambda group: group.admitted)  # stable: then in order of completion
        picked = ready[:count]
        if not picked or (len(picked) < count and not final):
            return None
        cut = self._stragglers(picked) if state.over_sampling else []
        if self._waits_for_old and state.batch is not None:
            youngest = max(group.admitted for group in picked)
            older_runs = any(group.admitted < youngest for group in self.running.difference(cut))
            if older_runs and state.must_wait([group.admitted for group in (*picked, *cut)], state.batch):
                return None
        self.deliver(picked)
        for group in cut:
            self._drop(group, "over_sampling", "cut: its batch was complete")
        return picked

    def take_evaluation(self, count: int) -> list[Group] | None:
        """``count`` groups of evaluation, to which no rule of age applies; None where they are not there yet."""
        picked = [group for group in self.ready if group.is_eval][:count]
        if len(picked) < count:
            return None
        self.deliver(picked)
        return picked

    def deliver(self, groups: list[Group]) -> None:
        """Hand over groups that are ready."""
        for group in groups:
            del self.ready[group]
            group.state = GroupState.DELIVERED
        training = [group for group in groups if not group.is_eval]
        self.staleness.train(group.admitted for group in training)
        self.in_training.extend(training)

    def _stragglers(self, picked: list[Group]) -> list[Group]:
        """The groups that over-sampling started in excess: those that run longest, then the youngest that are ready."""
        chosen = set(picked)
        running = sorted(self.running, key=lambda group: (group.admitted, group.task_id))
        spare = [group for group in self.ready if group not in chosen and not group.is_eval]
        return (running + spare[::-1])[: self.staleness.surplus]

    def _drop_stale(self) -> None:
        oldest_allowed = self.staleness.oldest
        for group in [group for group in self.ready if not group.is_eval]:
            oldest = group.admitted if group.head_version is None else group.head_version
            if oldest < oldest_allowed:
                if self._waits_for_old:
                    logger.warning(
                        "%s was sampled at version %d and cannot be trained at version %d (max_head_offpolicyness=%d): versions "
                        "were published without taking the batches between. It is dropped.",
                        group,
                        oldest,
                        self.staleness.head,
                        self.staleness.limit,
                    )
                self._drop(group, "stale", "older than max_head_offpolicyness allows")

    # -- versions ------------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """A version was published: the groups in training are trained and release their places."""
        if version == self.staleness.version:
            return
        self.staleness.publish(version)
        if not self._waits_for_old:
            for group in list(self.running):
                if group.admitted < self.staleness.oldest:
                    self._drop(group, "stale", "still running when it became too old")
            self._drop_stale()
        self.finish_training()

    def finish_training(self) -> None:
        """What is in training is done with."""
        for group in self.in_training:
            self.frontier.done(group.ordinal)
        self.in_training = []
        self.taken_by = None
        self.staleness.in_training = 0
        self._on_free()

    def restore(self, version: int, frontier: int, beyond: list[int], finished: list[Group]) -> None:
        """Go on where a checkpoint stood."""
        self.staleness.publish(version)
        self.frontier = Frontier(frontier, beyond)
        for group in finished:
            group.state = GroupState.READY
            group.trajectory = group.assemble()
            self.ready[group] = None
            self.staleness.restore(group.admitted)


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

    def done(self, ordinal: int) -> None:
        """Mark an ordinal as done. Idempotent."""
        if ordinal >= self.frontier:
            self._beyond.add(ordinal)
            while self.frontier in self._beyond:
                self._beyond.remove(self.frontier)
                self.frontier += 1

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self._beyond
