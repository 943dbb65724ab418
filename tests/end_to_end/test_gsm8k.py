"""The GSM8K example on real rows, with a tiny model that cannot solve them: the reward stays 0, everything else works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_the_example_is_short():
    assert len((REPOSITORY / "examples" / "gsm8k_grpo.yaml").read_text().splitlines()) <= 35


def test_two_steps_on_gsm8k(shared, tiny_model, tmp_path):
    rows = shared("data/gsm8k/train.jsonl")
    command = [
        *(sys.executable, "-m", "rollwright", "run", "examples/gsm8k_grpo.yaml"),
        *(f"actor.path={tiny_model}", f"train_dataset.path={rows}", "valid_dataset=null", "evaluator.every_steps=null"),
        *("train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=16", "total_train_steps=2"),
        *("reward_fn=accuracy_reward", f"cluster.fileroot={tmp_path}"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "gsm8k-grpo" / "trial"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "reward" in record] == [1, 2]
    assert {record["reward"] for record in records if "reward" in record} == {0.0}
    assert (run / "checkpoints" / "final" / "model.safetensors").exists()
