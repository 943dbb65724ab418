"""What goes into an experience store and what comes out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollwright.experience.experience import Experience

#: The samples of one task; a sample is one experience or a list of them.
Group = Sequence[Experience | Sequence[Experience]]


@dataclass(frozen=True)
class TaskClaim:
    """The right of one explorer to run one task, for as long as its lease lasts.

    ``attempt`` counts the claims of the task from 0. What an older attempt brings after the task was claimed again is
    refused, so that a task is stored once.
    """

    ordinal: int
    attempt: int
    owner: str


@dataclass(frozen=True)
class StoredGroup:
    """All experiences of one task, as they are stored."""

    id: int
    name: str
    ordinal: int | None
    attempt: int
    version: int  # of the oldest sampled token; -1 where it is not known
    uses: int  # including the one at hand
    complete: bool
    experiences: list[Experience]


@dataclass(frozen=True)
class Batch:
    """What one call of ``sample`` drew."""

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


@dataclass(frozen=True)
class Announcement:
    """Weights that explorers are to load.

    ``epoch`` counts the trainer's restarts: after a restart from an earlier checkpoint the same version number may name
    other weights, so an explorer reloads when ``(epoch, version)`` is not what it has. ``since`` is the first version that was
    announced in this epoch: that version and later ones of earlier epochs are weights that no longer exist.
    """

    version: int
    path: str
    epoch: int
    since: int = 0

    def names_weights_of(self, loaded: Announcement | None) -> bool:
        """True where these very weights are loaded already."""
        return loaded is not None and (loaded.epoch, loaded.version) == (self.epoch, self.version)

    def takes_back(self, loaded: Announcement | None) -> bool:
        """True where the trainer began again from before what was loaded: those weights no longer exist."""
        before = Announcement(0, "", self.epoch) if loaded is None else loaded
        return self.version < before.version or (before.epoch != self.epoch and self.since <= before.version)


@dataclass(frozen=True)
class StoreStatus:
    """Counts, all from one state of the store."""

    declared_tasks: int | None  # None: no end was declared
    drawn_tasks: int  # ordinals handed out so far
    claimed_tasks: int
    released_tasks: int  # to be claimed again
    finished_tasks: int
    open_groups: int  # samples are missing
    unused_groups: int  # complete, never trained on
    used_groups: int  # trained on at least once
    training_groups: int  # trained on, the next version not yet published
    experiences: int
    uncommitted_uses: int  # since the trainer's last checkpoint
    drops: dict[str, int] = field(default_factory=dict)  # rows, by what dropped them

    @property
    def production_ended(self) -> bool:
        """True where the tasks have a declared end and every one of them is finished."""
        return self.declared_tasks is not None and self.finished_tasks >= self.declared_tasks


def experiences_of(group: Group) -> Iterator[Experience]:
    """The experiences of a group, sample by sample."""
    for item in group:
        yield from [item] if isinstance(item, Experience) else item


def task_group(ordinal: int) -> str:
    """Name of a task's group."""
    return f"task/{ordinal}"


def own_name(group: Group) -> str:
    """A name for a group that was given none: the same experience, appended again, gets the same."""
    first = next(experiences_of(group))
    return f"experience/{first.eid}/{hashlib.sha256(first.tokens.numpy().tobytes()).hexdigest()[:16]}"


def oldest_version(experience: Experience) -> int:
    """The version of an experience's oldest sampled token; -1 where it is not known."""
    if experience.versions is not None:
        sampled = [value for value in experience.versions.tolist() if value >= 0]
        if sampled:
            return min(sampled)
    return int(experience.info.get("model_version", -1))
