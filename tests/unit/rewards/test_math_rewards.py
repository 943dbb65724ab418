"""Mathematics by math-verify, the countdown game, and DAPO's punishment of length."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright import AsyncRewardWrapper
from rollwright.errors import RewardError
from rollwright.rewards.math import (
    accuracy_reward,
    equivalent,
    last_boxed,
    math_boxed_reward,
    math_dapo_reward,
    math_reward,
    overlong_penalty,
)
from rollwright.rewards.text import countdown_reward, evaluate


def score(function, completion, answer, ids=(), **data):
    return function("prompt", completion, [], list(ids), answer=answer, **data)


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"so \boxed{\frac{1}{2}}", r"\frac{2}{4}", True),
        ("<answer>1/2</answer>", "0.5", True),
        (r"<answer>\boxed{72}</answer>", "72", True),
        ("work\n#### 72", "9*8\n#### 72", True),
        ("The answer is $x^2+2x+1$.", "$(x+1)^2$", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("the answer is 72", "72", True),
        ("the answer is 73", "72", False),
        (r"first 72, then \boxed{73}", "72", False),
        ("no idea", "72", False),
    ],
)
def test_accuracy_is_mathematical(completion, answer, right):
    assert score(accuracy_reward, completion, answer) == float(right)


def test_boxes_are_read_with_balanced_braces():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{a}{b}} end") == r"\frac{a}{b}"
    assert last_boxed(r"\boxed{1") is None
    assert score(math_boxed_reward, r"\boxed{7}", "7") == 1.0
    assert score(math_boxed_reward, "7", "7") == 0.0
    assert score(math_boxed_reward, r"<think>a</think> \boxed{7}", "7", with_think=True) == 1.0
    assert score(math_boxed_reward, r"\boxed{7}", "7", with_think=True) == pytest.approx(0.9)


def test_math_reward_adds_format_to_accuracy():
    assert score(math_reward, "<think>a</think><answer>7</answer>", "7") == pytest.approx(1.1)
    assert score(math_reward, "<think>a</think><answer>8</answer>", "7") == pytest.approx(0.1)
    assert score(math_reward, "7", "7") == pytest.approx(0.9)
    assert score(math_reward, "8", "7") == pytest.approx(-0.1)


def test_dapo_wants_its_last_line_and_punishes_length():
    assert score(math_dapo_reward, "so\nAnswer: $7$", "7") == 1.0
    assert score(math_dapo_reward, "Answer: 8\nAnswer: 7", "7") == 1.0
    assert score(math_dapo_reward, "7", "7") == -1.0
    assert score(math_dapo_reward, "Answer: 7", "7", ids=range(90), max_response_length=100, cache_length=20) == pytest.approx(
        0.5
    )


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 100))
def test_the_punishment_falls_from_nothing_to_its_factor(length, longest, cache):
    cache = min(cache, longest)
    penalty = overlong_penalty(length, longest, cache, 2.0)
    assert -2.0 <= penalty <= 0.0
    assert overlong_penalty(length + 1, longest, cache, 2.0) <= penalty
    assert (penalty == 0.0) == (length <= longest - cache)


async def test_a_hostile_answer_is_killed_and_the_next_is_scored():
    wrapper = AsyncRewardWrapper(accuracy_reward, timeout_seconds=120, max_workers=1)
    hurried = AsyncRewardWrapper(accuracy_reward, timeout_seconds=2.5, max_workers=1)  # over the same worker
    assert await wrapper("p", r"\boxed{8}", [], [], answer="$2^3$") == 1.0
    with pytest.raises(RewardError, match=r"did not return within 2\.5 s"):
        await hurried("p", r"\boxed{" + "9^" * 6 + "9}", [], [], answer=r"$9^{9^{9^{9}}}+1$")
    assert await wrapper("p", r"\boxed{8}", [], [], answer="$2^3$") == 1.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<answer>(6 - 2) * 25</answer>", 1.0),
        ("<answer>(6 - 2) * 25 = 100</answer>", 1.0),
        ("<answer>100</answer>", 0.1),
        ("<answer>25 * 6 - 25 * 2</answer>", 0.1),
        ("<answer>6 - 2</answer>", 0.1),
        ("<answer>25 / (6 - 6)</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>9**9**9**9</answer>", 0.1),
        ("<answer>" + "(" * 400 + "</answer>", 0.1),
        ("(6 - 2) * 25", 0.0),
    ],
)
def test_countdown(completion, value):
    assert countdown_reward("p", completion, [], [], target=100, nums=[25, 6, 2]) == value
    assert countdown_reward("p", completion, [], [], answer={"target": 100, "numbers": [25, 6, 2]}) == value


def test_countdown_is_exact_and_needs_its_columns():
    assert evaluate("1/3*3")[0] == 1
    with pytest.raises(RewardError, match="needs the columns 'target' and 'nums'"):
        countdown_reward("p", "c", [], [], target=1)


def test_without_math_verify_numbers_are_compared_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert equivalent("12", "12.0")
    with pytest.raises(RewardError, match=r"math_verify.*rollwright\[math\]"):
        equivalent("x^2", "x*x")
