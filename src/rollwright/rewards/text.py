"""Text rewards whose cost is linear in the completion's length: exact match, F1, format and the countdown game."""

from __future__ import annotations

import ast
import operator
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rollwright.errors import RewardError
from rollwright.rewards.registry import REWARD_FUNCTIONS

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset(("a", "an", "the"))
_LONGEST_EQUATION = 500
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def last_tagged(text: str, tag: str) -> str | None:
    """Return the stripped text between the last ``</tag>`` and the ``<tag>`` before it, or None if there is no such pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, or None if there is none or its braces are not balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for index in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index].strip()
    return None


def references(answer: Any) -> list[str]:
    """Convert reference answers (a string, a number or a list of these) to a list of strings.

    Raises:
        RewardError: there is no answer, or ``answer`` is a mapping.
    """
    if isinstance(answer, Mapping):
        raise RewardError(
            f"the task's column 'answer' is a mapping ({', '.join(map(str, answer))}); give a text, a number or a list."
        )
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        answer = [answer]
    out = [str(one) for one in answer if one is not None]
    if not out:
        raise RewardError("the task has no reference answer: its column 'answer' is missing or empty; rename the right column.")
    return out


@REWARD_FUNCTIONS.register_module("exact_match_reward", runs_inline=True)
def exact_match_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return 1 if the completion, or its last ``<answer>…</answer>``, is one of the references, else 0."""
    tagged = last_tagged(completion, "answer")
    found = completion.strip() if tagged is None else tagged
    return float(any(found == one.strip() for one in references(answer)))


def normalise_answer(text: str) -> list[str]:
    """Split an answer into words as in SQuAD's evaluation: lower case, without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def f1_score(prediction: str, reference: str) -> float:
    """Compute the F1 score over words, counting repetitions (Rajpurkar et al., arXiv 1606.05250, section 6.1).

    It is the harmonic mean of precision and recall. If neither answer has words, the score is 1; if only one has words, it is 0.
    """
    found, wanted = normalise_answer(prediction), normalise_answer(reference)
    if not found or not wanted:
        return float(found == wanted)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted))


@REWARD_FUNCTIONS.register_module("f1_reward", runs_inline=True)
def f1_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return the best F1 score of the completion, or of its last ``<answer>…</answer>``, among the references."""
    tagged = last_tagged(completion, "answer")
    return max(f1_score(completion if tagged is None else tagged, one) for one in references(answer))


def has_think_answer_format(completion: str) -> bool:
    """Return whether a completion is exactly ``<think>…</think> <answer>…</answer>``, with each tag once.

    The opening ``<think>`` may be missing, for templates that end the prompt with it.
    """
    text = completion.strip()
    if any(text.count(tag) != 1 for tag in ("</think>", "<answer>", "</answer>")) or text.count("<think>") > 1:
        return False
    if "<think>" in text and not text.startswith("<think>"):
        return False
    thought, rest = text.split("</think>")
    return "<answer>" not in thought and rest.strip().startswith("<answer>") and rest.endswith("</answer>")


@REWARD_FUNCTIONS.register_module("format_reward", runs_inline=True)
def format_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, format_weight: float = 0.1, **_: Any
) -> float:
    """Return ``format_weight`` if ``has_think_answer_format`` holds for the completion, else ``-format_weight``."""
    return format_weight if has_think_answer_format(completion) else -format_weight


# ------------------------------------------------------------------ the countdown game


def evaluate(equation: str) -> tuple[Fraction, list[int]]:
    """Compute the exact value of an expression over whole numbers, and list the numbers in it.

    Raises:
        ValueError: the text is not such an expression, is too long, or divides by zero.
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
    """Return 1 if the equation in the last ``<answer>`` yields the target and uses every number once, else ``format_score``.

    Args:
        prompt: unused.
        completion: the text to score.
        prompt_ids: unused.
        completion_ids: unused.
        target: number to reach.
        nums: numbers to use.
        answer: ``{"target": …, "numbers": […]}``, an alternative to ``target`` and ``nums``.
        format_score: reward of a wrong answer in tags. Without tags, the reward is 0.

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
