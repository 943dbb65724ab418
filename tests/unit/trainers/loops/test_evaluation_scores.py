"""mean@k and pass@k against the definition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import ConfigError
from rollwright.trainers.loops.evaluation import pass_at_k, scores_of


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_sample(samples, data):
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [True] * passed + [False] * (samples - passed)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_scores_of_several_tasks():
    scores = scores_of([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 1.0]], pass_at=[1, 2, 8], pass_reward=1.0)
    assert scores == pytest.approx({"mean@4": 4.5 / 8, "pass@1": (1 / 4 + 3 / 4) / 2, "pass@2": (0.5 + 1.0) / 2})


def test_more_than_there_are_samples_cannot_be_told():
    with pytest.raises(ConfigError, match="pass@9 cannot be told from 8 samples"):
        pass_at_k(8, 4, 9)
