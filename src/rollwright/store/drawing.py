"""What the trainer draws from an experience store, in which order, how often, and under which of its checkpoints.

A use is written when a group is drawn and gets its checkpoint when the trainer commits. Uses without a checkpoint, and those
of checkpoints after the one that a trainer restarts from, are undone by ``recover``: their groups are drawn again.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, or_, select, update

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError, StoreError
from rollwright.registry import Registry
from rollwright.store.database import (
    DROPPED,
    FINISHED,
    OPEN,
    READY,
    checkpoints,
    count_rows,
    counters,
    experiences,
    groups,
    poll,
    tasks,
    uses,
    versions,
)
from rollwright.store.groups import Batch, GroupStorage

#: ``(version of the group, uses so far, random numbers, **arguments) -> priority, or None where it is not to be used again``.
PriorityFunction = Callable[..., float | None]

#: Number of tasks of the run, among the facts of the store.
DECLARED = "declared_tasks"

#: Priority functions by name; a user's own is registered, or named by its import path.
PRIORITY_FUNCTIONS: Registry[PriorityFunction] = Registry("priority function", ConfigError, variable="PRIORITY_FUNCTIONS")


@PRIORITY_FUNCTIONS.register("linear_decay")
def linear_decay(version: int, uses: int, generator: random.Random, *, decay: float = 2.0) -> float:
    """``version - decay · uses``: the freshest first, and what was used falls behind what is up to ``decay`` versions older."""
    return version - decay * uses


@PRIORITY_FUNCTIONS.register("linear_decay_use_count_control_randomization")
def linear_decay_use_count_control_randomization(
    version: int, uses: int, generator: random.Random, *, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0
) -> float | None:
    """:func:`linear_decay` with Gaussian noise, and at most ``use_count_limit`` uses."""
    if uses >= use_count_limit:
        return None
    return version - decay * uses + (generator.gauss(0.0, sigma) if sigma else 0.0)


_COLUMNS = (groups.c.id, groups.c.rows, groups.c.version, groups.c.uses)
#: Orders that the database makes.
_SORTED_BY = {
    "fifo": (groups.c.sequence,),
    "freshest": (groups.c.version.desc(), groups.c.uses, groups.c.sequence),
}
ORDERS = ("fifo", "freshest", "priority", "uniform")


@dataclass(frozen=True)
class Sampling:
    """How groups are drawn.

    Attributes:
        order: ``fifo`` (the order in which groups were completed), ``freshest`` (newest version first), ``priority`` or
            ``uniform``.
        uses: how often each group is trained on; None, where ``order`` is ``priority`` or ``uniform``: without end.
        priority_fn: name in :data:`PRIORITY_FUNCTIONS` or import path, where ``order`` is ``priority``.
        priority_fn_args: its arguments.
        cooldown_seconds: how long a used group rests before it is used again.
        seed: of ``uniform`` and of noisy priorities. Draws depend on it and on the number of the batch, so that a trainer
            that goes back to a checkpoint draws again what it drew.
    """

    order: str = "fifo"
    uses: int | None = 1
    priority_fn: str = "linear_decay"
    priority_fn_args: Mapping[str, Any] = field(default_factory=dict)
    cooldown_seconds: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"store.order is {self.order!r}: choose from {', '.join(ORDERS)}.")
        if self.uses is None and self.order not in ("priority", "uniform"):
            raise ConfigError(
                f"store.uses is None with store.order={self.order}, which would train on the same groups for ever: set a number."
            )
        if self.uses is not None and self.uses < 1:
            raise ConfigError(f"store.uses is {self.uses}: each experience is used at least once.")
        if self.order != "priority":
            return
        signature = inspect.signature(PRIORITY_FUNCTIONS.get(self.priority_fn))
        try:
            signature.bind(0, 0, random.Random(), **self.priority_fn_args)
        except TypeError as error:
            raise ConfigError(
                f"priority_fn {self.priority_fn} was given {dict(self.priority_fn_args)}, but {error}; it takes {signature}."
            ) from None

    @classmethod
    def from_config(cls, config: StoreConfig, seed: int = 1) -> Sampling:
        """The sampling that a config asks for."""
        return cls(seed=seed, **{each.name: getattr(config, each.name) for each in fields(cls) if each.name != "seed"})

    def eligible(self, now: float, min_version: int | None) -> Select:
        """Statement for the groups that may be drawn: ``id, rows, version, uses``."""
        statement = select(*_COLUMNS).where(groups.c.state == READY)
        if self.uses is not None:
            statement = statement.where(groups.c.uses == 0 if self.uses == 1 else groups.c.uses < self.uses)
        if self.cooldown_seconds > 0:
            statement = statement.where(groups.c.available_at <= now)
        if min_version is not None:
            statement = statement.where(groups.c.version >= min_version)
        return statement

    def draw(self, connection: Connection, limit: int, batch: int, now: float, min_version: int | None) -> list[Any]:
        """The first ``limit`` groups in order, or all there are: rows with ``id`` and ``rows``."""
        statement = self.eligible(now, min_version)
        if self.order in _SORTED_BY:
            return list(connection.execute(statement.order_by(*_SORTED_BY[self.order]).limit(limit)))
        found = connection.execute(statement.order_by(groups.c.sequence)).all()
        generator = random.Random(f"{self.seed}/{batch}")
        if self.order == "uniform":
            return generator.sample(found, min(limit, len(found)))
        function = PRIORITY_FUNCTIONS.get(self.priority_fn)
        priorities = [function(row.version, row.uses, generator, **self.priority_fn_args) for row in found]
        ranked = [(priority, row) for priority, row in zip(priorities, found, strict=True) if priority is not None]
        ranked.sort(key=lambda each: -each[0])  # stable: ties stay in completion order
        return [row for _, row in ranked[:limit]]


@dataclass(frozen=True)
class _Demand:
    """What a call of ``sample`` asks for: ``groups`` groups, or whole groups with ``experiences`` rows."""

    sampling: Sampling
    groups: int | None
    experiences: int | None
    min_version: int | None
    partial_groups: bool

    def first_enough(self, drawn: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """The first of the groups that are enough, or all of them; and whether they are enough."""
        row_count = 0
        for group_count, group in enumerate(drawn, 1):
            row_count += group.rows
            if group_count == self.groups or (self.experiences is not None and row_count >= self.experiences):
                return drawn[:group_count], True
        return drawn, False


class BatchDrawing(GroupStorage):
    """What :class:`~rollwright.store.store.ExperienceStore` does for the trainer."""

    _epoch: int | None = None  # set when this process begins to consume

    def _declared_tasks(self, connection: Connection) -> int | None:
        value = self.fact(connection, DECLARED)
        return None if value is None else int(value)

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
        demand = _Demand(sampling or Sampling(), groups, experiences, min_version, partial_groups)
        if self._epoch is None:
            with self._consuming():
                pass  # refuses now rather than after a wait for groups that an earlier trainer holds
        if not poll(lambda: self._look(demand), timeout, cancelled) and not partial_batch:
            return None
        with self._consuming() as connection:
            number = self.counter(connection, "batch")
            ids = self._take(connection, demand, number, partial_batch)
        if not ids:
            return None
        with self.reading() as connection:
            return Batch(number, self._load(connection, ids))

    def drop_older_than(self, version: int, *, sampling: Sampling | None = None, reason: str = "stale") -> int:
        """Drops groups that have uses left and whose oldest token is older than ``version``; returns how many.

        The drop is counted under ``reason`` and, like a use, is undone by a recovery from an earlier checkpoint.
        """
        eligible = (sampling or Sampling()).eligible(float("inf"), None).with_only_columns(groups.c.id)
        old = groups.c.id.in_(eligible.where(groups.c.version < version).scalar_subquery())
        with self._consuming() as connection:
            statement = update(groups).where(old).values(state=DROPPED, dropped_by=reason, drop_checkpoint=None)
            return connection.execute(statement).rowcount

    def _look(self, demand: _Demand) -> tuple[bool, bool]:
        """Whether a batch can be drawn now, and whether no more groups will come."""
        with self.reading() as connection:
            _, enough = demand.first_enough(self._drawable(connection, demand))
            declared = self._declared_tasks(connection)
            ended = declared is not None and count_rows(connection, tasks, tasks.c.state == FINISHED) >= declared
        return enough, ended and demand.sampling.cooldown_seconds == 0

    def _drawable(self, connection: Connection, demand: _Demand) -> list[Any]:
        """The next groups in order, as many as can be needed; unfinished ones come last."""
        limit = demand.groups or demand.experiences or 0
        batch, now = self.counter(connection, "batch"), self.now(connection)
        drawn = demand.sampling.draw(connection, limit, batch, now, demand.min_version)
        if demand.partial_groups:
            oldest = -1 if demand.min_version is None else demand.min_version
            unfinished = select(*_COLUMNS).where(groups.c.state == OPEN, groups.c.version >= oldest)
            drawn += connection.execute(unfinished.order_by(groups.c.id).limit(limit)).all()
        return drawn

    def _take(self, connection: Connection, demand: _Demand, batch: int, partial_batch: bool) -> Sequence[int]:
        """Draws a batch and writes its uses; returns the ids of its groups, or none where there are not enough."""
        drawn, enough = demand.first_enough(self._drawable(connection, demand))
        if not drawn or not (enough or partial_batch):
            return []
        ids = [group.id for group in drawn]
        if demand.partial_groups:
            still_open = select(groups.c.id).where(groups.c.id.in_(ids), groups.c.state == OPEN).order_by(groups.c.id)
            for group_id in connection.scalars(still_open).all():
                self._complete(connection, group_id)
        self.add_to(connection, "batch")
        connection.execute(insert(uses), [{"group_id": group_id, "batch": batch, "published": False} for group_id in ids])
        available_at = self.now(connection) + demand.sampling.cooldown_seconds
        connection.execute(
            update(groups).where(groups.c.id == bindparam("group")).values(uses=groups.c.uses + 1, available_at=available_at),
            [{"group": group_id} for group_id in ids],
        )
        return ids

    # -- the trainer's cursor ------------------------------------------------------------------------------------------

    def commit(self, checkpoint: str, *, version: int | None = None) -> int:
        """Ties what was drawn since the last commit to a checkpoint of the trainer; returns how many uses.

        Call it when the checkpoint is written but before it becomes visible under its name: a trainer then never finds a
        checkpoint that the store does not know. ``version`` is that of its weights; a recovery withdraws announcements of
        later ones.
        """
        with self._consuming() as connection:
            if connection.scalar(select(checkpoints.c.sequence).where(checkpoints.c.name == checkpoint)) is not None:
                raise StoreError(
                    f"{self.name} has a checkpoint {checkpoint!r} already: give each checkpoint a name of its own."
                )
            values = {"name": checkpoint, "version": version, "batch": self.counter(connection, "batch")}
            sequence = connection.scalar(insert(checkpoints).values(**values).returning(checkpoints.c.sequence))
            dropped = (groups.c.state == DROPPED) & groups.c.drop_checkpoint.is_(None)
            connection.execute(update(groups).where(dropped).values(drop_checkpoint=sequence))
            tied = update(uses).where(uses.c.checkpoint.is_(None)).values(checkpoint=sequence)
            count = connection.execute(tied).rowcount
        self.flush()
        return count

    def recover(self, checkpoint: str | None) -> int:
        """Makes this process the store's trainer and goes back to a checkpoint, or with None to the beginning.

        Groups drawn after it are drawn again, announcements of later weights are withdrawn, and a trainer that still runs is
        refused from now on. Returns how many uses were undone.

        Raises:
            StoreError: the store does not know the checkpoint.
        """
        with self.writing() as connection:
            sequence, version, batch = 0, None, 0
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
            if checkpoint is None or version is not None:
                connection.execute(delete(versions).where(versions.c.version > (-1 if version is None else version)))
            connection.execute(update(counters).where(counters.c.name == "batch").values(value=batch))
            self._epoch = self.add_to(connection, "epoch") + 1
        return sum(count for _, count in undone)

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Deletes the rows of groups that are used up or dropped and that no kept checkpoint can need; returns how many rows.

        ``sampling`` says how many uses a group has; ``keep_checkpoints``: the newest that a trainer may still go back to.
        """
        allowed = (sampling or Sampling()).uses
        newest = select(checkpoints.c.sequence).order_by(checkpoints.c.sequence.desc())
        with self._consuming() as connection:
            oldest_kept = connection.scalar(newest.offset(keep_checkpoints - 1).limit(1))
            if oldest_kept is None or allowed is None:
                return 0
            needed = select(uses.c.group_id).where(or_(uses.c.checkpoint.is_(None), uses.c.checkpoint > oldest_kept))
            used_up = (groups.c.uses >= allowed) & groups.c.id.not_in(needed)
            dropped = (groups.c.state == DROPPED) & (groups.c.drop_checkpoint <= oldest_kept)
            done = select(groups.c.id).where(or_(used_up, dropped))
            return connection.execute(delete(experiences).where(experiences.c.group_id.in_(done))).rowcount

    @contextmanager
    def _consuming(self) -> Iterator[Connection]:
        """A writing transaction of the store's one trainer.

        Raises:
            StoreError: another trainer has recovered the store, or an earlier one left uses that would be lost.
        """
        with self.writing() as connection:
            epoch = self.counter(connection, "epoch")
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
