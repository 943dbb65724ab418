"""The choice of groups for a batch: by order, number of uses and age."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, Select, select

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError
from rollwright.registry import Registry
from rollwright.store.database import READY, groups

#: ``(version of the group, uses so far, random generator, **arguments) -> priority, or None if it must not be used again``.
PriorityFunction = Callable[..., float | None]

#: Priority functions by name; a user's own is registered, or named by its import path.
PRIORITY_FUNCTIONS: Registry[PriorityFunction] = Registry("priority function", ConfigError, variable="PRIORITY_FUNCTIONS")


@PRIORITY_FUNCTIONS.register("linear_decay")
def linear_decay(version: int, uses: int, generator: random.Random, *, decay: float = 2.0) -> float:
    """Return ``version - decay · uses``: the freshest groups come first, and each use counts like ``decay`` versions of age."""
    return version - decay * uses


@PRIORITY_FUNCTIONS.register("linear_decay_use_count_control_randomization")
def linear_decay_use_count_control_randomization(
    version: int, uses: int, generator: random.Random, *, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0
) -> float | None:
    """Return :func:`linear_decay` plus Gaussian noise, or None after ``use_count_limit`` uses."""
    if uses >= use_count_limit:
        return None
    return version - decay * uses + (generator.gauss(0.0, sigma) if sigma else 0.0)


DRAWN_COLUMNS = (groups.c.id, groups.c.state, groups.c.rows, groups.c.version, groups.c.uses)
#: Orders that the database sorts by itself.
_SORTED_BY = {
    "fifo": (groups.c.sequence,),
    "freshest": (groups.c.version.desc(), groups.c.uses, groups.c.sequence),
}
ORDERS = ("fifo", "freshest", "priority", "uniform")


@dataclass(frozen=True)
class Sampling:
    """The rules by which groups are drawn.

    Attributes:
        order: ``fifo`` (the order in which groups were completed), ``freshest`` (newest version first), ``priority`` or
            ``uniform``.
        uses: how often each group is trained on; unlimited if None, which requires ``priority`` or ``uniform``.
        priority_fn: name in :data:`PRIORITY_FUNCTIONS`, or import path, of the function that ``priority`` uses.
        priority_fn_args: keyword arguments of that function.
        cooldown_seconds: time before a used group can be drawn again.
        seed: seed of ``uniform`` and of noisy priorities. A draw depends on it and on the number of the batch, so a trainer
            that returns to a checkpoint repeats its draws.

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
        """Create the sampling rules from a ``store`` section."""
        return cls(seed=seed, **{each.name: getattr(config, each.name) for each in fields(cls) if each.name != "seed"})

    def eligible(self, now: float, min_version: int | None) -> Select:
        """Build a statement that selects ``DRAWN_COLUMNS`` of the groups that may be drawn."""
        statement = select(*DRAWN_COLUMNS).where(groups.c.state == READY)
        if self.uses is not None:
            statement = statement.where(groups.c.uses == 0 if self.uses == 1 else groups.c.uses < self.uses)
        if self.cooldown_seconds > 0:
            statement = statement.where(groups.c.available_at <= now)
        if min_version is not None:
            statement = statement.where(groups.c.version >= min_version)
        return statement

    def draw(self, connection: Connection, limit: int, batch: int, now: float, min_version: int | None) -> list[Any]:
        """Return up to ``limit`` groups in order, as rows with ``DRAWN_COLUMNS``."""
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
