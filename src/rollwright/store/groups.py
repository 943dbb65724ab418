"""Groups of experiences: what goes into a store and comes out of it, each row stored exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from rollwright.errors import StoreError, TrajectoryError
from rollwright.experience.experience import Experience
from rollwright.store.database import DROPPED, OPEN, READY, Database, drops, experiences, groups

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
    sampled = [] if experience.versions is None else [value for value in experience.versions.tolist() if value >= 0]
    return min(sampled) if sampled else int(experience.info.get("model_version", -1))


# -- in the database --------------------------------------------------------------------------------------------------

#: Counts rows that came for a group after a batch had taken it unfinished.
LATE = "late"
#: Ids in one query; SQLite allows 32,766 parameters.
_IDS_A_QUERY = 500


class GroupStorage(Database):
    """What :class:`~rollwright.store.store.ExperienceStore` does with groups."""

    def append(
        self,
        group: Group,
        *,
        ordinal: int | None = None,
        name: str | None = None,
        attempt: int = 0,
        index: int | None = None,
        group_size: int | None = None,
        version: int | None = None,
    ) -> int:
        """Stores a group, or one sample of it. Idempotent.

        Args:
            group: the samples of the group, each one experience or a list of them; with ``index``, the rows of one sample.
            ordinal: the task's ordinal, which names the group.
            name: the group's name, where it has no ordinal; None: made of the first experience's id and tokens.
            attempt: of the task. A newer attempt replaces an older one's rows while the group is not complete.
            index: which sample of the group this is; the group is complete when ``group_size`` samples have come.
            version: of the experiences, where they do not say it themselves.

        Returns:
            How many rows were stored; 0 where all were there already or belong to a replaced attempt.
        """
        if (index is None) != (group_size is None):
            raise StoreError("append was given only one of index and group_size: a sample of a group needs both.")
        if index is not None:
            if ordinal is None and name is None:
                raise StoreError(
                    "a single sample was appended to a group without ordinal or name: give one, so that the group can be found."
                )
            group = [list(experiences_of(group))]
        rows = rows_of(group, version, index or 0)
        if not rows:
            raise StoreError(
                "append was given a group without experiences: leave it out, or finish its task with an empty group."
            )
        name = task_group(ordinal) if ordinal is not None else name or own_name(group)
        with self.writing() as connection:
            return self._write_group(connection, name, ordinal, rows, attempt, group_size)

    def complete_group(self, name: str) -> bool:
        """Completes a group with the samples that it has, where no more will come; false where there is no open one."""
        still_open = select(groups.c.id).where(groups.c.name == name, groups.c.state == OPEN)
        with self.writing() as connection:
            group_id = connection.scalar(still_open)
            if group_id is not None:
                self._complete(connection, group_id)
        return group_id is not None

    def open_groups(self, prefix: str = "") -> set[str]:
        """Names of the groups that miss samples and whose name begins with ``prefix``."""
        still_open = select(groups.c.name).where(groups.c.state == OPEN, groups.c.name.startswith(prefix, autoescape=True))
        with self.reading() as connection:
            return set(connection.scalars(still_open))

    def count_drops(self, counts: Mapping[str, int]) -> None:
        """Counts rows that were dropped, under the name of what dropped them."""
        with self.writing() as connection:
            self._count_drops(connection, counts)

    def groups(self, *, partial: bool = False) -> Iterator[StoredGroup]:
        """All groups in the order in which they came, without using them; with ``partial`` also those that miss samples."""
        states = (OPEN, READY, DROPPED) if partial else (READY, DROPPED)
        statement = select(groups.c.id).where(groups.c.state.in_(states)).order_by(groups.c.id).limit(_IDS_A_QUERY)
        last = 0
        while True:
            with self.reading() as connection:
                ids = connection.scalars(statement.where(groups.c.id > last)).all()
                loaded = self._load(connection, ids)
            if not loaded:
                return
            yield from loaded
            last = ids[-1]

    def damaged(self) -> list[str]:
        """Damaged parts of the store: pages of a SQLite file, and rows that differ from what was written; empty if there are none."""
        found: list[str] = []
        try:
            with self.reading() as connection:
                if self.dialect == "sqlite":
                    said = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
                    found += [f"{self.name}: {each}" for each in said if each != "ok"]
                names = dict(connection.execute(select(groups.c.id, groups.c.name)).all())
                columns = (
                    experiences.c.id,
                    experiences.c.group_id,
                    experiences.c.data,
                    experiences.c.reward,
                    experiences.c.eid,
                )
                for row in connection.execute(select(*columns).order_by(experiences.c.id)):
                    try:
                        _experience_of(row)
                    except TrajectoryError as error:
                        found.append(
                            f"{self.name}: a row of group {names.get(row.group_id, row.group_id)!r} cannot be read ({error})"
                        )
        except (SQLAlchemyError, StoreError, ValueError, TypeError) as error:
            found.append(f"{self.name}: its rows cannot be read ({str(getattr(error, 'orig', None) or error).splitlines()[0]})")
        return found

    # -- inside a transaction --------------------------------------------------------------------------------------------

    def _write_group(
        self,
        connection: Connection,
        name: str,
        ordinal: int | None,
        rows: Sequence[dict[str, Any]],
        attempt: int,
        group_size: int | None = None,
    ) -> int:
        """Stores rows of a group, and completes it where all ``group_size`` samples have come (None: these are all).

        Returns how many rows were stored. A row is named by group, sample, part and attempt; one that is there already, or
        of an attempt that another has replaced, is left alone; a newer attempt replaces the rows of an older one while the
        group is open.
        """
        complete = group_size is None or len({row["sample"] for row in rows}) >= group_size
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        group = {
            "name": name,
            "ordinal": ordinal,
            "attempt": attempt,
            "state": READY if complete else OPEN,
            "sequence": self.add_to(connection, "sequence") if complete else None,
            "uses": 0,
            "available_at": 0.0,
            "rows": len(rows),
            "version": min(row["version"] for row in rows),
            "reward": sum(rewards) / len(rewards) if rewards else None,
        }
        group_id = connection.execute(self._insert_group, group).scalar_one_or_none()
        if group_id is None:
            return self._add_rows(connection, name, attempt, rows, group_size)
        connection.execute(_INSERT_ROWS, [{**row, "group_id": group_id} for row in rows])
        return len(rows)

    @cached_property
    def _insert_group(self) -> Any:
        return self.upsert(groups).on_conflict_do_nothing(index_elements=["name"]).returning(groups.c.id)

    def _add_rows(
        self, connection: Connection, name: str, attempt: int, rows: Sequence[dict[str, Any]], group_size: int | None
    ) -> int:
        """Stores those rows of a group that are not there yet."""
        group = connection.execute(select(groups).where(groups.c.name == name)).one()
        if attempt < group.attempt or (group.state != OPEN and attempt != group.attempt):
            return 0
        if attempt > group.attempt:
            connection.execute(delete(experiences).where(experiences.c.group_id == group.id))
            connection.execute(update(groups).where(groups.c.id == group.id).values(attempt=attempt))
        statement = select(experiences.c.sample, experiences.c.part).where(experiences.c.group_id == group.id)
        present = {(row.sample, row.part) for row in connection.execute(statement)}
        fresh = [{**row, "group_id": group.id} for row in rows if (row["sample"], row["part"]) not in present]
        if group.state != OPEN:
            self._count_drops(connection, {LATE: len(fresh)})
            return 0
        if fresh:
            connection.execute(_INSERT_ROWS, fresh)
        samples = {sample for sample, _ in present} | {row["sample"] for row in rows}
        if group_size is None or len(samples) >= group_size:
            self._complete(connection, group.id)
        else:
            connection.execute(update(groups).where(groups.c.id == group.id).values(rows=len(present) + len(fresh)))
        return len(fresh)

    def _complete(self, connection: Connection, group_id: int) -> None:
        """Makes an open group ready for training, with the rows that it has."""
        summary = select(
            func.count().label("rows"),
            func.coalesce(func.min(experiences.c.version), -1).label("version"),
            func.avg(experiences.c.reward).label("reward"),
        ).where(experiences.c.group_id == group_id)
        values = {**connection.execute(summary).one()._mapping, "sequence": self.add_to(connection, "sequence")}
        connection.execute(update(groups).where(groups.c.id == group_id).values(state=READY, **values))

    def _count_drops(self, connection: Connection, counts: Mapping[str, int]) -> None:
        for reason, rows in counts.items():
            if rows:
                statement = self.upsert(drops).values(reason=reason, rows=rows)
                summed = {"rows": drops.c.rows + statement.excluded.rows}
                connection.execute(statement.on_conflict_do_update(index_elements=["reason"], set_=summed))

    def _load(self, connection: Connection, ids: Sequence[int]) -> list[StoredGroup]:
        """Groups with their rows, in the order of ``ids``.

        Raises:
            StoreError: a row's bytes are damaged.
        """
        loaded: dict[int, StoredGroup] = {}
        for start in range(0, len(ids), _IDS_A_QUERY):
            some = list(ids[start : start + _IDS_A_QUERY])
            for row in connection.execute(select(groups).where(groups.c.id.in_(some))):
                complete = row.state != OPEN
                loaded[row.id] = StoredGroup(row.id, row.name, row.ordinal, row.attempt, row.version, row.uses, complete, [])
            wanted = (experiences.c.group_id, experiences.c.data, experiences.c.reward, experiences.c.eid)
            statement = select(*wanted).where(experiences.c.group_id.in_(some))
            for row in connection.execute(statement.order_by(experiences.c.group_id, experiences.c.sample, experiences.c.part)):
                group = loaded[row.group_id]
                try:
                    group.experiences.append(_experience_of(row))
                except TrajectoryError as error:
                    raise StoreError(
                        f"{self.name}: row {len(group.experiences)} of group {group.name!r} cannot be read ({error}): "
                        "restore the store from a copy, or delete that group."
                    ) from error
        return [loaded[group_id] for group_id in ids]


_INSERT_ROWS = insert(experiences)


def _experience_of(row: Any) -> Experience:
    """Decode a stored row and check it against its columns.

    Raises:
        TrajectoryError: the row is damaged.
    """
    experience = Experience.deserialize(row.data)
    if _number(row.reward) != _number(experience.reward):
        raise TrajectoryError(f"its reward is {experience.reward}, but the column has {row.reward}; the row is damaged.")
    if row.eid != str(experience.eid):
        raise TrajectoryError(f"its id is {experience.eid}, but the column has {row.eid}; the row is damaged.")
    return experience


def _number(reward: float | None) -> float | None:
    """The reward, with None for NaN, which SQLite stores as NULL."""
    return None if reward is None or reward != reward else reward


def rows_of(group: Group, version: int | None, first_sample: int = 0) -> list[dict[str, Any]]:
    """The rows of a group; ``sample`` and ``part`` are their places in the nested lists.

    ``version`` is that of experiences that do not say it themselves, ``first_sample`` the number of the first sample.
    """
    return [
        {
            "sample": sample,
            "part": part,
            "eid": str(experience.eid),
            "version": oldest_version(experience) if version is None else version,
            "reward": experience.reward,
            "data": experience.serialize(),
        }
        for sample, item in enumerate(group, first_sample)
        for part, experience in enumerate([item] if isinstance(item, Experience) else item)
    ]
