"""What the trainer has used, and under which of its checkpoints.

A use is written when a group is sampled and gets its checkpoint when the trainer commits. Uses without a checkpoint, and
those of checkpoints after the one that a trainer restarts from, are undone by :func:`recover`: their groups are drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from rollwright.errors import StoreError
from rollwright.store.database import Database
from rollwright.store.sampling import Sampling
from rollwright.store.schema import DROPPED, OPEN, READY, checkpoints, counters, experiences, groups, uses, versions
from rollwright.store.writing import complete_group


def check_epoch(database: Database, connection: Connection, epoch: int) -> None:
    """Refuses a trainer after another one has recovered the store."""
    current = database.counter(connection, "epoch")
    if current != epoch:
        raise StoreError(
            f"{database.name}: another trainer has recovered this store (epoch {current}, this process has {epoch}); "
            "stop one of the two: a store has one trainer."
        )


def check_recovered(database: Database, connection: Connection) -> None:
    """Refuses to go on over uses that an earlier trainer did not commit: they would be lost."""
    pending = connection.execute(select(func.count()).select_from(uses).where(uses.c.checkpoint.is_(None))).scalar_one()
    known = connection.execute(select(func.count()).select_from(checkpoints)).scalar_one()
    if pending or known:
        raise StoreError(
            f"{database.name} was used by an earlier trainer ({known} checkpoints, {pending} uses not committed): call "
            "recover(checkpoint) with the checkpoint that this trainer starts from, or recover(None) where it starts from none."
        )


def take(
    database: Database,
    connection: Connection,
    sampling: Sampling,
    *,
    group_count: int | None,
    row_count: int | None,
    min_version: int | None,
    partial_batch: bool,
    partial_groups: bool,
) -> tuple[int, list[int]] | None:
    """Draws a batch and writes its uses.

    Returns:
        Number of the batch and the ids of its groups in order, or None where there are not enough (nothing is used then).
    """
    now = database.now(connection)
    number = database.counter(connection, "batch")
    wanted = group_count if group_count is not None else row_count
    assert wanted is not None
    drawn = sampling.draw(connection, wanted, number, now, min_version)
    if partial_groups and _reached(drawn, row_count) < wanted:
        drawn += _unfinished(connection, wanted, min_version)
    drawn = _enough(drawn, wanted, row_count)
    if not drawn or (_reached(drawn, row_count) < wanted and not partial_batch):
        return None
    if partial_groups:
        _seal(database, connection, [group_id for group_id, _ in drawn])
    ids = [group_id for group_id, _ in drawn]
    database.count(connection, "batch")
    connection.execute(insert(uses), [{"group_id": group_id, "batch": number, "published": False} for group_id in ids])
    available_at = now + sampling.cooldown_seconds
    connection.execute(
        update(groups).where(groups.c.id == bindparam("group")).values(uses=groups.c.uses + 1, available_at=available_at),
        [{"group": group_id} for group_id in ids],
    )
    return number, ids


def _reached(drawn: Sequence[tuple[int, int]], row_count: int | None) -> int:
    return len(drawn) if row_count is None else sum(rows for _, rows in drawn)


def _enough(drawn: Sequence[tuple[int, int]], wanted: int, row_count: int | None) -> list[tuple[int, int]]:
    """The first groups that reach ``wanted`` groups or rows."""
    chosen: list[tuple[int, int]] = []
    for group in drawn:
        if _reached(chosen, row_count) >= wanted:
            break
        chosen.append(group)
    return chosen


def _unfinished(connection: Connection, limit: int | None, min_version: int | None) -> list[tuple[int, int]]:
    statement = select(groups.c.id, groups.c.rows).where(groups.c.state == OPEN)
    if min_version is not None:
        statement = statement.where(groups.c.version >= min_version)
    return [(row.id, row.rows) for row in connection.execute(statement.order_by(groups.c.id).limit(limit))]


def _seal(database: Database, connection: Connection, ids: Sequence[int]) -> None:
    """Completes those of the groups that are still open, as they stand."""
    still_open = select(groups.c.id).where(groups.c.id.in_(ids), groups.c.state == OPEN).order_by(groups.c.id)
    for group_id in connection.execute(still_open).scalars().all():
        complete_group(database, connection, group_id)


def available(
    database: Database, connection: Connection, sampling: Sampling, min_version: int | None, partial_groups: bool
) -> tuple[int, int]:
    """Groups and rows that a sample could draw from now."""
    now = database.now(connection)
    if sampling.order == "priority":  # its function may refuse groups that have uses left
        drawn = sampling.draw(connection, None, database.counter(connection, "batch"), now, min_version)
        drawn += _unfinished(connection, None, min_version) if partial_groups else []
        return len(drawn), sum(rows for _, rows in drawn)
    eligible = sampling.eligible(now, min_version)
    if partial_groups:
        unfinished = select(groups.c.id, groups.c.rows, groups.c.version, groups.c.uses).where(groups.c.state == OPEN)
        eligible = eligible.union_all(unfinished)
    found = eligible.subquery()
    count, rows = connection.execute(select(func.count(), func.coalesce(func.sum(found.c.rows), 0)).select_from(found)).one()
    return int(count), int(rows)


def drop_older_than(database: Database, connection: Connection, sampling: Sampling, version: int, reason: str) -> int:
    """Drops groups whose oldest token is older than ``version`` and that have uses left; returns how many."""
    eligible = sampling.eligible(float("inf"), None).with_only_columns(groups.c.id).where(groups.c.version < version)
    statement = update(groups).where(groups.c.id.in_(eligible.scalar_subquery()))
    return connection.execute(statement.values(state=DROPPED, dropped_by=reason, drop_checkpoint=None)).rowcount


def commit(database: Database, connection: Connection, name: str, version: int | None) -> int:
    """Ties everything used since the last commit to a checkpoint; returns how many uses."""
    if connection.execute(select(checkpoints.c.sequence).where(checkpoints.c.name == name)).scalar_one_or_none() is not None:
        raise StoreError(f"{database.name} has a checkpoint {name!r} already: give each checkpoint a name of its own.")
    values = {"name": name, "version": version, "batch": database.counter(connection, "batch")}
    sequence = connection.execute(insert(checkpoints).values(**values).returning(checkpoints.c.sequence)).scalar_one()
    dropped = (groups.c.state == DROPPED) & groups.c.drop_checkpoint.is_(None)
    connection.execute(update(groups).where(dropped).values(drop_checkpoint=sequence))
    return connection.execute(update(uses).where(uses.c.checkpoint.is_(None)).values(checkpoint=sequence)).rowcount


def recover(database: Database, connection: Connection, name: str | None) -> tuple[int, int]:
    """Goes back to a checkpoint, or to the beginning.

    Returns:
        The new epoch, and how many uses were undone.
    """
    sequence, version, batch = 0, None, 0
    if name is not None:
        row = connection.execute(select(checkpoints).where(checkpoints.c.name == name)).one_or_none()
        if row is None:
            known = connection.execute(select(checkpoints.c.name).order_by(checkpoints.c.sequence)).scalars().all()
            raise StoreError(
                f"{database.name} knows no checkpoint {name!r} (it knows {', '.join(known[-5:]) or 'none'}): commit(checkpoint) comes "
                "before the checkpoint becomes visible on disk; recover from one that the store knows."
            )
        sequence, version, batch = row.sequence, row.version, row.batch
    later = or_(uses.c.checkpoint.is_(None), uses.c.checkpoint > sequence)
    undone = connection.execute(select(uses.c.group_id, func.count()).where(later).group_by(uses.c.group_id)).all()
    if undone:
        connection.execute(
            update(groups).where(groups.c.id == bindparam("group")).values(uses=groups.c.uses - bindparam("count")),
            [{"group": group_id, "count": count} for group_id, count in undone],
        )
    connection.execute(delete(uses).where(later))
    connection.execute(update(uses).where(uses.c.published.is_(False)).values(published=True))
    dropped = (groups.c.state == DROPPED) & or_(groups.c.drop_checkpoint.is_(None), groups.c.drop_checkpoint > sequence)
    connection.execute(update(groups).where(dropped).values(state=READY, dropped_by=None, drop_checkpoint=None))
    connection.execute(update(groups).where(groups.c.available_at > 0).values(available_at=0.0))
    connection.execute(delete(checkpoints).where(checkpoints.c.sequence > sequence))
    if name is None:
        connection.execute(delete(versions))
    elif version is not None:
        connection.execute(delete(versions).where(versions.c.version > version))
    connection.execute(update(counters).where(counters.c.name == "batch").values(value=batch))
    return database.count(connection, "epoch") + 1, sum(count for _, count in undone)


def forget_used(connection: Connection, sampling: Sampling, keep_checkpoints: int) -> int:
    """Deletes the rows of groups that are used up or dropped and that a recovery from the newest checkpoints cannot ask for again."""
    newest = select(checkpoints.c.sequence).order_by(checkpoints.c.sequence.desc())
    oldest_kept = connection.execute(newest.offset(keep_checkpoints - 1).limit(1)).scalar_one_or_none()
    if oldest_kept is None or sampling.uses is None:
        return 0
    needed = select(uses.c.group_id).where(or_(uses.c.checkpoint.is_(None), uses.c.checkpoint > oldest_kept))
    used_up = (groups.c.uses >= sampling.uses) & groups.c.id.not_in(needed)
    dropped = (groups.c.state == DROPPED) & (groups.c.drop_checkpoint <= oldest_kept)
    done = select(groups.c.id).where(or_(used_up, dropped))
    return connection.execute(delete(experiences).where(experiences.c.group_id.in_(done))).rowcount
