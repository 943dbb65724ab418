"""A disk that is full, and a directory that is moved, while a run writes: one message that says so, whatever the workflow catches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

CONFIG = """
experiment_name: disk
trial_name: trial
workflow: disk_parts.Stubborn
reward_fn: disk_parts.reward
gconfig: {n_samples: 2, max_new_tokens: 4}
actor: {path: MODEL, optimizer: {lr: 1e-3}}
rollout: {max_failed_share: 1.0}
recover: {every_steps: 1}
stats_logger: {display: none}
train_dataset: {path: arithmetic, split: train, batch_size: 4, kwargs: {digits: 1}}
total_train_steps: 3
"""
PARTS = """
    import os, resource
    from rollwright import RLVRWorkflow

    def reward(*arguments, **keywords):
        return 1.0

    class Stubborn(RLVRWorkflow):
        calls = 0

        async def arun_episode(self, engine, data):
            self.calls += 1
            if self.calls == 12:  # in the second step
                if os.environ["FAULT"] == "full":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
                else:
                    os.rename("runs/disk/trial", "runs/elsewhere")
            for _ in range(3):
                try:
                    return await super().arun_episode(engine, data)
                except Exception:  # whatever it is, it is tried again
                    pass
            return None
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("full", r"error: JournalError: The journal in runs/disk/trial/journal cannot be written ([Errno 27] File too large)"),
        ("moved", "error: CheckpointError: "),
    ],
)
def test_the_run_ends_with_one_message_that_says_what_to_do(tmp_path, tiny_model, fault, said):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(tiny_model)))
    (tmp_path / "disk_parts.py").write_text(textwrap.dedent(PARTS))
    environment = {
        **os.environ,
        "FAULT": fault,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    started = time.monotonic()
    command = [sys.executable, "-m", "rollwright", "run", "config.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 1, ended.stderr
    assert time.monotonic() - started < 120
    assert said in ended.stderr
    assert (
        "then start the run again, which goes on from its last checkpoint" in ended.stderr
        or "start the run again: it goes" in (ended.stderr)
    )
    assert "Traceback" not in ended.stderr + ended.stdout
