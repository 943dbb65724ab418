"""What the trainer does with an experience store: draw batches, commit them with its checkpoints, announce weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from rollwright.errors import StoreError
from rollwright.store import consumption, reading
from rollwright.store import weights as store_weights
from rollwright.store.database import Database
from rollwright.store.polling import poll
from rollwright.store.records import Batch
from rollwright.store.sampling import Sampling


class TrainerSide:
    """The methods of :class:`~rollwright.store.store.ExperienceStore` that the trainer calls."""

    _database: Database
    _epoch: int | None = None  # set when this process begins to consume

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
    ) -> Batch | None:
        """Draws a batch for the trainer and counts a use of each of its groups.

        Args:
            groups: how many groups.
            experiences: instead of ``groups``: whole groups until they have at least so many rows.
            sampling: order and number of uses.
            min_version: leave out groups with older tokens.
            timeout: seconds to wait for enough groups; None waits as long as more can come.
            partial_batch: take what there is when the wait is over, where it is less.
            partial_groups: also take groups whose samples have not all come; what comes later is counted as ``late``.
            cancelled: asked while waiting; true ends the wait.

        Returns:
            The batch, or None where there were not enough groups; nothing is used then.

        Raises:
            StoreError: another trainer has taken over, or an earlier trainer's uses wait for :meth:`recover`.
        """
        if (groups is None) == (experiences is None):
            raise StoreError("sample wants either groups or experiences: give one of the two.")
        sampling = sampling or Sampling()
        if self._epoch is None:
            with self._consuming():
                pass  # refuses now rather than after a wait for groups that an earlier trainer holds
        enough = self._wait_for(groups, experiences, sampling, min_version, timeout, partial_groups, cancelled)
        if not enough and not partial_batch:
            return None
        with self._consuming() as connection:
            taken = consumption.take(
                self._database,
                connection,
                sampling,
                group_count=groups,
                row_count=experiences,
                min_version=min_version,
                partial_batch=partial_batch,
                partial_groups=partial_groups,
            )
        if taken is None:
            return None
        number, ids = taken
        with self._database.reading() as connection:
            return Batch(number, reading.load_groups(self._database, connection, ids))

    def _wait_for(
        self,
        group_count: int | None,
        row_count: int | None,
        sampling: Sampling,
        min_version: int | None,
        timeout: float | None,
        partial_groups: bool,
        cancelled: Callable[[], bool],
    ) -> bool:
        """True when a batch can be drawn; false when the wait is over without."""
        cooldown = sampling.cooldown_seconds > 0

        def look() -> tuple[bool, bool]:
            with self._database.reading() as connection:
                ended = reading.production_ended(self._database, connection) and not cooldown
                count, rows = consumption.available(self._database, connection, sampling, min_version, partial_groups)
            enough = count >= group_count if group_count is not None else rows >= (row_count or 0)
            return enough, ended

        return bool(poll(look, timeout, cancelled))

    def drop_older_than(self, version: int, *, sampling: Sampling | None = None, reason: str = "stale") -> int:
        """Drops groups that have uses left and whose oldest token is older than ``version``; returns how many.

        The drop is counted under ``reason`` and, like a use, is undone by a recovery from an earlier checkpoint.
        """
        with self._consuming() as connection:
            return consumption.drop_older_than(self._database, connection, sampling or Sampling(), version, reason)

    # -- the trainer's cursor ------------------------------------------------------------------------------------------

    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """Ties what was drawn since the last commit to a checkpoint of the trainer.

        Call it when the checkpoint is written but before it becomes visible under its name: a trainer then never finds a
        checkpoint that the store does not know.

        Args:
            checkpoint: the checkpoint's name.
            version: of its weights; a recovery withdraws announcements of later ones.

        Returns:
            How many uses it tied.
        """
        with self._consuming() as connection:
            count = consumption.commit(self._database, connection, checkpoint, version)
        self._database.flush()
        return count

    def recover(self, checkpoint: str | None) -> int:
        """Makes this process the store's trainer and goes back to a checkpoint.

        Groups drawn after it are drawn again, announcements of later weights are withdrawn, and a trainer that still runs
        is refused from now on.

        Args:
            checkpoint: name given to :meth:`commit`; None goes back to the beginning.

        Returns:
            How many uses were undone.

        Raises:
            StoreError: the store does not know the checkpoint.
        """
        with self._database.writing() as connection:
            self._epoch, undone = consumption.recover(self._database, connection, checkpoint)
        return undone

    @contextmanager
    def _consuming(self) -> Iterator[Connection]:
        with self._database.writing() as connection:
            if self._epoch is None:
                consumption.check_recovered(self._database, connection)
                epoch = self._database.counter(connection, "epoch")
            else:
                epoch = self._epoch
                consumption.check_epoch(self._database, connection, epoch)
            yield connection
        self._epoch = epoch

    # -- weights -----------------------------------------------------------------------------------------------------

    def publish_version(self, path: str, version: int) -> None:
        """Announces weights to the explorers; groups in training release their places.

        Raises:
            StoreError: a version as new was announced with other weights, or another trainer has taken over.
        """
        with self._consuming() as connection:
            store_weights.publish_version(self._database, connection, str(path), version)

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Deletes the rows of groups that are used up or dropped and that no kept checkpoint can need again; returns how many rows.

        Args:
            sampling: says how many uses a group has.
            keep_checkpoints: the newest checkpoints that a trainer may still go back to.
        """
        with self._consuming() as connection:
            return consumption.forget_used(connection, sampling or Sampling(), keep_checkpoints)
