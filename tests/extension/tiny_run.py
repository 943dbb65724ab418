"""A tiny run on sums, by the command that users type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CONFIG = """
experiment_name: extension
trial_name: trial
cluster: {fileroot: runs}
stages:
  - {name: model, kind: model, path: "${run_dir}/model", architecture: qwen3, hidden_size: 32, layers: 1, heads: 2, kv_heads: 1,
     head_dim: 16, intermediate_size: 64, max_position_embeddings: 128, characters: "0123456789+-*= ", pieces: ["<answer>", "</answer>"]}
  - name: grpo
    kind: rl
    actor: {path: "${run_dir}/model", ACTOR}
    workflow: rollwright.workflows.rlvr.RLVRWorkflow
    reward_fn: numeric_reward
    gconfig: {n_samples: 2, max_new_tokens: 4}
    train_dataset: {path: arithmetic, split: train, batch_size: 2, kwargs: {digits: 1}}
    total_train_steps: 1
"""


def rollwright(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a directory whose modules can be imported."""
    paths = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(directory), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "rollwright", *arguments], cwd=directory, capture_output=True, text=True, env=environment
    )


def metrics_of_a_step(directory: Path, actor: str, *arguments: str) -> dict[str, float]:
    """Train one step with these keys of the actor; what the step reported."""
    (directory / "run.yaml").write_text(CONFIG.replace("ACTOR", actor))
    done = rollwright(directory, "run", "run.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    line = (directory / "runs/extension/trial/grpo/metrics.jsonl").read_text().splitlines()[0]
    return json.loads(line)
