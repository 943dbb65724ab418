"""The weights that a store's trainer announces to its explorers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from rollwright.errors import StoreError
from rollwright.store.database import Database, counter_value, fact, poll, set_fact, uses, versions

_HIGHEST = "highest_version"


@dataclass(frozen=True)
class Announcement:
    """Weights for explorers to load.

    Attributes:
        version: version of the weights.
        path: directory that holds them.
        epoch: number of the trainer's restarts. After a restart from an earlier checkpoint the same version may name other
            weights, so an explorer reloads whenever ``(epoch, version)`` differs from what it has loaded.
        since: first version announced in this epoch. Weights of earlier epochs with this or a later version no longer exist.
    """

    version: int
    path: str
    epoch: int
    since: int = 0

    def names_weights_of(self, loaded: Announcement | None) -> bool:
        """Return True if ``loaded`` announced the same weights."""
        return loaded is not None and (loaded.epoch, loaded.version) == (self.epoch, self.version)

    def takes_back(self, loaded: Announcement | None) -> bool:
        """Return True if the trainer restarted from a point before the loaded weights, so they no longer exist."""
        before = Announcement(0, "", self.epoch) if loaded is None else loaded
        return self.version < before.version or (before.epoch != self.epoch and self.since <= before.version)


class Announcements:
    """The weights that the trainer published, for explorers to load.

    Args:
        database: holds the announcements.
        training: opens a writing transaction for the store's only trainer.
    """

    def __init__(self, database: Database, training: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._database = database
        self._training = training

    def publish(self, path: str, version: int) -> None:
        """Announce weights to the explorers. Groups in training no longer count towards ``max_outstanding``.

        Raises:
            StoreError: other weights were announced as this or a later version, or another trainer has taken over.
        """
        with self._training() as connection:
            newest = _newest(connection)
            if newest is not None and (newest.version, newest.path) == (version, str(path)):
                return
            if newest is not None and newest.version >= version:
                raise StoreError(
                    f"{self._database.name}: version {version} was announced from {path}, but version {newest.version} from {newest.path} was "
                    "announced before: versions only grow; after a restart call recover(checkpoint) first."
                )
            epoch = counter_value(connection, "epoch")
            connection.execute(insert(versions).values(version=version, path=str(path), epoch=epoch))
            connection.execute(update(uses).where(uses.c.published.is_(False)).values(published=True))
            if version > int(fact(connection, _HIGHEST) or -1):
                set_fact(connection, _HIGHEST, str(version))

    def newest(self) -> Announcement | None:
        """Return the newest announced weights, or None if there are none."""
        with self._database.reading() as connection:
            return _newest(connection)

    def highest_version(self) -> int:
        """Return the highest version ever announced, including withdrawn ones, or -1 if there is none."""
        with self._database.reading() as connection:
            return int(fact(connection, _HIGHEST) or -1)

    def wait_for(
        self, version: int, timeout: float | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> Announcement | None:
        """Wait until weights of ``version`` or later are announced. Returns None on a timeout or cancellation."""

        def look() -> tuple[Announcement | None, bool]:
            newest = self.newest()
            return (newest if newest is not None and newest.version >= version else None), False

        return poll(look, timeout, cancelled)


def _newest(connection: Connection) -> Announcement | None:
    row = connection.execute(select(versions).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    since = connection.scalars(select(func.min(versions.c.version)).where(versions.c.epoch == row.epoch)).one()
    return Announcement(row.version, row.path, row.epoch, since)
