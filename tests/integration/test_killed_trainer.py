"""A trainer that is stopped or killed in the middle of a step leaves no process and no shared memory behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from real_servers import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TRAINER = """
import sys
from rollwright import PPOTrainer
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import DatasetConfig
from rollwright.config.sections import ClusterConfig, OptimizerConfig, PPOActorConfig, RecoverConfig, RolloutConfig


def reward(prompt, completion, prompt_ids, completion_ids, **data):
    return float(len(set(completion_ids)))


if __name__ == "__main__":
    model, runs = sys.argv[1:3]
    config = PPOConfig(
        experiment_name="killed",
        actor=PPOActorConfig(path=model, optimizer=OptimizerConfig(lr=1e-4)),
        rollout=RolloutConfig(backend="builtin_process", max_head_offpolicyness=1, setup_timeout=300),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=60, temperature=0.7, ignore_eos=True),
        total_train_steps=100_000,
        total_train_epochs=100_000,
        recover=RecoverConfig(every_steps=1),
        cluster=ClusterConfig(fileroot=runs, threads=1),
    )
    rows = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]
    with PPOTrainer(config, rows) as trainer:
        trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
"""


def steps(runs: Path) -> int:
    files = list(runs.glob("**/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty where it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def wait_for(what, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_a_trainer(tmp_path, number):
    model, runs, script, log = (tmp_path / name for name in ("model", "runs", "trainer.py", "trainer.log"))
    write_model(model)
    script.write_text(TRAINER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        command = [sys.executable, str(script), str(model), str(runs)]
        trainer = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_for(lambda: steps(runs) >= 2 or trainer.poll() is not None, 240)
        assert trainer.poll() is None, log.read_text()[-3000:]
        family = psutil.Process(trainer.pid).children(recursive=True)
        words = next(words for words in map(command_of, family) if "serve-model" in words)
        roots = [Path(words[index + 1]) for index, word in enumerate(words) if word == "--weights-root"]
        assert roots
        assert all(list(root.iterdir()) for root in roots)  # what weights travel through
        trainer.send_signal(number)
        status = trainer.wait(240)
    finally:
        trainer.kill()
        trainer.wait()
    assert status == (128 + number if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(map(command_of, family)), 120)
    wait_for(lambda: not any(root.exists() for root in roots), 120)
    if number == signal.SIGTERM:  # asked to stop, it has finished its step and saved it
        recorded = [json.loads(line)["step"] for line in next(runs.glob("**/metrics.jsonl")).read_text().splitlines()]
        saved = sorted(path.name for path in next(runs.glob("**/recover")).iterdir())
        assert f"{max(recorded)}" in saved[-1]
