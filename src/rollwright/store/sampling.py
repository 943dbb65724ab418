"""In which order a store's groups are trained on, and how often each."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, select

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError
from rollwright.store.schema import READY, groups

#: ``(version of the group, uses so far, random numbers, **arguments) -> priority, or None where it is not to be used again``.
PriorityFunction = Callable[..., float | None]

ORDERS = ("fifo", "freshest", "priority", "uniform")


def linear_decay(version: int, uses: int, generator: random.Random, *, decay: float = 2.0) -> float:
    """``version - decay · uses``: the freshest first, and what was used falls behind what is up to ``decay`` versions older."""
    return version - decay * uses


def linear_decay_use_count_control_randomization(
    version: int, uses: int, generator: random.Random, *, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0
) -> float | None:
    """:func:`linear_decay` with Gaussian noise, and at most ``use_count_limit`` uses."""
    if uses >= use_count_limit:
        return None
    return version - decay * uses + (generator.gauss(0.0, sigma) if sigma else 0.0)


#: Priority functions by name; a user's own is added as ``PRIORITY_FUNCTIONS["name"] = function``.
PRIORITY_FUNCTIONS: dict[str, PriorityFunction] = {
    "linear_decay": linear_decay,
    "linear_decay_use_count_control_randomization": linear_decay_use_count_control_randomization,
}


@dataclass(frozen=True)
class Sampling:
    """How groups are drawn.

    Attributes:
        order: ``fifo`` (the order in which groups were completed), ``freshest`` (newest version first), ``priority`` or
            ``uniform``.
        uses: how often each group is trained on; None, where ``order`` is ``priority`` or ``uniform``: without end.
        priority_fn: name in :data:`PRIORITY_FUNCTIONS`, where ``order`` is ``priority``.
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
        if self.order == "priority" and self.priority_fn not in PRIORITY_FUNCTIONS:
            raise ConfigError(f"priority_fn is {self.priority_fn!r}: choose from {', '.join(PRIORITY_FUNCTIONS)}.")
        if self.order == "priority":
            function = PRIORITY_FUNCTIONS[self.priority_fn]
            try:
                inspect.signature(function).bind(0, 0, random.Random(), **self.priority_fn_args)
            except TypeError as error:
                raise ConfigError(
                    f"priority_fn {self.priority_fn} was given {dict(self.priority_fn_args)}, but {error}; it takes "
                    f"{inspect.signature(function)}."
                ) from None

    @classmethod
    def from_config(cls, config: StoreConfig, seed: int = 1) -> Sampling:
        """The sampling that a config asks for."""
        return cls(
            order=config.order,
            uses=config.uses,
            priority_fn=config.priority_fn,
            priority_fn_args=config.priority_fn_args,
            cooldown_seconds=config.cooldown_seconds,
            seed=seed,
        )

    def eligible(self, now: float, min_version: int | None) -> Select:
        """Statement for the groups that may be drawn: ``id, rows, version, uses``, in completion order."""
        statement = select(groups.c.id, groups.c.rows, groups.c.version, groups.c.uses).where(groups.c.state == READY)
        if self.uses is not None:
            statement = statement.where(groups.c.uses == 0 if self.uses == 1 else groups.c.uses < self.uses)
        if self.cooldown_seconds > 0:
            statement = statement.where(groups.c.available_at <= now)
        if min_version is not None:
            statement = statement.where(groups.c.version >= min_version)
        return statement

    def draw(
        self, connection: Connection, limit: int | None, batch: int, now: float, min_version: int | None
    ) -> list[tuple[int, int]]:
        """The first ``limit`` groups in order, or all there are (also where it is None).

        Returns:
            ``(id, rows)`` of each.
        """
        statement = self.eligible(now, min_version)
        if self.order == "fifo":
            statement = statement.order_by(groups.c.sequence).limit(limit)
            return [(row.id, row.rows) for row in connection.execute(statement)]
        if self.order == "freshest":
            statement = statement.order_by(groups.c.version.desc(), groups.c.uses, groups.c.sequence).limit(limit)
            return [(row.id, row.rows) for row in connection.execute(statement)]
        found = connection.execute(statement.order_by(groups.c.sequence)).all()
        generator = random.Random(f"{self.seed}/{batch}")
        if self.order == "uniform":
            return [
                (row.id, row.rows) for row in generator.sample(found, min(len(found) if limit is None else limit, len(found)))
            ]
        function = PRIORITY_FUNCTIONS[self.priority_fn]
        priorities = [function(row.version, row.uses, generator, **self.priority_fn_args) for row in found]
        ranked = [index for index, priority in enumerate(priorities) if priority is not None]
        ranked.sort(key=lambda index: -(priorities[index] or 0.0))  # stable: ties stay in completion order
        return [(found[index].id, found[index].rows) for index in ranked[:limit]]
