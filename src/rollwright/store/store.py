"""The experience store: where experiences wait between the processes that make them and the one that trains on them.

Invariants, whoever is killed and whenever:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot make.
- A group is drawn whole. What the trainer draws is its own once it commits a checkpoint; a trainer that restarts from a
  checkpoint draws again what was drawn after it, and nothing else. A batch that is not full is not drawn; its groups wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, bindparam, case, delete, func, insert, or_, select, update

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError, StoreError
from rollwright.store.database import (
    CLAIMED,
    DROPPED,
    FINISHED,
    OPEN,
    READY,
    RELEASED,
    count_rows,
    drops,
    experiences,
    groups,
    poll,
    tasks,
    uses,
    versions,
)
from rollwright.store.drawing import DECLARED, BatchDrawing
from rollwright.store.files import FileStore, export_parquet
from rollwright.store.groups import Announcement, Group, StoreStatus, TaskClaim, rows_of, task_group
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

_HIGHEST = "highest_version"
#: Built once: SQLAlchemy takes longer to build a statement than SQLite takes to run it.
_TASK = select(tasks.c.state, tasks.c.attempt).where(tasks.c.ordinal == bindparam("task"))
_FINISH = update(tasks).where(tasks.c.ordinal == bindparam("task")).values(state=FINISHED)
_TRAINING = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))


class ExperienceStore(BatchDrawing):
    """Experiences in a database, used by any number of explorers and one trainer, in any number of processes.

    Explorers claim and finish tasks (``claim_tasks``, ``finish_task``) or ``append`` groups; the trainer draws with ``sample``,
    ``commit``s its checkpoints and announces weights. One object may be used from several threads. A process that forks must
    open its own.

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory) or ``postgresql://…``.
        run: identity of the run; a store of another run is refused. None opens whatever is there.
        create: make the store where it does not exist.

    Raises:
        StoreError: the store is missing, damaged, or of another run.
        ConfigError: the URL or its driver is not usable.
    """

    # -- tasks -----------------------------------------------------------------------------------------------------------

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
            self.set_fact(connection, DECLARED, str(total))

    def claim_tasks(
        self, owner: str, count: int, *, lease_seconds: float = 60.0, max_outstanding: int | None = None
    ) -> list[TaskClaim]:
        """Claims up to ``count`` tasks to run: first those that another explorer released or lost, then new ordinals.

        Args:
            owner: name of this explorer, unique among those that run.
            lease_seconds: how long the claims last without :meth:`renew_claims`.
            max_outstanding: claim only as many as keep ``running + ready + in training`` groups within this, which is
                ``(max_head_offpolicyness + 1) · batch``. A group is in training until the version trained on it is
                published.
        """
        with self.writing() as connection:
            now = self.now(connection)
            if max_outstanding is not None:
                running = count_rows(connection, tasks, tasks.c.state == CLAIMED, tasks.c.lease_until >= now)
                waiting = count_rows(connection, groups, groups.c.state == READY, groups.c.uses == 0)
                count = min(count, max_outstanding - running - waiting - connection.scalars(_TRAINING).one())
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
            else:  # what was appended sample by sample is completed or deleted
                appended = select(groups.c.id, groups.c.attempt).where(
                    groups.c.ordinal == claim.ordinal, groups.c.state == OPEN
                )
                for row in connection.execute(appended).all():
                    if group is None and row.attempt == claim.attempt:
                        self._complete(connection, row.id)
                    else:
                        connection.execute(delete(experiences).where(experiences.c.group_id == row.id))
                        connection.execute(delete(groups).where(groups.c.id == row.id))
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

    # -- weights -----------------------------------------------------------------------------------------------------

    def publish_version(self, path: str, version: int) -> None:
        """Announces weights to the explorers; groups in training release their places.

        Raises:
            StoreError: a version as new was announced with other weights, or another trainer has taken over.
        """
        with self._consuming() as connection:
            newest = _newest(connection)
            if newest is not None and (newest.version, newest.path) == (version, str(path)):
                return
            if newest is not None and newest.version >= version:
                raise StoreError(
                    f"{self.name}: version {version} was announced from {path}, but version {newest.version} from {newest.path} was "
                    "announced before: versions only grow; after a restart call recover(checkpoint) first."
                )
            epoch = self.counter(connection, "epoch")
            connection.execute(insert(versions).values(version=version, path=str(path), epoch=epoch))
            connection.execute(update(uses).where(uses.c.published.is_(False)).values(published=True))
            if version > int(self.fact(connection, _HIGHEST) or -1):
                self.set_fact(connection, _HIGHEST, str(version))

    def latest_version(self) -> Announcement | None:
        """The newest announced weights, or None where none were announced."""
        with self.reading() as connection:
            return _newest(connection)

    def highest_version(self) -> int:
        """The highest version that was ever announced, also by a trainer that went back since; -1 where none was."""
        with self.reading() as connection:
            return int(self.fact(connection, _HIGHEST) or -1)

    def wait_for_version(
        self, version: int, timeout: float | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> Announcement | None:
        """Waits until weights of ``version`` or later are announced; None where the wait is over without."""

        def look() -> tuple[Announcement | None, bool]:
            newest = self.latest_version()
            return (newest if newest is not None and newest.version >= version else None), False

        return poll(look, timeout, cancelled)

    # -- looking inside ----------------------------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        """Counts of everything."""
        by_policy = select(groups.c.dropped_by, func.sum(groups.c.rows)).where(groups.c.state == DROPPED)
        with self.reading() as connection:
            count = partial(count_rows, connection)
            dropped = {row.reason: row.rows for row in connection.execute(select(drops))}
            for reason, rows in connection.execute(by_policy.group_by(groups.c.dropped_by)):
                dropped[reason] = dropped.get(reason, 0) + int(rows)
            return StoreStatus(
                declared_tasks=self._declared_tasks(connection),
                drawn_tasks=self.counter(connection, "next_ordinal"),
                claimed_tasks=count(tasks, tasks.c.state == CLAIMED),
                released_tasks=count(tasks, tasks.c.state == RELEASED),
                finished_tasks=count(tasks, tasks.c.state == FINISHED),
                open_groups=count(groups, groups.c.state == OPEN),
                unused_groups=count(groups, groups.c.state == READY, groups.c.uses == 0),
                used_groups=count(groups, groups.c.uses > 0),
                training_groups=connection.scalars(_TRAINING).one(),
                experiences=count(experiences),
                uncommitted_uses=count(uses, uses.c.checkpoint.is_(None)),
                drops=dropped,
            )

    def export_parquet(self, path: str | Path, *, partial: bool = False) -> int:
        """Writes all groups to a Parquet file, one experience a row; returns how many rows."""
        return export_parquet(self.groups(partial=partial), path)

    def __enter__(self) -> ExperienceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _newest(connection: Connection) -> Announcement | None:
    """The newest announced weights, or None where none were announced."""
    row = connection.execute(select(versions).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    since = connection.scalars(select(func.min(versions.c.version)).where(versions.c.epoch == row.epoch)).one()
    return Announcement(row.version, row.path, row.epoch, since)


def open_store(config: StoreConfig, directory: str | Path, *, run: str, create: bool = True) -> ExperienceStore | FileStore:
    """Opens the store of a run: a database for ``sql`` and ``queue``, a :class:`FileStore` for ``file``.

    Args:
        directory: the run directory, where the store is kept unless ``url`` says otherwise.
        run: identity of the run.
        create: make the store where it does not exist.

    Raises:
        ConfigError: keys contradict one another.
        StoreError: the store belongs to another run or is damaged.
    """
    once_in_order = config.order == "fifo" and config.uses == 1 and config.cooldown_seconds == 0
    if config.type != "sql" and not once_in_order:
        raise ConfigError(
            f"store.type={config.type} is first in, first out, each used once, but store.order is {config.order}, uses {config.uses} and "
            f"cooldown_seconds {config.cooldown_seconds:g}: set store.type=sql, or take these keys out."
        )
    if config.type == "file":
        path = config.url or str(Path(directory) / "experiences.jsonl")
        if "://" in path:
            raise ConfigError(f"store.type=file, but store.url is {path!r}: give the path of a JSONL file.")
        return FileStore(path)
    if config.type not in ("sql", "queue"):
        raise ConfigError(f"store.type is {config.type!r}: choose from sql, queue, file.")
    return ExperienceStore(config.url or f"sqlite:///{Path(directory) / 'experiences.db'}", run=run, create=create)
