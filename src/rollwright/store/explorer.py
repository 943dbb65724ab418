"""What explorers do with an experience store: claim tasks, store their groups, look for new weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright.errors import StoreError
from rollwright.experience.experience import Experience
from rollwright.store import tasks as store_tasks
from rollwright.store import weights as store_weights
from rollwright.store.database import Database
from rollwright.store.polling import poll
from rollwright.store.records import Announcement, TaskClaim, experience_row, own_name
from rollwright.store.writing import complete_named_group, count_drops, write_group
from rollwright.tracking.logging import getLogger

logger = getLogger("store")


class ExplorerSide:
    """The methods of :class:`~rollwright.store.store.ExperienceStore` that explorers call."""

    _database: Database

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

    def complete_group(self, name: str) -> bool:
        """Completes a group with the samples that it has, where no more will come; false where it is complete, or not there."""
        with self._database.writing() as connection:
            return complete_named_group(self._database, connection, name)

    def count_drops(self, counts: Mapping[str, int]) -> None:
        """Counts rows that were dropped, under the name of what dropped them."""
        with self._database.writing() as connection:
            count_drops(self._database, connection, dict(counts))

    # -- weights -----------------------------------------------------------------------------------------------------

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

        return poll(look, timeout, cancelled) or None


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
