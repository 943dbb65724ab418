"""Batches for training, and the interface of the stores that deliver them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollwright.errors import StoreError
from rollwright.experience.experience import Experience
from rollwright.store.announcements import Announcements
from rollwright.store.groups import Group, StoredGroup
from rollwright.store.sampling import Sampling


@dataclass(frozen=True)
class BatchRequest:
    """The size and choice of a batch: a number of groups, or whole groups with at least a number of experiences in total.

    Attributes:
        groups: number of groups.
        experiences: smallest number of experiences, instead of ``groups``.
        sampling: order and number of uses.
        min_version: oldest version of tokens that may be trained; unlimited if None.
        partial_groups: also take groups that lack samples.

    Raises:
        StoreError: both numbers are given, or neither.
    """

    groups: int | None = None
    experiences: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    min_version: int | None = None
    partial_groups: bool = False

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.experiences is None):
            raise StoreError("sample wants either groups or experiences: give one of the two.")

    @property
    def limit(self) -> int:
        """The largest number of groups that a batch can need."""
        return self.groups or self.experiences or 0

    def is_filled_by(self, groups: int, experiences: int) -> bool:
        """Return True if this many groups, with this many experiences in total, fill a batch."""
        return groups == self.groups or (self.experiences is not None and experiences >= self.experiences)

    def first_enough(self, drawn: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """Return the first groups that fill the batch, or else all groups, and whether they fill it."""
        row_count = 0
        for group_count, group in enumerate(drawn, 1):
            row_count += group.rows
            if self.is_filled_by(group_count, row_count):
                return drawn[:group_count], True
        return drawn, False


@dataclass(frozen=True)
class StoredBatch:
    """The groups that one call of ``sample`` drew."""

    number: int
    groups: list[StoredGroup]

    @property
    def experiences(self) -> list[Experience]:
        """The experiences of all groups, group by group."""
        return [experience for group in self.groups for experience in group.experiences]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[StoredGroup]:
        return iter(self.groups)


class TrainingStore(ABC):
    """A store that a trainer reads batches from.

    Draws become permanent once a checkpoint commits them. A trainer that restarts from a checkpoint draws the groups that
    were drawn after it again, and no others.

    Attributes:
        announcements: weights that the trainer publishes for explorers, or None if the store has no explorers.
    """

    announcements: Announcements | None

    @abstractmethod
    def append(self, group: Group, *, ordinal: int | None = None, name: str | None = None, attempt: int = 0) -> int:
        """Store a group. Idempotent.

        Args:
            group: the samples of the group, each one experience or a list of them.
            ordinal: ordinal of the task, from which the group gets its name.
            name: the group's name if it has no ordinal. If None, it is derived from the first experience's id and tokens.
            attempt: attempt of the task.

        Returns:
            The number of experiences stored; 0 if the group is present already.

        Raises:
            StoreError: the group has no experience, or the store cannot accept it.
        """

    @abstractmethod
    def next_batch(self, request: BatchRequest, cancelled: Callable[[], bool]) -> StoredBatch | None:
        """Wait for the next batch of a trainer; groups that are too old for ``request`` are dropped.

        Args:
            request: size and choice of the groups.
            cancelled: polled while waiting; returning True ends the wait.

        Returns:
            The batch, or None if no further batch will come or the wait was cancelled.
        """

    @abstractmethod
    def groups(self) -> Iterator[StoredGroup]:
        """Iterate over all groups in order of arrival, without recording a use."""

    @abstractmethod
    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """Assign all draws since the last commit to a checkpoint of the trainer. Returns the number of uses.

        Call it after the checkpoint is written and before it appears under its name, so that a trainer never finds a checkpoint
        that the store does not know.

        Args:
            checkpoint: name of the checkpoint.
            version: version of its weights; a recovery withdraws announcements of later versions.

        Raises:
            StoreError: the store already has a checkpoint of this name.
        """

    @abstractmethod
    def recover(self, checkpoint: str | None) -> int:
        """Become the store's trainer and return to a checkpoint, or to the beginning if it is None.

        Groups drawn after the checkpoint can be drawn again, announcements of later weights are withdrawn, later checkpoints are
        forgotten, and every other trainer gets an error from now on. Returns the number of uses undone.

        Raises:
            StoreError: the store does not know the checkpoint.
        """

    @abstractmethod
    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Delete the rows of used or dropped groups that no kept checkpoint can need. Returns the number of rows.

        Args:
            sampling: sets how often a group is used.
            keep_checkpoints: number of newest checkpoints that a trainer can still return to.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
