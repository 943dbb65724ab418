"""Extracts the number that a completion states as its answer, and compares it in the numeric, GSM8K and arithmetic rewards.

A completion's **stated number** is the number at its last mark: the content of ``\\boxed{…}`` or ``<answer>…</answer>``, the first number
after ``####``, or the first number in the sentence after "answer is", "Answer:" and similar. Without a mark it is the last number. If two
numbers are joined by "and", "or" or a range, neither is the stated number. A number may have a sign, thousands separators, an exponent
(``1e3``, ``10^3``) and units, or be a fraction or a mixed number (``2 1/2``, ``2½``); a percent sign is a unit. LaTeX is accepted if it
is a number (``\\frac{1}{2}``, ``1{,}234``, ``\\$18``); an expression such as ``\\frac{2a}{2}`` is left to the math rewards.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.text import last_boxed, last_tagged, references

#: A number with its power or power of ten. A minus after a word, digit or bracket is an operator, not a sign. The other alternatives and
#: the last group match parts of expressions, which are not numbers: ``\pm 5``, ``\sqrt``, ``\pi``, ``x^2``, ``{2a}``, ``3x``, ``2^n``.
_NUMBER = re.compile(
    r"(?:\\pm|\\mp|[±∓])\s*[\d.]*|\\[a-zA-Z]+(?=\s*\{)|\\(?:pi|infty|theta|alpha|beta|phi|lambda|sin|cos|tan|log|ln|exp)(?![a-zA-Z])|[\^_{]\s*[-+]?\.?\d[\d.]*"
    r"|((?:(?<![\w.)\]}])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+(?!\w)|/\d+)?|\.\d+))"
    r"(?:(?:\s*(?:\\times|\\cdot|[×*])\s*(10))?\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+)))?"
    r"(\s*\^|[abcdijnpqrtuvwxyz](?![a-zA-Z]))?"
)
_HUGE = re.compile(r"[eE][-+]?\d{4}")  # exact arithmetic on such exponents would take too long
_FRACTION = re.compile(r"(?:(?<!\d)(\d{1,9}) ?)?\\[dt]?frac ?(?:\{ ?(\d{1,99}) ?\} ?\{ ?(\d{1,99}) ?\}|(\d) ?(\d))")
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ])\s*(?=\d{3}(?!\d))")
_SPACING = re.compile(r"\\[,!;: ]\s*")
#: ``2 1/2`` and ``2 and 1/2``.
_MIXED = re.compile(r"(?<![\d.,/^])(\d{1,9}) +(?:and +)?(\d{1,9})/(\d{1,9})(?![\d/.])")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_SUPERSCRIPT = re.compile(r"(?<=\d)[⁰¹²³⁴-⁹]+")
#: A unit with its power, which is not a power of the number: ``cm^2``, ``ft²``.
_UNIT_POWER = re.compile(
    r"(?<![A-Za-z\\])(mm|cm|dm|m|km|in|inch(?:es)?|ft|feet|foot|yd|yards?|mi|miles?|meters?|metres?|units?|sec|s)\s*"
    r"(?:\^\s*(?:\{\s*[23]\s*\}|[23])|[²³])(?!\d)"
)
#: Text between two numbers neither of which is the answer: ``20 apples and 18``, ``3 or 5``, ``3 to 5``, ``3–5``.
_JOINED = re.compile(r"\W{0,3}(?:[A-Za-z]+\W{1,3}){0,3}(?:and|or|&)\W{0,3}|\s*(?:to|[–—])\s*")
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
_DECORATION = re.compile(r"\\(?:[$%()\[\],!;: ]|left|right|displaystyle)|\^\s*\{?\\circ\}?")
_STATED = re.compile(r"####|\b(?:answer|Answer|ANSWER)\W{0,6}(?:is\b|are\b|[:=])")
_SEVERAL_EQUATIONS = re.compile(r"[,;]|\b(?:and|or)\b")
_SPACED_MINUS = re.compile(r"^\s*-\s+(?=[\d.\\])")
_FACTORIAL = re.compile(r"\d\s*!")
_PROSE = re.compile(r"[A-Za-z]{2,}")
#: A word of prose, such as a unit, but not the name of a function.
_WORD = re.compile(r"(?<![\\{A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|mod|sqrt|pi)(?![A-Za-z]))[A-Za-z]{2,}")
#: A unit of one letter, as in ``1.2e3 m``.
_LETTER_UNIT = re.compile(r"(?<![A-Za-z\\])[mgshlkL](?![A-Za-z])")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_LONGEST_NUMBER = 400  # digits; longer numbers are not answers, and exact arithmetic on them would take too long


def without_grouping(text: str) -> str:
    r"""Remove LaTeX's digit grouping: ``1{,}234`` and ``1\,234`` become ``1234``."""
    return _GROUPED.sub("", text)


def _numbers(text: str) -> list[re.Match[str]]:
    """Find the numbers in a text, in order, including the operands of expressions."""
    return list(_NUMBER.finditer(_written_plainly(text)))


def _written_plainly(text: str) -> str:
    """Replace LaTeX and special characters in numbers by plain text, and mixed numbers by fractions."""
    text = text.replace("−", "-")
    if "\\" in text or "{" in text:
        text = _FRACTION.sub(_plain_fraction, _SPACING.sub(" ", without_grouping(text)))
        text = _DECORATION.sub("", _WRAPPED.sub(r" \1 ", text))
    if not text.isascii():
        text = _VULGAR.sub(lambda one: f" {unicodedata.normalize('NFKC', one[0]).replace('⁄', '/')}", text)
        text = _SUPERSCRIPT.sub(lambda power: f"^{unicodedata.normalize('NFKC', power[0])}", text)
    return _MIXED.sub(_improper, _UNIT_POWER.sub(r"\1", text))


def _improper(match: re.Match[str]) -> str:
    """Convert ``2 1/2`` to ``5/2``; if the second number is not a proper fraction, leave both unchanged."""
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}" if top < bottom else match[0]


def _plain_fraction(match: re.Match[str]) -> str:
    r"""Convert ``1\frac{1}{2}`` to ``3/2``."""
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
    """Return the only number in an answer, ignoring units and words, or None if it has none or several. ``x = 18`` gives 18."""
    head, _, tail = text.rpartition("=")
    if "=" in head and _SEVERAL_EQUATIONS.search(head):
        return None
    tail = _SPACED_MINUS.sub("-", tail.replace("−", "-"))
    if _FACTORIAL.search(tail) and not _PROSE.search(tail):
        return None
    found = _numbers(tail)
    return _value(found[0]) if len(found) == 1 else None


def is_plain_number(text: str) -> bool:
    """Return whether an answer is one number, possibly with words and symbols around it, and not an expression."""
    rest = _NUMBER.sub(" ", _written_plainly(text))
    return (
        sole_number(text) is not None
        and not any(map(str.isalpha, _LETTER_UNIT.sub("", _WORD.sub("", rest))))
        and not re.search(r"[+*/^]", rest)
    )


def is_several_numbers(text: str) -> bool:
    """Return whether a text has several numbers and none is the answer: ``20 apples and 18 pears``, ``5 ft 6 in``, ``3 to 5``."""
    found = _numbers(text)
    rest = _NUMBER.sub(" ", _written_plainly(text))
    is_prose = bool(_PROSE.search(rest) or re.search("[–—]", rest)) and not re.search(r"[\\=^*/+]", rest)
    return is_prose and len(found) > 1 and all(_value(one) is not None for one in found)


def first_number(text: str) -> Fraction | None:
    """Return the first number in a text, or None if there is none or an expression such as ``3x`` comes first."""
    found = _numbers(text)
    return _value(found[0]) if found else None


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None if there is none or an expression such as ``3x`` comes last.

    The last number of ``5-3`` is 3, and that of ``= -3`` is -3.
    """
    found = _numbers(text)
    return _value(found[-1]) if found else None


def stated_number(text: str) -> Fraction | None:
    """Return the number that a completion states as its answer (defined at the top of this module), or None if it states none."""
    take, part = _statement(text)
    return None if states_several(text) else take(part)


def states_several(text: str) -> bool:
    """Return whether a completion states two joined numbers, neither of which is its answer."""
    take, part = _statement(text)
    if take is sole_number:
        return is_several_numbers(part)
    found = _numbers(part)
    pair = found[:2] if take is first_number else found[-2:]
    return len(pair) == 2 and bool(_JOINED.fullmatch(pair[0].string[pair[0].end() : pair[1].start()]))


def _statement(text: str) -> tuple[Callable[[str], Fraction | None], str]:
    """Return the function that extracts the number from a completion's answer, and the part of the completion that states it."""
    mark = max(_STATED.finditer(text), key=re.Match.end, default=None)
    start = -1 if mark is None else mark.start()
    box, tag = text.rfind("\\boxed{"), text.rfind("<answer>")
    if box >= 0 and box > start and (boxed := last_boxed(text)) is not None:
        return sole_number, boxed
    if tag >= 0 and (tagged := last_tagged(text, "answer")) is not None and text.rfind("</answer>") > start:
        return sole_number, tagged
    if mark is not None:
        statement = _SENTENCE_END.split(text[mark.end() :].lstrip(" \t\n*_:$"), maxsplit=1)[0].rsplit("=", 1)[-1]
        if _numbers(statement):
            return first_number, statement
    return last_number, text


def gsm8k_answer(text: str) -> str:
    """Return the final answer of a GSM8K solution: the text after its last ``####``, or the whole text if there is no such mark."""
    return text.rsplit("####", 1)[-1].strip()


def _same_number(found: Fraction | None, answer: Any) -> float:
    return float(found is not None and any(found == sole_number(gsm8k_answer(one)) for one in references(answer)))


@REWARD_FUNCTIONS.register_module("numeric_reward", runs_inline=True)
def numeric_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return 1 if the number that the completion states is the answer, else 0."""
    return _same_number(stated_number(completion), answer)


@REWARD_FUNCTIONS.register_module("gsm8k_reward", runs_inline=True)
def gsm8k_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return 1 if the number after the last ``####``, or else the stated number, is that of the GSM8K solution, else 0."""
    text = f"#### {gsm8k_answer(completion)}" if "####" in completion else completion
    return _same_number(stated_number(text), answer)


@REWARD_FUNCTIONS.register_module("arithmetic_reward", runs_inline=True)
def arithmetic_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: Any = None, **_: Any
) -> float:
    """Return 1 if the only number in the last ``<answer>…</answer>``, or else the stated number, is the answer, else 0."""
    tagged = last_tagged(completion, "answer")
    return _same_number(stated_number(completion if tagged is None else f"<answer>{tagged}</answer>"), answer)
