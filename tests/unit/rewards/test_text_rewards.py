"""Matches, F1 and format, against hand-worked cases and an independent formula."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import RewardError
from rollwright.rewards.numbers import arithmetic_reward, numeric_reward
from rollwright.rewards.text import (
    exact_match_reward,
    f1_reward,
    f1_score,
    format_reward,
    last_tagged,
)


def score(function, completion, answer, **data):
    return function("prompt", completion, [], [], answer=answer, **data)


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
