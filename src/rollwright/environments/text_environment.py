"""The protocol of environments that are played in text, and the dataset of seeds for them."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol

from rollwright.data.splits import check_split, split_of
from rollwright.errors import DataError


class StepResult(NamedTuple):
    """Result of an action.

    ``info["valid"]`` is False if the action could not be performed; the environment is then unchanged and the reward is 0.
    ``info["reason"]`` may say why, in words for the model.
    """

    observation: str
    reward: float
    done: bool
    info: dict[str, Any]


class TextEnvironment(Protocol):
    """One episode of an environment: texts in, texts out. The shop's sessions and :class:`GymnasiumText` are such environments.

    ``observation``, ``step`` and ``close``, if it has one, may be async, as those of :class:`OpenEnv`.
    """

    def observation(self) -> str | Awaitable[str]:
        """Return what the model sees now."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Perform the action that a reply contains. An invalid reply changes nothing; see :class:`StepResult`."""
        ...

    def snapshot(self) -> Any:
        """Return the state of the episode. Later steps do not change it.

        Raises:
            WorkflowError: the environment cannot be copied.
        """
        ...

    def restore(self, snapshot: Any) -> None:
        """Return to a state of this environment, or of another one with the same arguments. A snapshot can be restored many times."""
        ...


def seeds(split: str = "train", size: int = 1000, seed: int = 1) -> list[dict[str, Any]]:
    """Return tasks that consist of a seed: ``{"seed": 1234, "query_id": "seed-1234"}``. Splits never share a seed.

    Args:
        split: train, valid or test.
        size: number of tasks.
        seed: seed of the choice of seeds.

    Raises:
        DataError: there is no such split, or ``size`` is below 1.
    """
    check_split("seeds", split)
    if size < 1:
        raise DataError(f"seeds: size is {size}; ask for at least one task.")
    generator = random.Random(f"seeds {split} {seed}")
    drawn: dict[int, None] = {}
    while len(drawn) < size:
        number = generator.randrange(2**31)
        if split_of(f"seed {number}") == split:
            drawn[number] = None
    return [{"seed": number, "query_id": f"seed-{number}"} for number in drawn]
