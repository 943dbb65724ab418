"""The experience store: where groups of experiences wait between the processes that sample them and the one that trains.

Invariants, whichever process is killed at whatever moment:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot commit.
- A group is drawn whole. Committing a checkpoint makes the trainer's draws permanent; a trainer that restarts from a checkpoint
  draws again what was drawn after it, and nothing else. A batch that is not full is not drawn; its groups wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy import func, select

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError
from rollwright.store.database import (
    CLAIMED,
    DROPPED,
    FINISHED,
    OPEN,
    READY,
    RELEASED,
    Database,
    count_rows,
    drops,
    experiences,
    groups,
    tasks,
    uses,
)
from rollwright.store.file_store import FileStore, export_parquet
from rollwright.store.groups import GroupTable, StoredBatch
from rollwright.store.sampling import BatchSampler, Sampling
from rollwright.store.task_leases import TaskLeases, training_groups
from rollwright.store.trainer import Announcements, TrainerCursor
from rollwright.tracking.logging import getLogger

logger = getLogger("store")

#: Seconds between two messages that the trainer waits for experiences.
REMINDER_SECONDS = 60.0


@dataclass(frozen=True)
class StoreStatus:
    """Counts of a store, all from one transaction."""

    declared_tasks: int | None  # None if no end was declared
    drawn_tasks: int  # ordinals handed out so far
    claimed_tasks: int
    released_tasks: int  # to be claimed again
    finished_tasks: int
    open_groups: int  # lack samples
    unused_groups: int  # complete, never trained on
    used_groups: int  # trained on at least once
    training_groups: int  # trained on, the next version not yet published
    experiences: int
    uncommitted_uses: int  # since the trainer's last checkpoint
    drops: dict[str, int] = field(default_factory=dict)  # rows, by the reason for the drop

    @property
    def production_ended(self) -> bool:
        """True if the tasks have a declared end and all of them are finished."""
        return self.declared_tasks is not None and self.finished_tasks >= self.declared_tasks


class ExperienceStore:
    """Experiences in a database, used by any number of explorers and one trainer, in any number of processes.

    Explorers claim and finish tasks (``claim_tasks``, ``finish_task``) or ``append`` groups. The trainer draws with ``sample``,
    ``commit``s its checkpoints and announces weights. An object may be used from several threads. A process that forks must open
    its own.

    The methods belong to the store's parts: groups (:class:`GroupTable`), tasks (:class:`TaskLeases`), batches
    (:class:`BatchSampler`), and the trainer's checkpoints (:class:`TrainerCursor`) and weights (:class:`Announcements`).

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory) or ``postgresql://…``.
        run: identity of the run; a store of another run is refused. None opens whatever is there.
        create: create the store if it does not exist.

    Raises:
        StoreError: the store is missing, damaged, or of another run.
        ConfigError: the URL or its driver is not usable.
    """

    def __init__(self, url: str, *, run: str | None = None, create: bool = True) -> None:
        self._database = Database(url, run=run, create=create)
        self._groups = GroupTable(self._database)
        self._tasks = TaskLeases(self._database, self._groups)
        trainer = TrainerCursor(self._database)
        self.announcements = Announcements(self._database, trainer)
        batches = BatchSampler(self._database, self._groups, self._tasks, trainer)
        self.name, self.close = self._database.name, self._database.close
        # groups
        self.append = self._groups.append
        self.complete_group = self._groups.complete_group
        self.open_groups = self._groups.open_groups
        self.count_drops = self._groups.count_drops
        self.groups = self._groups.groups
        self.damaged = self._groups.damaged
        # tasks
        self.declare_tasks = self._tasks.declare_tasks
        self.claim_tasks = self._tasks.claim_tasks
        self.finish_task = self._tasks.finish_task
        self.renew_claims = self._tasks.renew_claims
        self.release_claims = self._tasks.release_claims
        self.keeping_claims = self._tasks.keeping_claims
        # batches
        self.sample = batches.sample
        self.drop_older_than = batches.drop_older_than
        self.forget_used = batches.forget_used
        # the trainer's checkpoints and weights
        self.commit = trainer.commit
        self.recover = trainer.recover
        self.publish_version = self.announcements.publish_version
        self.latest_version = self.announcements.latest_version
        self.highest_version = self.announcements.highest_version
        self.wait_for_version = self.announcements.wait_for_version

    def next_batch(
        self,
        *,
        groups: int | None,
        experiences: int | None,
        sampling: Sampling,
        min_version: int | None,
        cancelled: Callable[[], bool],
    ) -> StoredBatch | None:
        """Wait for the next batch of a trainer.

        Args:
            groups: number of groups.
            experiences: instead of ``groups``: whole groups until they have at least so many rows.
            sampling: order and number of uses.
            min_version: version of the oldest tokens that may be trained; groups with older ones are dropped. None allows any
                age.
            cancelled: polled while waiting; returning True ends the wait.

        Returns:
            The batch, or None if no more will come or the wait was cancelled.
        """
        while not cancelled():
            if min_version is not None and (dropped := self.drop_older_than(min_version, sampling=sampling)):
                logger.info("%d groups were older than max_head_offpolicyness allows and are dropped", dropped)
            batch = self.sample(
                groups=groups,
                experiences=experiences,
                sampling=sampling,
                min_version=min_version,
                timeout=REMINDER_SECONDS,
                cancelled=cancelled,
            )
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

    def status(self) -> StoreStatus:
        """Counts of everything in the store."""
        by_policy = select(groups.c.dropped_by, func.sum(groups.c.rows)).where(groups.c.state == DROPPED)
        with self._database.reading() as connection:
            count = partial(count_rows, connection)
            dropped = {row.reason: row.rows for row in connection.execute(select(drops))}
            for reason, rows in connection.execute(by_policy.group_by(groups.c.dropped_by)):
                dropped[reason] = dropped.get(reason, 0) + int(rows)
            return StoreStatus(
                declared_tasks=self._tasks.declared(connection),
                drawn_tasks=self._database.counter(connection, "next_ordinal"),
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

    def export_parquet(self, path: str | Path, *, partial: bool = False) -> int:
        """Write all groups to a Parquet file, one experience a row. Returns the number of rows."""
        return export_parquet(self.groups(partial=partial), path)

    def __enter__(self) -> ExperienceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(config: StoreConfig, directory: str | Path, *, run: str, create: bool = True) -> ExperienceStore | FileStore:
    """Open the store of a run: a database for ``sql`` and ``queue``, a :class:`FileStore` for ``file``.

    Args:
        config: the store's section.
        directory: the run directory, which holds the store unless ``url`` names another place.
        run: identity of the run.
        create: create the store if it does not exist.

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
