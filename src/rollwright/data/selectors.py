"""Choose the next task: selectors within a taskset, and mixtures of several tasksets.

Selectors are added by name::

    @SELECTORS.register("newest_first")
    class NewestFirst(Selector):
        def _position(self, draw):
            return self.size - 1 - draw % self.size
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.datasets import dataset_rows
from rollwright.data.formats import Row, read_rows_by
from rollwright.data.loader import endless, shuffled
from rollwright.errors import ConfigError, DataError
from rollwright.registry import Registry

#: Number of draws that are remembered until their reward arrives.
REMEMBERED_DRAWS = 100_000


class Selector(ABC):
    """Draws positions of a taskset of ``size`` rows; the same seed draws the same positions.

    The state is the number of draws and the rewards reported so far.
    """

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.seed = seed
        self.draws = 0

    def next(self) -> int:
        """Return the next position, from 0 to ``size - 1``."""
        position = self._position(self.draws)
        self.draws += 1
        return position

    @abstractmethod
    def _position(self, draw: int) -> int:
        """Return the position of the draw with this number, counted from 0."""

    def feedback(self, position: int, reward: float) -> None:
        """Report the mean reward of a task. Selectors that do not learn from rewards ignore it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state to continue from."""
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another selector of the same taskset."""
        self.draws = state["draws"]


SELECTORS: Registry[type[Selector]] = Registry("selector", ConfigError, variable="SELECTORS")


@SELECTORS.register("sequential")
class Sequential(Selector):
    """Draws tasks in the order of the file, repeatedly."""

    def _position(self, draw: int) -> int:
        return draw % self.size


@SELECTORS.register("shuffle")
class Shuffled(Selector):
    """Draws every task once in each epoch, in a new order."""

    _order: tuple[int, list[int]] = (-1, [])  # an epoch and its positions

    def _position(self, draw: int) -> int:
        epoch, place = divmod(draw, self.size)
        if self._order[0] != epoch:
            self._order = (epoch, shuffled(self.size, self.seed, epoch))
        return self._order[1][place]


@SELECTORS.register("random")
class Uniform(Selector):
    """Draws tasks independently and uniformly."""

    def _position(self, draw: int) -> int:
        return random.Random(f"{self.seed}/{draw}").randrange(self.size)


@SELECTORS.register("difficulty")
class ByDifficulty(Selector):
    """Prefers tasks whose mean reward so far is near a target, because they are neither solved nor hopeless.

    A task's weight is ``exp(-sharpness · |mean reward - target_reward|)``; a task without a reward so far counts as on target.

    Args:
        target_reward: mean reward of the preferred tasks.
        sharpness: strength of the preference; 0 draws all tasks equally often.
        memory: weight of the past in a task's moving mean, 0 to 1.
    """

    def __init__(
        self, size: int, seed: int = 1, *, target_reward: float = 0.5, sharpness: float = 4.0, memory: float = 0.7
    ) -> None:
        super().__init__(size, seed)
        self.target_reward = target_reward
        self.sharpness = sharpness
        self.memory = memory
        self.means: dict[int, float] = {}

    def _position(self, draw: int) -> int:
        means = [self.means.get(position, self.target_reward) for position in range(self.size)]
        weights = [math.exp(-self.sharpness * abs(mean - self.target_reward)) for mean in means]
        return random.Random(f"{self.seed}/{draw}").choices(range(self.size), weights)[0]

    def feedback(self, position: int, reward: float) -> None:
        """Move the task's mean towards ``reward``."""
        seen = position in self.means
        self.means[position] = self.memory * self.means[position] + (1 - self.memory) * reward if seen else reward

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws, and the mean of each task seen."""
        means = dict(self.means)  # a copy, because rewards arrive in another thread
        return {**super().state_dict(), "means": {str(position): mean for position, mean in means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another selector of the same taskset."""
        super().load_state_dict(state)
        self.means = {int(position): mean for position, mean in state["means"].items()}


def make_selector(taskset: TasksetConfig, size: int, seed: int) -> Selector:
    """Build a taskset's selector over ``size`` rows; ``seed`` is used unless its ``selector_args`` set one.

    Raises:
        ConfigError: there is no selector of that name, or it does not take the arguments.
    """
    return SELECTORS.build(taskset.selector, size, **{"seed": seed, **taskset.selector_args})


class TaskMixture:
    """Draws batches of rows from several tasksets. Each row includes the name of its ``taskset`` and its ``ordinal``.

    Each draw is from the taskset that is furthest behind its ratio, so any stretch of draws keeps to the ratios.

    Args:
        tasksets: names, selectors and ratios.
        rows: rows of each taskset.
        batch_size: number of rows in a batch.
        seed: seed of selectors whose ``selector_args`` set none.

    Raises:
        DataError: a taskset has no rows, two share a name, or there are fewer rows than a batch.
    """

    def __init__(
        self, tasksets: Sequence[TasksetConfig], rows: Sequence[Sequence[Row]], batch_size: int, seed: int = 1
    ) -> None:
        names = [taskset.name for taskset in tasksets]
        if len(set(names)) < len(names):
            raise DataError(f"two tasksets share a name ({', '.join(names)}): give each its own, metrics are kept by it.")
        for taskset, own in zip(tasksets, rows, strict=True):
            if not own:
                raise DataError(f"taskset {taskset.name} ({taskset.path}) has no rows: check its path and split.")
        total = sum(map(len, rows))
        if total < batch_size:
            raise DataError(f"the tasksets have {total} rows together, fewer than a batch of {batch_size}; lower batch_size.")
        self.tasksets = list(tasksets)
        self.rows = [list(own) for own in rows]
        self.batch_size = batch_size
        self.selectors: list[Selector] = [
            make_selector(taskset, len(own), seed) for taskset, own in zip(tasksets, rows, strict=True)
        ]
        self.ordinal = 0
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of batches that draw as many rows as all tasksets have."""
        return sum(map(len, self.rows)) // self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        for _ in range(len(self)):
            yield self.draw()

    def forever(self) -> Iterator[list[Row]]:
        """Iterate over batches without end."""
        return endless(self)

    def draw(self) -> list[Row]:
        """Return the next batch."""
        return [self._draw_one() for _ in range(self.batch_size)]

    def feedback(self, ordinal: int, reward: float) -> None:
        """Report the mean reward of the task that was drawn as ``ordinal``."""
        if ordinal in self._places:
            taskset, position = self._places[ordinal]
            self.selectors[taskset].feedback(position, reward)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of draws so far, and the state of each selector."""
        return {"ordinal": self.ordinal, "selectors": [selector.state_dict() for selector in self.selectors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another mixture of the same tasksets."""
        if len(state["selectors"]) != len(self.selectors):
            raise DataError(
                f"the saved position is of {len(state['selectors'])} tasksets, but there are {len(self.selectors)} now; resume "
                "with the same tasksets."
            )
        self.ordinal = state["ordinal"]
        for selector, own in zip(self.selectors, state["selectors"], strict=True):
            selector.load_state_dict(own)

    def _draw_one(self) -> Row:
        behind = min(
            range(len(self.tasksets)), key=lambda index: ((self.selectors[index].draws + 1) / self.tasksets[index].ratio, index)
        )
        position = self.selectors[behind].next()
        row = {**self.rows[behind][position], "taskset": self.tasksets[behind].name, "ordinal": self.ordinal}
        self._places[self.ordinal] = (behind, position)
        if len(self._places) > REMEMBERED_DRAWS:
            self._places.popitem(last=False)
        self.ordinal += 1
        return row


def taskset_rows(taskset: TasksetConfig) -> list[Row]:
    """Load the rows of a taskset. A registered format is applied here; other formats are applied by the workflows."""
    rows = dataset_rows(taskset)
    return read_rows_by(taskset.format, rows, taskset.source) if isinstance(taskset.format, str) else list(rows)
