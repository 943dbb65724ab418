"""A deterministic run that is killed, damaged and resumed gives the curve of one that was not; so does the same seed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import WarmProcess

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
def start(warm, tmp_path, tiny_model) -> Callable[[str], WarmProcess]:
    """Starts a trial; what it says goes to ``said.txt``."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "test_resume_parts.py").write_text(PARTS)

    def start(trial: str) -> WarmProcess:
        said(tmp_path).write_text("")
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        return warm.start(
            ["run", "config.yaml", f"trial_name={trial}", f"actor.path={tiny_model}"], tmp_path, said(tmp_path), path
        )

    return start


def said(directory: Path) -> Path:
    return directory / "said.txt"


def end_of(process: WarmProcess, directory: Path) -> str:
    """Wait for the end of a trial that has to end well; returns what it said."""
    assert process.wait(400) == 0, said(directory).read_text()
    return said(directory).read_text()


def wait_for_step(run: Path, step: int, process: WarmProcess, directory: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(said(directory).read_text())


@pytest.mark.timeout(1800)
def test_a_killed_run_that_is_resumed_gives_the_same_curve(start, tmp_path):
    end_of(start("whole"), tmp_path)
    expected = curve(tmp_path / "runs" / "resume" / "whole")
    assert [step for step, *_ in expected] == list(range(1, 8))

    run = tmp_path / "runs" / "resume" / "killed"
    for number, step in ((signal.SIGKILL, 3), (signal.SIGTERM, 5)):
        hold = tmp_path / f"hold-after-{step}"  # however late this process looks, the run is not over
        hold.touch()
        process = start("killed")
        wait_for_step(run, step, process, tmp_path)
        process.send_signal(number)
        hold.unlink()
        assert process.wait(300) == (-9 if number == signal.SIGKILL else 143)
    newest = max((run / "recover").glob("step_*")) / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    output = end_of(start("killed"), tmp_path)  # goes on from the checkpoint before
    assert f"{newest.parent.name} is damaged" in output
    assert curve(run) == expected

    output = end_of(start("killed"), tmp_path)  # finished: not silently run again
    assert "trial_name" in output
    assert curve(run) == expected
