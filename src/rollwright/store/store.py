"""The experience store: where experiences wait between the processes that make them and the one that trains on them.

Invariants, whoever is killed and whenever:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot make.
- A group is drawn whole. What the trainer draws is its own once it commits a checkpoint; a trainer that restarts from a
  checkpoint draws again what was drawn after it, and nothing else.
- A batch that is not full is not drawn; its groups wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError, StoreError
from rollwright.store.database import (
    CLAIMED,
    DROPPED,
    FINISHED,
    OPEN,
    READY,
    RELEASED,
    drops,
    experiences,
    groups,
    poll,
    tasks,
    uses,
    versions,
)
from rollwright.store.drawing import BatchDrawing
from rollwright.store.files import FileStore, export_parquet
from rollwright.store.records import Announcement, StoreStatus

_HIGHEST = "highest_version"


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

            def count(table: Any, *conditions: Any) -> int:
                return connection.scalars(select(func.count()).select_from(table).where(*conditions)).one()

            dropped = {row.reason: row.rows for row in connection.execute(select(drops))}
            for reason, rows in connection.execute(by_policy.group_by(groups.c.dropped_by)):
                dropped[reason] = dropped.get(reason, 0) + int(rows)
            training = select(func.count(uses.c.group_id.distinct())).where(uses.c.published.is_(False))
            return StoreStatus(
                declared_tasks=self._declared_tasks(connection),
                drawn_tasks=self.counter(connection, "next_ordinal"),
                claimed_tasks=count(tasks, tasks.c.state == CLAIMED),
                released_tasks=count(tasks, tasks.c.state == RELEASED),
                finished_tasks=count(tasks, tasks.c.state == FINISHED),
                open_groups=count(groups, groups.c.state == OPEN),
                unused_groups=count(groups, groups.c.state == READY, groups.c.uses == 0),
                used_groups=count(groups, groups.c.uses > 0),
                training_groups=connection.scalars(training).one(),
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
    """Opens the store of a run.

    Args:
        config: the run's ``store`` section.
        directory: the run directory, where the store is kept unless ``url`` says otherwise.
        run: identity of the run.
        create: make the store where it does not exist.

    Returns:
        A database for ``sql`` and ``queue``, a :class:`FileStore` for ``file``.

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
