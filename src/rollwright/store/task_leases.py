"""The tasks of a run: each is claimed by one explorer at a time, under a lease, and its group is stored once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, case, func, insert, or_, select, update

from rollwright.errors import StoreError
from rollwright.store.database import (
    CLAIMED,
    FINISHED,
    READY,
    RELEASED,
    Database,
    add_to,
    count_rows,
    counter_value,
    fact,
    groups,
    now,
    set_fact,
    tasks,
    uses,
)
from rollwright.store.groups import Group, add_drops, rows_of, settle_open_group, task_group, write_group
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

_DECLARED = "declared_tasks"
#: Built once: SQLAlchemy takes longer to build a statement than SQLite takes to run it.
_TASK = select(tasks.c.state, tasks.c.attempt).where(tasks.c.ordinal == bindparam("task"))
_FINISH = update(tasks).where(tasks.c.ordinal == bindparam("task")).values(state=FINISHED)
_TRAINING = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))


@dataclass(frozen=True)
class TaskClaim:
    """The right of one explorer to run one task until its lease ends.

    ``attempt`` counts the claims of the task from 0. Once a task is claimed again, results of older attempts are rejected, so
    each task is stored once.
    """

    ordinal: int
    attempt: int
    owner: str


class TaskLeases:
    """Claims, renews, releases and finishes the tasks of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def declare(self, total: int) -> None:
        """Declare that the run consists of the tasks ``0 … total - 1``, so that claims and waits end. ``total`` may only grow.

        Raises:
            StoreError: more tasks were declared before.
        """
        with self._database.writing() as connection:
            before = declared_tasks(connection)
            if before is not None and total < before:
                raise StoreError(
                    f"{self._database.name} was told of {before} tasks and now of {total}: a run may be made longer, not shorter; "
                    "start a run of its own with another trial_name."
                )
            set_fact(connection, _DECLARED, str(total))

    def claim(
        self, owner: str, count: int, *, lease_seconds: float = 60.0, max_outstanding: int | None = None
    ) -> list[TaskClaim]:
        """Claim up to ``count`` tasks to run: first those that another explorer released or lost, then new ordinals.

        Args:
            owner: name of this explorer, unique among the running explorers.
            count: number of tasks.
            lease_seconds: how long the claims last without :meth:`renew`.
            max_outstanding: upper limit of ``running + ready + in training`` groups, which is
                ``(max_head_offpolicyness + 1) · batch``. A group is in training until the version trained on it is
                published.
        """
        with self._database.writing() as connection:
            started = now(connection)
            if max_outstanding is not None:
                running = count_rows(connection, tasks, tasks.c.state == CLAIMED, tasks.c.lease_until >= started)
                waiting = count_rows(connection, groups, groups.c.state == READY, groups.c.uses == 0)
                count = min(count, max_outstanding - running - waiting - training_groups(connection))
            if count <= 0:
                return []
            lost = or_(tasks.c.state == RELEASED, (tasks.c.state == CLAIMED) & (tasks.c.lease_until < started))
            statement = select(tasks.c.ordinal, tasks.c.attempt).where(lost).order_by(tasks.c.ordinal).limit(count)
            claims = [TaskClaim(row.ordinal, row.attempt + 1, owner) for row in connection.execute(statement)]
            lease = {"state": CLAIMED, "owner": owner, "lease_until": started + lease_seconds}
            if claims:
                mine = tasks.c.ordinal.in_([claim.ordinal for claim in claims])
                connection.execute(update(tasks).where(mine).values(attempt=tasks.c.attempt + 1, **lease))
            total = declared_tasks(connection)
            first = counter_value(connection, "next_ordinal")
            last = first + count - len(claims) if total is None else min(first + count - len(claims), total)
            if last > first:
                add_to(connection, "next_ordinal", last - first)
                connection.execute(insert(tasks), [{"ordinal": each, "attempt": 0, **lease} for each in range(first, last)])
                claims += [TaskClaim(ordinal, 0, owner) for ordinal in range(first, last)]
            return claims

    def finish(
        self, claim: TaskClaim, group: Group | None, *, version: int | None = None, drops: Mapping[str, int] | None = None
    ) -> bool:
        """Store the group of a task and finish the task, in one transaction.

        An expired lease does not matter unless another explorer has claimed the task.

        Args:
            claim: the claim under which the task was run.
            group: the samples of the task, each one experience or a list of them. An empty group (rejected, or dropped by an
                operator) leaves nothing to train on. If None, the group consists of the samples appended one by one.
            version: weight version of all rows. If None, that of each experience's oldest sampled token.
            drops: number of rows that operators dropped, by operator name.

        Returns:
            False, with nothing stored, if the claim is not valid any more: the task was claimed again, released or finished.
        """
        rows = rows_of(group or [], version)
        with self._database.writing() as connection:
            task = connection.execute(_TASK, {"task": claim.ordinal}).one_or_none()
            if task is None or task.state != CLAIMED or task.attempt != claim.attempt:
                return False
            if rows:
                write_group(connection, task_group(claim.ordinal), claim.ordinal, rows, claim.attempt)
            else:
                settle_open_group(connection, claim.ordinal, claim.attempt if group is None else None)
            add_drops(connection, drops or {})
            connection.execute(_FINISH, {"task": claim.ordinal})
            return True

    def renew(self, owner: str, *, lease_seconds: float = 60.0) -> int:
        """Extend the leases of all tasks that an explorer holds. Returns the number of these tasks."""
        mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
        with self._database.writing() as connection:
            until = now(connection) + lease_seconds
            longer = case((tasks.c.lease_until < until, until), else_=tasks.c.lease_until)
            return connection.execute(update(tasks).where(mine).values(lease_until=longer)).rowcount

    def release(self, owner: str, ordinals: Sequence[int] | None = None) -> int:
        """Release the claims of an explorer that stops or has died. Returns the number of released claims.

        Args:
            owner: name of the explorer.
            ordinals: tasks to release; all if None.
        """
        mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
        if ordinals is not None:
            mine &= tasks.c.ordinal.in_(list(ordinals))
        with self._database.writing() as connection:
            return connection.execute(update(tasks).where(mine).values(state=RELEASED)).rowcount

    @contextmanager
    def keeping_claims(self, owner: str, *, lease_seconds: float = 60.0) -> Iterator[None]:
        """Renew an explorer's leases in a thread while the block runs, and release its remaining claims at the end."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(lease_seconds / 3):
                try:
                    self.renew(owner, lease_seconds=lease_seconds)
                except StoreError as error:  # such as a full disk or a restarting database; the loop tries again
                    logger.warning("the claims of %s could not be renewed: %s", owner, error)

        thread = threading.Thread(target=renew, name=f"claims of {owner}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release(owner)


# -- within a transaction of the caller ------------------------------------------------------------------------------


def declared_tasks(connection: Connection) -> int | None:
    """Return the declared number of tasks, or None if no end was declared."""
    value = fact(connection, _DECLARED)
    return None if value is None else int(value)


def all_finished(connection: Connection) -> bool:
    """Return True if the tasks have a declared end and all of them are finished."""
    declared = declared_tasks(connection)
    return declared is not None and count_rows(connection, tasks, tasks.c.state == FINISHED) >= declared


def training_groups(connection: Connection) -> int:
    """Count the groups in training: those drawn for a version that is not yet published."""
    return connection.scalars(_TRAINING).one()
