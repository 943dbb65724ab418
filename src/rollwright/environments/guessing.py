"""Guess a number from "higher" and "lower": a game that no single answer wins, and whose best play is known.

games(size=2)      # tasks: {"messages": [user: "23-37"], "answer": "28", "query_id"}
verdict(…)         # what the player is told after a guess: the feedback function of ``MultiTurnWorkflow``
episode(task)      # a worked episode by a timid player, for a supervised warm-up
best_reward(4)     # what halving the interval earns

A player writes which numbers are left, and a guess: ``27-37 32``. The interval has 15 numbers, so that halving it finds any of
them in at most four guesses. The intervals of the splits begin at different numbers: a held-out game is one in an interval that
was never played in.
"""

from __future__ import annotations

import random
import re
from typing import Any

from rollwright.errors import DataError

NUMBERS = 15
HIGHER, LOWER, NO_NUMBER = "higher", "lower", "no number"
_FIRST, _LAST = 10, 99 - NUMBERS + 1  # two digits throughout
_SPLITS = {"train": (0, 2, 3), "valid": (1,), "test": (4,)}  # remainders modulo 5 of where intervals begin
_TIMIDITY = 0.6
_USER, _ASSISTANT, _END = "<|user|>", "<|assistant|>", "<|end|>"
_NUMBER = re.compile(r"[0-9]+")


def games(
    split: str = "train", size: int | None = None, seed: int = 1, worked: bool = False, max_turns: int = 4
) -> list[dict[str, Any]]:
    """A taskset of games, each once, in a random order.

    Args:
        split: train, valid or test.
        size: number of games; None: all of the split. Worked games may be repeated, played differently each time.
        seed: which games, in which order, played how.
        worked: add ``segments``, a worked episode, for supervised training.
        max_turns: guesses of a worked episode at most.

    Raises:
        DataError: there is no such split, or it has fewer games.
    """
    if split not in _SPLITS:
        raise DataError(f"games: there is no split {split!r}; choose {', '.join(_SPLITS)}.")
    generator = random.Random(f"{split} {seed}")
    firsts = [first for first in range(_FIRST, _LAST + 1) if first % 5 in _SPLITS[split]]
    tasks = [_game(first, number) for first in firsts for number in range(first, first + NUMBERS)]
    generator.shuffle(tasks)
    if size is not None and size > len(tasks) and not worked:
        raise DataError(f"games: {size} games were asked for, split {split!r} has {len(tasks)}.")
    tasks = [dict(tasks[index % len(tasks)]) for index in range(len(tasks) if size is None else size)]
    if worked:
        for task in tasks:
            task["segments"] = episode(task, generator, max_turns)
    return tasks


def _game(first: int, number: int) -> dict[str, Any]:
    interval = f"{first}-{first + NUMBERS - 1}"
    return {
        "messages": [{"role": "user", "content": interval}],
        "answer": str(number),
        "query_id": f"{interval}:{number}",
    }


def verdict(completion: str, reward: float, task: dict[str, Any]) -> str:
    """``higher`` or ``lower``: where the number is from the last one that was written; ``no number`` where none was."""
    written = _NUMBER.findall(completion)
    if not written:
        return NO_NUMBER
    return HIGHER if int(written[-1][:9]) < int(task["answer"]) else LOWER


def episode(task: dict[str, Any], generator: random.Random | None = None, max_turns: int = 4) -> list[dict[str, Any]]:
    """A worked episode as ``segments``, ``[{"text", "train"}]``, in the form that ``MultiTurnWorkflow`` runs.

    The player is timid: most guesses are the lowest number that is left, the others any of them.

    Args:
        task: one of ``games``.
        generator: draws the guesses; None: the task's own.
        max_turns: guesses at most.
    """
    generator = generator or random.Random(task["query_id"])
    said = task["messages"][0]["content"]
    low, high = map(int, said.split("-"))
    segments = []
    for _ in range(max_turns):
        guess = low if generator.random() < _TIMIDITY else generator.randint(low, high)
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
