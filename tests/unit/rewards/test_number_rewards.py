"""Numbers that texts hold and the rewards that compare them, against hand-worked cases."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.rewards.numbers import arithmetic_reward, gsm8k_answer, gsm8k_reward, last_number, numeric_reward

GSM8K = Path(__file__).parents[4] / "shared/data/gsm8k/test.jsonl"


def score(function, completion, answer):
    return function("prompt", completion, [], [], answer=answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("−3", -3), ("1,234.5", Fraction("1234.5")), ("3/4", Fraction(3, 4)), (".5", Fraction(1, 2)), ("x=-2", -2),
        ("5-3", 3), ("(-4)", -4), ("1,2,3", 3), ("18.", 18), ("$1,000.", 1000), ("a-5", 5), ("2 - 7", 7), ("= -3", -3),
        ("1/0", None), ("none", None), ("-.5", Fraction(-1, 2)), ("9" * 1000, None), ("in 1999, 7 of 12", 12),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc =.,", max_size=10))
def test_a_number_written_with_commas_is_found_again(number, before):
    assert last_number(f"{before} = {number:,}") == number


@given(st.text(max_size=300))
def test_any_text_has_a_number_or_none(text):
    last_number(text)
    score(arithmetic_reward, text, "3")
    score(gsm8k_reward, text, "3")


def test_numeric_compares_values():
    assert score(numeric_reward, "so 1,024.0 it is", "1024") == 1.0
    assert score(numeric_reward, "so 1024", 1024) == 1.0
    assert score(numeric_reward, "3 then 4", "3") == 0.0
    assert score(numeric_reward, "nothing", "3") == 0.0
    assert score(numeric_reward, "two: 2", ["1", "2"]) == 1.0


def test_arithmetic_reads_the_tag_first():
    assert score(arithmetic_reward, "7+8=15 <answer>95</answer>", "95") == 1.0
    assert score(arithmetic_reward, "95 <answer>9 5</answer>", "95") == 0.0
    assert score(arithmetic_reward, "it is 95", "95") == 1.0


def test_gsm8k_compares_the_final_answers():
    gold = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
    assert gsm8k_answer(gold) == "18"
    assert score(gsm8k_reward, "it is\n#### $18 a day of 7", gold) == 1.0
    assert score(gsm8k_reward, "so 18.", gold) == 1.0
    assert score(gsm8k_reward, "18 of 20", gold) == 0.0


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not beside the checkout")
def test_every_gsm8k_solution_is_right_by_its_own_answer():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    assert rows
    assert all(score(gsm8k_reward, row["answer"], row["answer"]) == 1.0 for row in rows)
    assert all(score(numeric_reward, row["answer"], row["answer"]) == 1.0 for row in rows)
