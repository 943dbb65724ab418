"""Rewards with their parts (numbers by name) and notes (texts by name, such as a judge's verdict)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any


class Score(float):
    """A reward with its parts and notes.

    Attributes:
        parts: numbers by name, such as those whose sum is the reward.
        notes: texts by name, such as a judge's verdict.
    """

    parts: Mapping[str, float]
    notes: Mapping[str, str]

    def __new__(cls, reward: float, parts: Mapping[str, float] | None = None, notes: Mapping[str, str] | None = None) -> Score:
        made = super().__new__(cls, reward)
        made.parts, made.notes = dict(parts or {}), dict(notes or {})
        return made

    @classmethod
    def of_mapping(cls, values: Mapping[str, Any]) -> Score:
        """Make a score of a reward function's mapping: its ``reward``, or else the sum of its numbers; strings are notes.

        Raises:
            TypeError: it has neither, or a value is neither a number nor a string.
        """
        plain = {str(name): value.item() if hasattr(value, "item") else value for name, value in values.items()}
        notes = {name: value for name, value in plain.items() if isinstance(value, str)}
        numbers = {name: value for name, value in plain.items() if name not in notes}
        if not numbers or not all(isinstance(value, int | float) for value in numbers.values()):
            raise TypeError(
                f"it returned {values!r:.80}; a mapping has a number 'reward', or parts that are numbers and are summed"
            )
        parts = {name: float(value) for name, value in numbers.items() if name != "reward"}
        return cls(float(numbers.get("reward", sum(parts.values()))), parts, notes)


def as_score(value: Any) -> float:
    """Convert what a reward function returned to a finite float; a mapping, to a ``Score``.

    Raises:
        TypeError, ValueError: as for ``as_float``.
    """
    score = Score.of_mapping(value) if isinstance(value, Mapping) else value
    return Score(as_float(float(score)), score.parts, score.notes) if isinstance(score, Score) else as_float(score)


def packed(reward: float) -> float | dict[str, Any]:
    """Return a reward as a JSON value: a number, or a dict if it has parts or notes."""
    if isinstance(reward, Score) and (reward.parts or reward.notes):
        return {"reward": float(reward), "parts": reward.parts, "notes": reward.notes}
    return float(reward)


def unpacked(kept: Any) -> float:
    """Return the reward from a value of ``packed``. Journals of earlier versions hold numbers."""
    return Score(**kept) if isinstance(kept, dict) else kept


def as_float(value: Any) -> float:
    """Convert a bool, a number, or an array or tensor with one element to a finite float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is NaN or infinite.
    """
    if inspect.isawaitable(value):
        name = getattr(value, "__qualname__", type(value).__name__)
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError(f"it returned a call of {name} that was not awaited: write await before it")
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"it returned {value!r}, not a number")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception as error:
        raise TypeError(f"it returned {type(value).__name__}, not one number") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, not a finite number")
    return number
