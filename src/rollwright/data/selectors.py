"""Which task of a taskset is drawn next. A selector's state is its number of draws and what it was told of rewards."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rollwright.errors import ConfigError


class Selector(ABC):
    """Draws positions of a taskset of ``size`` rows, the same ones for the same seed."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.seed = seed
        self.draws = 0

    def next(self) -> int:
        """The next position, from 0 to ``size - 1``."""
        position = self._position(self.draws)
        self.draws += 1
        return position

    @abstractmethod
    def _position(self, draw: int) -> int: ...

    def feedback(self, position: int, reward: float) -> None:
        """A task was trained with this mean reward; selectors that do not learn from it ignore it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on from here."""
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another selector of the same taskset stood."""
        self.draws = state["draws"]


class Sequential(Selector):
    """In the order of the file, again and again."""

    def _position(self, draw: int) -> int:
        return draw % self.size


class Shuffled(Selector):
    """Every task once in each epoch, in a new order."""

    def __init__(self, size: int, seed: int = 1) -> None:
        super().__init__(size, seed)
        self._order: tuple[int, list[int]] = (-1, [])

    def _position(self, draw: int) -> int:
        epoch, place = divmod(draw, self.size)
        if self._order[0] != epoch:
            order = list(range(self.size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]


class Uniform(Selector):
    """Any task, each draw anew."""

    def _position(self, draw: int) -> int:
        return random.Random(f"{self.seed}/{draw}").randrange(self.size)


class ByDifficulty(Selector):
    """Prefers tasks whose mean reward so far is near a target: neither solved nor hopeless.

    A task's weight is ``exp(-sharpness · |mean reward - target_reward|)``; one not seen yet counts as on target.

    Args:
        target_reward: mean reward that teaches most.
        sharpness: 0: all alike; larger: only those near the target.
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
        weights = [self._weight(self.means.get(position, self.target_reward)) for position in range(self.size)]
        return random.Random(f"{self.seed}/{draw}").choices(range(self.size), weights)[0]

    def _weight(self, mean: float) -> float:
        return math.exp(-self.sharpness * abs(mean - self.target_reward))

    def feedback(self, position: int, reward: float) -> None:
        """Moves the task's mean towards ``reward``."""
        past = self.means.get(position)
        self.means[position] = reward if past is None else self.memory * past + (1 - self.memory) * reward

    def state_dict(self) -> dict[str, Any]:
        """Draws, and the mean of each task seen."""
        means = dict(self.means)  # at once: rewards come from another thread
        return {**super().state_dict(), "means": {str(position): mean for position, mean in means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another selector of the same taskset stood."""
        super().load_state_dict(state)
        self.means = {int(position): mean for position, mean in state["means"].items()}


SELECTORS: dict[str, Callable[..., Selector]] = {
    "sequential": Sequential,
    "shuffle": Shuffled,
    "random": Uniform,
    "difficulty": ByDifficulty,
}


def make_selector(name: str, size: int, seed: int, arguments: dict[str, Any]) -> Selector:
    """The selector of a name.

    Raises:
        ConfigError: there is none of that name, or it does not take the arguments.
    """
    if name not in SELECTORS:
        raise ConfigError(f"selector is {name!r}; there are {', '.join(SELECTORS)}.")
    try:
        return SELECTORS[name](size, **{"seed": seed, **arguments})
    except TypeError as error:
        raise ConfigError(f"selector {name} cannot take selector_args {arguments}: {error}.") from None
