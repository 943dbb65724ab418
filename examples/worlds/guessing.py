"""Guess a number from "higher" and "lower": a game that no single answer wins, and whose best play is known.

games(size=2)      # the dataset guessing_games: tasks: {"messages": [user: "23-37"], "answer": "28", "query_id"}
Game(task)         # the game as a ``TextEnvironment``, with snapshots
verdict(…)         # guessing_verdict, what the player is told after a guess: the feedback function of ``MultiTurnWorkflow``
episode(task)      # the worked episode of one who halves; ``episode(task, halves=False)``: of one who tries number by number
best_reward(4)     # what halving earns
talks(size=3)      # the dataset guessing_talks: worked games and verdicts of a solver and a critic
proposals()        # the dataset guessing_proposals: what a critic sees of a guess, and what it should say

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
SAFE, RISKY = "safe", "risky"
_LOWEST, _HIGHEST = 10, 99  # two digits throughout
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
    numbers: int = NUMBERS,
) -> list[dict[str, Any]]:
    """A taskset of games, each once, in a random order.

    Args:
        split: train, valid or test; no two share a game.
        size: number of games; None: all of the split. Worked games may be repeated.
        seed: which games, in which order.
        worked: add ``segments``, a worked episode, for supervised training.
        halving_share: share of the worked episodes that halve what is left, spread evenly; the others try number by number.
        max_turns: guesses of a worked episode at most.
        numbers: numbers of an interval.

    Raises:
        DataError: there is no such split, it has fewer games, or a share or ``numbers`` is out of range.
    """
    check_split("games", split)
    if not 0.0 <= halving_share <= 1.0:
        raise DataError(f"games: halving_share is {halving_share}; it is between 0 and 1.")
    if not 1 <= numbers <= _HIGHEST - _LOWEST + 1:
        raise DataError(f"games: numbers is {numbers}; an interval has 1 to {_HIGHEST - _LOWEST + 1} numbers.")
    intervals = [range(first, first + numbers) for first in range(_LOWEST, _HIGHEST - numbers + 2)]
    played = [_game(interval, number) for interval in intervals for number in interval]
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


def _game(numbers: range, number: int) -> dict[str, Any]:
    interval = f"{numbers[0]}-{numbers[-1]}"
    return {
        "messages": [{"role": "user", "content": interval}],
        "answer": str(number),
        "query_id": f"{interval}:{number}",
    }


def right_verdict(left: range, guess: int | None, turns: int) -> str:
    """``safe`` if no other guess finds the number more often, when ``turns`` perfect guesses follow it; else ``risky``.

    Args:
        left: the numbers that are possible before the guess.
        guess: the guess; None if there is none.
        turns: guesses after this one. They find the number among ``2**turns - 1``, and no more.
    """
    if guess is None or guess not in left:
        return RISKY
    sides = guess - left.start, left.stop - 1 - guess
    found = 1 + sum(min(side, 2**turns - 1) for side in sides)
    return SAFE if found == min(len(left), 2 ** (turns + 1) - 1) else RISKY


@FUNCTIONS.register("guessing_verdict")
def verdict(completion: str, reward: float, task: dict[str, Any]) -> str:
    """``higher`` or ``lower``: where the number is from the last one that was written; ``no number`` where none was."""
    guess = last_number(completion)
    if guess is None:
        return NO_NUMBER
    return HIGHER if guess < int(task["answer"]) else LOWER


def last_number(reply: str) -> int | None:
    """The guess in a reply: its last number, None if it has none."""
    written = _NUMBER.findall(reply)
    return int(written[-1][:9]) if written else None


def numbers_left(left: range, guess: int | None, said: str) -> range:
    """Narrow the numbers that are left by what was said about a guess; one outside of them leaves them as they are."""
    if guess is None or guess not in left:
        return left
    return range(guess + 1, left.stop) if said == HIGHER else range(left.start, guess)


@FUNCTIONS.register("guessing_game")
class Game:
    """One game, as a text environment: the same messages and verdicts as in ``MultiTurnWorkflow``; a hit pays 1.

    Args:
        task: one of ``games``.

    Attributes:
        left: the numbers that the verdicts so far leave.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.said: str = task["messages"][0]["content"]
        self.done = False
        first, last = map(int, self.said.split("-"))
        self.left = range(first, last + 1)

    def observation(self) -> str:
        """What the player was told last."""
        return self.said

    def step(self, action: str) -> StepResult:
        """Take the last number of a reply as the guess. A reply without a number is a guess that misses."""
        if self.done:
            return StepResult(self.said, 0.0, True, {"valid": False, "reason": "The number has been found."})
        guess = last_number(action)
        self.done = guess == int(self.task["answer"])
        if not self.done:
            self.said = verdict(action, 0.0, self.task)
            self.left = numbers_left(self.left, guess, self.said)
        return StepResult(self.said, float(self.done), self.done, {})

    def right_verdict(self, action: str, turns: int) -> str:
        """What a critic should say of a reply that is not played yet, if ``turns`` guesses follow it."""
        return right_verdict(self.left, last_number(action), turns)

    def sides(self, action: str) -> str:
        """How many numbers would be left below and above a reply's guess: ``3 3``; ``no number`` without a guess among those left."""
        guess = last_number(action)
        if guess is None or guess not in self.left:
            return NO_NUMBER
        return f"{guess - self.left.start} {self.left.stop - 1 - guess}"

    def snapshot(self) -> dict[str, Any]:
        """The state of the game."""
        return {"said": self.said, "done": self.done, "left": [self.left.start, self.left.stop]}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot of a game of the same task."""
        self.said, self.done, self.left = snapshot["said"], snapshot["done"], range(*snapshot["left"])


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


@DATASET_REGISTRY.register("guessing_talks")
def talks(
    split: str = "train",
    size: int = 20000,
    seed: int = 1,
    halving_share: float = 0.5,
    max_turns: int = 4,
    numbers: int = NUMBERS,
) -> list[dict[str, Any]]:
    """Worked games of a solver who hears objections, and verdicts of a critic, as ``segments`` for supervised training.

    Two rows of three are games. Each guess but the last meets an objection with probability 0.4, whether it is good or not, and the
    solver then makes the other guess: the lowest number instead of the middle, or the middle instead of the lowest number. Verdicts
    are drawn at random, so that they teach the critic its words and nothing else.

    Args:
        split: train, valid or test; no two share a game.
        size: number of rows.
        seed: which games, in which order.
        halving_share: probability that a game's first proposals halve what is left; otherwise they are its lowest number.
        max_turns: guesses that count.
        numbers: numbers of an interval.
    """
    draw = random.Random(f"talks {split} {seed}")
    rows = games(split, size, seed, worked=True, max_turns=max_turns, numbers=numbers)
    for number, row in enumerate(rows):
        exchanges, judged = _talk(row, draw, draw.random() < halving_share, max_turns)
        if number % 3 == 2:
            exchanges = [(draw.choice(judged)[0], draw.choice((SAFE, RISKY)))]
        row["segments"] = [segment for exchange in exchanges for segment in _segments(*exchange)]
    return rows


def _talk(task: dict[str, Any], draw: random.Random, halves: bool, max_turns: int) -> tuple[list[tuple[str, str]], ...]:
    """What a solver heard and said in a game; and what a critic would see of its first proposals, with the right verdicts."""
    game, exchanges, judged = Game(task), [], []
    for turn in range(max_turns):
        after = max_turns - turn - 1
        for heard in [game.observation(), RISKY][: 1 + (after > 0 and draw.random() < 0.4)]:
            first, last = game.left.start, game.left.stop - 1
            is_middle = halves != (heard == RISKY)
            reply = f"{first}-{last} {(first + last) // 2 if is_middle else first}"
            exchanges.append((heard, reply))
            if after > 0 and heard != RISKY:
                judged.append((game.sides(reply), game.right_verdict(reply, after)))
        if game.step(reply).done:
            break
    return exchanges, judged


@DATASET_REGISTRY.register("guessing_proposals")
def proposals(split: str = "test", max_turns: int = 3, numbers: int = 7) -> list[dict[str, Any]]:
    """Tasks for a critic alone: what it sees of each first proposal that the players of ``talks`` make, once; ``answer`` is the right verdict."""
    seen = {}
    for task in games(split, numbers=numbers):
        for halves in (False, True):
            seen.update(_talk(task, random.Random(0), halves, max_turns)[1])
    return [
        {"messages": [{"role": "user", "content": sides}], "answer": right, "query_id": sides}
        for sides, right in sorted(seen.items())
    ]


def _segments(heard: str, said: str) -> list[dict[str, Any]]:
    return [
        {"text": f"{_USER}{heard}{_END}{_ASSISTANT}", "train": False},
        {"text": f"{said}{_END}", "train": True},
    ]
