"""The store's one trainer: its checkpoints, which commit what it drew, and the weights that it announces to explorers.

A use is recorded when a group is drawn and gets a checkpoint when the trainer commits. Uses without a checkpoint, and those of
checkpoints after the one that a trainer restarts from, are undone by ``recover``: their groups are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from rollwright.errors import StoreError
from rollwright.store.database import (
    DROPPED,
    READY,
    Database,
    checkpoints,
    count_rows,
    counters,
    groups,
    poll,
    uses,
    versions,
)

_HIGHEST = "highest_version"


class TrainerCursor:
    """What the trainer has drawn, up to which checkpoint. A store has one trainer at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._epoch: int | None = None  # set when this process begins to consume

    @property
    def has_begun(self) -> bool:
        """True if this process is known to be the trainer."""
        return self._epoch is not None

    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """Bind what was drawn since the last commit to a checkpoint of the trainer. Returns the number of uses.

        Call it when the checkpoint is written but not yet visible under its name, so that a trainer never finds a checkpoint
        unknown to the store.

        Args:
            checkpoint: name of the checkpoint.
            version: version of its weights; a recovery withdraws announcements of later ones.
        """
        with self.consuming() as connection:
            if connection.scalar(select(checkpoints.c.sequence).where(checkpoints.c.name == checkpoint)) is not None:
                raise StoreError(
                    f"{self._database.name} has a checkpoint {checkpoint!r} already: give each checkpoint a name of its own."
                )
            values = {"name": checkpoint, "version": version, "batch": self._database.counter(connection, "batch")}
            sequence = connection.scalar(insert(checkpoints).values(**values).returning(checkpoints.c.sequence))
            dropped = (groups.c.state == DROPPED) & groups.c.drop_checkpoint.is_(None)
            connection.execute(update(groups).where(dropped).values(drop_checkpoint=sequence))
            tied = update(uses).where(uses.c.checkpoint.is_(None)).values(checkpoint=sequence)
            count = connection.execute(tied).rowcount
        self._database.flush()
        return count

    def recover(self, checkpoint: str | None) -> int:
        """Become the store's trainer and go back to a checkpoint, or to the beginning if it is None.

        Groups drawn after the checkpoint are drawn again, announcements of later weights are withdrawn, and any other trainer
        is refused from now on. Returns the number of uses undone.

        Raises:
            StoreError: the store does not know the checkpoint.
        """
        with self._database.writing() as connection:
            sequence, version, batch = 0, -1, 0
            if checkpoint is not None:
                row = connection.execute(select(checkpoints).where(checkpoints.c.name == checkpoint)).one_or_none()
                if row is None:
                    known = connection.scalars(select(checkpoints.c.name).order_by(checkpoints.c.sequence)).all()
                    raise StoreError(
                        f"{self._database.name} knows no checkpoint {checkpoint!r} (it knows {', '.join(known[-5:]) or 'none'}): "
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
            self._epoch = self._database.add_to(connection, "epoch") + 1
        return sum(count for _, count in undone)

    @contextmanager
    def consuming(self) -> Iterator[Connection]:
        """A writing transaction of the store's one trainer.

        Raises:
            StoreError: another trainer has recovered the store, or an earlier one left uses that would be lost.
        """
        with self._database.writing() as connection:
            epoch = self._database.counter(connection, "epoch")
            if self._epoch is None:
                pending = count_rows(connection, uses, uses.c.checkpoint.is_(None))
                known = count_rows(connection, checkpoints)
                if pending or known:
                    raise StoreError(
                        f"{self._database.name} was used by an earlier trainer ({known} checkpoints, {pending} uses not committed): call "
                        "recover(checkpoint) with the checkpoint that this trainer starts from, or recover(None) where it starts "
                        "from none."
                    )
            elif self._epoch != epoch:
                raise StoreError(
                    f"{self._database.name}: another trainer has recovered this store (epoch {epoch}, this process has {self._epoch}); "
                    "stop one of the two: a store has one trainer."
                )
            yield connection
        self._epoch = epoch


@dataclass(frozen=True)
class Announcement:
    """Weights for explorers to load.

    Attributes:
        version: version of the weights.
        path: directory that holds them.
        epoch: number of the trainer's restarts. After a restart from an earlier checkpoint the same version may name other
            weights, so an explorer reloads whenever ``(epoch, version)`` differs from what it has loaded.
        since: first version announced in this epoch. This version and later ones of earlier epochs no longer exist.
    """

    version: int
    path: str
    epoch: int
    since: int = 0

    def names_weights_of(self, loaded: Announcement | None) -> bool:
        """True if these weights are loaded already."""
        return loaded is not None and (loaded.epoch, loaded.version) == (self.epoch, self.version)

    def takes_back(self, loaded: Announcement | None) -> bool:
        """True if the trainer restarted from before the loaded weights, so that those no longer exist."""
        before = Announcement(0, "", self.epoch) if loaded is None else loaded
        return self.version < before.version or (before.epoch != self.epoch and self.since <= before.version)


class Announcements:
    """The weights that the trainer published, for explorers to load."""

    def __init__(self, database: Database, trainer: TrainerCursor) -> None:
        self._database = database
        self._trainer = trainer

    def publish_version(self, path: str, version: int) -> None:
        """Announce weights to the explorers. Groups in training release their slots.

        Raises:
            StoreError: other weights were announced as this or a later version, or another trainer has taken over.
        """
        with self._trainer.consuming() as connection:
            newest = _newest(connection)
            if newest is not None and (newest.version, newest.path) == (version, str(path)):
                return
            if newest is not None and newest.version >= version:
                raise StoreError(
                    f"{self._database.name}: version {version} was announced from {path}, but version {newest.version} from {newest.path} was "
                    "announced before: versions only grow; after a restart call recover(checkpoint) first."
                )
            epoch = self._database.counter(connection, "epoch")
            connection.execute(insert(versions).values(version=version, path=str(path), epoch=epoch))
            connection.execute(update(uses).where(uses.c.published.is_(False)).values(published=True))
            if version > int(self._database.fact(connection, _HIGHEST) or -1):
                self._database.set_fact(connection, _HIGHEST, str(version))

    def latest_version(self) -> Announcement | None:
        """The newest announced weights; None if there are none."""
        with self._database.reading() as connection:
            return _newest(connection)

    def highest_version(self) -> int:
        """The highest version ever announced, even if withdrawn since; -1 if there is none."""
        with self._database.reading() as connection:
            return int(self._database.fact(connection, _HIGHEST) or -1)

    def wait_for_version(
        self, version: int, timeout: float | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> Announcement | None:
        """Wait until weights of ``version`` or later are announced. Returns None if the wait ends without them."""

        def look() -> tuple[Announcement | None, bool]:
            newest = self.latest_version()
            return (newest if newest is not None and newest.version >= version else None), False

        return poll(look, timeout, cancelled)


def _newest(connection: Connection) -> Announcement | None:
    row = connection.execute(select(versions).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    since = connection.scalars(select(func.min(versions.c.version)).where(versions.c.epoch == row.epoch)).one()
    return Announcement(row.version, row.path, row.epoch, since)
