"""The batches that a run delivered after its last checkpoint, delivered again in the same order after a restart.

Steps that a crash undid are made again from the same groups, so that a resumed run trains what the interrupted one trained. That
asks three things, in two places of the scheduler and where tasks are drawn:

* ``next_batch``, when a batch leaves: the batch that was delivered next, as soon as its groups are ready;
* ``holds``, when a sample starts: a sample of a later batch waits if its recorded tokens come from weights that the trainer has
  not made again yet, until their version is published or another batch is asked for first;
* ``draw``: tasks that failed are drawn after the replayed batches, which were formed without them.

If a group cannot come any more, the order is given up and batches are formed anew. Tasks that were rejected or filtered stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from itertools import islice
from typing import Any

from rollwright.experience.journal.records import GroupEnd
from rollwright.rollout.task_group import Group, TaskSource
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")


class ReplayOrder:
    """See the module; without arguments there is nothing to replay.

    Args:
        delivered: ordinals of the groups that were delivered after the checkpoint, in order.
        failed: ordinals of tasks that failed.
        rejected: ends of the groups that were rejected or filtered, by ordinal.

    Attributes:
        deferred: failed tasks that were drawn, and wait until the batches have been replayed.
    """

    def __init__(
        self, delivered: Iterable[int] = (), failed: Iterable[int] = (), rejected: Mapping[int, GroupEnd] | None = None
    ) -> None:
        self.rejected = dict(rejected or {})
        self.deferred: list[dict[str, Any]] = []
        self._delivered = dict.fromkeys(delivered)
        self._failed = set(failed)
        self._awaits_version = False  # the last batch was taken, and its version is not published yet

    @property
    def is_active(self) -> bool:
        """True while a batch is still to be replayed."""
        return bool(self._delivered)

    @property
    def ordinals(self) -> Set[int]:
        """Ordinals of the groups that are still to be delivered again."""
        return self._delivered.keys()

    def next_batch(
        self, count: int, ready: Set[int], living: Set[int], is_done: Callable[[int], bool], no_more: bool
    ) -> list[int] | None:
        """Ordinals of the batch that was delivered next. None if it is not ready, or the order was given up.

        Args:
            count: groups in the batch.
            ready: ordinals of the groups that are ready.
            living: ordinals of the groups that run or are ready.
            is_done: says whether a task is done.
            no_more: no further group can start.
        """
        wanted = list(islice((ordinal for ordinal in self._delivered if not is_done(ordinal)), count))
        if len(wanted) == count and ready >= set(wanted):
            for ordinal in wanted:
                del self._delivered[ordinal]
            self._awaits_version = not self._delivered
            return wanted
        cannot_come = no_more and not living >= set(wanted)
        if cannot_come:
            logger.warning(
                "batches that were taken after the checkpoint cannot be taken again as they were; they are formed anew"
            )
        if len(wanted) < count or cannot_come:
            self._delivered = {}
        return None

    def holds(self, group: Group, index: int, version: int) -> bool:
        """True if a sample must wait for a version that the trainer has not made again yet."""
        if not (self._delivered or self._awaits_version) or group.ordinal in self._delivered:
            return False
        return index in group.past and group.past[index].newest_version > version

    def release(self) -> bool:
        """Hold no sample after the last batch: its version was published, or a further batch is asked for. True if any was held."""
        was_waiting, self._awaits_version = self._awaits_version, False
        return was_waiting

    def draw(self, source: TaskSource, count: int) -> list[dict[str, Any]]:
        """Draw up to ``count`` tasks of a source; failed ones are deferred until the batches have been replayed."""
        is_active = self.is_active
        if self.deferred and (source.is_over or not is_active):
            source.put_back(self.deferred)
            self.deferred, self._failed = [], set()
        rows = source.draw(count)
        if is_active and self._failed:
            self.deferred += [row for row in rows if row.get("ordinal") in self._failed]
            rows = [row for row in rows if row.get("ordinal") not in self._failed]
        return rows
