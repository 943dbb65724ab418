r"""A hundred answers, each with a reference and the rewards that take the one for the other: what docs/rewards.md says, for all of them.

The letters: N numeric_reward, G gsm8k_reward, A arithmetic_reward, C accuracy_reward (and math_reward, MathVerifyWorker), B math_boxed_reward
(and MathBoxedRewardFn), D math_dapo_reward. All others say that the answer is wrong.
"""

from __future__ import annotations

import pytest

from rollwright.compat.trinity_names import MathVerifyWorker
from rollwright.rewards.math import (
    MathBoxedRewardFn,
    accuracy_reward,
    math_boxed_reward,
    math_dapo_reward,
    math_reward,
)
from rollwright.rewards.numbers import arithmetic_reward, gsm8k_reward, numeric_reward
from rollwright.rewards.text import exact_match_reward

REWARDS = {
    "N": numeric_reward,
    "G": gsm8k_reward,
    "A": arithmetic_reward,
    "C": accuracy_reward,
    "B": math_boxed_reward,
    "D": math_dapo_reward,
}

ANSWERS = [
    # units and words
    (r"\boxed{18}", "18", "NGACBD"),
    (r"\boxed{18 USD}", "18", "NGACBD"),
    (r"\boxed{18 square meters}", "18", "NGACBD"),
    (r"\boxed{18 cm^2}", "18", "NGACBD"),
    (r"\boxed{18 cm²}", "18", "NGACBD"),
    (r"\boxed{18\text{ cm}^2}", "18", "NGACBD"),
    (r"\boxed{18\,\text{m/s}^2}", "18", "NGACBD"),
    (r"\boxed{18^\circ}", "18", "NGACBD"),
    (r"\boxed{18m}", "18", "NGACBD"),
    (r"\boxed{18}", "18 apples", "NGACBD"),
    ("<answer>18 apples</answer>", "18", "NGAC"),
    ("#### 18 apples", "18", "NGAC"),
    ("Answer: 18 apples", "18", "NGACD"),
    # two numbers
    (r"\boxed{20 apples and 18 pears}", "18", ""),
    (r"\boxed{20 apples and 18 pears}", "20", ""),
    ("<answer>20 apples and 18 pears</answer>", "18", ""),
    ("<answer>20 apples and 18 pears</answer>", "20", ""),
    ("#### 20 apples and 18 pears", "20", ""),
    ("#### 20 apples and 18 pears", "18", ""),
    ("Answer: 20 apples and 18 pears", "20", ""),
    ("Answer: 20 apples and 18 pears", "18", ""),
    ("She has 20 apples and 18 pears.", "18", ""),
    (r"\boxed{18 or 19}", "18", ""),
    (r"\boxed{18 or 19}", "19", ""),
    (r"\boxed{20, 18}", "18", ""),
    (r"\boxed{x = 5, y = 6}", "6", ""),
    (r"\boxed{5 ft 6 in}", "5", ""),
    (r"\boxed{5 ft 6 in}", "6", ""),
    (r"\boxed{3 hours 20 minutes}", "20", ""),
    ("The answer is 18 a day for 7 days.", "18", "NGAC"),
    # mixed numbers
    (r"\boxed{2 1/2}", "2.5", "NGACBD"),
    (r"\boxed{2 1/2}", "1", ""),
    (r"\boxed{2 1/2}", "1/2", ""),
    (r"\boxed{-2 1/2}", "-2.5", "NGACBD"),
    (r"\boxed{2 1/2 hours}", "5/2", "NGACBD"),
    (r"\boxed{2 and 1/2}", "2.5", "NGACBD"),
    (r"\boxed{2\frac{1}{2}}", "2.5", "NGACBD"),
    (r"\boxed{2\ \frac{1}{2}}", "2.5", "NGACBD"),
    (r"\boxed{2½}", "2.5", "NGACBD"),
    (r"\boxed{2.5}", "2 1/2", "NGACBD"),
    ("it is 2 1/2", "2.5", "NGAC"),
    ("it is 2 1/2", "0.5", ""),
    ("<answer>2 1/2</answer>", "2.5", "NGAC"),
    ("#### 2 1/2", "2.5", "NGAC"),
    ("Answer: 2 1/2", "2.5", "NGACD"),
    # percent
    (r"\boxed{0.5}", "50%", ""),
    (r"\boxed{0.5}", r"50\%", ""),
    (r"\boxed{50\%}", "0.5", ""),
    (r"\boxed{50\%}", "50", "NGACBD"),
    (r"\boxed{50}", r"50\%", "NGACBD"),
    (r"\boxed{50\%}", "50%", "NGACBD"),
    (r"\boxed{50 percent}", "50%", "NGACBD"),
    (r"\boxed{50 percent}", "0.5", ""),
    ("it is 0.5", "50%", ""),
    ("it is 50%", "0.5", ""),
    ("Answer: 50%", "50", "NGACD"),
    # exponents
    (r"\boxed{1e3}", "1000", "NGACBD"),
    (r"\boxed{1e3}", "3", ""),
    (r"\boxed{1E3}", "1000", "NGACBD"),
    (r"\boxed{1.5e-3}", "0.0015", "NGACBD"),
    (r"\boxed{1.2e+3 m}", "1200", "NGACBD"),
    (r"\boxed{1000}", "1e3", "NGACBD"),
    ("it is 1e3", "1000", "NGAC"),
    ("<answer>1e3</answer>", "1000", "NGAC"),
    ("Answer: 1e3", "1000", "NGACD"),
    (r"\boxed{10^{-3}}", "0.001", "NGACBD"),
    (r"\boxed{2\cdot10^3}", "2000", "NGACBD"),
    (r"\boxed{2 \times 10^3}", "2000", "NGACBD"),
    (r"\boxed{2^3}", "8", "NGACBD"),
    (r"\boxed{3²}", "9", "NGACBD"),
    (r"\boxed{3²}", "3", ""),
    # separators of thousands
    (r"\boxed{1,234,567}", "1234567", "NGACBD"),
    (r"\boxed{1{,}234}", "1234", "NGACBD"),
    (r"\boxed{1\,234}", "1234", "NGACBD"),
    (r"\boxed{1 234}", "1234", ""),
    (r"\boxed{1.234,5}", "1234.5", ""),
    # fractions and decimals
    (r"\boxed{6/4}", "3/2", "NGACBD"),
    (r"\boxed{\frac{6}{4}}", "1.5", "NGACBD"),
    (r"\boxed{½}", "0.5", "NGACBD"),
    (r"\boxed{.5}", "1/2", "NGACBD"),
    (r"\boxed{18.0}", "18", "NGACBD"),
    (r"\boxed{0.333333}", "1/3", "CBD"),
    (r"\boxed{0.33}", "1/3", ""),
    (r"\boxed{1/2 cup}", "0.5", "NGACBD"),
    # signs
    (r"\boxed{-5}", "5", ""),
    (r"\boxed{- 5}", "-5", "NGACBD"),
    (r"\boxed{- 5}", "5", ""),
    (r"\boxed{+5}", "5", "NGACBD"),
    (r"\boxed{−5}", "-5", "NGACBD"),
    (r"\boxed{\pm 5}", "5", ""),
    (r"\boxed{±5}", "5", ""),
    # currency
    (r"\boxed{\$18}", "18", "NGACBD"),
    (r"\boxed{£1,000.50}", "1000.5", "NGACBD"),
    (r"\boxed{18€}", "18", "NGACBD"),
    # ranges, ratios, expressions
    (r"\boxed{3 to 5}", "5", ""),
    (r"\boxed{3–5}", "5", ""),
    (r"\boxed{between 3 and 5}", "3", ""),
    (r"\boxed{3-5}", "-2", "CBD"),
    (r"\boxed{1:2}", "1/2", "CBD"),
    (r"\boxed{2+3}", "5", "CBD"),
    (r"\boxed{9 + 9 = 18}", "18", "NGACBD"),
    (r"\boxed{5!}", "120", "CBD"),
    (r"\boxed{5!}", "5", ""),
    # other texts
    (r"\boxed{x = 5}", "5", "NGACBD"),
    (r"\boxed{twelve}", "12", ""),
    (r"\boxed{\approx 3.14}", "3.14", "NGACBD"),
]


@pytest.mark.parametrize(("completion", "truth", "takes"), ANSWERS)
def test_what_each_reward_takes_for_the_answer(completion, truth, takes):
    said = {name: function("p", completion, [], [], answer=truth) for name, function in REWARDS.items()}
    wrong = {name: -1.0 if name == "D" else 0.0 for name in REWARDS}
    assert said == {name: 1.0 if name in takes else wrong[name] for name in REWARDS}
    assert math_reward("p", completion, [], [], answer=truth) == said["C"] - 0.1  # no <think>
    assert MathVerifyWorker().verify(completion, truth) == said["C"]
    assert MathBoxedRewardFn()(completion, truth) == {"accuracy": said["B"], "format_score": 0.0}


@pytest.mark.parametrize(("completion", "truth", "takes"), ANSWERS)
def test_exact_match_compares_texts(completion, truth, takes):
    assert exact_match_reward("p", completion, [], [], answer=truth) == 0.0
    assert exact_match_reward("p", f"so <answer>{truth}</answer>", [], [], answer=truth) == 1.0


def test_the_table_is_long_enough():
    assert len(ANSWERS) == len({(completion, truth) for completion, truth, _ in ANSWERS}) >= 100
