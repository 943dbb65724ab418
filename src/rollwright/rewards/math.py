"""Rewards for mathematics, based on ``math-verify`` (the extra ``math``).

They run in worker processes that can be killed, because a symbolic comparison may never end.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

from rollwright.errors import RewardError
from rollwright.rewards.numbers import (
    gsm8k_answer,
    is_plain_number,
    is_several_numbers,
    sole_number,
    stated_number,
    states_several,
    without_grouping,
)
from rollwright.rewards.registry import REWARD_FUNCTIONS, RewardFn
from rollwright.rewards.text import format_reward, last_boxed, last_tagged, references

#: Imported only by workers, because the import takes a second.
_IMPORTS = ("math_verify",) if importlib.util.find_spec("math_verify") else ()
_ROUNDING = Fraction(1, 2_000_000)
_LONGEST_ANSWER = 2000  # characters at the end of a completion that are parsed
_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
#: Percent signs; math-verify would interpret them as a division by 100.
_PERCENT = re.compile(r"\s*(?:\\?%|\bper ?cent\b)")
_DAPO_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def equivalent(found: str, wanted: str, *, is_free_text: bool = False) -> bool:
    """Return whether two answers are mathematically equal.

    There is no time limit, because math-verify's own limit works only in a main thread. Call this function in a process that can be killed.

    Args:
        found: the answer.
        wanted: the reference answer.
        is_free_text: True if ``found`` is a completion, from whose end math-verify extracts the answer.
    """
    found, wanted = without_grouping(found), without_grouping(wanted)
    number = sole_number(wanted)
    if is_free_text:
        if number is not None and states_several(found):
            return False
        if number is not None and stated_number(found) == number:
            return True
    elif found.strip() == wanted.strip() or (number is not None and is_several_numbers(found)):
        return found.strip() == wanted.strip()
    elif number is not None and is_plain_number(found):
        return _same(sole_number(found), number)
    found, wanted = _PERCENT.sub("", found), _PERCENT.sub("", wanted)
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise RewardError(
            f"Answers other than plain numbers are compared by {error.name}, which is not installed: pip install 'rollwright[math]'."
        ) from error

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about every call without a limit
    texts = (_marked(wanted), found[-_LONGEST_ANSWER:] if is_free_text else _marked(found))
    gold, guess = (math_verify.parse(text, parsing_timeout=0) for text in texts)
    return bool(gold) and bool(guess) and math_verify.verify(gold, guess, timeout_seconds=None)


def _same(found: Fraction | None, wanted: Fraction) -> bool:
    """Return whether two numbers are equal exactly or to six decimals, as math-verify compares a decimal with a fraction."""
    if found is None:
        return False
    difference = abs(found - wanted)
    return difference <= _ROUNDING and difference <= 4 * _ROUNDING * abs(wanted)


def _marked(answer: str) -> str:
    """Put an answer in a box unless it has delimiters, because math-verify accepts LaTeX only with delimiters."""
    answer = answer[-_LONGEST_ANSWER:]
    return answer if _DELIMITED.search(answer) else f"\\boxed{{{answer}}}"


def _is_right(found: str | None, answer: Any) -> bool:
    """Return whether an answer equals one of the references."""
    return found is not None and any(equivalent(found, gsm8k_answer(one)) for one in references(answer))


def accuracy(completion: str, answer: Any) -> float:
    r"""Return 1 if the completion's answer (tagged, boxed, after ``####``, or else at its end) is one of the references, else 0."""
    part = last_tagged(completion, "answer")
    if part is None:
        part = last_boxed(completion)
    if part is None and "####" in completion:
        part = gsm8k_answer(completion)
    if part is None:
        return float(any(equivalent(completion, gsm8k_answer(one), is_free_text=True) for one in references(answer)))
    boxed = last_boxed(part)
    return float(_is_right(part if boxed is None else boxed, answer))


@REWARD_FUNCTIONS.register_module("accuracy_reward", worker_imports=_IMPORTS)
def accuracy_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return 1 if the completion's answer equals a reference according to math-verify, else 0."""
    return accuracy(completion, answer)


@REWARD_FUNCTIONS.register_module("math_reward", worker_imports=_IMPORTS)
def math_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any = None,
    format_weight: float = 0.1,
    **_: Any,
) -> float:
    """Return the accuracy (1 or 0) plus the ``format_reward``, which is ``format_weight`` or ``-format_weight``."""
    return accuracy(completion, answer) + format_reward(
        prompt, completion, prompt_ids, completion_ids, format_weight=format_weight
    )


@REWARD_FUNCTIONS.register_module("math_boxed_reward", worker_imports=_IMPORTS)
def math_boxed_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any = None,
    with_think: bool = False,
    format_weight: float = 0.1,
    **_: Any,
) -> float:
    r"""Return 1 if the last ``\boxed{…}`` equals a reference, else 0.

    Args:
        prompt: unused.
        completion: the text to score.
        prompt_ids: unused.
        completion_ids: unused.
        answer: the reference answers.
        with_think: subtract ``format_weight`` unless the reasoning ends with exactly one ``</think>`` before the box.
        format_weight: penalty for a wrong format.
    """
    return sum(MathBoxedRewardFn()(completion, answer, with_think, format_weight).values())


class MathRewardFn(RewardFn):
    """``math_reward`` for calls in the ``run`` of task-style workflows: ``{"accuracy": …, "format_score": …}``."""

    def __call__(self, response: str, prompt: str | None = None, truth: Any = None) -> dict[str, float]:
        """Return the parts of the reward by name; their sum is the reward."""
        return {"accuracy": accuracy(response, truth), "format_score": format_reward("", response, [], [])}


class MathBoxedRewardFn(RewardFn):
    """``math_boxed_reward`` for calls in the ``run`` of task-style workflows: ``{"accuracy": …, "format_score": …}``."""

    def __call__(
        self, response: str, truth: Any = None, with_think: bool = False, format_score_coef: float = 0.1, **_: Any
    ) -> dict[str, float]:
        """Return the parts of the reward by name; their sum is the reward."""
        format_score = 0.0
        if with_think:
            thought, __, rest = response.partition("</think>")
            if not rest or "</think>" in rest or "\\boxed" not in rest or thought.count("<think>") > 1:
                format_score = -format_score_coef
        return {"accuracy": float(_is_right(last_boxed(response), truth)), "format_score": format_score}


@REWARD_FUNCTIONS.register_module("math_dapo_reward", worker_imports=_IMPORTS)
def math_dapo_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any = None,
    max_response_length: int | None = None,
    cache_length: int = 0,
    penalty_factor: float = 1.0,
    **_: Any,
) -> float:
    """Return 1 if the answer on the last ``Answer: …`` line equals a reference, else -1, plus DAPO's soft overlong penalty.

    If no line has this form, the last ``\\boxed{…}`` is the answer. The penalty is 0 up to ``max_response_length - cache_length`` tokens,
    falls linearly to ``-penalty_factor`` at ``max_response_length``, and stays there (Yu et al., arXiv 2503.14476, equation 13). If
    ``max_response_length`` is None, there is no penalty.
    """
    found = _DAPO_ANSWER.findall(completion)
    part = found[-1].strip() if found else last_boxed(completion)
    if part is not None and (boxed := last_boxed(part)) is not None:
        part = boxed
    return (1.0 if _is_right(part, answer) else -1.0) + overlong_penalty(
        len(completion_ids), max_response_length, cache_length, penalty_factor
    )


def overlong_penalty(length: int, max_response_length: int | None, cache_length: int, penalty_factor: float) -> float:
    """Return DAPO's penalty, at most 0, for a response of ``length`` tokens; see ``math_dapo_reward``."""
    if max_response_length is None:
        return 0.0
    free = max_response_length - cache_length
    if length <= free:
        return 0.0
    if length >= max_response_length or cache_length <= 0:
        return -penalty_factor
    return penalty_factor * (free - length) / cache_length
