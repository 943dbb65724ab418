"""Which explorer runs which task: claims with leases, and the transaction that stores a task's group and finishes the task."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, bindparam, case, delete, func, insert, or_, select, update

from rollwright.errors import StoreError
from rollwright.store.database import CLAIMED, FINISHED, OPEN, READY, RELEASED, experiences, groups, tasks, uses
from rollwright.store.groups import GroupStorage, rows_of
from rollwright.store.records import Group, TaskClaim, task_group
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

_DECLARED = "declared_tasks"
#: Built once: SQLAlchemy takes longer to build a statement than SQLite takes to run it.
_TASK = select(tasks.c.state, tasks.c.attempt).where(tasks.c.ordinal == bindparam("task"))
_FINISH = update(tasks).where(tasks.c.ordinal == bindparam("task")).values(state=FINISHED)


class TaskClaims(GroupStorage):
    """What :class:`~rollwright.store.store.ExperienceStore` does with tasks."""

    def declare_tasks(self, total: int) -> None:
        """Says that the run has tasks ``0 … total - 1``, so that claims and waits come to an end. ``total`` may only grow.

        Raises:
            StoreError: more were declared before.
        """
        with self.writing() as connection:
            before = self._declared_tasks(connection)
            if before is not None and total < before:
                raise StoreError(
                    f"{self.name} was told of {before} tasks and now of {total}: a run may be made longer, not shorter; "
                    "start a run of its own with another trial_name."
                )
            self.set_fact(connection, _DECLARED, str(total))

    def claim_tasks(
        self, owner: str, count: int, *, lease_seconds: float = 60.0, max_outstanding: int | None = None
    ) -> list[TaskClaim]:
        """Claims tasks to run: first those that another explorer released or lost, then new ordinals.

        Args:
            owner: name of this explorer, unique among those that run.
            count: how many at most.
            lease_seconds: how long the claims last without :meth:`renew_claims`.
            max_outstanding: claim only as many as keep ``running + ready + in training`` groups within this, which is
                ``(max_head_offpolicyness + 1) · batch``.

        Returns:
            The claims; empty where there is nothing to do now.
        """
        with self.writing() as connection:
            now = self.now(connection)
            if max_outstanding is not None:
                count = min(count, max_outstanding - self._outstanding_groups(connection, now))
            if count <= 0:
                return []
            lost = or_(tasks.c.state == RELEASED, (tasks.c.state == CLAIMED) & (tasks.c.lease_until < now))
            statement = select(tasks.c.ordinal, tasks.c.attempt).where(lost).order_by(tasks.c.ordinal).limit(count)
            claims = [TaskClaim(row.ordinal, row.attempt + 1, owner) for row in connection.execute(statement)]
            lease = {"state": CLAIMED, "owner": owner, "lease_until": now + lease_seconds}
            if claims:
                mine = tasks.c.ordinal.in_([claim.ordinal for claim in claims])
                connection.execute(update(tasks).where(mine).values(attempt=tasks.c.attempt + 1, **lease))
            total = self._declared_tasks(connection)
            first = self.counter(connection, "next_ordinal")
            last = first + count - len(claims) if total is None else min(first + count - len(claims), total)
            if last > first:
                self.add_to(connection, "next_ordinal", last - first)
                connection.execute(insert(tasks), [{"ordinal": each, "attempt": 0, **lease} for each in range(first, last)])
                claims += [TaskClaim(ordinal, 0, owner) for ordinal in range(first, last)]
            return claims

    def finish_task(
        self, claim: TaskClaim, group: Group | None, *, version: int | None = None, drops: Mapping[str, int] | None = None
    ) -> bool:
        """Stores the group of a task and finishes the task, in one transaction.

        A lease that ran out does not matter as long as nobody else has claimed the task.

        Args:
            claim: from :meth:`claim_tasks`.
            group: the samples of the task; a sample is one experience or a list of them. Empty: nothing is trained on
                (rejected, or dropped by an operator). None: what was appended sample by sample is the group.
            version: of the experiences, where they do not say it themselves.
            drops: rows that operators dropped, by the operator's name.

        Returns:
            False where the claim was lost to another explorer; nothing is stored then.
        """
        rows = rows_of(group or [], version)
        with self.writing() as connection:
            task = connection.execute(_TASK, {"task": claim.ordinal}).one_or_none()
            if task is None or task.state != CLAIMED or task.attempt != claim.attempt:
                return False
            if rows:
                self._write_group(connection, task_group(claim.ordinal), claim.ordinal, rows, claim.attempt)
            else:
                self._end_open_group(connection, claim, keep=group is None)
            self._count_drops(connection, drops or {})
            connection.execute(_FINISH, {"task": claim.ordinal})
            return True

    def renew_claims(self, owner: str, *, lease_seconds: float = 60.0) -> int:
        """Extends the leases of all tasks that an explorer holds; returns how many it holds."""
        mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
        with self.writing() as connection:
            until = self.now(connection) + lease_seconds
            longer = case((tasks.c.lease_until < until, until), else_=tasks.c.lease_until)
            return connection.execute(update(tasks).where(mine).values(lease_until=longer)).rowcount

    def release_claims(self, owner: str, ordinals: Sequence[int] | None = None) -> int:
        """Releases claims at once: by an explorer that stops, or by whoever saw it die. Returns how many."""
        mine = (tasks.c.owner == owner) & (tasks.c.state == CLAIMED)
        if ordinals is not None:
            mine &= tasks.c.ordinal.in_(list(ordinals))
        with self.writing() as connection:
            return connection.execute(update(tasks).where(mine).values(state=RELEASED)).rowcount

    @contextmanager
    def keeping_claims(self, owner: str, *, lease_seconds: float = 60.0) -> Iterator[None]:
        """Renews an explorer's leases from a thread while the block runs, and releases what is left at its end."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(lease_seconds / 3):
                try:
                    self.renew_claims(owner, lease_seconds=lease_seconds)
                except StoreError as error:  # a full disk, a database that restarts: the next time is soon
                    logger.warning("the claims of %s could not be renewed: %s", owner, error)

        thread = threading.Thread(target=renew, name=f"claims of {owner}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release_claims(owner)

    # -- inside a transaction --------------------------------------------------------------------------------------------

    def _declared_tasks(self, connection: Connection) -> int | None:
        value = self.fact(connection, _DECLARED)
        return None if value is None else int(value)

    def _outstanding_groups(self, connection: Connection, now: float) -> int:
        """Groups that run, wait, or are trained on while the next version is not published."""
        running = select(func.count()).select_from(tasks).where(tasks.c.state == CLAIMED, tasks.c.lease_until >= now)
        waiting = select(func.count()).select_from(groups).where(groups.c.state == READY, groups.c.uses == 0)
        training = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))
        return sum(connection.scalars(statement).one() for statement in (running, waiting, training))

    def _end_open_group(self, connection: Connection, claim: TaskClaim, keep: bool) -> None:
        """Completes what was appended to a task's group sample by sample, or deletes it."""
        statement = select(groups.c.id, groups.c.attempt).where(groups.c.ordinal == claim.ordinal, groups.c.state == OPEN)
        for group in connection.execute(statement).all():
            if keep and group.attempt == claim.attempt:
                self._complete(connection, group.id)
            else:
                connection.execute(delete(experiences).where(experiences.c.group_id == group.id))
                connection.execute(delete(groups).where(groups.c.id == group.id))
