"""The vision example learns to count: what docs/vision.md says of it."""

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
def test_the_example_learns_to_count(tmp_path):
    command = [sys.executable, "-m", "rollwright", "run", "examples/vision_counting.yaml", f"cluster.fileroot={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "vision_counting" / "trial"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval"]["before"]["greedy"] < 0.5
    assert summary["eval"]["after"]["greedy"] >= 0.8
    records = [json.loads(line) for line in (run / "grpo" / "metrics.jsonl").read_text().splitlines()]
    differences = [record["actor/logprob_difference/max"] for record in records if "actor/logprob_difference/max" in record]
    assert differences
    assert max(differences) < 1e-4
    assert (run / "grpo" / "checkpoints" / "final" / "preprocessor_config.json").exists()
