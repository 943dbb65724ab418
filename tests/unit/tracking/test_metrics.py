"""Metrics: reductions, scopes, threads."""

import asyncio
import math
import statistics
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.tracking.metrics import MetricError, MetricsTracker, get_tracker

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1))
def test_reductions_agree_with_the_standard_library(values):
    tracker = MetricsTracker()
    for value in values:
        tracker.scalar(mean=value)
        tracker.sum(total=value)
        tracker.minimum(low=value)
        tracker.maximum(high=value)
        tracker.gauge(last=value)
    tracker.histogram(spread=values)
    got = tracker.export()
    assert got["mean"] == pytest.approx(math.fsum(values) / len(values), abs=1e-6)
    assert got["total"] == pytest.approx(math.fsum(values), abs=1e-6)
    assert (got["low"], got["high"], got["last"]) == (min(values), max(values), values[-1])
    assert got["spread/p50"] == pytest.approx(statistics.median(values), abs=1e-6)
    assert got["spread/std"] == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(numbers, st.floats(0.1, 100)), min_size=1))
def test_weighted_mean(pairs):
    tracker = MetricsTracker()
    for value, weight in pairs:
        tracker.weighted(weight, loss=value)
    expected = math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
    assert tracker.export()["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_scopes_nest_and_views_share_the_numbers():
    tracker = MetricsTracker()
    with tracker.scope("train"), tracker.scope("actor"):
        tracker.scalar(loss=1.0)
    tracker.get("train").get("actor").scalar(loss=3.0)
    assert tracker.get("train").export(reset=False) == {"train/actor/loss": 2.0}
    assert tracker.get("rollout").export() == {}
    assert tracker.export() == {"train/actor/loss": 2.0}
    assert tracker.export() == {}


def test_export_of_a_scope_leaves_the_others():
    tracker = MetricsTracker()
    tracker.get("a").scalar(x=1)
    tracker.get("b").scalar(x=2)
    assert tracker.get("a").export(reset=True) == {"a/x": 1.0}
    assert tracker.export() == {"b/x": 2.0}


async def test_a_scope_belongs_to_the_task_that_opened_it():
    tracker = MetricsTracker()

    async def report(name: str, value: float) -> None:
        with tracker.scope(name):
            await asyncio.sleep(0.001)
            tracker.scalar(reward=value)

    await asyncio.gather(*(report(f"task{i}", float(i)) for i in range(5)))
    assert tracker.export() == {f"task{i}/reward": float(i) for i in range(5)}


def test_no_report_of_many_threads_is_lost():
    tracker = MetricsTracker()

    def report() -> None:
        for _ in range(2000):
            tracker.sum(count=1)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    exported = 0.0
    while any(thread.is_alive() for thread in threads):
        exported += tracker.export().get("count", 0.0)
    assert exported + tracker.export().get("count", 0.0) == 8000


def test_tensors_and_nan_are_taken():
    torch = pytest.importorskip("torch")
    tracker = MetricsTracker()
    tracker.scalar(loss=torch.tensor([1.0, 3.0]), one=torch.tensor(4))
    tracker.maximum(worst=float("nan"))
    tracker.maximum(worst=1.0)
    got = tracker.export()
    assert got["loss"] == 2.0
    assert got["one"] == 4.0
    assert math.isnan(got["worst"])


def test_a_name_keeps_its_reduction():
    tracker = MetricsTracker()
    tracker.scalar(x=1)
    with pytest.raises(MetricError, match="'x' was reported as scalar and now as sum"):
        tracker.sum(x=1)
    with pytest.raises(MetricError, match="is no number"):
        tracker.scalar(y="high")


def test_the_process_has_one_tracker():
    get_tracker("unit").gauge(a=1)
    assert get_tracker().get("unit").export() == {"unit/a": 1.0}


@given(st.lists(st.lists(numbers, max_size=4), min_size=1, max_size=4))
def test_what_several_processes_reported_is_what_one_would_have(parts):
    whole, merged = MetricsTracker(), MetricsTracker()
    for values in parts:
        process = MetricsTracker()
        for tracker in (whole, process):
            for value in values:
                tracker.scalar(mean=value)
                tracker.sum(total=value)
                tracker.minimum(low=value)
                tracker.maximum(high=value)
                tracker.gauge(last=value)
                tracker.histogram(spread=value)
        merged.merge(process.take())
        assert not process.export()
    expected = whole.export()
    got = merged.export()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-6), name
