"""Which explorer runs which task: claims with leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, insert, or_, select, update

from rollwright.errors import StoreError
from rollwright.store.database import Database
from rollwright.store.records import TaskClaim
from rollwright.store.schema import CLAIMED, FINISHED, OPEN, READY, RELEASED, experiences, groups, tasks, uses
from rollwright.store.writing import complete_group, count_drops, write_group

_DECLARED = "declared_tasks"
_TASK = select(tasks.c.state, tasks.c.attempt).where(tasks.c.ordinal == bindparam("task"))
_FINISH = update(tasks).where(tasks.c.ordinal == bindparam("task")).values(state=FINISHED)


def group_name(ordinal: int) -> str:
    """Name of the group of a task."""
    return f"task/{ordinal}"


def declared_tasks(database: Database, connection: Connection) -> int | None:
    """How many tasks the run has, where that was declared."""
    value = database.fact(connection, _DECLARED)
    return None if value is None else int(value)


def declare_tasks(database: Database, connection: Connection, total: int) -> None:
    """Says that tasks ``0 … total - 1`` are the run's; the end may move back later, never forward."""
    before = declared_tasks(database, connection)
    if before is not None and total < before:
        raise StoreError(
            f"{database.name} was told of {before} tasks and now of {total}: a run may be made longer, not shorter; "
            "start a run of its own with another trial_name."
        )
    database.set_fact(connection, _DECLARED, str(total))


def outstanding_groups(connection: Connection, now: float) -> int:
    """Groups that run, wait, or are trained on while the next version is not published."""
    running = select(func.count()).select_from(tasks).where(tasks.c.state == CLAIMED, tasks.c.lease_until >= now)
    waiting = select(func.count()).select_from(groups).where(groups.c.state == READY, groups.c.uses == 0)
    training = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))
    return sum(int(connection.execute(statement).scalar_one()) for statement in (running, waiting, training))


def claim_tasks(
    database: Database, connection: Connection, owner: str, count: int, lease_seconds: float, max_outstanding: int | None
) -> list[TaskClaim]:
    """Hands out tasks: first those that were given back or whose explorer's lease ran out, then new ones."""
    now = database.now(connection)
    if max_outstanding is not None:
        count = min(count, max_outstanding - outstanding_groups(connection, now))
    if count <= 0:
        return []
    lost = or_(tasks.c.state == RELEASED, (tasks.c.state == CLAIMED) & (tasks.c.lease_until < now))
    statement = select(tasks.c.ordinal, tasks.c.attempt).where(lost).order_by(tasks.c.ordinal).limit(count)
    claims = [TaskClaim(row.ordinal, row.attempt + 1, owner) for row in connection.execute(statement)]
    lease = {"state": CLAIMED, "owner": owner, "lease_until": now + lease_seconds}
    if claims:
        mine = tasks.c.ordinal.in_([claim.ordinal for claim in claims])
        connection.execute(update(tasks).where(mine).values(attempt=tasks.c.attempt + 1, **lease))
    total = declared_tasks(database, connection)
    first = database.counter(connection, "next_ordinal")
    fresh = count - len(claims) if total is None else min(count - len(claims), total - first)
    if fresh > 0:
        database.count(connection, "next_ordinal", fresh)
        connection.execute(insert(tasks), [{"ordinal": first + index, "attempt": 0, **lease} for index in range(fresh)])
        claims += [TaskClaim(first + index, 0, owner) for index in range(fresh)]
    return claims


def holds(connection: Connection, claim: TaskClaim) -> bool:
    """True where the claim is still its owner's."""
    row = connection.execute(_TASK, {"task": claim.ordinal}).one_or_none()
    return row is not None and row.state == CLAIMED and row.attempt == claim.attempt


def finish_task(
    database: Database,
    connection: Connection,
    claim: TaskClaim,
    rows: Sequence[dict[str, Any]] | None,
    drops: Mapping[str, int],
) -> bool:
    """Stores the group of a task and finishes the task, both or neither.

    A lease that ran out does not matter as long as nobody else has claimed the task.

    Returns:
        False where the claim was lost: nothing is stored then.
    """
    if not holds(connection, claim):
        return False
    name = group_name(claim.ordinal)
    if rows:
        write_group(database, connection, name=name, ordinal=claim.ordinal, attempt=claim.attempt, rows=rows, group_size=None)
    else:
        _end_open_group(database, connection, claim, keep=rows is None)
    count_drops(database, connection, dict(drops))
    connection.execute(_FINISH, {"task": claim.ordinal})
    return True


def renew_claims(database: Database, connection: Connection, owner: str, lease_seconds: float) -> int:
    """Extends every lease of an owner; returns how many tasks it still holds."""
    mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
    until = database.now(connection) + lease_seconds
    longer = case((tasks.c.lease_until < until, until), else_=tasks.c.lease_until)
    return connection.execute(update(tasks).where(mine).values(lease_until=longer)).rowcount


def release_claims(connection: Connection, owner: str, ordinals: Sequence[int] | None) -> int:
    """Gives tasks back so that any explorer can claim them at once; returns how many."""
    mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
    if ordinals is not None:
        mine &= tasks.c.ordinal.in_(list(ordinals))
    return connection.execute(update(tasks).where(mine).values(state=RELEASED)).rowcount


def _end_open_group(database: Database, connection: Connection, claim: TaskClaim, keep: bool) -> None:
    """Completes what was appended to a task's group sample by sample, or deletes it."""
    statement = select(groups.c.id, groups.c.attempt).where(groups.c.ordinal == claim.ordinal, groups.c.state == OPEN)
    for group in connection.execute(statement).all():
        if keep and group.attempt == claim.attempt:
            complete_group(database, connection, group.id)
        else:
            connection.execute(delete(experiences).where(experiences.c.group_id == group.id))
            connection.execute(delete(groups).where(groups.c.id == group.id))
