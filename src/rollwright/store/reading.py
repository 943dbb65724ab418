"""Reading an experience store: groups with their rows, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from rollwright.errors import StoreError, TrajectoryError
from rollwright.experience.experience import Experience
from rollwright.store import schema as schema
from rollwright.store.database import Database
from rollwright.store.records import StoredGroup, StoreStatus
from rollwright.store.tasks import declared_tasks

#: Ids in one query; SQLite allows 32,766 parameters.
_IDS_A_QUERY = 500


def load_groups(database: Database, connection: Connection, ids: Sequence[int]) -> list[StoredGroup]:
    """Groups with their rows, in the order of ``ids``.

    Raises:
        StoreError: a row's bytes are damaged.
    """
    groups, experiences = schema.groups, schema.experiences
    loaded: dict[int, StoredGroup] = {}
    for start in range(0, len(ids), _IDS_A_QUERY):
        some = list(ids[start : start + _IDS_A_QUERY])
        for row in connection.execute(select(groups).where(groups.c.id.in_(some))):
            complete = row.state != schema.OPEN
            loaded[row.id] = StoredGroup(row.id, row.name, row.ordinal, row.attempt, row.version, row.uses, complete, [])
        statement = select(experiences.c.group_id, experiences.c.data).where(experiences.c.group_id.in_(some))
        for row in connection.execute(statement.order_by(experiences.c.group_id, experiences.c.sample, experiences.c.part)):
            group = loaded[row.group_id]
            try:
                group.experiences.append(Experience.deserialize(row.data))
            except TrajectoryError as error:
                raise StoreError(
                    f"{database.name}: row {len(group.experiences)} of group {group.name!r} cannot be read ({error}): "
                    "restore the store from a copy, or delete that group."
                ) from error
    return [loaded[group_id] for group_id in ids]


def group_ids(connection: Connection, after: int, partial: bool) -> list[int]:
    """The next ids after ``after`` in the order in which groups came; open groups only where ``partial``."""
    groups = schema.groups
    states = (schema.OPEN, schema.READY, schema.DROPPED) if partial else (schema.READY, schema.DROPPED)
    statement = select(groups.c.id).where(groups.c.id > after, groups.c.state.in_(states)).order_by(groups.c.id)
    return list(connection.execute(statement.limit(_IDS_A_QUERY)).scalars())


def count(connection: Connection, table: Any, *conditions: Any) -> int:
    """Rows of a table that meet all conditions."""
    return int(connection.execute(select(func.count()).select_from(table).where(*conditions)).scalar_one())


def production_ended(database: Database, connection: Connection) -> bool:
    """True where the tasks have a declared end and every one of them is finished."""
    total = declared_tasks(database, connection)
    return total is not None and count(connection, schema.tasks, schema.tasks.c.state == schema.FINISHED) >= total


def read_status(database: Database, connection: Connection) -> StoreStatus:
    """Counts of everything."""
    tasks, groups, uses, drops = schema.tasks, schema.groups, schema.uses, schema.drops
    dropped = {row.reason: row.rows for row in connection.execute(select(drops))}
    by_policy = select(groups.c.dropped_by, func.sum(groups.c.rows).label("count")).where(groups.c.state == schema.DROPPED)
    for row in connection.execute(by_policy.group_by(groups.c.dropped_by)):
        dropped[row.dropped_by] = dropped.get(row.dropped_by, 0) + int(row[1])
    training = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))
    return StoreStatus(
        declared_tasks=declared_tasks(database, connection),
        drawn_tasks=database.counter(connection, "next_ordinal"),
        claimed_tasks=count(connection, tasks, tasks.c.state == schema.CLAIMED),
        released_tasks=count(connection, tasks, tasks.c.state == schema.RELEASED),
        finished_tasks=count(connection, tasks, tasks.c.state == schema.FINISHED),
        open_groups=count(connection, groups, groups.c.state == schema.OPEN),
        unused_groups=count(connection, groups, groups.c.state == schema.READY, groups.c.uses == 0),
        used_groups=count(connection, groups, groups.c.uses > 0),
        training_groups=int(connection.execute(training).scalar_one()),
        experiences=count(connection, schema.experiences),
        uncommitted_uses=count(connection, uses, uses.c.checkpoint.is_(None)),
        drops=dropped,
    )
