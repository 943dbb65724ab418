"""The example of tool-integrated reasoning learns to compute: what docs/tool-integrated.md says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_the_example_learns_to_compute(tmp_path):
    command = [sys.executable, "-m", "rollwright", "run", "examples/tool_integrated.yaml", f"cluster.fileroot={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "tool_integrated" / "trial"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval"]["before"]["greedy"] < 0.2
    assert summary["eval"]["after"]["greedy"] >= 0.8
    assert summary["eval"]["after"]["mean@4"] > 0.7 > 0.4 > summary["eval"]["before"]["mean@4"]
    assert summary["eval"]["without_python"]["greedy"] < 0.05
    records = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "rollout/scripts" in record]
    assert steps[0]["rollout/scripts"] < 0.6 < 0.9 < steps[-1]["rollout/scripts"]
    assert max(record["actor/logprob_difference/max"] for record in steps) < 1e-4
    dump = max((run / "grpo" / "rollouts").glob("step-*.txt")).read_text()
    assert "</python>⟦<output>" in dump
