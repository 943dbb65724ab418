"""Modes as processes: explore and train on one store do what both does in one process; tests/faults kills them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sqlalchemy")

from mode_processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run_of(warm, tmp_path, tiny_model):
    runs = []

    def make(steps: int) -> Run:
        runs.append(Run(warm, tmp_path, tiny_model, steps))
        return runs[-1]

    yield make
    for run in runs:
        run.stop()


def test_two_processes_learn_what_one_does(run_of):
    run = run_of(4)
    one = run.start("trial_name=alone")
    parts = run.start("mode=explore", "store={}"), run.start("mode=train", "store={}")
    run.finished(one, *parts)
    alone = Run.rewards(run, "../alone")
    assert sorted(alone) == [1, 2, 3, 4]
    assert run.rewards("trainer") == pytest.approx(alone, abs=1e-6)  # the same tasks, seeds and weights, step by step
    (explorer,) = run.trial.glob("explorer-*")
    assert "eval/reward" in (explorer / "metrics.jsonl").read_text()

    bench = run.start("mode=bench", "store={}")
    run.finished(bench)
    (result,) = run.trial.glob("bench-*/bench.json")
    labels = [each["label"] for each in json.loads(result.read_text())["benchmarks"]]
    assert labels == ["start", "trainer/checkpoints/step-000002", "trainer/checkpoints/step-000004"]  # which is the final one
