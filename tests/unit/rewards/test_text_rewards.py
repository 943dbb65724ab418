"""Numbers, matches, F1 and format, against hand-worked cases and an independent formula."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import RewardError
from rollwright.rewards.text import (
    arithmetic_reward,
    exact_match_reward,
    f1_reward,
    f1_score,
    format_reward,
    gsm8k_answer,
    gsm8k_reward,
    last_number,
    last_tagged,
    numeric_reward,
)

GSM8K = Path(__file__).parents[4] / "shared/data/gsm8k/test.jsonl"


def score(function, completion, answer, **data):
    return function("prompt", completion, [], [], answer=answer, **data)


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


def test_exact_match_ignores_space_around_and_reads_tags():
    assert score(exact_match_reward, " yes \n", "yes") == 1.0
    assert score(exact_match_reward, "<think>no</think><answer> yes </answer>", ["no", "yes"]) == 1.0
    assert score(exact_match_reward, "Yes", "yes") == 0.0


def squad_f1(prediction, truth):
    """Word for word after the description of the SQuAD evaluation, with precision and recall spelled out."""

    def words(text):
        text = "".join(c for c in text.lower() if c not in set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"))
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    found, wanted = words(prediction), words(truth)
    common = Counter(found) & Counter(wanted)
    same = sum(common.values())
    if not found or not wanted:
        return float(found == wanted)
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


phrases = st.lists(st.sampled_from(["the", "a", "James", "Bond,", "bond", "Smith!", "an", "of", "1997"]), max_size=8).map(
    " ".join
)


@given(phrases, phrases)
def test_f1_is_that_of_squad(prediction, truth):
    assert f1_score(prediction, truth) == pytest.approx(squad_f1(prediction, truth))


def test_f1_takes_the_best_reference_and_the_tag():
    assert score(f1_reward, "<answer>James Smith</answer>", ["Bond", "James Bond"]) == pytest.approx(0.5)
    assert score(f1_reward, "The James Bond.", "james bond") == 1.0


@pytest.mark.parametrize("function", [numeric_reward, exact_match_reward, f1_reward, arithmetic_reward])
def test_a_task_without_reference_is_an_error_not_a_zero(function):
    with pytest.raises(RewardError, match="no reference answer"):
        score(function, "5", None)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>so</think><answer>4</answer>", True),
        (" <think>so</think>\n\n<answer>4</answer>\n", True),
        ("so</think><answer>4</answer>", True),
        ("<think>so</think> it is <answer>4</answer>", False),
        ("<think>so</think><answer>4</answer> done", False),
        ("<answer>4</answer><think>so</think>", False),
        ("<think>a</think><think>b</think><answer>4</answer>", False),
        ("<think>so</think><answer>4</answer><answer>5</answer>", False),
        ("hm <think>so</think><answer>4</answer>", False),
        ("4", False),
    ],
)
def test_format(completion, right):
    assert format_reward("p", completion, [], []) == (0.1 if right else -0.1)
    assert format_reward("p", completion, [], [], format_weight=1.0) == (1.0 if right else -1.0)


def test_the_last_tag_counts():
    assert last_tagged("<answer>1</answer> <answer> 2 </answer>", "answer") == "2"
    assert last_tagged("<answer>1", "answer") is None
    assert last_tagged("</answer>", "answer") is None
