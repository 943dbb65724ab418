"""How far sampling may run ahead of training, and which complete groups leave for it; evaluation is not counted.

A group is admitted while

    running + ready + in_training < (max_head_offpolicyness + 1) * batch        (and the extra groups of over-sampling)

A group in training releases its slot when the next version is published. Nothing counts over the life of the run, so a
rejection, a drop or a resume can neither starve nor flood it. Each batch in training counts as a version to come.

A group admitted at version ``s`` must be trained at version ``s + max_head_offpolicyness`` at the latest. Batches take the
oldest ready groups first. Under ``on_stale: wait`` a batch leaves only if the groups that stay behind can still all meet their
deadline (earliest deadline first). The admission rule makes that possible, so "wait" drops nothing for its age.

``Staleness`` is the rule; ``Delivery`` keeps the groups by it, on the executor's loop. Invariants:

* a group is delivered once, and no group that is older than ``max_head_offpolicyness`` allows;
* slots are counted here and nowhere else, and each is released exactly once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from rollwright.config.sections import RolloutConfig
from rollwright.rollout.task_group import Group, GroupState
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")


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
        self.again: dict[int, None] = {}  # ordinals delivered after the checkpoint that the run was resumed from, in order
        self._awaits_last_again = False  # the last of these batches was taken, and its version is not published
        self._waits_for_old = config.on_stale == "wait"
        self._deterministic = deterministic
        self._drop = drop
        self._on_free = on_free

    # -- in ------------------------------------------------------------------------------------------------------------

    def admit(self, group: Group) -> None:
        """A group begins to run."""
        group.admitted = self.staleness.version
        if group.in_stream:
            group.admitted = self.staleness.admit(min((past.begin.version for past in group.past.values()), default=None))
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
        """``count`` groups for training, or None where they are not there yet or must not leave yet (``on_stale: wait``).

        Args:
            count: groups in the batch.
            final: no more groups will come: fewer are taken where there are fewer.
        """
        state = self.staleness
        if self.again:
            picked = self._taken_again(count, final)
            if picked is not None:
                self._deliver_and_cut(picked, self._surplus(picked))
                self._awaits_last_again = not self.again
            if picked is not None or self.again:
                return picked
        elif self._awaits_last_again:  # a further batch is asked for before a version: nobody is to wait for that
            self._awaits_last_again = False
            self._on_free()
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
        cut = self._surplus(picked)
        if self._waits_for_old and state.batch is not None:
            youngest = max(group.admitted for group in picked)
            older_runs = any(group.admitted < youngest for group in self.running.difference(cut))
            if older_runs and state.must_wait([group.admitted for group in (*picked, *cut)], state.batch):
                return None
        self._deliver_and_cut(picked, cut)
        return picked

    def _deliver_and_cut(self, picked: list[Group], cut: list[Group]) -> None:
        self.deliver(picked)
        for group in cut:
            self._drop(group, "over_sampling", "cut: its batch was complete")

    def _surplus(self, picked: list[Group]) -> list[Group]:
        """What over-sampling started in excess: those that run longest, then the youngest that are ready."""
        if not self.staleness.over_sampling:
            return []
        kept = {group.ordinal for group in picked} | self.again.keys()
        running = [group for group in self.running if group.ordinal not in kept]
        spare = [group for group in self.ready if group.ordinal not in kept and not group.is_eval]
        cut = sorted(running, key=lambda group: (group.admitted, group.task_id)) + spare[::-1]
        return cut[: self.staleness.surplus]

    def _taken_again(self, count: int, final: bool) -> list[Group] | None:
        """The batch that was taken next before the run was stopped; None where it is not there, or there is no other."""
        wanted = list(islice((ordinal for ordinal in self.again if not self.frontier.is_done(ordinal)), count))
        ready = {group.ordinal: group for group in self.ready if not group.is_eval}
        if len(wanted) == count and ready.keys() >= set(wanted):
            for ordinal in wanted:
                del self.again[ordinal]
            return [ready[ordinal] for ordinal in wanted]
        living = ready.keys() | {group.ordinal for group in self.running}
        cannot_come = (final or self.staleness.capacity < 1) and not living >= set(wanted)
        if cannot_come:
            logger.warning(
                "batches that were taken after the checkpoint cannot be taken again as they were; they are formed anew"
            )
        if len(wanted) < count or cannot_come:
            self.again = {}
            self._on_free()
        return None

    def waits_for_version(self, group: Group, index: int) -> bool:
        """True where a sample's past has tokens of weights that are still to be made again, before which it is not to go on."""
        if not (self.again or self._awaits_last_again) or self._deterministic or group.ordinal in self.again:
            return False
        return index in group.past and group.past[index].newest_version > self.staleness.version

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
            self.ready.pop(group, None)  # those of rollout_batch were never in it
            group.state = GroupState.DELIVERED
        self.staleness.train(group.admitted for group in groups if group.in_stream)
        self.in_training.extend(group for group in groups if not group.is_eval)

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
        self._awaits_last_again = False
        self.staleness.in_training = 0
        self._on_free()

    def restore(self, version: int, frontier: int, beyond: list[int], finished: list[Group]) -> None:
        """Go on where a checkpoint stood."""
        self.staleness.publish(version)
        self.frontier = Frontier(frontier, beyond)
        for group in finished:
            group.state = GroupState.READY
            group.complete()
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
