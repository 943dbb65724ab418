"""mean@k and pass@k against the definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.trainers.loops.evaluation import pass_at_k, scores_by_task


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(samples, data):
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [True] * passed + [False] * (samples - passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_scores_of_several_tasks():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 1.0]]
    scores = scores_by_task("mean@4", rewards, pass_at=[1, 2, 8], pass_reward=1.0)
    assert scores == {"mean@4": [0.25, 0.875], "pass@1": [0.25, 0.75], "pass@2": pytest.approx([0.5, 1.0])}


def test_more_than_there_are_samples_cannot_be_told():
    with pytest.raises(ConfigError, match="pass@9 cannot be told from 8 samples"):
        pass_at_k(8, 4, 9)
