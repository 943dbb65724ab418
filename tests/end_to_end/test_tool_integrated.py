"""The example of tool-integrated reasoning learns to compute: what docs/tool-integrated.md says of it."""

from __future__ import annotations

from statistics import fmean

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]


@pytest.mark.timeout(1800)
def test_the_example_learns_to_compute(run_example):
    few = (f"stages.{name}.dataset.kwargs.size=128" for name in ("before", "after", "without_python"))  # of 256
    run = run_example("tool_integrated", *few, "stages.grpo.total_train_steps=12")  # of 30: by then it has learned
    scores = run.evaluations
    assert scores["before"]["greedy"] < 0.2
    assert scores["after"]["greedy"] >= 0.8
    assert scores["after"]["mean@4"] > 0.7 > 0.4 > scores["before"]["mean@4"]
    assert scores["without_python"]["greedy"] < 0.05
    steps = run.steps("rollout/scripts")
    scripts = [step["rollout/scripts"] for step in steps]
    assert scripts[0] < 0.6 < 0.85 < fmean(scripts[-5:])
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-3
    dump = run.last_rollouts()
    assert "</python>⟦<output>" in dump
