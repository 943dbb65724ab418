"""The countdown game: make a target out of given numbers, each used once, with + - * / and brackets."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rollwright.errors import RewardError
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.text import last_tagged

_LONGEST_EQUATION = 500
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate(equation: str) -> tuple[Fraction, list[int]]:
    """Exact value of an expression over whole numbers, and the numbers in it.

    Raises:
        ValueError: it is no such expression, is too long, or divides by zero.
    """
    if len(equation) > _LONGEST_EQUATION:
        raise ValueError("too long")
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{type(node).__name__} is not allowed")

    try:
        return value(ast.parse(equation.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


@REWARD_FUNCTIONS.register_module("countdown_reward", runs_inline=True)
def countdown_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    target: float | None = None,
    nums: Sequence[int] | None = None,
    answer: Any = None,
    format_score: float = 0.1,
    **_: Any,
) -> float:
    """1 for an equation in ``<answer>`` that makes the target with every number once, ``format_score`` for any other answer.

    Args:
        target, nums: the task; or ``answer={"target": …, "numbers": […]}``.
        format_score: for an answer in its tags that is wrong. Without tags the reward is 0.

    Raises:
        RewardError: the task has no target or no numbers.
    """
    if isinstance(answer, dict):
        target = answer.get("target", target)
        nums = answer.get("numbers", answer.get("nums", nums))
    if target is None or nums is None:
        raise RewardError("countdown_reward needs the columns 'target' and 'nums', or an 'answer' with target and numbers.")
    equation = last_tagged(completion, "answer")
    if equation is None:
        return 0.0
    try:
        result, used = evaluate(equation.split("=")[0])
    except ValueError:
        return format_score
    right = Counter(used) == Counter(int(number) for number in nums) and abs(result - Fraction(target)) < Fraction(1, 100_000)
    return 1.0 if right else format_score
