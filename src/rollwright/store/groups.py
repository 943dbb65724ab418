"""The groups of a store: how they are written, completed and read. Each row is stored exactly once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from rollwright.errors import StoreError, TrajectoryError
from rollwright.experience.experience import Experience
from rollwright.store.database import DIALECTS, OPEN, READY, add_to, drops, experiences, groups, upsert

#: The samples of one task; a sample is one experience or a list of them.
Group = Sequence[Experience | Sequence[Experience]]


@dataclass(frozen=True)
class StoredGroup:
    """A group as stored: all experiences of one task."""

    id: int
    name: str
    ordinal: int | None
    attempt: int
    version: int  # of the oldest sampled token; -1 if unknown
    uses: int  # including the current one
    complete: bool
    experiences: list[Experience]


def experiences_of(group: Group) -> Iterator[Experience]:
    """Iterate over the experiences of a group, sample by sample."""
    for item in group:
        yield from [item] if isinstance(item, Experience) else item


def task_group(ordinal: int) -> str:
    """Return the name of a task's group."""
    return f"task/{ordinal}"


def group_name(group: Group, ordinal: int | None, name: str | None) -> str:
    """Return the name of a group: its task's name, the given name, or one derived from its first experience.

    Appending the same experiences again yields the same name.
    """
    if ordinal is not None:
        return task_group(ordinal)
    if name is not None:
        return name
    first = next(experiences_of(group))
    return f"experience/{first.eid}/{hashlib.sha256(first.tokens.numpy().tobytes()).hexdigest()[:16]}"


def oldest_version(experience: Experience) -> int:
    """Return the version of an experience's oldest sampled token, or -1 if it is unknown."""
    sampled = [] if experience.versions is None else [value for value in experience.versions.tolist() if value >= 0]
    return min(sampled) if sampled else int(experience.info.get("model_version", -1))


# -- within a transaction of the caller ------------------------------------------------------------------------------

#: Reason for dropping rows that arrive after a batch has drawn their unfinished group.
LATE = "late"
#: Ids in one query; SQLite allows 32,766 parameters.
IDS_A_QUERY = 500


_INSERT_ROWS = insert(experiences)
#: Built once: SQLAlchemy takes longer to build a statement than SQLite takes to run it.
_INSERT_GROUP = {
    name: dialect.insert(groups).on_conflict_do_nothing(index_elements=["name"]).returning(groups.c.id)
    for name, dialect in DIALECTS.items()
}
#: Columns that ``experience_of`` reads.
ROW = (experiences.c.group_id, experiences.c.data, experiences.c.reward, experiences.c.eid)


def write_group(
    connection: Connection,
    name: str,
    ordinal: int | None,
    rows: Sequence[dict[str, Any]],
    attempt: int,
    group_size: int | None = None,
) -> int:
    """Store rows of a group, and complete it once ``group_size`` samples are present. If that is None, ``rows`` is the whole group.

    A row is identified by group, sample, part and attempt. Rows that are present already, or belong to a replaced attempt, are
    skipped. A newer attempt replaces the rows of an older one while the group is open.

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
        "sequence": add_to(connection, "sequence") if complete else None,
        "uses": 0,
        "available_at": 0.0,
        "rows": len(rows),
        "version": min(row["version"] for row in rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }
    group_id = connection.execute(_INSERT_GROUP[connection.dialect.name], group).scalar_one_or_none()
    if group_id is None:
        return _add_rows(connection, name, attempt, rows, group_size)
    connection.execute(_INSERT_ROWS, [{**row, "group_id": group_id} for row in rows])
    return len(rows)


def _add_rows(connection: Connection, name: str, attempt: int, rows: Sequence[dict[str, Any]], group_size: int | None) -> int:
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
        add_drops(connection, {LATE: len(fresh)})
        return 0
    if fresh:
        connection.execute(_INSERT_ROWS, fresh)
    samples = {sample for sample, _ in present} | {row["sample"] for row in rows}
    if group_size is None or len(samples) >= group_size:
        mark_complete(connection, group.id)
    else:
        connection.execute(update(groups).where(groups.c.id == group.id).values(rows=len(present) + len(fresh)))
    return len(fresh)


def mark_complete(connection: Connection, group_id: int) -> None:
    """Mark an open group as ready for training, with the rows it has."""
    summary = select(
        func.count().label("rows"),
        func.coalesce(func.min(experiences.c.version), -1).label("version"),
        func.avg(experiences.c.reward).label("reward"),
    ).where(experiences.c.group_id == group_id)
    values = {**connection.execute(summary).one()._mapping, "sequence": add_to(connection, "sequence")}
    connection.execute(update(groups).where(groups.c.id == group_id).values(state=READY, **values))


def settle_open_group(connection: Connection, ordinal: int, attempt: int | None) -> None:
    """Complete a task's open group if it belongs to ``attempt``; otherwise, or if ``attempt`` is None, delete it."""
    still_open = select(groups.c.id, groups.c.attempt).where(groups.c.ordinal == ordinal, groups.c.state == OPEN)
    for row in connection.execute(still_open).all():
        if row.attempt == attempt:
            mark_complete(connection, row.id)
        else:
            connection.execute(delete(experiences).where(experiences.c.group_id == row.id))
            connection.execute(delete(groups).where(groups.c.id == row.id))


def add_drops(connection: Connection, counts: Mapping[str, int]) -> None:
    """Add to the counts of dropped rows, by the reason for the drop."""
    for reason, rows in counts.items():
        if rows:
            statement = upsert(connection, drops).values(reason=reason, rows=rows)
            summed = {"rows": drops.c.rows + statement.excluded.rows}
            connection.execute(statement.on_conflict_do_update(index_elements=["reason"], set_=summed))


def load_groups(connection: Connection, ids: Sequence[int], store: str) -> list[StoredGroup]:
    """Load groups with their rows, in the order of ``ids``.

    Args:
        connection: a transaction of the store.
        ids: ids of the groups.
        store: name of the store, for error messages.

    Raises:
        StoreError: the bytes of a row are damaged.
    """
    loaded: dict[int, StoredGroup] = {}
    for start in range(0, len(ids), IDS_A_QUERY):
        some = list(ids[start : start + IDS_A_QUERY])
        for row in connection.execute(select(groups).where(groups.c.id.in_(some))):
            complete = row.state != OPEN
            loaded[row.id] = StoredGroup(row.id, row.name, row.ordinal, row.attempt, row.version, row.uses, complete, [])
        statement = select(*ROW).where(experiences.c.group_id.in_(some))
        for row in connection.execute(statement.order_by(experiences.c.group_id, experiences.c.sample, experiences.c.part)):
            group = loaded[row.group_id]
            try:
                group.experiences.append(experience_of(row))
            except TrajectoryError as error:
                raise StoreError(
                    f"{store}: row {len(group.experiences)} of group {group.name!r} cannot be read ({error}): "
                    "restore the store from a copy, or delete that group."
                ) from error
    return [loaded[group_id] for group_id in ids]


def experience_of(row: Any) -> Experience:
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
    """Return the reward, or None for NaN, which SQLite stores as NULL."""
    return None if reward is None or reward != reward else reward


def rows_of(group: Group, version: int | None, first_sample: int = 0) -> list[dict[str, Any]]:
    """Build the database rows of a group; ``sample`` and ``part`` are indices in the nested lists.

    Args:
        group: the samples.
        version: weight version of all rows. If None, that of each experience's oldest sampled token.
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
