"""Tasksets are drawn by their ratios, resume exactly, and learn from rewards."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.mixture import TaskMixture
from rollwright.data.selectors import SELECTORS, make_selector
from rollwright.errors import ConfigError, DataError


def mixture(ratios=(1.0, 3.0), selector="shuffle", batch_size=4):
    tasksets = [TasksetConfig(name=f"t{i}", ratio=ratio, selector=selector) for i, ratio in enumerate(ratios)]
    rows = [[{"question": f"{i}/{j}"} for j in range(5)] for i in range(len(ratios))]
    return TaskMixture(tasksets, rows, batch_size)


def test_ratios_hold_in_every_stretch():
    tasks = mixture()
    drawn = [row["taskset"] for _ in range(10) for row in tasks.draw()]
    for start in range(0, len(drawn) - 4, 4):
        assert Counter(drawn[start : start + 4]) == {"t0": 1, "t1": 3}


@given(st.sampled_from(sorted(SELECTORS)), st.integers(0, 20))
def test_a_resumed_mixture_goes_on_exactly(selector, batches):
    first, second = mixture(selector=selector), mixture(selector=selector)
    for _ in range(batches):
        for row in first.draw():
            first.feedback(row["ordinal"], row["ordinal"] % 3 / 2)
    second.load_state_dict(first.state_dict())
    assert second.draw() == first.draw()


def test_shuffled_draws_every_row_once_an_epoch():
    selector = make_selector("shuffle", 7, 1, {})
    epochs = [[selector.next() for _ in range(7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_difficulty_prefers_tasks_near_the_target():
    selector = make_selector("difficulty", 3, 1, {"sharpness": 8.0})
    for _ in range(10):
        selector.feedback(0, 1.0)
        selector.feedback(1, 0.5)
        selector.feedback(2, 0.0)
    counts = Counter(selector.next() for _ in range(500))
    assert counts[1] > 450


def test_wrong_use_is_told():
    with pytest.raises(ConfigError, match="there are sequential, shuffle, random, difficulty"):
        make_selector("hardest", 3, 1, {})
    with pytest.raises(ConfigError, match="cannot take selector_args"):
        make_selector("random", 3, 1, {"target": 1})
    with pytest.raises(DataError, match="fewer than a batch of 99"):
        mixture(batch_size=99)
