"""The example of several turns learns the better way to play: what docs/multi-turn.md says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollwright.environments.guessing import best_reward

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_example_learns_to_halve(tmp_path):
    command = [sys.executable, "-m", "rollwright", "run", "examples/multi_turn.yaml", f"cluster.fileroot={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "multi_turn" / "trial"
    summary = json.loads((run / "summary.json").read_text())
    best = best_reward(4, 0.9)
    assert summary["eval"]["before"]["greedy"] < 0.5 * best
    assert summary["eval"]["after"]["greedy"] > 0.75 * best
    assert summary["eval"]["after"]["greedy"] < 1.1 * best
    records = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "rollout/solved" in record]
    assert steps[0]["rollout/solved"] < 0.6 < 0.8 < steps[-1]["rollout/solved"]
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-4
    dump = max((run / "grpo" / "rollouts").glob("step-*.txt")).read_text()
    assert "⟦<|user|>higher<|end|><|assistant|>⟧" in dump
