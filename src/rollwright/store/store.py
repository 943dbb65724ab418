"""The experience store, which holds groups of experiences between the processes that sample them and the one that trains on them.

These invariants hold no matter which process is killed, and when:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot commit.
- A group is drawn whole. Committing a checkpoint makes the trainer's draws permanent; a trainer that restarts from a checkpoint
  draws the groups that were drawn after it again, and no others. A batch that is not full is not drawn; its groups wait.

A use is recorded when a group is drawn and gets a checkpoint when the trainer commits. ``recover`` undoes the uses without a
checkpoint and those of checkpoints after the one that the trainer restarts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError, StoreError, TrajectoryError
from rollwright.store.announcements import Announcements
from rollwright.store.batches import BatchRequest, StoredBatch, TrainingStore
from rollwright.store.database import (
    CLAIMED,
    DROPPED,
    FINISHED,
    OPEN,
    READY,
    RELEASED,
    Database,
    add_to,
    checkpoints,
    count_rows,
    counter_value,
    counters,
    drops,
    experiences,
    groups,
    now,
    poll,
    tasks,
    uses,
    versions,
)
from rollwright.store.file_store import FileStore, export_parquet
from rollwright.store.groups import (
    IDS_A_QUERY,
    ROW,
    Group,
    StoredGroup,
    add_drops,
    experience_of,
    experiences_of,
    group_name,
    load_groups,
    mark_complete,
    rows_of,
    write_group,
)
from rollwright.store.sampling import DRAWN_COLUMNS, Sampling
from rollwright.store.task_leases import TaskLeases, all_finished, declared_tasks, training_groups
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

#: Seconds between two messages of a trainer that waits for experiences.
REMINDER_SECONDS = 60.0


@dataclass(frozen=True)
class StoreStatus:
    """Counts of a store, taken in one transaction."""

    declared_tasks: int | None  # None if no end was declared
    drawn_tasks: int  # ordinals handed out so far
    claimed_tasks: int
    released_tasks: int  # to be claimed again
    finished_tasks: int
    open_groups: int  # lack samples
    unused_groups: int  # complete, never trained on
    used_groups: int  # trained on at least once
    training_groups: int  # drawn for a version that is not yet published
    experiences: int
    uncommitted_uses: int  # since the trainer's last checkpoint
    drops: dict[str, int] = field(default_factory=dict)  # rows, by the reason for the drop

    @property
    def production_ended(self) -> bool:
        """True if the tasks have a declared end and all of them are finished."""
        return self.declared_tasks is not None and self.finished_tasks >= self.declared_tasks


class ExperienceStore(TrainingStore):
    """Experiences in a database, used by any number of explorers and one trainer, in any number of processes.

    Explorers claim and finish tasks (``tasks``) or ``append`` groups. The trainer draws with ``sample``, ``commit``s its checkpoints
    and publishes weights (``announcements``). A store is thread-safe, but a forked process must open its own.

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory) or ``postgresql://…``.
        run: identity of the run; the store of another run raises an error. If None, the store of any run can be opened.
        create: create the store if it does not exist.

    Attributes:
        name: URL of the database, without its password.
        tasks: claims, renews, releases and finishes tasks.
        announcements: weights that the trainer has published.

    Raises:
        StoreError: the store is missing or damaged, or belongs to another run.
        ConfigError: the URL or its driver is not usable.
    """

    announcements: Announcements

    def __init__(self, url: str, *, run: str | None = None, create: bool = True) -> None:
        self._database = Database(url, run=run, create=create)
        self._epoch: int | None = None  # epoch of this process as the trainer; None before its first draw
        self.name = self._database.name
        self.tasks = TaskLeases(self._database)
        self.announcements = Announcements(self._database, self._training)

    # -- groups --------------------------------------------------------------------------------------------------------

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
        """Store a group, or one sample of it. Idempotent.

        Args:
            group: the samples of the group, each one experience or a list of them. If ``index`` is given, the rows of that sample.
            ordinal: ordinal of the task, from which the group gets its name.
            name: the group's name if it has no ordinal. If None, it is derived from the first experience's id and tokens.
            attempt: attempt of the task. A newer attempt replaces the rows of an older one until the group is complete.
            index: index of this sample in the group.
            group_size: number of samples that complete the group; required with ``index``.
            version: weight version of all rows. If None, that of each experience's oldest sampled token.

        Returns:
            The number of rows stored; 0 if all rows were present already or belong to a replaced attempt.

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
        name = group_name(group, ordinal, name)
        with self._database.writing() as connection:
            return write_group(connection, name, ordinal, rows, attempt, group_size)

    def complete_group(self, name: str) -> bool:
        """Mark a group as complete with the samples it has. Returns False if no group of that name is open."""
        still_open = select(groups.c.id).where(groups.c.name == name, groups.c.state == OPEN)
        with self._database.writing() as connection:
            group_id = connection.scalar(still_open)
            if group_id is not None:
                mark_complete(connection, group_id)
        return group_id is not None

    def open_groups(self, prefix: str = "") -> set[str]:
        """Return the names of the groups that lack samples and whose names begin with ``prefix``."""
        still_open = select(groups.c.name).where(groups.c.state == OPEN, groups.c.name.startswith(prefix, autoescape=True))
        with self._database.reading() as connection:
            return set(connection.scalars(still_open))

    def count_drops(self, counts: Mapping[str, int]) -> None:
        """Add to the counts of dropped rows, by the reason for the drop."""
        with self._database.writing() as connection:
            add_drops(connection, counts)

    def groups(self, *, partial: bool = False) -> Iterator[StoredGroup]:
        """Iterate over all groups in order of arrival, without recording a use; ``partial`` includes incomplete groups."""
        states = (OPEN, READY, DROPPED) if partial else (READY, DROPPED)
        statement = select(groups.c.id).where(groups.c.state.in_(states)).order_by(groups.c.id).limit(IDS_A_QUERY)
        last = 0
        while True:
            with self._database.reading() as connection:
                ids = connection.scalars(statement.where(groups.c.id > last)).all()
                loaded = load_groups(connection, ids, self.name)
            if not loaded:
                return
            yield from loaded
            last = ids[-1]

    # -- batches -------------------------------------------------------------------------------------------------------

    def sample(
        self,
        *,
        groups: int | None = None,
        experiences: int | None = None,
        sampling: Sampling | None = None,
        min_version: int | None = None,
        timeout: float | None = 0.0,
        partial_batch: bool = False,
        partial_groups: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StoredBatch | None:
        """Draw a batch for the trainer and record a use of each of its groups.

        Args:
            groups: number of groups.
            experiences: instead of ``groups``: draw whole groups until they have at least this many rows in total.
            sampling: order and number of uses. If None, each group is drawn once, in order of completion.
            min_version: skip groups that contain tokens of older versions.
            timeout: seconds to wait for enough groups. If None, wait until no more groups can arrive.
            partial_batch: take a smaller batch if there are not enough groups when the wait ends.
            partial_groups: also take groups that lack samples; samples that arrive later are dropped and counted as ``late``.
            cancelled: polled while waiting; returning True ends the wait.

        Returns:
            The batch, or None, with no use recorded, if there were not enough groups.

        Raises:
            StoreError: another trainer has taken over, or an earlier trainer used the store and ``recover`` was not called.
        """
        request = BatchRequest(groups, experiences, sampling or Sampling(), min_version, partial_groups)
        return self._draw(request, timeout, partial_batch, cancelled)

    def next_batch(self, request: BatchRequest, cancelled: Callable[[], bool]) -> StoredBatch | None:
        """See ``TrainingStore.next_batch``."""
        while not cancelled():
            oldest = request.min_version
            if oldest is not None and (dropped := self.drop_older_than(oldest, sampling=request.sampling)):
                logger.info("%d groups were older than max_head_offpolicyness allows and are dropped", dropped)
            batch = self._draw(request, REMINDER_SECONDS, False, cancelled)
            if batch is not None:
                return batch
            status = self.status()
            if status.production_ended:
                logger.info("every task is finished; %d groups are left, less than a batch", status.unused_groups)
                return None
            if not cancelled():
                logger.info(
                    "waiting for experiences: %d groups are ready and %d tasks run; is an explorer running?",
                    status.unused_groups,
                    status.claimed_tasks,
                )
        return None

    def drop_older_than(self, version: int, *, sampling: Sampling | None = None, reason: str = "stale") -> int:
        """Drop groups that have uses left and whose oldest token is older than ``version``. Returns the number of groups.

        The drop is counted under ``reason`` and, like a use, is undone by a recovery from an earlier checkpoint.
        """
        eligible = (sampling or Sampling()).eligible(float("inf"), None).with_only_columns(groups.c.id)
        old = groups.c.id.in_(eligible.where(groups.c.version < version).scalar_subquery())
        with self._training() as connection:
            statement = update(groups).where(old).values(state=DROPPED, dropped_by=reason, drop_checkpoint=None)
            return connection.execute(statement).rowcount

    def _draw(
        self, request: BatchRequest, timeout: float | None, partial_batch: bool, cancelled: Callable[[], bool]
    ) -> StoredBatch | None:
        if self._epoch is None:
            with self._training():
                pass  # raises now rather than after a wait for groups that an earlier trainer has drawn
        if not poll(lambda: self._look(request), timeout, cancelled) and not partial_batch:
            return None
        with self._training() as connection:
            number = counter_value(connection, "batch")
            ids = self._take(connection, request, number, partial_batch)
        if not ids:
            return None
        with self._database.reading() as connection:
            return StoredBatch(number, load_groups(connection, ids, self.name))

    def _look(self, request: BatchRequest) -> tuple[bool, bool]:
        """Return whether a batch can be drawn now, and whether no more groups will come."""
        with self._database.reading() as connection:
            _, enough = request.first_enough(self._drawable(connection, request))
            ended = all_finished(connection)
        return enough, ended and request.sampling.cooldown_seconds == 0

    def _drawable(self, connection: Connection, request: BatchRequest) -> list[Any]:
        """Return the next groups in order, as many as the request can need; incomplete groups come last."""
        limit, batch = request.limit, counter_value(connection, "batch")
        drawn = request.sampling.draw(connection, limit, batch, now(connection), request.min_version)
        if request.partial_groups:
            oldest = -1 if request.min_version is None else request.min_version
            unfinished = select(*DRAWN_COLUMNS).where(groups.c.state == OPEN, groups.c.version >= oldest)
            drawn += connection.execute(unfinished.order_by(groups.c.id).limit(limit)).all()
        return drawn

    def _take(self, connection: Connection, request: BatchRequest, batch: int, partial_batch: bool) -> Sequence[int]:
        """Draw a batch and record its uses. Returns the ids of its groups; empty if there are not enough."""
        drawn, enough = request.first_enough(self._drawable(connection, request))
        if not drawn or not (enough or partial_batch):
            return []
        ids = [group.id for group in drawn]
        for group in drawn:
            if group.state == OPEN:
                mark_complete(connection, group.id)
        add_to(connection, "batch")
        connection.execute(insert(uses), [{"group_id": group_id, "batch": batch, "published": False} for group_id in ids])
        available_at = now(connection) + request.sampling.cooldown_seconds
        connection.execute(
            update(groups).where(groups.c.id == bindparam("group")).values(uses=groups.c.uses + 1, available_at=available_at),
            [{"group": group_id} for group_id in ids],
        )
        return ids

    # -- the trainer's checkpoints -------------------------------------------------------------------------------------

    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """See ``TrainingStore.commit``."""
        with self._training() as connection:
            if connection.scalar(select(checkpoints.c.sequence).where(checkpoints.c.name == checkpoint)) is not None:
                raise StoreError(
                    f"{self.name} has a checkpoint {checkpoint!r} already: give each checkpoint a name of its own."
                )
            values = {"name": checkpoint, "version": version, "batch": counter_value(connection, "batch")}
            sequence = connection.scalar(insert(checkpoints).values(**values).returning(checkpoints.c.sequence))
            dropped = (groups.c.state == DROPPED) & groups.c.drop_checkpoint.is_(None)
            connection.execute(update(groups).where(dropped).values(drop_checkpoint=sequence))
            tied = update(uses).where(uses.c.checkpoint.is_(None)).values(checkpoint=sequence)
            count = connection.execute(tied).rowcount
        self._database.flush()
        return count

    def recover(self, checkpoint: str | None) -> int:
        """See ``TrainingStore.recover``."""
        with self._database.writing() as connection:
            sequence, version, batch = 0, -1, 0
            if checkpoint is not None:
                row = connection.execute(select(checkpoints).where(checkpoints.c.name == checkpoint)).one_or_none()
                if row is None:
                    known = connection.scalars(select(checkpoints.c.name).order_by(checkpoints.c.sequence)).all()
                    raise StoreError(
                        f"{self.name} knows no checkpoint {checkpoint!r} (it knows {', '.join(known[-5:]) or 'none'}): "
                        "commit(checkpoint) comes before the checkpoint becomes visible on disk; recover from one that the store knows."
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
            if version is not None:
                connection.execute(delete(versions).where(versions.c.version > version))
            connection.execute(update(counters).where(counters.c.name == "batch").values(value=batch))
            self._epoch = add_to(connection, "epoch") + 1
        return sum(count for _, count in undone)

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """See ``TrainingStore.forget_used``."""
        allowed = (sampling or Sampling()).uses
        newest = select(checkpoints.c.sequence).order_by(checkpoints.c.sequence.desc())
        with self._training() as connection:
            oldest_kept = connection.scalar(newest.offset(keep_checkpoints - 1).limit(1))
            if oldest_kept is None or allowed is None:
                return 0
            needed = select(uses.c.group_id).where(or_(uses.c.checkpoint.is_(None), uses.c.checkpoint > oldest_kept))
            used_up = (groups.c.uses >= allowed) & groups.c.id.not_in(needed)
            dropped = (groups.c.state == DROPPED) & (groups.c.drop_checkpoint <= oldest_kept)
            done = select(groups.c.id).where(or_(used_up, dropped))
            return connection.execute(delete(experiences).where(experiences.c.group_id.in_(done))).rowcount

    @contextmanager
    def _training(self) -> Iterator[Connection]:
        """Open a writing transaction for the store's only trainer.

        Raises:
            StoreError: another trainer has recovered the store, or an earlier trainer used it and ``recover`` was not called.
        """
        with self._database.writing() as connection:
            epoch = counter_value(connection, "epoch")
            if self._epoch is None:
                pending = count_rows(connection, uses, uses.c.checkpoint.is_(None))
                known = count_rows(connection, checkpoints)
                if pending or known:
                    raise StoreError(
                        f"{self.name} was used by an earlier trainer ({known} checkpoints, {pending} uses not committed): call "
                        "recover(checkpoint) with the checkpoint that this trainer starts from, or recover(None) where it starts "
                        "from none."
                    )
            elif self._epoch != epoch:
                raise StoreError(
                    f"{self.name}: another trainer has recovered this store (epoch {epoch}, this process has {self._epoch}); "
                    "stop one of the two: a store has one trainer."
                )
            yield connection
        self._epoch = epoch

    # -- inspection ----------------------------------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        """Count the tasks, groups, experiences, uses and drops."""
        by_policy = select(groups.c.dropped_by, func.sum(groups.c.rows)).where(groups.c.state == DROPPED)
        with self._database.reading() as connection:
            count = partial(count_rows, connection)
            dropped = {row.reason: row.rows for row in connection.execute(select(drops))}
            for reason, rows in connection.execute(by_policy.group_by(groups.c.dropped_by)):
                dropped[reason] = dropped.get(reason, 0) + int(rows)
            return StoreStatus(
                declared_tasks=declared_tasks(connection),
                drawn_tasks=counter_value(connection, "next_ordinal"),
                claimed_tasks=count(tasks, tasks.c.state == CLAIMED),
                released_tasks=count(tasks, tasks.c.state == RELEASED),
                finished_tasks=count(tasks, tasks.c.state == FINISHED),
                open_groups=count(groups, groups.c.state == OPEN),
                unused_groups=count(groups, groups.c.state == READY, groups.c.uses == 0),
                used_groups=count(groups, groups.c.uses > 0),
                training_groups=training_groups(connection),
                experiences=count(experiences),
                uncommitted_uses=count(uses, uses.c.checkpoint.is_(None)),
                drops=dropped,
            )

    def damaged(self) -> list[str]:
        """List the damaged parts of the store: pages of a SQLite file, and rows that differ from what was written."""
        found: list[str] = []
        store = self.name
        try:
            with self._database.reading() as connection:
                if self._database.dialect == "sqlite":
                    pages = connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars().all()
                    found += [f"{store}: {each}" for each in pages if each != "ok"]
                names = dict(connection.execute(select(groups.c.id, groups.c.name)).all())
                for row in connection.execute(select(*ROW).order_by(experiences.c.id)):
                    try:
                        experience_of(row)
                    except TrajectoryError as error:
                        found.append(
                            f"{store}: a row of group {names.get(row.group_id, row.group_id)!r} cannot be read ({error})"
                        )
        except (SQLAlchemyError, StoreError, ValueError, TypeError) as error:
            found.append(f"{store}: its rows cannot be read ({str(getattr(error, 'orig', None) or error).splitlines()[0]})")
        return found

    def export_parquet(self, path: str | Path, *, partial: bool = False) -> int:
        """Write all groups to a Parquet file, with one row per experience. Returns the number of rows."""
        return export_parquet(self.groups(partial=partial), path)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def open_store(config: StoreConfig, directory: str | Path, *, run: str) -> ExperienceStore | FileStore:
    """Open the store of a run: a database for ``sql`` and ``queue``, a :class:`FileStore` for ``file``.

    Args:
        config: the ``store`` section.
        directory: the run directory, which holds the store unless ``url`` is set.
        run: identity of the run.

    Raises:
        ConfigError: keys contradict each other.
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
    return ExperienceStore(config.url or f"sqlite:///{Path(directory) / 'experiences.db'}", run=run)
