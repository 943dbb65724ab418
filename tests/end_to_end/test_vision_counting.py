"""The vision example learns to count: what docs/vision.md says of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_example_learns_to_count(run_example):
    run = run_example("vision_counting")
    scores = run.evaluations
    assert scores["before"]["greedy"] < 0.6
    assert scores["after"]["greedy"] >= max(0.8, scores["before"]["greedy"] + 0.25)
    differences = [record["actor/logprob_difference/max"] for record in run.steps("actor/logprob_difference/max")]
    assert differences
    assert max(differences) < 1e-3
    assert (run.directory / "grpo" / "checkpoints" / "final" / "preprocessor_config.json").exists()
