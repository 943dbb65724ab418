"""Importance ratios, the behaviour weight and what is measured of them."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rollwright.algorithms.losses import behaviour_weight, importance_ratio, interpolated_prox_logp, turn_index
from rollwright.errors import ConfigError


def test_turns_are_runs_of_trained_tokens():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]])
    assert turn_index(mask).tolist() == [[1, 1, 0, 2, 0, 0, 3], [0] * 7]


def by_hand(logp: list[float], old: list[float], mask: list[int], level: str) -> list[float]:
    """The ratio of each token, one by one: the exponential of the mean log-ratio of the tokens that it is pooled with."""
    trained = [index for index, trains in enumerate(mask) if trains]
    turns: list[list[int]] = []
    for index in trained:
        if turns and turns[-1][-1] == index - 1:
            turns[-1].append(index)
        else:
            turns.append([index])
    row = [trained] if trained else []
    pools = {"token": [[index] for index in trained], "turn": turns, "sequence": row, "sequence_product": row}[level]
    ratios = [1.0] * len(mask)
    for pool in pools:
        total = sum(logp[index] - old[index] for index in pool)
        mean = max(-20.0, min(20.0, total)) if level == "sequence_product" else total / len(pool)
        for index in pool:
            ratios[index] = math.exp(mean)
    return ratios


@given(
    rows=st.lists(
        st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 1)), min_size=6, max_size=6),
        min_size=1,
        max_size=4,
    ),
    level=st.sampled_from(["token", "turn", "sequence", "sequence_product"]),
    cap=st.floats(0.1, 20.0),
    mode=st.sampled_from(["mask", "clamp"]),
)
def test_ratios_and_behaviour_weights_at_every_level_are_those_made_by_hand(rows, level, cap, mode):
    logp, old, mask = (torch.tensor([[token[part] for token in row] for row in rows], dtype=torch.float64) for part in range(3))
    expected = torch.tensor(
        [by_hand([t[0] for t in row], [t[1] for t in row], [t[2] for t in row], level) for row in rows], dtype=torch.float64
    )
    torch.testing.assert_close(importance_ratio(logp, old, mask, level), expected, rtol=1e-9, atol=1e-12)
    weight, capped = behaviour_weight(logp, old, mask, cap=cap, mode=mode, level=level)
    over = expected > cap
    kept = expected.clamp(max=cap) if mode == "clamp" else expected * ~over
    near = (expected / cap - 1).abs() < 1e-9  # either side of the cap is right within rounding
    torch.testing.assert_close(weight[~near], (kept * mask)[~near], rtol=1e-9, atol=1e-12)
    assert torch.equal(capped[~near], (over & mask.bool())[~near])


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_what_is_not_trained_does_not_count(level):
    logp, old = torch.zeros(1, 4), torch.tensor([[100.0, -1.0, 100.0, -1.0]])
    ratio = importance_ratio(logp, old, torch.tensor([[0.0, 1.0, 0.0, 1.0]]), level)
    assert ratio[0].tolist() == pytest.approx([1.0, math.e, 1.0, math.e])


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="token, turn, sequence"):
        importance_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "word")


def test_the_cap_masks_or_clamps():
    prox = torch.tensor([[0.0, math.log(2.0), math.log(9.0), 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    masked, capped = behaviour_weight(prox, torch.zeros(1, 4), mask, cap=5.0, mode="mask")
    clamped, _ = behaviour_weight(prox, torch.zeros(1, 4), mask, cap=5.0, mode="clamp")
    free, none = behaviour_weight(prox, torch.zeros(1, 4), mask, cap=None, mode="mask")
    assert masked[0].tolist() == pytest.approx([1, 2, 0, 0])
    assert clamped[0].tolist() == pytest.approx([1, 2, 5, 0])
    assert free[0].tolist() == pytest.approx([1, 2, 9, 0])
    assert capped[0].tolist() == [False, False, True, False]
    assert not none.any()


def test_no_gradient_flows_through_the_behaviour_weight():
    prox = torch.zeros(1, 2, requires_grad=True)
    weight, _ = behaviour_weight(prox, torch.zeros(1, 2), torch.ones(1, 2), cap=None, mode="clamp")
    assert not weight.requires_grad


def test_interpolation_moves_with_age():
    logp, behaviour = torch.full((1, 3), -1.0), torch.full((1, 3), -3.0)
    got = interpolated_prox_logp(logp, behaviour, torch.tensor([[5, 4, 2]]), current_version=5)
    alpha = [0.0, (5 - 1 - 4) / (5 - 4), (5 - 1 - 2) / (5 - 2)]  # AReaL: (v - 1 - v_b) / (v - v_b)
    assert got[0].tolist() == pytest.approx([-3.0 + 2.0 * share for share in alpha])


def test_a_sequences_weight_is_a_product_or_its_geometric_mean():
    """verl's sequence-level weight e^(sum of differences), capped at 2, and the length-normalised one."""
    prox, behaviour = torch.tensor([[0.0, 0.3, 0.1, 0.2]]), torch.zeros(1, 4)
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    product, _ = behaviour_weight(prox, behaviour, mask, cap=None, mode="clamp", level="sequence_product")
    mean, _ = behaviour_weight(prox, behaviour, mask, cap=None, mode="clamp", level="sequence")
    capped, over = behaviour_weight(2 * prox, behaviour, mask, cap=2.0, mode="clamp", level="sequence_product")
    assert product[0].tolist() == pytest.approx([0.0] + [math.exp(0.6)] * 3)
    assert mean[0].tolist() == pytest.approx([0.0] + [math.exp(0.2)] * 3)
    assert capped[0].tolist() == pytest.approx([0.0, 2.0, 2.0, 2.0])
    assert over[0].tolist() == [False, True, True, True]
