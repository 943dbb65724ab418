"""Announcements of weights, from the trainer to the explorers."""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, select, update

from rollwright.errors import StoreError
from rollwright.store.database import Database
from rollwright.store.records import Announcement
from rollwright.store.schema import uses, versions

_HIGHEST = "highest_version"


def publish_version(database: Database, connection: Connection, path: str, version: int) -> None:
    """Announces weights; groups in training release their places.

    Raises:
        StoreError: a version as new was announced with other weights.
    """
    newest = latest_version(connection)
    if newest is not None and (newest.version, newest.path) == (version, path):
        return
    if newest is not None and newest.version >= version:
        raise StoreError(
            f"{database.name}: version {version} was announced from {path}, but version {newest.version} from {newest.path} was "
            "announced before: versions only grow; after a restart call recover(checkpoint) first."
        )
    epoch = database.counter(connection, "epoch")
    connection.execute(insert(versions).values(version=version, path=path, epoch=epoch))
    connection.execute(update(uses).where(uses.c.published.is_(False)).values(published=True))
    if version > highest_version(database, connection):
        database.set_fact(connection, _HIGHEST, str(version))


def highest_version(database: Database, connection: Connection) -> int:
    """The highest version that was ever announced, withdrawn ones included; -1 where none was."""
    return int(database.fact(connection, _HIGHEST) or -1)


def latest_version(connection: Connection) -> Announcement | None:
    """The newest announced weights, or None where none were announced."""
    row = connection.execute(select(versions).order_by(versions.c.version.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    since = connection.execute(select(func.min(versions.c.version)).where(versions.c.epoch == row.epoch)).scalar_one()
    return Announcement(row.version, row.path, row.epoch, since)
