"""Advantages against formulas written out sample by sample, in float64."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.algorithms.advantages import baseline_and_scale, groups_without_variance, returns_to_go
from rollwright.errors import ConfigError


def normalised_rewards(rewards, group_ids, sample_ids, **levels):
    baseline, scale = baseline_and_scale(rewards, group_ids, sample_ids, **levels)
    return ((rewards.double() - baseline) * scale).to(rewards.dtype)


def ids(*values):
    return torch.tensor(values)


def test_group_normalisation_is_the_z_score_of_each_group():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.5, 2.0, -1.0], dtype=torch.float64)
    got = normalised_rewards(rewards, ids(7, 7, 7, 3, 3, 3), torch.arange(6), eps=1e-9)
    for rows in ([0, 1, 2], [3, 4, 5]):
        values = [float(rewards[row]) for row in rows]
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        for row in rows:
            assert float(got[row]) == pytest.approx((float(rewards[row]) - mean) / deviation, abs=1e-7)


def test_a_sample_of_several_rows_counts_once():
    # Sample 0 has four rows of reward 1, samples 1 and 2 one row of reward 0: the mean is 1/3, not 4/6.
    rewards = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    got = normalised_rewards(rewards, torch.zeros(6).long(), ids(0, 0, 0, 0, 1, 2), std_level="none")
    assert got.tolist() == pytest.approx([2 / 3] * 4 + [-1 / 3] * 2)
    scaled = normalised_rewards(rewards, torch.zeros(6).long(), ids(0, 0, 0, 0, 1, 2), eps=1e-12)
    assert scaled[0].item() == pytest.approx((2 / 3) / math.sqrt(2 / 9))


def test_leave_one_out_compares_with_the_others():
    rewards = torch.tensor([0.0, 1.0, 5.0, 2.0], dtype=torch.float64)
    got = normalised_rewards(rewards, torch.zeros(4).long(), torch.arange(4), std_level="none", leave_one_out=True)
    expected = [value - (sum(rewards.tolist()) - value) / 3 for value in rewards.tolist()]
    assert got.tolist() == pytest.approx(expected)


def test_leave_one_out_leaves_out_all_rows_of_the_sample():
    rewards = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)  # rows 0 and 1 are one sample of mean 3
    got = normalised_rewards(rewards, torch.zeros(3).long(), ids(0, 0, 1), std_level="none", leave_one_out=True)
    assert got.tolist() == pytest.approx([4 - 1, 2 - 1, 1 - 3])


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std_level", ["group", "batch", "none"])
def test_a_group_of_one_gets_zero_and_not_its_reward(std_level, leave_one_out):
    rewards = torch.tensor([3.0, 0.0, 1.0])
    got = normalised_rewards(rewards, ids(0, 1, 1), torch.arange(3), std_level=std_level, leave_one_out=leave_one_out)
    assert got[0] == 0
    assert got[1] < 0 < got[2]


@pytest.mark.parametrize("mean_level", ["group", "batch", "none"])
@pytest.mark.parametrize("std_level", ["group", "batch"])
def test_no_variance_gives_zero_whatever_rounding_does(mean_level, std_level):
    rewards = torch.full((6,), 0.1)
    got = normalised_rewards(rewards, ids(0, 0, 0, 1, 1, 1), torch.arange(6), mean_level=mean_level, std_level=std_level)
    assert got.abs().max() == 0


def test_group_mean_with_the_batch_deviation():
    rewards = torch.tensor([0.0, 1.0, 4.0, 6.0], dtype=torch.float64)
    got = normalised_rewards(rewards, ids(0, 0, 1, 1), torch.arange(4), std_level="batch", eps=1e-12)
    deviation = statistics.pstdev(rewards.tolist())
    assert got.tolist() == pytest.approx([value / deviation for value in (-0.5, 0.5, -1.0, 1.0)])


def test_the_deviation_of_centred_rewards_is_reinforce_plus_plus_baselines():
    """arXiv 2501.03262: rewards less their group's mean, over the batch's deviation of those."""
    groups = [[10.0, 10.0, 10.0, 9.0], [0.0, 0.0, 0.0, 1.0]]
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()
    centred = [value - statistics.fmean(group) for group in groups for value in group]
    deviation = statistics.pstdev(centred)
    group_ids = torch.arange(8) // 4
    got = normalised_rewards(rewards, group_ids, torch.arange(8), std_level="batch", std_after_mean=True, eps=1e-12)
    assert got.tolist() == pytest.approx([value / deviation for value in centred])
    assert got[0].item() == pytest.approx(0.577, abs=1e-3)
    raw = normalised_rewards(rewards, group_ids, torch.arange(8), std_level="batch", eps=1e-12)  # Lite PPO's
    assert raw.tolist() == pytest.approx([value / statistics.pstdev(rewards.tolist()) for value in centred])


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match=r"mean_level.*'task'"):
        normalised_rewards(torch.zeros(1), torch.zeros(1).long(), torch.zeros(1).long(), mean_level="task")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(-5, 5)), min_size=1, max_size=20))
def test_repeating_the_rows_of_every_sample_changes_nothing(rows):
    groups = torch.tensor([group for group, _, _ in rows])
    samples = torch.tensor([group * 10 + sample for group, sample, _ in rows])
    rewards = torch.tensor([reward for _, _, reward in rows], dtype=torch.float64)
    once = normalised_rewards(rewards, groups, samples)
    thrice = normalised_rewards(rewards.repeat(3), groups.repeat(3), samples.repeat(3))
    torch.testing.assert_close(thrice, once.repeat(3), atol=1e-6, rtol=1e-6)


def test_returns_to_go():
    rewards = torch.tensor([[0.0, 1.0, 2.0, 4.0]])
    assert returns_to_go(rewards, torch.tensor([[1.0, 1.0, 1.0, 0.0]])).tolist() == [[3.0, 3.0, 2.0, 0.0]]


def test_groups_without_variance():
    without, groups = groups_without_variance(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5]), ids(0, 0, 1, 1, 2))
    assert (float(without), float(groups)) == (2.0, 3.0)
