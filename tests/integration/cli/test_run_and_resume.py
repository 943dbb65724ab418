"""A run of several stages as a process: stopped in the third, it goes on there; finished, it is not run again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

TEXT = """\
experiment_name: cli
cluster: {fileroot: FILEROOT, threads: 1}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: numeric_reward
gconfig: {n_samples: 2, max_new_tokens: 8}
stages:
  - {kind: model, name: model, path: "${run_dir}/model", layers: 1, hidden_size: 32, heads: 2, characters: "0123456789+= "}
  - kind: sft
    name: warmup
    model: {path: "${run_dir}/model"}
    train_dataset: {path: arithmetic, batch_size: 4, kwargs: {answer_format: "{answer}"}}
    total_train_steps: 2
  - kind: rl
    name: grpo
    actor: {path: "${run_dir}/warmup/checkpoints/final"}
    train_dataset: {path: arithmetic, batch_size: 4}
    total_train_steps: 100000
    recover: {every_steps: 1}
  - {kind: eval, name: after, path: "${run_dir}/grpo/checkpoints/final", dataset: {path: arithmetic, limit: 4}, samples: 2}
"""


def steps(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_stopped_resumed_finished(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(TEXT.replace("FILEROOT", str(tmp_path / "runs")))
    run = tmp_path / "runs" / "cli" / "trial"
    command = [sys.executable, "-m", "rollwright", "run", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 200
        while first.poll() is None and len(steps(run / "grpo" / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(200) == 128 + signal.SIGTERM, (tmp_path / "first.log").read_text()
    stopped = max(steps(run / "grpo" / "metrics.jsonl"))
    assert set(json.loads((run / "stages.json").read_text())) == {"model", "warmup", "checksum"}

    again = [*command, f"stages.grpo.total_train_steps={stopped + 2}"]
    second = subprocess.run(again, capture_output=True, text=True, timeout=200, env=environment)
    assert second.returncode == 0, second.stderr
    assert "stage warmup was finished before" in second.stderr
    said = [
        "3/4 grpo ──",
        "4 tasks × 2 samples a step",
        "4/4 after ──",
        " over 4 tasks",
        "where to look",
        f"rollwright view {run}",
        "samples to read",
    ]
    places = [second.stdout.find(each) for each in said]
    assert places == sorted(places), second.stdout
    assert -1 not in places, second.stdout
    assert "Loading weights" not in second.stdout + second.stderr
    assert sorted(set(steps(run / "grpo" / "metrics.jsonl"))) == list(range(1, stopped + 3))
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["eval"]) == {"after"}
    for score in ("greedy", "mean@2"):
        assert "── completion" in (run / "after" / "rollouts" / f"{score}-000000.txt").read_text()
    assert set(summary["seconds"]) == {"model", "warmup", "grpo", "after"}

    third = subprocess.run(again, capture_output=True, text=True, timeout=200, env=environment)
    assert third.returncode == 0
    (line,) = third.stdout.splitlines()
    assert line.startswith(f"nothing to do: {run} holds a run that began")
    assert "has finished" in line
