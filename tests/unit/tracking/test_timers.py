"""Phases: no second counted twice."""

import json
import threading

import pytest

from rollwright.tracking.metrics import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_inner_phases_are_taken_out_of_the_outer():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("generate"):
        clock.now += 2
        with timer.phase("reward"):
            clock.now += 3
            with timer.phase("publish"):
                clock.now += 1
        clock.now += 4
        assert timer.current == "generate"
    with timer.phase("train"):
        clock.now += 5
    assert timer.current is None
    assert timer.export() == {"publish": 1, "reward": 3, "generate": 6, "train": 5}
    assert timer.export() == {}
    assert sum(timer.totals.values()) == clock.now - 100


def test_a_phase_that_raises_is_counted_and_left():
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def fail():
        with timer.phase("train"):
            clock.now += 1
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert timer.export() == {"train": 1}
    assert timer.current is None


def test_threads_have_their_own_nesting():
    timer = PhaseTimer()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with timer.phase("reward"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with timer.phase("generate"):
        thread.start()
        inside.wait(60)
        leave.set()
        thread.join()
    seconds = timer.export()
    assert seconds["generate"] >= seconds["reward"]


def test_the_trace_is_what_chrome_reads(tmp_path):
    clock = Clock()
    timer = PhaseTimer(max_events=2, clock=clock)
    for name in ("a", "b", "c"):
        with timer.phase(name):
            clock.now += 0.5
    timer.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["name"], event["ph"], event["ts"], event["dur"]) for event in events] == [
        ("b", "X", 0.5e6, 0.5e6),
        ("c", "X", 1.0e6, 0.5e6),
    ]
