"""Guess a number from "higher" and "lower": a game that no single answer wins, and whose best play is known.

games(size=2)      # the dataset guessing_games: tasks: {"messages": [user: "23-37"], "answer": "28", "query_id"}
Game(task)         # the game as a ``TextEnvironment``, with snapshots
verdict(…)         # guessing_verdict, what the player is told after a guess: the feedback function of ``MultiTurnWorkflow``
episode(task)      # the worked episode of one who halves; ``episode(task, halves=False)``: of one who tries number by number
best_reward(4)     # what halving earns

A player writes which numbers are left, and a guess: ``27-37 32``. The interval has 15 numbers, so that halving it finds any of
them in at most four guesses.
"""

from __future__ import annotations

import random
import re
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import check_split, split_of
from rollwright.environments.text_environment import StepResult
from rollwright.errors import DataError
from rollwright.workflows.registry import FUNCTIONS

NUMBERS = 15
HIGHER, LOWER, NO_NUMBER = "higher", "lower", "no number"
_FIRST, _LAST = 10, 99 - NUMBERS + 1  # two digits throughout
_USER, _ASSISTANT, _END = "<|user|>", "<|assistant|>", "<|end|>"
_NUMBER = re.compile(r"[0-9]+")


@DATASET_REGISTRY.register("guessing_games")
def games(
    split: str = "train",
    size: int | None = None,
    seed: int = 1,
    worked: bool = False,
    halving_share: float = 0.3,
    max_turns: int = 4,
) -> list[dict[str, Any]]:
    """A taskset of games, each once, in a random order.

    Args:
        split: train, valid or test; no two share a game.
        size: number of games; None: all of the split. Worked games may be repeated.
        seed: which games, in which order.
        worked: add ``segments``, a worked episode, for supervised training.
        halving_share: share of the worked episodes that halve what is left, spread evenly; the others try number by number.
        max_turns: guesses of a worked episode at most.

    Raises:
        DataError: there is no such split, it has fewer games, or the share is out of range.
    """
    check_split("games", split)
    if not 0.0 <= halving_share <= 1.0:
        raise DataError(f"games: halving_share is {halving_share}; it is between 0 and 1.")
    played = [_game(first, number) for first in range(_FIRST, _LAST + 1) for number in range(first, first + NUMBERS)]
    tasks = [task for task in played if split_of(task["query_id"]) == split]
    random.Random(f"{split} {seed}").shuffle(tasks)
    if size is not None and size > len(tasks) and not worked:
        raise DataError(f"games: {size} games were asked for, split {split!r} has {len(tasks)}.")
    tasks = [dict(tasks[index % len(tasks)]) for index in range(len(tasks) if size is None else size)]
    if worked:
        for index, task in enumerate(tasks):
            halves = int((index + 1) * halving_share) > int(index * halving_share)
            task["segments"] = episode(task, halves, max_turns)
    return tasks


def _game(first: int, number: int) -> dict[str, Any]:
    interval = f"{first}-{first + NUMBERS - 1}"
    return {
        "messages": [{"role": "user", "content": interval}],
        "answer": str(number),
        "query_id": f"{interval}:{number}",
    }


@FUNCTIONS.register("guessing_verdict")
def verdict(completion: str, reward: float, task: dict[str, Any]) -> str:
    """``higher`` or ``lower``: where the number is from the last one that was written; ``no number`` where none was."""
    written = _NUMBER.findall(completion)
    if not written:
        return NO_NUMBER
    return HIGHER if int(written[-1][:9]) < int(task["answer"]) else LOWER


class Game:
    """One game, as a text environment: the same messages and verdicts as in ``MultiTurnWorkflow``; a hit pays 1.

    Args:
        task: one of ``games``.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.said: str = task["messages"][0]["content"]
        self.done = False

    def observation(self) -> str:
        """What the player was told last."""
        return self.said

    def step(self, action: str) -> StepResult:
        """Take the last number of a reply as the guess. A reply without a number is a guess that misses."""
        if self.done:
            return StepResult(self.said, 0.0, True, {"valid": False, "reason": "The number has been found."})
        written = _NUMBER.findall(action)
        self.done = bool(written) and written[-1] == self.task["answer"]
        if not self.done:
            self.said = verdict(action, 0.0, self.task)
        return StepResult(self.said, float(self.done), self.done, {})

    def snapshot(self) -> dict[str, Any]:
        """The state of the game."""
        return {"said": self.said, "done": self.done}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot of a game of the same task."""
        self.said, self.done = snapshot["said"], snapshot["done"]


def episode(task: dict[str, Any], halves: bool = True, max_turns: int = 4) -> list[dict[str, Any]]:
    """A worked episode as ``segments``, ``[{"text", "train"}]``, in the form that ``MultiTurnWorkflow`` runs.

    Args:
        task: one of ``games``.
        halves: each guess is the middle of what is left; else its lowest number.
        max_turns: guesses at most.
    """
    said = task["messages"][0]["content"]
    low, high = map(int, said.split("-"))
    segments = []
    for _ in range(max_turns):
        guess = (low + high) // 2 if halves else low
        segments.append({"text": f"{_USER}{said}{_END}{_ASSISTANT}", "train": False})
        segments.append({"text": f"{low}-{high} {guess}{_END}", "train": True})
        if str(guess) == task["answer"]:
            break
        said = verdict(str(guess), 0.0, task)
        low, high = (guess + 1, high) if said == HIGHER else (low, guess - 1)
    return segments


def best_reward(max_turns: int = 4, turn_discount: float = 1.0, numbers: int = NUMBERS) -> float:
    """What the best play earns on average: of ``numbers``, halving finds ``2**t`` with guess ``t + 1``."""
    reward, left = 0.0, numbers
    for turn in range(max_turns):
        found = min(left, 2**turn)
        reward += found * turn_discount**turn
        left -= found
    return reward / numbers
