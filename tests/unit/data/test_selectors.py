"""Tasksets are drawn by their ratios, resume exactly, and learn from rewards."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.selectors import SELECTORS, Selector, TaskMixture, make_selector
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
    selector = make_selector(TasksetConfig(selector="shuffle"), 7, 1)
    epochs = [[selector.next() for _ in range(7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_difficulty_prefers_tasks_near_the_target():
    selector = make_selector(TasksetConfig(selector="difficulty", selector_args={"sharpness": 8.0}), 3, 1)
    for _ in range(10):
        selector.feedback(0, 1.0)
        selector.feedback(1, 0.5)
        selector.feedback(2, 0.0)
    counts = Counter(selector.next() for _ in range(500))
    assert counts[1] > 450


def test_wrong_use_is_told():
    with pytest.raises(ConfigError, match=r"'hardest' was not found.*difficulty, random, sequential, shuffle"):
        make_selector(TasksetConfig(selector="hardest"), 3, 1)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'target'"):
        make_selector(TasksetConfig(selector="random", selector_args={"target": 1}), 3, 1)
    with pytest.raises(DataError, match="fewer than a batch of 99"):
        mixture(batch_size=99)


def test_a_selector_of_the_users_own():
    @SELECTORS.register("test_newest_first")
    class NewestFirst(Selector):
        def _position(self, draw):
            return self.size - 1 - draw % self.size

    try:
        selector = make_selector(TasksetConfig(selector="test_newest_first"), 3, 1)
        assert [selector.next() for _ in range(4)] == [2, 1, 0, 2]
    finally:
        del SELECTORS["test_newest_first"]
