"""The example of paths side by side learns, with branches that are exact: what docs/parallel-generation.md says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(2400)
def test_the_example_learns_to_add_on_two_paths(tmp_path):
    command = [sys.executable, "-m", "rollwright", "run", "examples/parallel_sums.yaml", f"cluster.fileroot={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "parallel_sums" / "trial"
    summary = json.loads((run / "summary.json").read_text())["eval"]
    assert summary["before"]["greedy"] < 0.5
    assert summary["after"]["greedy"] > summary["before"]["greedy"] + 0.2
    assert summary["after"]["mean@4"] > summary["before"]["mean@4"] + 0.15
    records = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "rollout/paths" in record]
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-3
    assert all(record["rollout/other_context_share"] == 0.0 for record in steps)
    assert steps[-1]["rollout/paths"] == 2.0
    dump = max((run / "grpo" / "rollouts").glob("step-*.txt")).read_text()
    assert "</Path>⟦\n<Path>\n2.⟧" in dump
