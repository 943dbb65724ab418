"""The number that a completion gives as its answer, and the rewards that compare it: numeric, GSM8K and arithmetic.

A completion's **stated number** is the one at its last mark: what ``\\boxed{…}`` holds, the first number after ``####``, or that of the
sentence after "answer is", "Answer:" and the like. Without a mark it is the last number. LaTeX is read as far as it writes a number
(``\\frac{1}{2}``, ``10^3``, ``1{,}234``, ``\\$18``); an expression such as ``\\frac{2a}{2}`` is no number, and the math rewards compare it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.text import last_boxed, last_tagged, references

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
_LONGEST_NUMBER = 400  # digits; longer ones are no answers, and exact arithmetic on them would take time


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
