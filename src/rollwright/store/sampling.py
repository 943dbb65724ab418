"""Drawing batches for training: in which order, how often, and which groups are too old."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, insert, or_, select, update

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError
from rollwright.registry import Registry
from rollwright.store.database import (
    DROPPED,
    OPEN,
    READY,
    Database,
    checkpoints,
    experiences,
    groups,
    poll,
    uses,
)
from rollwright.store.groups import BatchSize, GroupTable, StoredBatch
from rollwright.store.task_leases import TaskLeases
from rollwright.store.trainer import TrainerCursor

#: ``(version of the group, uses so far, random generator, **arguments) -> priority, or None if it must not be used again``.
PriorityFunction = Callable[..., float | None]

#: Priority functions by name; a user's own is registered, or named by its import path.
PRIORITY_FUNCTIONS: Registry[PriorityFunction] = Registry("priority function", ConfigError, variable="PRIORITY_FUNCTIONS")


@PRIORITY_FUNCTIONS.register("linear_decay")
def linear_decay(version: int, uses: int, generator: random.Random, *, decay: float = 2.0) -> float:
    """``version - decay · uses``: the freshest first; each use counts like ``decay`` versions of age."""
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
#: Orders that the database sorts by itself.
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
        uses: how often each group is trained on. None sets no limit and requires ``priority`` or ``uniform``.
        priority_fn: name in :data:`PRIORITY_FUNCTIONS`, or import path, of the function that ``priority`` uses.
        priority_fn_args: its arguments.
        cooldown_seconds: how long a used group rests before it is used again.
        seed: seed of ``uniform`` and of noisy priorities. A draw depends on it and on the number of the batch, so a trainer
            that goes back to a checkpoint repeats its draws.

    Raises:
        ConfigError: an unknown order or priority function, or arguments that the function does not take.
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
class _Request:
    """What a call of ``sample`` asks for."""

    sampling: Sampling
    size: BatchSize
    min_version: int | None
    partial_groups: bool

    def first_enough(self, drawn: Sequence[Any]) -> tuple[Sequence[Any], bool]:
        """The first groups that fill the batch, or all groups; and whether they fill it."""
        row_count = 0
        for group_count, group in enumerate(drawn, 1):
            row_count += group.rows
            if self.size.is_reached(group_count, row_count):
                return drawn[:group_count], True
        return drawn, False


class BatchSampler:
    """Draws batches for the trainer, drops groups that are too old, and deletes groups that are used up."""

    def __init__(self, database: Database, groups: GroupTable, tasks: TaskLeases, trainer: TrainerCursor) -> None:
        self._database = database
        self._groups = groups
        self._tasks = tasks
        self._trainer = trainer

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
    ) -> StoredBatch | None:
        """Draw a batch for the trainer and count a use of each of its groups.

        Args:
            groups: number of groups.
            experiences: instead of ``groups``: draw whole groups until they have at least so many rows.
            sampling: order and number of uses. None draws each group once, in order of completion.
            min_version: leave out groups with older tokens.
            timeout: seconds to wait for enough groups. None waits as long as more can come.
            partial_batch: take a smaller batch if there are not enough groups when the wait ends.
            partial_groups: also take groups that lack samples; samples that come later are counted as ``late``.
            cancelled: polled while waiting; returning True ends the wait.

        Returns:
            The batch, or None if there were not enough groups; nothing is used then.

        Raises:
            StoreError: another trainer has taken over, or an earlier trainer's uses wait for ``recover``.
        """
        request = _Request(sampling or Sampling(), BatchSize(groups, experiences), min_version, partial_groups)
        if not self._trainer.has_begun:
            with self._trainer.consuming():
                pass  # refuses now rather than after a wait for groups that an earlier trainer holds
        if not poll(lambda: self._look(request), timeout, cancelled) and not partial_batch:
            return None
        with self._trainer.consuming() as connection:
            number = self._database.counter(connection, "batch")
            ids = self._take(connection, request, number, partial_batch)
        if not ids:
            return None
        with self._database.reading() as connection:
            return StoredBatch(number, self._groups.load(connection, ids))

    def drop_older_than(self, version: int, *, sampling: Sampling | None = None, reason: str = "stale") -> int:
        """Drop groups that have uses left and whose oldest token is older than ``version``. Returns how many.

        The drop is counted under ``reason`` and, like a use, is undone by a recovery from an earlier checkpoint.
        """
        eligible = (sampling or Sampling()).eligible(float("inf"), None).with_only_columns(groups.c.id)
        old = groups.c.id.in_(eligible.where(groups.c.version < version).scalar_subquery())
        with self._trainer.consuming() as connection:
            statement = update(groups).where(old).values(state=DROPPED, dropped_by=reason, drop_checkpoint=None)
            return connection.execute(statement).rowcount

    def forget_used(self, *, sampling: Sampling | None = None, keep_checkpoints: int = 2) -> int:
        """Delete the rows of used or dropped groups that no kept checkpoint can need. Returns the number of rows.

        Args:
            sampling: determines how many uses a group has.
            keep_checkpoints: number of newest checkpoints that a trainer may still go back to.
        """
        allowed = (sampling or Sampling()).uses
        newest = select(checkpoints.c.sequence).order_by(checkpoints.c.sequence.desc())
        with self._trainer.consuming() as connection:
            oldest_kept = connection.scalar(newest.offset(keep_checkpoints - 1).limit(1))
            if oldest_kept is None or allowed is None:
                return 0
            needed = select(uses.c.group_id).where(or_(uses.c.checkpoint.is_(None), uses.c.checkpoint > oldest_kept))
            used_up = (groups.c.uses >= allowed) & groups.c.id.not_in(needed)
            dropped = (groups.c.state == DROPPED) & (groups.c.drop_checkpoint <= oldest_kept)
            done = select(groups.c.id).where(or_(used_up, dropped))
            return connection.execute(delete(experiences).where(experiences.c.group_id.in_(done))).rowcount

    def _look(self, request: _Request) -> tuple[bool, bool]:
        """Whether a batch can be drawn now, and whether no more groups will come."""
        with self._database.reading() as connection:
            _, enough = request.first_enough(self._drawable(connection, request))
            ended = self._tasks.all_finished(connection)
        return enough, ended and request.sampling.cooldown_seconds == 0

    def _drawable(self, connection: Connection, request: _Request) -> list[Any]:
        """The next groups in order, as many as the request can need; incomplete groups come last."""
        limit = request.size.groups or request.size.experiences or 0
        batch, now = self._database.counter(connection, "batch"), self._database.now(connection)
        drawn = request.sampling.draw(connection, limit, batch, now, request.min_version)
        if request.partial_groups:
            oldest = -1 if request.min_version is None else request.min_version
            unfinished = select(*_COLUMNS).where(groups.c.state == OPEN, groups.c.version >= oldest)
            drawn += connection.execute(unfinished.order_by(groups.c.id).limit(limit)).all()
        return drawn

    def _take(self, connection: Connection, request: _Request, batch: int, partial_batch: bool) -> Sequence[int]:
        """Draw a batch and record its uses. Returns the ids of its groups, or none if there are not enough."""
        drawn, enough = request.first_enough(self._drawable(connection, request))
        if not drawn or not (enough or partial_batch):
            return []
        ids = [group.id for group in drawn]
        if request.partial_groups:
            still_open = select(groups.c.id).where(groups.c.id.in_(ids), groups.c.state == OPEN).order_by(groups.c.id)
            for group_id in connection.scalars(still_open).all():
                self._groups.complete(connection, group_id)
        self._database.add_to(connection, "batch")
        connection.execute(insert(uses), [{"group_id": group_id, "batch": batch, "published": False} for group_id in ids])
        available_at = self._database.now(connection) + request.sampling.cooldown_seconds
        connection.execute(
            update(groups).where(groups.c.id == bindparam("group")).values(uses=groups.c.uses + 1, available_at=available_at),
            [{"group": group_id} for group_id in ids],
        )
        return ids
