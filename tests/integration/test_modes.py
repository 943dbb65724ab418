"""Modes as processes: explore and train on one store do what both does in one process, also when the trainer is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT = 240.0

CONFIG = """
experiment_name: modes
trial_name: trial
cluster: {{fileroot: {root}}}
actor: {{path: {model}, optimizer: {{lr: 1.0e-3}}}}
gconfig: {{n_samples: 4, max_new_tokens: 8}}
train_dataset: {{path: arithmetic, split: train, batch_size: 4, kwargs: {{digits: 1}}}}
valid_dataset: {{path: arithmetic, split: valid, limit: 4, kwargs: {{digits: 1}}}}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: rewards_of_modes.share_of_digits
total_train_steps: {steps}
recover: {{every_steps: 2}}
saver: {{every_steps: 2}}
evaluator: {{every_steps: 4, gconfig: {{greedy: false, max_new_tokens: 8}}}}
bench: {{samples: 2}}
stats_logger: {{display: none, dump_rollouts: 0}}
"""

REWARDS = """
def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
"""


class Run:
    """Starts parts of one run, and looks at what they wrote."""

    def __init__(self, root: Path, model: Path, steps: int) -> None:
        self.root = root
        self.file = root / "modes.yaml"
        self.file.write_text(CONFIG.format(root=root / "runs", model=model, steps=steps))
        (root / "rewards_of_modes.py").write_text(REWARDS)
        self.trial = root / "runs" / "modes" / "trial"
        self.processes: list[subprocess.Popen] = []

    def start(self, *overrides: str) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{self.root}:{os.environ.get('PYTHONPATH', '')}"}
        log = (self.root / f"log-{len(self.processes)}.txt").open("w")
        command = [sys.executable, "-m", "rollwright", "run", str(self.file), *overrides]
        process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def finished(self, *processes: subprocess.Popen) -> None:
        for process in processes:
            process.wait(LIMIT)
            log = (self.root / f"log-{self.processes.index(process)}.txt").read_text()
            assert process.returncode == 0, log

    def rewards(self, part: str) -> dict[int, float]:
        lines = (self.trial / part / "metrics.jsonl").read_text().splitlines()
        return {step["step"]: step["reward"] for step in map(json.loads, lines) if "actor/loss" in step}


@pytest.fixture
def run_of(tmp_path, tiny_model):
    runs = []

    def make(steps: int) -> Run:
        runs.append(Run(tmp_path, tiny_model, steps))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def test_two_processes_learn_what_one_does(run_of):
    run = run_of(4)
    one = run.start("trial_name=alone")
    parts = run.start("mode=explore", "store={}"), run.start("mode=train", "store={}")
    run.finished(one, *parts)
    alone = Run.rewards(run, "../alone")
    assert sorted(alone) == [1, 2, 3, 4]
    assert run.rewards("trainer") == pytest.approx(alone, abs=1e-6)  # the same tasks, seeds and weights, step by step
    (explorer,) = run.trial.glob("explorer-*")
    assert "eval/reward" in (explorer / "metrics.jsonl").read_text()

    bench = run.start("mode=bench", "store={}")
    run.finished(bench)
    (result,) = run.trial.glob("bench-*/bench.json")
    labels = [each["label"] for each in json.loads(result.read_text())["benchmarks"]]
    assert labels == ["start", *(f"trainer/checkpoints/{name}" for name in ("step-000002", "step-000004", "final"))]


def test_a_killed_trainer_goes_on_from_its_checkpoint(run_of):
    run = run_of(8)
    explorer, trainer = run.start("mode=explore", "store={}"), run.start("mode=train", "store={}")
    checkpoint = run.trial / "trainer" / "recover" / "step_00000004"
    started = time.monotonic()
    while not checkpoint.exists() and trainer.poll() is None:
        assert time.monotonic() - started < LIMIT
        time.sleep(0.002)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    again = run.start("mode=train", "store={}")
    run.finished(explorer, again)
    assert sorted(run.rewards("trainer")) == list(range(1, 9))

    from rollwright.experience.store import ExperienceStore

    with ExperienceStore(f"sqlite:///{run.trial}/experiences.db") as store:
        status = store.status()
        assert (status.used_groups, status.uncommitted_uses, status.claimed_tasks) == (32, 0, 0)  # 8 steps of 4 groups
        assert store.latest_version().version == 8
