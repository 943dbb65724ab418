"""How groups come into a store, each row exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from rollwright.store.database import Database
from rollwright.store.schema import OPEN, READY, drops, experiences, groups

#: Rows that came for a group which a reader had asked for before it was complete.
LATE = "late"


#: Statements of every write are built once: building one takes SQLAlchemy longer than SQLite takes to run it.
_INSERT_ROWS = insert(experiences)
_insert_group_of: dict[str, Any] = {}


def _insert_group(database: Database) -> Any:
    if database.dialect not in _insert_group_of:
        statement = database.upsert(groups).on_conflict_do_nothing(index_elements=["name"]).returning(groups.c.id)
        _insert_group_of[database.dialect] = statement
    return _insert_group_of[database.dialect]


def write_group(
    database: Database,
    connection: Connection,
    *,
    name: str,
    ordinal: int | None,
    attempt: int,
    rows: Sequence[dict[str, Any]],
    group_size: int | None,
) -> int:
    """Stores rows of a group and completes it where all its samples have come.

    A row is named by group, sample, part and attempt. A row that is there already, or of an attempt that another has
    replaced, is left alone; a newer attempt replaces the rows of an older one while the group is open.

    Args:
        database: the database.
        connection: a writing transaction.
        name: the group's name.
        ordinal: the task's ordinal, where it has one.
        attempt: the attempt that produced the rows.
        rows: columns ``sample``, ``part``, ``eid``, ``version``, ``reward``, ``data``.
        group_size: samples of a complete group; None: complete with these rows.

    Returns:
        How many rows were stored.
    """
    complete = group_size is None or len({row["sample"] for row in rows}) >= group_size
    group = {
        "name": name,
        "ordinal": ordinal,
        "attempt": attempt,
        "state": READY if complete else OPEN,
        "sequence": database.count(connection, "sequence") if complete else None,
        "uses": 0,
        "available_at": 0.0,
        **_summary(rows),
    }
    group_id = connection.execute(_insert_group(database), group).scalar_one_or_none()
    if group_id is not None:
        connection.execute(_INSERT_ROWS, [{**row, "group_id": group_id} for row in rows])
        return len(rows)
    return _add_rows(database, connection, name, attempt, rows, group_size)


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "rows": len(rows),
        "version": min((row["version"] for row in rows), default=-1),
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }


def _add_rows(
    database: Database, connection: Connection, name: str, attempt: int, rows: Sequence[dict[str, Any]], group_size: int | None
) -> int:
    group = connection.execute(select(groups).where(groups.c.name == name)).one()
    if attempt < group.attempt or (group.state != OPEN and attempt != group.attempt):
        return 0
    if attempt > group.attempt:
        connection.execute(delete(experiences).where(experiences.c.group_id == group.id))
        connection.execute(update(groups).where(groups.c.id == group.id).values(attempt=attempt))
    statement = select(experiences.c.sample, experiences.c.part).where(experiences.c.group_id == group.id)
    present = {(row.sample, row.part) for row in connection.execute(statement)}
    fresh = [row for row in rows if (row["sample"], row["part"]) not in present]
    if group.state != OPEN:
        if fresh:
            count_drops(database, connection, {LATE: len(fresh)})
        return 0
    if fresh:
        connection.execute(insert(experiences), [{**row, "group_id": group.id} for row in fresh])
    samples = {sample for sample, _ in present} | {row["sample"] for row in rows}
    if group_size is None or len(samples) >= group_size:
        complete_group(database, connection, group.id)
    else:
        connection.execute(update(groups).where(groups.c.id == group.id).values(rows=len(present) + len(fresh)))
    return len(fresh)


def complete_group(database: Database, connection: Connection, group_id: int) -> None:
    """Makes an open group ready for training, with the rows that it has."""
    mine = experiences.c.group_id == group_id
    count, version, reward = connection.execute(
        select(func.count(), func.min(experiences.c.version), func.avg(experiences.c.reward)).where(mine)
    ).one()
    values = {"rows": count, "version": -1 if version is None else version, "reward": reward}
    sequence = database.count(connection, "sequence")
    connection.execute(update(groups).where(groups.c.id == group_id).values(state=READY, sequence=sequence, **values))


def complete_named_group(database: Database, connection: Connection, name: str) -> bool:
    """Makes an open group ready by its name; false where there is none."""
    still_open = select(groups.c.id).where(groups.c.name == name, groups.c.state == OPEN)
    group_id = connection.execute(still_open).scalar_one_or_none()
    if group_id is None:
        return False
    complete_group(database, connection, group_id)
    return True


def count_drops(database: Database, connection: Connection, counts: dict[str, int]) -> None:
    """Adds to the count of rows that were dropped under each name."""
    for reason, rows in counts.items():
        if rows:
            statement = database.upsert(drops).values(reason=reason, rows=rows)
            connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["reason"], set_={"rows": drops.c.rows + statement.excluded.rows}
                )
            )
