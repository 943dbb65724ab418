"""Groups of experiences: how they are written, completed and read, with each row stored exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
class StoredGroup:
    """All experiences of one task, as stored."""

    id: int
    name: str
    ordinal: int | None
    attempt: int
    version: int  # of the oldest sampled token; -1 if unknown
    uses: int  # including the current one
    complete: bool
    experiences: list[Experience]


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch: a number of groups, or whole groups with at least so many experiences.

    Raises:
        StoreError: both numbers are given, or neither.
    """

    groups: int | None = None
    experiences: int | None = None

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.experiences is None):
            raise StoreError("sample wants either groups or experiences: give one of the two.")

    def is_reached(self, groups: int, experiences: int) -> bool:
        """True if so many groups with so many experiences fill a batch."""
        return groups == self.groups or (self.experiences is not None and experiences >= self.experiences)


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


def experiences_of(group: Group) -> Iterator[Experience]:
    """The experiences of a group, sample by sample."""
    for item in group:
        yield from [item] if isinstance(item, Experience) else item


def task_group(ordinal: int) -> str:
    """Name of a task's group."""
    return f"task/{ordinal}"


def own_name(group: Group) -> str:
    """A name for a group that was given none. Appending the same experience again yields the same name."""
    first = next(experiences_of(group))
    return f"experience/{first.eid}/{hashlib.sha256(first.tokens.numpy().tobytes()).hexdigest()[:16]}"


def oldest_version(experience: Experience) -> int:
    """The version of an experience's oldest sampled token; -1 if unknown."""
    sampled = [] if experience.versions is None else [value for value in experience.versions.tolist() if value >= 0]
    return min(sampled) if sampled else int(experience.info.get("model_version", -1))


# -- in the database --------------------------------------------------------------------------------------------------

#: Reason under which rows are counted that came after a batch had drawn their group unfinished.
LATE = "late"
#: Ids in one query; SQLite allows 32,766 parameters.
_IDS_A_QUERY = 500


class GroupTable:
    """Writes and reads the groups of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

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
            ordinal: ordinal of the task, from which the group gets its name.
            name: the group's name if it has no ordinal. None derives it from the first experience's id and tokens.
            attempt: attempt of the task. A newer attempt replaces the rows of an older one until the group is complete.
            index: index of this sample in the group.
            group_size: number of samples that complete the group; required with ``index``.
            version: version of experiences that do not carry one.

        Returns:
            The number of rows stored; 0 if all were present already or belong to a replaced attempt.

        Raises:
            StoreError: the arguments do not identify a group, or there is no experience.
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
        with self._database.writing() as connection:
            return self.write(connection, name, ordinal, rows, attempt, group_size)

    def complete_group(self, name: str) -> bool:
        """Complete a group with the samples that it has. Returns False if no group of that name is open."""
        still_open = select(groups.c.id).where(groups.c.name == name, groups.c.state == OPEN)
        with self._database.writing() as connection:
            group_id = connection.scalar(still_open)
            if group_id is not None:
                self.complete(connection, group_id)
        return group_id is not None

    def open_groups(self, prefix: str = "") -> set[str]:
        """Names of the groups that lack samples and whose name begins with ``prefix``."""
        still_open = select(groups.c.name).where(groups.c.state == OPEN, groups.c.name.startswith(prefix, autoescape=True))
        with self._database.reading() as connection:
            return set(connection.scalars(still_open))

    def count_drops(self, counts: Mapping[str, int]) -> None:
        """Add to the counts of dropped rows, by the reason for the drop."""
        with self._database.writing() as connection:
            self.add_drops(connection, counts)

    def groups(self, *, partial: bool = False) -> Iterator[StoredGroup]:
        """Iterate over all groups in order of arrival, without counting a use; ``partial`` includes incomplete ones."""
        states = (OPEN, READY, DROPPED) if partial else (READY, DROPPED)
        statement = select(groups.c.id).where(groups.c.state.in_(states)).order_by(groups.c.id).limit(_IDS_A_QUERY)
        last = 0
        while True:
            with self._database.reading() as connection:
                ids = connection.scalars(statement.where(groups.c.id > last)).all()
                loaded = self.load(connection, ids)
            if not loaded:
                return
            yield from loaded
            last = ids[-1]

    def damaged(self) -> list[str]:
        """Damaged parts of the store: pages of a SQLite file, and rows that differ from what was written; empty if none."""
        found: list[str] = []
        store = self._database.name
        try:
            with self._database.reading() as connection:
                if self._database.dialect == "sqlite":
                    pages = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
                    found += [f"{store}: {each}" for each in pages if each != "ok"]
                names = dict(connection.execute(select(groups.c.id, groups.c.name)).all())
                for row in connection.execute(select(*_ROW).order_by(experiences.c.id)):
                    try:
                        _experience_of(row)
                    except TrajectoryError as error:
                        found.append(
                            f"{store}: a row of group {names.get(row.group_id, row.group_id)!r} cannot be read ({error})"
                        )
        except (SQLAlchemyError, StoreError, ValueError, TypeError) as error:
            found.append(f"{store}: its rows cannot be read ({str(getattr(error, 'orig', None) or error).splitlines()[0]})")
        return found

    # -- within a transaction of the caller ------------------------------------------------------------------------------

    def write(
        self,
        connection: Connection,
        name: str,
        ordinal: int | None,
        rows: Sequence[dict[str, Any]],
        attempt: int,
        group_size: int | None = None,
    ) -> int:
        """Store rows of a group, and complete it once all ``group_size`` samples are present. None: these are all.

        A row is identified by group, sample, part and attempt. Rows that are present already, or of a replaced attempt, are
        left out. A newer attempt replaces the rows of an older one while the group is open.

        Returns:
            The number of rows stored.
        """
        complete = group_size is None or len({row["sample"] for row in rows}) >= group_size
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        group = {
            "name": name,
            "ordinal": ordinal,
            "attempt": attempt,
            "state": READY if complete else OPEN,
            "sequence": self._database.add_to(connection, "sequence") if complete else None,
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
        return self._database.upsert(groups).on_conflict_do_nothing(index_elements=["name"]).returning(groups.c.id)

    def _add_rows(
        self, connection: Connection, name: str, attempt: int, rows: Sequence[dict[str, Any]], group_size: int | None
    ) -> int:
        """Store the rows of an existing group that are not present yet."""
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
            self.add_drops(connection, {LATE: len(fresh)})
            return 0
        if fresh:
            connection.execute(_INSERT_ROWS, fresh)
        samples = {sample for sample, _ in present} | {row["sample"] for row in rows}
        if group_size is None or len(samples) >= group_size:
            self.complete(connection, group.id)
        else:
            connection.execute(update(groups).where(groups.c.id == group.id).values(rows=len(present) + len(fresh)))
        return len(fresh)

    def complete(self, connection: Connection, group_id: int) -> None:
        """Make an open group ready for training, with the rows that it has."""
        summary = select(
            func.count().label("rows"),
            func.coalesce(func.min(experiences.c.version), -1).label("version"),
            func.avg(experiences.c.reward).label("reward"),
        ).where(experiences.c.group_id == group_id)
        values = {**connection.execute(summary).one()._mapping, "sequence": self._database.add_to(connection, "sequence")}
        connection.execute(update(groups).where(groups.c.id == group_id).values(state=READY, **values))

    def settle_open(self, connection: Connection, ordinal: int, attempt: int | None) -> None:
        """Complete the open group of a task if it has this attempt; otherwise, or if ``attempt`` is None, delete it."""
        still_open = select(groups.c.id, groups.c.attempt).where(groups.c.ordinal == ordinal, groups.c.state == OPEN)
        for row in connection.execute(still_open).all():
            if row.attempt == attempt:
                self.complete(connection, row.id)
            else:
                connection.execute(delete(experiences).where(experiences.c.group_id == row.id))
                connection.execute(delete(groups).where(groups.c.id == row.id))

    def add_drops(self, connection: Connection, counts: Mapping[str, int]) -> None:
        """Add to the counts of dropped rows, by the reason for the drop."""
        for reason, rows in counts.items():
            if rows:
                statement = self._database.upsert(drops).values(reason=reason, rows=rows)
                summed = {"rows": drops.c.rows + statement.excluded.rows}
                connection.execute(statement.on_conflict_do_update(index_elements=["reason"], set_=summed))

    def load(self, connection: Connection, ids: Sequence[int]) -> list[StoredGroup]:
        """Groups with their rows, in the order of ``ids``.

        Raises:
            StoreError: the bytes of a row are damaged.
        """
        loaded: dict[int, StoredGroup] = {}
        for start in range(0, len(ids), _IDS_A_QUERY):
            some = list(ids[start : start + _IDS_A_QUERY])
            for row in connection.execute(select(groups).where(groups.c.id.in_(some))):
                complete = row.state != OPEN
                loaded[row.id] = StoredGroup(row.id, row.name, row.ordinal, row.attempt, row.version, row.uses, complete, [])
            statement = select(*_ROW).where(experiences.c.group_id.in_(some))
            for row in connection.execute(statement.order_by(experiences.c.group_id, experiences.c.sample, experiences.c.part)):
                group = loaded[row.group_id]
                try:
                    group.experiences.append(_experience_of(row))
                except TrajectoryError as error:
                    raise StoreError(
                        f"{self._database.name}: row {len(group.experiences)} of group {group.name!r} cannot be read ({error}): "
                        "restore the store from a copy, or delete that group."
                    ) from error
        return [loaded[group_id] for group_id in ids]


_INSERT_ROWS = insert(experiences)
_ROW = (experiences.c.group_id, experiences.c.data, experiences.c.reward, experiences.c.eid)


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
    """The rows of a group; ``sample`` and ``part`` are their indices in the nested lists.

    Args:
        group: its samples.
        version: version of experiences that do not carry one.
        first_sample: index of the first sample.
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
