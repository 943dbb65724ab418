"""Rewards that are pure and linear in the completion's length: numbers, exact match, F1, format and the countdown game.

A completion's **stated number** is the one at its last mark: what ``\\boxed{…}`` holds, the first number after ``####``, or that of the
sentence after "answer is", "Answer:" and the like. Without a mark it is the last number. LaTeX is read as far as it writes a number
(``\\frac{1}{2}``, ``10^3``, ``1{,}234``, ``\\$18``); an expression such as ``\\frac{2a}{2}`` is no number, and the math rewards compare it.
"""

from __future__ import annotations

import ast
import operator
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rollwright.errors import RewardError
from rollwright.rewards.registry import REWARD_FUNCTIONS

#: A number with its power or power of ten, a minus after a word, digit or bracket being an operator. The other alternatives, and the
#: last group, find what is no number but part of an expression: ``\sqrt``, ``\pi``, ``x^2``, ``{2a}``, ``3x``, ``2^n``.
_NUMBER = re.compile(
    r"\\[a-zA-Z]+(?=\s*\{)|\\(?:pi|infty|theta|alpha|beta|phi|lambda|sin|cos|tan|log|ln|exp)(?![a-zA-Z])|[\^_{]\s*[-+]?\.?\d[\d.]*"
    r"|((?:(?<![\w.)\]}])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+(?!\w)|/\d+)?|\.\d+))"
    r"(?:(?:\s*(?:\\times|\\cdot|[×*])\s*(10))?\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+)))?"
    r"(\s*\^|[abcdijnpqrtuvwxyz](?![a-zA-Z]))?"
)
_HUGE = re.compile(r"[eE][-+]?\d{4}")  # exact arithmetic on these would take time
_FRACTION = re.compile(r"(?:(?<!\d)(\d{1,9}) ?)?\\[dt]?frac ?(?:\{ ?(\d{1,99}) ?\} ?\{ ?(\d{1,99}) ?\}|(\d) ?(\d))")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ])\s*(?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_DECORATION = re.compile(r"\\(?:[$%()\[\],!;: ]|left|right|displaystyle)|\^\s*\{?\\circ\}?")
_STATED = re.compile(r"####|\b(?:answer|Answer|ANSWER)\W{0,6}(?:is\b|are\b|[:=])")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset(("a", "an", "the"))
_LONGEST_NUMBER = 400  # digits; longer ones are no answers, and exact arithmetic on them would take time
_LONGEST_EQUATION = 500
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def last_tagged(text: str, tag: str) -> str | None:
    """What stands between the last ``<tag>`` and the ``</tag>`` after it, stripped; None where there is no such pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end].strip() if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, braces balanced; None where there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for index in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : index].strip()
    return None


def without_grouping(text: str) -> str:
    r"""``1{,}234`` and ``1\,234`` as ``1234``."""
    return _GROUPED.sub("", text)


def _numbers(text: str) -> list[re.Match[str]]:
    """The numbers of a text in their order, and what is only part of an expression."""
    text = text.replace("−", "-")
    if "\\" in text or "{" in text:
        text = _FRACTION.sub(_plain_fraction, without_grouping(text))
        text = _DECORATION.sub("", _WRAPPED.sub(r" \1 ", text))
    return list(_NUMBER.finditer(text))


def _plain_fraction(match: re.Match[str]) -> str:
    r"""``1\frac{1}{2}`` as ``3/2``."""
    whole, top, bottom, short_top, short_bottom = match.groups()
    top, bottom = int(top or short_top), int(bottom or short_bottom)
    space = " " if match.string[max(match.start() - 1, 0) : match.start()].isdigit() else ""
    return f"{space}{int(whole or 0) * bottom + top}/{bottom}"


def _value(match: re.Match[str]) -> Fraction | None:
    written, ten, braced, bare, more = match.groups()
    exponent = int(braced or bare or 1) if len(match[0]) <= _LONGEST_NUMBER else _LONGEST_NUMBER
    if written is None or more or abs(exponent) * len(written) > _LONGEST_NUMBER or _HUGE.search(written):
        return None
    try:
        number = Fraction(written.replace(",", ""))
        return number * Fraction(10) ** exponent if ten else number**exponent
    except (ValueError, ZeroDivisionError):
        return None


def sole_number(text: str) -> Fraction | None:
    """The number that an answer is, units and words aside; None where it has none or several. ``x = 18`` is 18."""
    found = _numbers(text.rsplit("=", 1)[-1])
    return _value(found[0]) if len(found) == 1 else None


def first_number(text: str) -> Fraction | None:
    """The first number in a text; None where there is none or an expression is first."""
    found = _numbers(text)
    return _value(found[0]) if found else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text; ``5-3`` ends with 3, ``= -3`` with minus 3. None where there is none or an expression is last."""
    found = _numbers(text)
    return _value(found[-1]) if found else None


def stated_number(text: str) -> Fraction | None:
    """The number that a completion gives as its answer, as the module says."""
    mark = max(_STATED.finditer(text), key=re.Match.end, default=None)
    box = text.rfind("\\boxed{")
    if box >= 0 and (mark is None or box > mark.start()) and (boxed := last_boxed(text)) is not None:
        return sole_number(boxed)
    if mark is not None:
        statement = _SENTENCE_END.split(text[mark.end() :].lstrip(" \t\n*_:$"), maxsplit=1)[0].rsplit("=", 1)[-1]
        if _numbers(statement):
            return first_number(statement)
    return last_number(text)


def gsm8k_answer(text: str) -> str:
    """The final answer of a GSM8K solution: what follows its last ``####``; the whole text where there is no such mark."""
    return text.rsplit("####", 1)[-1].strip()


def references(answer: Any) -> list[str]:
    """Reference answers as a list of texts, from a text, a number or a list of them.

    Raises:
        RewardError: there is none, or it is something else.
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


def _same_number(found: Fraction | None, answer: Any) -> float:
    return float(found is not None and any(found == sole_number(gsm8k_answer(one)) for one in references(answer)))


@REWARD_FUNCTIONS.register_module("numeric_reward", runs_inline=True)
def numeric_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """1 where the number that the completion states is the answer, else 0."""
    return _same_number(stated_number(completion), answer)


@REWARD_FUNCTIONS.register_module("gsm8k_reward", runs_inline=True)
def gsm8k_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """1 where the number after the completion's last ``####``, or else the one it states, is that of the GSM8K solution."""
    marked = "####" in completion
    return _same_number(first_number(gsm8k_answer(completion)) if marked else stated_number(completion), answer)


@REWARD_FUNCTIONS.register_module("arithmetic_reward", runs_inline=True)
def arithmetic_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """1 where the one number in the last ``<answer>…</answer>``, or without such tags the one stated, is the answer, else 0."""
    tagged = last_tagged(completion, "answer")
    return _same_number(stated_number(completion) if tagged is None else sole_number(tagged), answer)


@REWARD_FUNCTIONS.register_module("exact_match_reward", runs_inline=True)
def exact_match_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """1 where the completion, or what stands in its last ``<answer>…</answer>``, is one of the references, else 0."""
    tagged = last_tagged(completion, "answer")
    found = completion.strip() if tagged is None else tagged
    return float(any(found == one.strip() for one in references(answer)))


def normalise_answer(text: str) -> list[str]:
    """Words of an answer as SQuAD's evaluation compares them: lower case, no punctuation, no articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def f1_score(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, with multiplicity (Rajpurkar et al., arXiv 1606.05250, section 6.1).

    Two answers without words are equal (1); one of them makes it 0.
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
    """Best F1 of the completion, or of its last ``<answer>…</answer>``, with the references."""
    tagged = last_tagged(completion, "answer")
    return max(f1_score(completion if tagged is None else tagged, one) for one in references(answer))


def has_think_answer_format(completion: str) -> bool:
    """True for ``<think>…</think> <answer>…</answer>`` and nothing else, each tag once.

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
    """``format_weight`` where the completion thinks and answers in the right tags, else minus ``format_weight``."""
    return format_weight if has_think_answer_format(completion) else -format_weight


# ------------------------------------------------------------------ the countdown game


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
