"""Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119), and estimators that are called for each role."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright.algorithms.advantages import (
    baseline_and_scale,
    estimate_by_role,
    find_estimator,
    role_average,
    running_baselines,
)
from rollwright.config.recipes import apply_recipe
from rollwright.config.sections import NormConfig, PPOActorConfig
from rollwright.errors import ConfigError

DECAY = 0.95


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.floats(-1, 1), st.floats(0, 0.99))
def test_the_average_is_a_weighted_sum_of_earlier_rewards(rewards, start, decay):
    baselines, end = running_baselines(rewards, start, decay)
    for count, found in enumerate([*baselines, end]):
        weighted = sum((1 - decay) * decay ** (count - 1 - index) * rewards[index] for index in range(count))
        assert found == pytest.approx(decay**count * start + weighted, abs=1e-9)


def test_a_baseline_does_not_depend_on_its_own_reward():
    for last in (-1.0, 1.0):
        baselines, _ = running_baselines([1.0, -1.0, last], 0.25, DECAY)
        assert baselines[2] == pytest.approx(DECAY * (DECAY * 0.25 + 0.05) - 0.05)


def test_a_sample_of_several_rows_counts_once():
    memory = {}
    rewards, samples = torch.tensor([1.0, 0.0, 1.0, 0.5]), torch.tensor([7, 3, 7, 5])
    baselines, scales = role_average(rewards, samples, samples, memory=memory, decay=DECAY)
    after_first = 0.05  # sample 7, with mean reward 1
    assert baselines.tolist() == pytest.approx([0.0, after_first, 0.0, DECAY * after_first])
    assert scales.tolist() == [1.0] * 4
    assert memory["average"] == pytest.approx(DECAY * DECAY * after_first + 0.05 * 0.5)


def estimated(memories, rewards, roles, trainable=None, **config):
    rewards_B, roles_B = torch.tensor(rewards, dtype=torch.float64), torch.tensor(roles)
    count = torch.arange(len(rewards))
    trainable_B = torch.ones_like(roles_B, dtype=torch.bool) if trainable is None else torch.tensor(trainable)
    estimate = find_estimator(PPOActorConfig(**config))
    return estimate_by_role(estimate, rewards_B, torch.zeros_like(count), count, roles_B, trainable_B, memories)


def test_each_role_has_its_own_average_which_later_batches_continue():
    memories, rewards, roles = {}, [1.0, -1.0, 1.0, -1.0, 0.5, -0.5], [1, 2, 1, 2, 1, 2]
    config = {"adv_estimator": "role_average", "adv_estimator_kwargs": {"decay": 0.5}}
    whole, _ = estimated(memories, rewards, roles, **config)
    assert whole.tolist() == [0.0, 0.0, 0.5, -0.5, 0.75, -0.75]
    parts, again = [], {}
    for part in (slice(0, 2), slice(2, 6)):
        parts += estimated(again, rewards[part], roles[part], **config)[0].tolist()
    assert parts == whole.tolist()
    assert again == memories == {"1": {"average": 0.625}, "2": {"average": -0.625}}


@pytest.mark.parametrize("level", ["group", "batch"])
def test_no_mean_or_deviation_covers_two_sides_of_a_game(level):
    rewards, roles = [1.0, -1.0, 0.0, 0.0, 1.0, -1.0], [1, 2, 1, 2, 1, 2]
    baselines, scales = estimated({}, rewards, roles, adv_norm=NormConfig(mean_level=level, std_level=level))
    alone = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    for side, sign in ((0, 1.0), (1, -1.0)):
        expected = baseline_and_scale(sign * alone, torch.zeros(3), torch.arange(3), mean_level=level, std_level=level)
        assert torch.equal(baselines[side::2], expected[0])
        assert torch.equal(scales[side::2], expected[1])


def test_rows_of_players_that_are_not_trained_are_compared_with_nothing():
    memories = {}
    trainable = [True, False, True]
    baselines, scales = estimated(memories, [1.0, 9.0, 0.0], [1, 1, 1], trainable, adv_estimator="role_average")
    assert baselines.tolist() == pytest.approx([0.0, 0.0, 0.05])
    assert scales.tolist() == [1.0, 0.0, 1.0]
    assert memories["1"]["average"] == pytest.approx(0.05 * 0.95)


def test_the_recipe_is_its_estimator():
    config = apply_recipe(PPOActorConfig(recipe="rae"))
    assert config.adv_estimator == "role_average"


@pytest.mark.parametrize(
    ("kwargs", "message"), [({"decay": 1.0}, "decay"), ({"memory": {}}, "memory"), ({"alpha": 0.5}, "alpha")]
)
def test_wrong_arguments_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        find_estimator(PPOActorConfig(adv_estimator="role_average", adv_estimator_kwargs=kwargs))
