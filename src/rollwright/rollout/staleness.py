"""How far sampling may run ahead of training, counted in groups; evaluation is not counted.

A group is admitted while

    running + ready + in_training < (max_head_offpolicyness + 1) * batch        (and the extra groups of over-sampling)

and a group in training releases its place when the next version is published. Nothing here counts over the life of the
run, so a rejection, a drop or a resume can neither starve nor flood it.

Each batch in training counts as a version to come, so that several batches may be trained between two publications.

A group that was admitted at version ``s`` must be trained at version ``s + max_head_offpolicyness`` at the latest. Batches
take the oldest ready groups first, and where ``on_stale`` is "wait" a batch leaves only if the groups that stay behind can
still all meet their deadline in batches to come: earliest deadline first, which meets all deadlines whenever that is
possible. The admission rule makes it possible, so under "wait" nothing ever has to be dropped for its age.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable


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

    def admit(self) -> int:
        """A group begins to run; returns the version that it is admitted at."""
        self.running += 1
        self._living[self.version] += 1
        return self.version

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

        Args:
            leaving: versions at which the groups were admitted that are in the batch, or are cut when it leaves.
            batch: groups in a batch.

        With ``n`` groups left behind whose deadline is ``d`` or earlier, and the batches of the versions
        ``head + 1 … d`` to come, all are in time if ``n <= batch * (d - head)`` for every ``d``.
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
