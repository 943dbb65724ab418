"""A deterministic run that is killed, damaged and resumed gives the curve of one that was not; so does the same seed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFIG = """
experiment_name: resume
deterministic: true
recover: {mode: auto, every_steps: 2}
workflow: test_resume_parts.Held
reward_fn: test_resume_parts.digits
gconfig: {n_samples: 4, max_new_tokens: 8, temperature: 0.7}
train_dataset: {path: arithmetic, split: train, batch_size: 4, kwargs: {digits: 1}}
total_train_steps: 7
actor: {optimizer: {lr: 1.0e-3}}
"""
PARTS = """
import asyncio
from pathlib import Path

from rollwright import RLVRWorkflow


class Held(RLVRWorkflow):
    '''Begins nothing after a step for as long as there is a file that names it.'''

    async def arun_episode(self, engine, data):
        while Path(f"hold-after-{engine.get_version()}").exists():
            await asyncio.sleep(0.02)
        return await super().arun_episode(engine, data)


def digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / 8
"""


def curve(run: Path) -> list[tuple]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["reward"], r["response_tokens"], r["actor/grad_norm"]) for r in records if "reward" in r]


@pytest.fixture
def start(tmp_path, tiny_model):
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "test_resume_parts.py").write_text(PARTS)

    def start(trial: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "rollwright", "run", "config.yaml", f"trial_name={trial}", f"actor.path={tiny_model}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        return subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0])


@pytest.mark.timeout(1800)
def test_a_killed_run_that_is_resumed_gives_the_same_curve(start, tmp_path):
    whole = start("whole")
    output, _ = whole.communicate(timeout=400)
    assert whole.returncode == 0, output
    expected = curve(tmp_path / "runs" / "resume" / "whole")
    assert [step for step, *_ in expected] == list(range(1, 8))

    run = tmp_path / "runs" / "resume" / "killed"
    for number, step in ((signal.SIGKILL, 3), (signal.SIGTERM, 5)):
        hold = tmp_path / f"hold-after-{step}"  # however late this process looks, the run is not over
        hold.touch()
        process = start("killed")
        wait_for_step(run, step, process)
        process.send_signal(number)
        hold.unlink()
        process.communicate(timeout=300)
        assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    newest = max((run / "recover").glob("step_*")) / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    process = start("killed")  # goes on from the checkpoint before
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert f"{newest.parent.name} is damaged" in output
    assert curve(run) == expected

    again = start("killed")  # finished: not silently run again
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    assert "trial_name" in output
    assert curve(run) == expected
