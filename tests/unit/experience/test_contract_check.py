"""The checker: what is whole passes, every single breach is refused by name."""

from __future__ import annotations

import pytest
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import check_trajectory


def whole() -> dict:
    return {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 7, 0]]),
        "attention_mask": torch.tensor([[True] * 4, [True, True, True, False]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
        "logprobs": torch.tensor([[0.0, 0.0, -0.5, -1.0], [0.0, -2.0, 0.0, 0.0]]),
        "versions": torch.tensor([[-1, -1, 0, 1], [-1, 2, 2, -1]], dtype=torch.int32),
        "rewards": torch.tensor([1.0, -1.0]),
        "temperature": torch.tensor([0.7, 1.0]),
        "truncated": torch.tensor([False, True]),
    }


def with_value(key: str, index, value) -> dict:
    trajectory = whole()
    trajectory[key] = trajectory[key].clone()
    trajectory[key][index] = value
    return trajectory


def with_key(key: str, value) -> dict:
    return {**whole(), key: value}


def test_what_is_whole_passes():
    check_trajectory(whole())
    check_trajectory(with_key("loss_mask", whole()["loss_mask"].bool()))
    check_trajectory(with_key("loss_mask", whole()["loss_mask"].float()))
    check_trajectory(
        {
            **whole(),
            "group_ids": torch.zeros(2, dtype=torch.int64),
            "branch_ids": torch.zeros(2, 4, dtype=torch.int64),
            "multi_modal_inputs": [None, None],
            "hidden": torch.zeros(2, 4, 8),
        }
    )


@pytest.mark.parametrize("key", list(whole()))
def test_every_required_key_is_missed_by_name(key):
    broken = whole()
    del broken[key]
    with pytest.raises(TrajectoryError, match=f"workflow Search, task 17, key '{key}'"):
        check_trajectory(broken, workflow="Search", task="17")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("no dict", "it is str"),
        (
            with_key("input_ids", torch.ones(2, 6, dtype=torch.int64)),
            r"lengths disagree: input_ids \[2, 6\], attention_mask \[2, 4\]",
        ),
        (with_key("input_ids", torch.ones(4, dtype=torch.int64)), r"'input_ids': its shape is \[4\]"),
        (with_key("rewards", torch.ones(3)), r"'rewards': its shape is \[3\] for 2 rows"),
        (with_key("rewards", [1.0, 2.0]), "'rewards': it is list"),
        (with_key("logprobs", whole()["logprobs"].double()), "'logprobs': its type is torch.float64"),
        (with_key("input_ids", whole()["input_ids"].int()), "'input_ids': its type is torch.int32"),
        (with_key("attention_mask", whole()["attention_mask"].long()), "'attention_mask': its type is torch.int64"),
        (with_value("attention_mask", (0, 1), False), "'attention_mask': a token after padding, first at row 0, position 1"),
        (with_value("attention_mask", (1, 0), False), "'attention_mask': row 1 does not begin with a token"),
        (with_value("loss_mask", (1, 3), 1), "'loss_mask': it covers padding, first at row 1, position 3"),
        (with_value("loss_mask", (0, 0), 1), "'loss_mask': row 0 trains its first token"),
        (with_value("loss_mask", (0, 1), 2), "'loss_mask': neither 0 nor 1, first at row 0, position 1"),
        (with_value("input_ids", (1, 1), -100), "'input_ids': a negative id, first at row 1, position 1"),
        (with_value("logprobs", (0, 2), float("nan")), "'logprobs': NaN, first at row 0, position 2"),
        (with_value("logprobs", (0, 2), -float("inf")), "'logprobs': infinite"),
        (with_value("logprobs", (0, 2), 0.4), "'logprobs': 0.4 at row 0, position 2"),
        (with_value("logprobs", (0, 1), -0.4), "'logprobs': not 0.0 outside loss_mask"),
        (with_value("versions", (0, 2), -1), "'versions': negative under loss_mask, first at row 0, position 2"),
        (with_value("versions", (1, 0), 4), "'versions': not -1 outside loss_mask"),
        (with_value("rewards", (1,), float("nan")), "'rewards': NaN, first at row 1"),
        (with_value("temperature", (0,), 0.0), "'temperature': not positive"),
        (with_key("token_rewards", torch.full((2, 4), float("inf"))), "'token_rewards': infinite"),
        (with_key("hidden", torch.ones(3, 4)), "'hidden': it has 3 entries for 2 rows"),
        (with_key("images", ["one"]), "'images': it has 1 entries for 2 rows"),
    ],
)
def test_a_breach_is_refused_and_named(broken, message):
    with pytest.raises(TrajectoryError, match=message):
        check_trajectory(broken, workflow="Search", task="17")
