r"""The forms in which models write answers, each with a right and a wrong reference, over every reward that reads answers."""

from __future__ import annotations

import time

import pytest

from rollwright.rewards.math import accuracy_reward, math_boxed_reward
from rollwright.rewards.numbers import arithmetic_reward, gsm8k_reward, numeric_reward

NUMERIC = (numeric_reward, gsm8k_reward, arithmetic_reward)

#: Completion, the answer that it gives, and one that it does not give.
NUMBERS = [
    (r"\boxed{18}", "18", "19"),
    (r"\boxed{\$18}", "18", "19"),
    (r"so $\boxed{\$18.00}$ a day", "18", "0"),
    (r"\boxed{18\text{ dollars}}", "18", "19"),
    (r"\boxed{18 \text{ km/h}}", "18", "19"),
    (r"\boxed{\text{18}}", "18", "19"),
    (r"\boxed{18\%}", "18", "19"),
    (r"\boxed{18m}", "18", "19"),
    (r"\boxed{1{,}234}", "1234", "234"),
    (r"\boxed{1,234}", "1234", "234"),
    (r"\boxed{1\,234}", "1234", "235"),
    (r"\boxed{\frac{1}{2}}", "0.5", "2"),
    (r"\boxed{\dfrac{1}{2}}", "1/2", "2"),
    (r"\boxed{\tfrac12}", r"\frac{2}{4}", "12"),
    (r"\boxed{-\frac{3}{4}}", "-0.75", "0.75"),
    (r"\boxed{1\frac{1}{2}}", "1.5", "2"),
    (r"\boxed{10^3}", "1000", "3"),
    (r"\boxed{10^{3}}", "1000", "3"),
    (r"\boxed{2 \times 10^3}", "2,000", "3"),
    (r"\boxed{x = 18}", "18", "19"),
    (r"\boxed{−3}", "-3", "3"),
    (r"\boxed{18^\circ}", "18", "19"),
    ("work 3\n#### 18", "18", "3"),
    ("work 3\n#### $1,234", "1234", "234"),
    ("work 3\n#### 18 dollars", "9*2=18\n#### 18", "3"),
    ("3 <answer>18</answer>", "18", "3"),
    ("3 <answer>18 dollars</answer>", "18", "3"),
    (r"3 <answer>\$18</answer>", "18", "3"),
    ("<answer>1,234 people</answer>", "1234", "234"),
    (r"<answer>\boxed{18}</answer>", "18", "19"),
    ("<answer>9 + 9 = 18</answer>", "18", "9"),
    ("<answer>The answer is 18.</answer>", "18", "19"),
    ("The answer is 12. I used 3 steps", "12", "3"),
    ("The final answer is $12$. I used 3 steps.", "12", "3"),
    ("The answer is: $18.", "18", "19"),
    ("**Answer:** 18\n\nChecked in 2 ways.", "18", "2"),
    ("The answer is 9 + 9 = 18.", "18", "9"),
    (r"So \( x = 18 \).", "18", "19"),
    ("3 * 6 = 18 dollars", "18", "6"),
    ("She earns 1,234 dollars", "1234", "234"),
    ("it is 1/2", "0.5", "2"),
    (r"The result is 1{,}234", "1234", "234"),
    (r"The result is $\frac{1}{2}$", "0.5", "2"),
]

#: Answers that are no plain number: math-verify compares them, and the numeric rewards do not take a number out of them.
EXPRESSIONS = [
    (r"\boxed{\frac{2a}{2}}", r"\frac{2a}{2}", "2"),
    (r"\boxed{\sqrt{16}}", "4", "16"),
    (r"it is $\sqrt{16}$", "4", "16"),
    (r"\boxed{2a}", "2a", "2"),
    (r"\boxed{18\pi}", r"18\pi", "18"),
    (r"\boxed{2 \sin x}", r"2\sin x", "2"),
    (r"it is $2^n$", "2^n", "2"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", "2"),
    (r"\boxed{1, 2}", r"\{1, 2\}", "2"),
    ("<answer>2x</answer>", "2x", "2"),
]


def score(function, completion, answer):
    return function("p", completion, [], [], answer=answer)


@pytest.mark.parametrize(("completion", "right", "wrong"), NUMBERS)
def test_numbers(completion, right, wrong):
    boxed = (math_boxed_reward,) if "boxed" in completion else ()
    for function in (*NUMERIC, accuracy_reward, *boxed):
        assert (score(function, completion, right), score(function, completion, wrong)) == (1.0, 0.0), function.__name__


@pytest.mark.parametrize(("completion", "right", "wrong"), EXPRESSIONS)
def test_expressions(completion, right, wrong):
    assert (score(accuracy_reward, completion, right), score(accuracy_reward, completion, wrong)) == (1.0, 0.0)
    for function in NUMERIC:
        assert score(function, completion, wrong) == 0.0, function.__name__


def test_a_tag_with_two_numbers_is_no_answer():
    for answer in ("18", "19"):
        assert score(arithmetic_reward, "<answer>18 or 19</answer>", answer) == 0.0
        assert score(accuracy_reward, "<answer>18 or 19</answer>", answer) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\frac" + "1" * 100_000,
        r"\frac" * 20_000,
        "{" * 100_000,
        "1," * 50_000,
        "9" * 100_000,
        "answer is " * 10_000,
        "1^" * 50_000,
        "10^999999999",
        "1e999999999",
        "2^9999999",
        r"\boxed{" * 10_000,
        "1{,}" * 20_000,
        "answer" + "*" * 100_000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_text_costs_time_in_proportion_to_its_length(text):
    started = time.process_time()
    for function in NUMERIC:
        score(function, f"<answer>{text}</answer>", "1")
        score(function, text, "1")
    assert time.process_time() - started < 5
