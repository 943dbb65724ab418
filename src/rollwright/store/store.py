"""The experience store: where experiences wait between the processes that make them and the one that trains on them.

Invariants, whoever is killed and whenever:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot make.
- A group is drawn whole. What the trainer draws is its own once it commits a checkpoint; a trainer that restarts from a
  checkpoint draws again what was drawn after it, and nothing else.
- A batch that is not full is not drawn; its groups wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollwright.store import reading
from rollwright.store.database import Database
from rollwright.store.explorer import ExplorerSide
from rollwright.store.export import export_parquet
from rollwright.store.records import StoredGroup, StoreStatus
from rollwright.store.trainer import TrainerSide


class ExperienceStore(ExplorerSide, TrainerSide):
    """Experiences in a database, used by any number of explorers and one trainer, in any number of processes.

    One object may be used from several threads. A process that forks must open its own.

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory) or ``postgresql://…``.
        run: identity of the run; a store of another run is refused. None opens whatever is there.
        create: make the store where it does not exist.

    Raises:
        StoreError: the store is missing, damaged, or of another run.
        ConfigError: the URL or its driver is not usable.
    """

    def __init__(self, url: str, *, run: str | None = None, create: bool = True) -> None:
        self._database = Database(url, run, create)

    def groups(self, *, partial: bool = False) -> Iterator[StoredGroup]:
        """All groups in the order in which they came, without using them.

        Args:
            partial: also groups whose samples have not all come.
        """
        last = 0
        while True:
            with self._database.reading() as connection:
                ids = reading.group_ids(connection, last, partial)
                loaded = reading.load_groups(self._database, connection, ids)
            if not loaded:
                return
            yield from loaded
            last = ids[-1]

    def export_parquet(self, path: str | Path, *, partial: bool = False) -> int:
        """Writes all groups to a Parquet file, one experience a row; returns how many rows."""
        return export_parquet(self.groups(partial=partial), path)

    def status(self) -> StoreStatus:
        """Counts of everything."""
        with self._database.reading() as connection:
            return reading.read_status(self._database, connection)

    def close(self) -> None:
        """Closes the database's connections."""
        self._database.close()

    def __enter__(self) -> ExperienceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
