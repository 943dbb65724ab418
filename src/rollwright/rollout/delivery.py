"""Complete groups on their way to training: which may leave together, which are too old, and what was trained.

Runs on the executor's loop. Invariants:

* a group is delivered once, and no group is delivered that is older than ``max_head_offpolicyness`` allows;
* places are counted here and nowhere else, and each is given back exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

from rollwright.config.sections import RolloutConfig
from rollwright.rollout.group import Group, GroupState
from rollwright.rollout.staleness import Frontier, Staleness
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")


class Delivery:
    """Groups of the stream (``submit``, ``prepare_batch``) from their admission to the end of their training.

    Args:
        config: staleness, over-sampling and what is done about old groups.
        deterministic: batches leave in the order of their ordinals.
        drop: ends a group: ``(group, policy, reason)``.
        on_free: called when places were given back.
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
        self._completed = 0

    # -- in ------------------------------------------------------------------------------------------------------------

    def admit(self, group: Group) -> None:
        """A group begins to run."""
        group.admitted = self.staleness.version
        if group.in_stream:
            self.staleness.admit()
            self.running.add(group)

    def complete(self, group: Group) -> None:
        """A group is complete and accepted; it waits to be taken."""
        self._completed += 1
        group.finished_order = self._completed
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

        Args:
            count: groups in the batch.
            final: no more groups will come: fewer are taken where there are fewer.
        """
        if self.staleness.ready < count and not final:
            return None
        self._drop_stale()
        picked = self._in_order()[:count]
        if not picked or (len(picked) < count and not final):
            return None
        cut = self._stragglers(picked)
        if self._waits_for_old and self._should_wait_for_older(picked, cut):
            return None
        self._deliver(picked)
        for group in cut:
            self._drop(group, "over_sampling", "cut: its batch was complete")
        return picked

    def take_evaluation(self, count: int) -> list[Group] | None:
        """``count`` groups of evaluation, to which no rule of age applies; None where they are not there yet."""
        picked = [group for group in self.ready if group.is_eval][:count]
        if len(picked) < count:
            return None
        self._deliver(picked)
        return picked

    def take_task(self, group: Group) -> bool:
        """Deliver one particular group; False where it is not ready."""
        if group in self.ready:
            self._deliver([group])
            return True
        return False

    def _should_wait_for_older(self, picked: list[Group], cut: list[Group]) -> bool:
        """True where somebody left behind could not be in time, and an older group that still runs could take a place."""
        if self.staleness.batch is None:
            return False
        youngest = max(group.admitted for group in picked)
        if not any(group.admitted < youngest for group in self.running.difference(cut)):
            return False  # the oldest there are: waiting would change nothing
        return self.staleness.must_wait([group.admitted for group in (*picked, *cut)], self.staleness.batch)

    def _in_order(self) -> list[Group]:
        ready = [group for group in self.ready if not group.is_eval]
        if self._deterministic:
            first_running = min((group.ordinal for group in self.running), default=None)
            if first_running is not None:
                ready = [group for group in ready if group.ordinal < first_running]
            ready.sort(key=lambda group: group.ordinal)
        elif self._waits_for_old:
            ready.sort(key=lambda group: (group.admitted, group.finished_order))
        return ready

    def _stragglers(self, picked: list[Group]) -> list[Group]:
        """The groups that over-sampling started in excess: those that run longest, then the youngest that are ready."""
        surplus = self.staleness.surplus
        if surplus <= 0:
            return []
        chosen = set(picked)
        running = sorted(self.running, key=lambda group: (group.admitted, group.task_id))
        spare = [group for group in self.ready if group not in chosen and not group.is_eval]
        return (running + spare[::-1])[:surplus]

    def _deliver(self, groups: list[Group]) -> None:
        for group in groups:
            del self.ready[group]
            group.state = GroupState.DELIVERED
        training = [group for group in groups if not group.is_eval]
        self.staleness.train(group.admitted for group in training)
        self.in_training.extend(training)

    def _drop_stale(self) -> None:
        for group in [group for group in self.ready if not group.is_eval]:
            oldest = group.admitted if group.head_version is None else group.head_version
            if self.staleness.is_stale(oldest):
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
        """A version was published: the groups in training are trained and give their places back."""
        if version == self.staleness.version:
            return
        self.staleness.publish(version)
        if not self._waits_for_old:
            for group in list(self.running):
                if self.staleness.is_stale(group.admitted):
                    self._drop(group, "stale", "still running when it became too old")
            self._drop_stale()
        self.finish_training()

    def finish_training(self) -> None:
        """What is in training is done with."""
        for group in self.in_training:
            self.frontier.done(group.ordinal)
        self.in_training = []
        self.taken_by = None
        self.staleness.release()
        self._on_free()

    def restore(self, version: int, frontier: int, beyond: list[int], finished: list[Group]) -> None:
        """Go on where a checkpoint stood."""
        self.staleness.publish(version)
        self.frontier = Frontier(frontier, beyond)
        for group in finished:
            group.state = GroupState.READY
            group.renumber()
            self._completed += 1
            group.finished_order = self._completed
            self.ready[group] = None
            self.staleness.restore(group.admitted)
