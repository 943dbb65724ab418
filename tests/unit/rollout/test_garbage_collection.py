"""Collections are rarer while an executor runs, and as before when the last one has ended."""

import gc

import pytest
from echo import EchoEngine

from rollwright.rollout.event_loop import GC_THRESHOLDS
from rollwright.rollout.executor import RolloutExecutor


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def running() -> RolloutExecutor:
    executor = RolloutExecutor(EchoEngine())
    executor._start()
    executor._call(lambda: None)  # the loop runs
    return executor


def test_thresholds_are_set_while_any_executor_runs(thresholds):
    thresholds(700, 10, 10)
    first, second = running(), running()
    assert gc.get_threshold() == GC_THRESHOLDS
    first.destroy()
    assert gc.get_threshold() == GC_THRESHOLDS
    second.destroy()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(50_000, 10, 10), (0, 10, 10)])
def test_a_process_that_collects_more_rarely_keeps_its_way(thresholds, own):
    thresholds(*own)
    with running():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_thresholds_set_meanwhile_stay(thresholds):
    thresholds(700, 10, 10)
    with running():
        thresholds(1_000, 5, 5)
    assert gc.get_threshold() == (1_000, 5, 5)
