"""The example of paths side by side learns, with branches that are exact: what docs/parallel-generation.md says of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.timeout(2400)
def test_the_example_learns_to_add_on_two_paths(run_example):
    shortened = [f"stages.{name}.dataset.kwargs.size=128" for name in ("before", "after")]  # of 256
    run = run_example("parallel_sums", shortened=[*shortened, "stages.grpo.total_train_steps=40"])  # of 60
    scores = run.evaluations
    assert scores["before"]["greedy"] < 0.6
    assert scores["after"]["greedy"] > scores["before"]["greedy"] + (0.2 if run.is_whole else 0.1)
    assert scores["after"]["mean@4"] > scores["before"]["mean@4"] + (0.15 if run.is_whole else 0.08)
    steps = run.steps("rollout/paths")
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-3
    assert all(record["rollout/other_context_share"] == 0.0 for record in steps)
    assert steps[-1]["rollout/paths"] > 1.9
    dump = run.last_rollouts()
    assert "</Path>⟦\n<Path>\n2.⟧" in dump
    run.look_at()
    run.replay()
