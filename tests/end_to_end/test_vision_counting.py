"""The vision example learns to count: what docs/vision.md says of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_example_learns_to_count(run_example):
    run = run_example("vision_counting", shortened=["stages.grpo.total_train_steps=32"])  # of 40
    scores = run.evaluations
    assert scores["before"]["greedy"] < 0.6
    # After 32 steps: 1.0 greedily, from 0.40, and 0.83 of samples, from 0.05. After 28 it was 0.61 to 0.81, as processors differ.
    assert scores["after"]["greedy"] >= max(0.8 if run.is_whole else 0.65, scores["before"]["greedy"] + 0.2)
    assert scores["after"]["mean@4"] > scores["before"]["mean@4"] + 0.1
    differences = [record["actor/logprob_difference/max"] for record in run.steps("actor/logprob_difference/max")]
    assert differences
    assert max(differences) < 1e-3
    assert (run.directory / "grpo" / "checkpoints" / "final" / "preprocessor_config.json").exists()
    run.replay()
