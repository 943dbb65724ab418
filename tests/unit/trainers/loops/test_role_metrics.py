"""Metrics of games of several players: each role's own, and none of an opponent that is not trained."""

import pytest
import torch

from rollwright.trainers.loops.evaluation import rewards_by_role
from rollwright.trainers.loops.reporting import role_metrics, sample_means


def batch(**columns):
    rows = 6
    return {
        "input_ids": torch.ones(rows, 4, dtype=torch.int64),
        "loss_mask": torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]),
        "rewards": torch.tensor([1.0, -1.0, -1.0, 1.0, 0.5, -0.5]),
        "group_ids": torch.tensor([0, 0, 0, 0, 1, 1]),
        "sample_ids": torch.tensor([0, 0, 1, 1, 0, 0]),
        **columns,
    }


def test_rewards_and_tokens_are_told_by_role():
    found = role_metrics(batch(role=["first", "second"] * 3, trainable=torch.tensor([1, 1, 1, 0, 1, 0]).bool()))
    assert found == pytest.approx(
        {
            "reward/first": 0.5 / 3,
            "response_tokens/first": 2.0,
            "rows/first": 3.0,
            "reward/second": -1.0,
            "response_tokens/second": 1.0,
            "rows/second": 1.0,
        }
    )


def test_a_role_is_named_with_its_environment_if_there_are_several():
    found = role_metrics(batch(role=["first", "second"] * 3, environment=["nim"] * 4 + ["kuhn"] * 2))
    names = {name.removeprefix("reward/") for name in found if name.startswith("reward/")}
    assert names == {"nim/first", "nim/second", "kuhn/first", "kuhn/second"}


def test_batches_without_roles_have_no_such_metrics():
    assert role_metrics(batch()) == {}


def test_an_opponents_reward_is_not_in_a_samples_mean():
    one_sided = batch(trainable=torch.tensor([True, False, False, True, True, False]))
    assert sample_means(one_sided, one_sided["rewards"]).tolist() == [1.0, 1.0, 0.5]
    both = batch()
    assert sample_means(both, both["rewards"]).tolist() == [0.0, 0.0, 0.0]


def test_a_sample_without_a_trained_row_counts_with_all_its_rows():
    none = batch(trainable=torch.tensor([True, False, False, False, True, False]))
    none["rewards"] = torch.tensor([1.0, 0.0, 3.0, 1.0, 0.0, 0.0])
    assert sample_means(none, none["rewards"]).tolist() == [1.0, 2.0, 0.0]


def test_an_evaluation_tells_the_rewards_of_each_role_by_task():
    found = rewards_by_role(batch(role=["first", "second"] * 3, trainable=torch.tensor([1, 1, 1, 0, 1, 0]).bool()))
    assert found == {"first": [[1.0, -1.0], [0.5]], "second": [[-1.0]]}
    assert rewards_by_role(batch()) == {}
