"""The example of several turns learns the better way to play: what docs/multi-turn.md says of it."""

from __future__ import annotations

from statistics import fmean

import pytest
from worlds.guessing import best_reward

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_example_learns_to_halve(run_example):
    shortened = ["stages.warmup.total_train_steps=300", "stages.grpo.total_train_steps=20"]  # of 500 and 60
    run = run_example("multi_turn", shortened=shortened)
    scores = run.evaluations
    best = best_reward(4, 0.9)
    assert scores["before"]["greedy"] < 0.5 * best
    assert scores["after"]["greedy"] > 0.75 * best
    assert scores["after"]["greedy"] < 1.1 * best
    steps = run.steps("rollout/solved")
    solved = [step["rollout/solved"] for step in steps]
    assert fmean(solved[:3]) < 0.6 < 0.8 < fmean(solved[-5:])
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-3
    dump = run.last_rollouts()
    assert "⟦<|user|>higher<|end|><|assistant|>⟧" in dump
    run.look_at()
