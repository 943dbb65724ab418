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
    """What a trainer asks for: a number of groups, or whole groups with at least so many experiences.

    Attributes:
        groups: number of groups.
        experiences: instead of ``groups``: smallest number of experiences.
        sampling: order and number of uses.
        min_version: version of the oldest tokens that may be trained. None allows any age.
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
        """True if so many groups with so many experiences fill a batch."""
        return groups == self.groups or (self.experiences is not None and experiences >= self.experiences)

    def first_enough(self, drawn: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """The first groups that fill the batch, or all groups; and whether they fill it."""
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

    What the trainer draws is permanent once a checkpoint commits it. A trainer that restarts from a checkpoint draws again what was
    drawn after it, and nothing else.

    Attributes:
        announcements: weights that the trainer publishes for explorers. None if the store has no explorers.
    """

    announcements: Announcements | None

    @abstractmethod
    def append(self, group: Group, *, ordinal: int | None = None, name: str | None = None, attempt: int = 0) -> int:
        """Store a group. Idempotent.

        Args:
            group: the samples of the group, each one experience or a list of them.
            ordinal: ordinal of the task, from which the group gets its name.
            name: the group's name if it has no ordinal. None derives it from the first experience's id and tokens.
            attempt: attempt of the task.

        Returns:
            The number of experiences stored; 0 if the group is present already.

        Raises:
            StoreError: the group has no experience, or the store refused it.
        """

    @abstractmethod
    def next_batch(self, request: BatchRequest, cancelled: Callable[[], bool]) -> StoredBatch | None:
        """Wait for the next batch of a trainer; groups that are too old for ``request`` are dropped.

        Args:
            request: size and choice of the groups.
            cancelled: polled while waiting; returning True ends the wait.

        Returns:
            The batch, or None if no more will come or the wait was cancelled.
        """

    @abstractmethod
    def groups(self) -> Iterator[StoredGroup]:
        """Iterate over all groups in order of arrival, without counting a use."""

    @abstractmethod
    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """Bind what was drawn since the last commit to a checkpoint of the trainer. Returns the number of uses.

        Call it when the checkpoint is written but not yet visible under its name, so that a trainer never finds a checkpoint
        unknown to the store.

        Args:
            checkpoint: name of the checkpoint.
            version: version of its weights; a recovery withdraws announcements of later ones.

        Raises:
            StoreError: the checkpoint is known already.
        """

    @abstractmethod
    def recover(self, checkpoint: str | None) -> int:
        """Become the store's trainer and go back to a checkpoint, or to the beginning if it is None.

        What was drawn after the checkpoint is drawn again, announcements of later weights are withdrawn, later checkpoints are
        forgotten, and any other trainer is refused from now on. Returns the number of uses undone.

        Raises:
            StoreError: the store does not know the checkpoint.
        """

    @abstractmethod
    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Delete the rows of used or dropped groups that no kept checkpoint can need. Returns the number of rows.

        Args:
            sampling: determines how many uses a group has.
            keep_checkpoints: number of newest checkpoints that a trainer may still go back to.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
