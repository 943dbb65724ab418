"""The experience store: where experiences wait between the processes that make them and the one that trains on them.

Invariants, whoever is killed and whenever:

- A task is claimed by one explorer at a time, and its group is stored once: storing it and finishing the task are one
  transaction, which an older attempt cannot make.
- A group is drawn whole. What the trainer draws is its own once it commits a checkpoint; a trainer that restarts from a
  checkpoint draws again what was drawn after it, and nothing else.
- A batch that is not full is not drawn; its groups wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from rollwright.errors import StoreError
from rollwright.experience import store_consumption as consumption
from rollwright.experience import store_reading as reading
from rollwright.experience import store_tasks, store_weights
from rollwright.experience.experience import Experience
from rollwright.experience.store_database import Database
from rollwright.experience.store_export import export_parquet
from rollwright.experience.store_records import (
    Announcement,
    Batch,
    StoredGroup,
    StoreStatus,
    TaskClaim,
    experience_row,
    own_name,
)
from rollwright.experience.store_sampling import Sampling
from rollwright.experience.store_writing import count_drops, write_group

_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.25


class ExperienceStore:
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
        self._epoch: int | None = None  # set when this process begins to consume

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def declare_tasks(self, total: int) -> None:
        """Says that the run has tasks ``0 … total - 1``, so that claims and waits come to an end.

        Raises:
            StoreError: more were declared before.
        """
        with self._database.writing() as connection:
            store_tasks.declare_tasks(self._database, connection, total)

    def claim_tasks(
        self, owner: str, count: int, *, lease_seconds: float = 60.0, max_outstanding: int | None = None
    ) -> list[TaskClaim]:
        """Claims tasks to run: first those that another explorer lost, then new ordinals.

        Args:
            owner: name of this explorer, unique among those that run.
            count: how many at most.
            lease_seconds: how long the claims last without :meth:`renew_claims`.
            max_outstanding: claim only as many as keep ``running + ready + in training`` groups within this, which is
                ``(max_head_offpolicyness + 1) · batch``.

        Returns:
            The claims; empty where there is nothing to do now.
        """
        with self._database.writing() as connection:
            return store_tasks.claim_tasks(self._database, connection, owner, count, lease_seconds, max_outstanding)

    def finish_task(
        self,
        claim: TaskClaim,
        group: Sequence[Experience | Sequence[Experience]] | None,
        *,
        version: int | None = None,
        drops: Mapping[str, int] | None = None,
    ) -> bool:
        """Stores the group of a task and finishes the task, in one transaction.

        Args:
            claim: from :meth:`claim_tasks`.
            group: the samples of the task; a sample is one experience or a list of them. Empty: nothing is trained on
                (rejected, or dropped by an operator). None: what was appended sample by sample is the group.
            version: of the experiences, where they do not say it themselves.
            drops: rows that operators dropped, by the operator's name.

        Returns:
            False where the claim was lost to another explorer; nothing is stored then.
        """
        rows = None if group is None else _rows(group, None, version)
        with self._database.writing() as connection:
            return store_tasks.finish_task(self._database, connection, claim, rows, drops or {})

    def renew_claims(self, owner: str, *, lease_seconds: float = 60.0) -> int:
        """Extends the leases of all tasks that an explorer holds; returns how many it holds."""
        with self._database.writing() as connection:
            return store_tasks.renew_claims(self._database, connection, owner, lease_seconds)

    def release_claims(self, owner: str, ordinals: Sequence[int] | None = None) -> int:
        """Gives claims back at once: by an explorer that stops, or by whoever saw it die. Returns how many."""
        with self._database.writing() as connection:
            return store_tasks.release_claims(connection, owner, ordinals)

    @contextmanager
    def keeping_claims(self, owner: str, *, lease_seconds: float = 60.0) -> Iterator[None]:
        """Renews an explorer's leases from a thread while the block runs, and gives back what is left at its end."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(lease_seconds / 3):
                self.renew_claims(owner, lease_seconds=lease_seconds)

        thread = threading.Thread(target=renew, name=f"claims of {owner}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release_claims(owner)

    # -- experiences in ------------------------------------------------------------------------------------------------

    def append(
        self,
        group: Sequence[Experience | Sequence[Experience]],
        *,
        ordinal: int | None = None,
        name: str | None = None,
        attempt: int = 0,
        index: int | None = None,
        group_size: int | None = None,
        version: int | None = None,
    ) -> int:
        """Stores a group, or one sample of it; doing it again changes nothing.

        Args:
            group: the samples of the group, each one experience or a list of them; with ``index``, the rows of one sample.
            ordinal: the task's ordinal, which names the group.
            name: the group's name, where it has no ordinal; None: made of the first experience's id and tokens.
            attempt: of the task. A newer attempt replaces an older one's rows while the group is not complete.
            index: which sample of the group this is; the group is complete when ``group_size`` samples have come.
            group_size: samples of a complete group, with ``index``.
            version: of the experiences, where they do not say it themselves.

        Returns:
            How many rows were stored; 0 where all were there already or belong to a replaced attempt.
        """
        return self.append_many(
            [group], ordinals=[ordinal], names=[name], attempt=attempt, index=index, group_size=group_size, version=version
        )

    def append_many(
        self,
        many: Sequence[Sequence[Experience | Sequence[Experience]]],
        *,
        ordinals: Sequence[int | None] | None = None,
        names: Sequence[str | None] | None = None,
        attempt: int = 0,
        index: int | None = None,
        group_size: int | None = None,
        version: int | None = None,
    ) -> int:
        """:meth:`append` of several groups in one transaction: all or none of them are stored."""
        if (index is None) != (group_size is None):
            raise StoreError("append was given only one of index and group_size: a sample of a group needs both.")
        prepared = []
        for position, group in enumerate(many):
            rows = _rows(group, index, version)
            if not rows:
                raise StoreError(
                    "append was given a group without experiences: leave it out, or finish its task with an empty group."
                )
            ordinal = ordinals[position] if ordinals else None
            name = store_tasks.group_name(ordinal) if ordinal is not None else (names[position] if names else None)
            if name is None and index is not None:
                raise StoreError(
                    "a single sample was appended to a group without ordinal or name: give one, so that the group can be found."
                )
            prepared.append((name or own_name(group), ordinal, rows))
        with self._database.writing() as connection:
            return sum(
                write_group(
                    self._database, connection, name=name, ordinal=ordinal, attempt=attempt, rows=rows, group_size=group_size
                )
                for name, ordinal, rows in prepared
            )

    def export_parquet(self, path: str | Path, *, partial: bool = False) -> int:
        """Writes all groups to a Parquet file, one experience a row; returns how many rows."""
        return export_parquet(self.groups(partial=partial), path)

    def count_drops(self, counts: Mapping[str, int]) -> None:
        """Counts rows that were dropped, under the name of what dropped them."""
        with self._database.writing() as connection:
            count_drops(self._database, connection, dict(counts))

    # -- experiences out -----------------------------------------------------------------------------------------------

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

        return bool(_poll(look, timeout, cancelled))

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

    # -- weights -------------------------------------------------------------------------------------------------------

    def publish_version(self, path: str, version: int) -> None:
        """Announces weights to the explorers; groups in training release their places.

        Raises:
            StoreError: a version as new was announced with other weights, or another trainer has taken over.
        """
        with self._consuming() as connection:
            store_weights.publish_version(self._database, connection, str(path), version)

    def latest_version(self) -> Announcement | None:
        """The newest announced weights, or None where none were announced."""
        with self._database.reading() as connection:
            return store_weights.latest_version(connection)

    def highest_version(self) -> int:
        """The highest version that was ever announced, also by a trainer that went back since; -1 where none was."""
        with self._database.reading() as connection:
            return store_weights.highest_version(self._database, connection)

    def wait_for_version(
        self, version: int, timeout: float | None = None, cancelled: Callable[[], bool] = lambda: False
    ) -> Announcement | None:
        """Waits until weights of ``version`` or later are announced; None where the wait is over without."""

        def look() -> tuple[Announcement | None, bool]:
            newest = self.latest_version()
            return (newest if newest is not None and newest.version >= version else None), False

        return _poll(look, timeout, cancelled) or None

    # -- about the store -----------------------------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        """Counts of everything."""
        with self._database.reading() as connection:
            return reading.read_status(self._database, connection)

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Deletes the rows of groups without uses left that no kept checkpoint can need again; returns how many rows.

        Args:
            sampling: says how many uses a group has.
            keep_checkpoints: the newest checkpoints that a trainer may still go back to.
        """
        with self._consuming() as connection:
            return consumption.forget_used(connection, sampling or Sampling(), keep_checkpoints)

    def close(self) -> None:
        """Closes the database's connections."""
        self._database.close()

    def __enter__(self) -> ExperienceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rows(group: Sequence[Experience | Sequence[Experience]], index: int | None, version: int | None) -> list[dict[str, Any]]:
    """The rows of a group: sample and part of each are its places in the nested lists."""
    samples = [[item] if isinstance(item, Experience) else list(item) for item in group]
    if index is not None:
        samples = [[experience for sample in samples for experience in sample]]
    first = 0 if index is None else index
    return [
        {"sample": first + number, "part": part, **experience_row(experience, version)}
        for number, sample in enumerate(samples)
        for part, experience in enumerate(sample)
    ]


def _poll(look: Callable[[], tuple[Any, bool]], timeout: float | None, cancelled: Callable[[], bool]) -> Any:
    """Looks until there is something, nothing more can come, the time is over or the wait is cancelled."""
    limit = None if timeout is None else time.monotonic() + timeout
    pause = _SHORTEST_POLL
    while True:
        found, ended = look()
        if found or ended or cancelled() or (limit is not None and time.monotonic() >= limit):
            return found
        time.sleep(pause if limit is None else max(0.0, min(pause, limit - time.monotonic())))
        pause = min(_LONGEST_POLL, pause * 1.5)
