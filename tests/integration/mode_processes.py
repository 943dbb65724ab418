"""Parts of one run as processes of ``rollwright run``, for tests: an explorer, a trainer, whatever else there is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

#: Seconds for a part to end, on a machine that is busy with other things.
LIMIT = 250.0

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
        """Start a part, or another process of the run."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{self.root}:{os.environ.get('PYTHONPATH', '')}"}
        log = (self.root / f"log-{len(self.processes)}.txt").open("w")
        command = [sys.executable, "-m", "rollwright", "run", str(self.file), *overrides]
        process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def finished(self, *processes: subprocess.Popen) -> None:
        """Wait until parts have ended well."""
        for process in processes:
            process.wait(LIMIT)
            assert process.returncode == 0, self.log(process)

    def rewards(self, part: str) -> dict[int, float]:
        """Reward of each step."""
        return {step["step"]: step["reward"] for step in self.metrics(part)}

    def metrics(self, part: str) -> list[dict[str, float]]:
        """What was logged of each training step."""
        lines = (self.trial / part / "metrics.jsonl").read_text().splitlines()
        return [step for step in map(json.loads, lines) if "actor/loss" in step]

    def until(self, condition: Callable[[], object], *living: subprocess.Popen) -> None:
        """Wait until a condition holds, while these parts live."""
        started = time.monotonic()
        while not condition():
            for process in living:
                assert process.poll() is None, self.log(process)
            assert time.monotonic() - started < LIMIT
            time.sleep(0.01)

    def kill_while(self, process: subprocess.Popen, condition: Callable[[], object]) -> None:
        """Kill a process at a moment at which a condition surely holds: it is stopped first, and looked at again."""
        while True:
            self.until(condition, process)
            process.send_signal(signal.SIGSTOP)
            self.until(lambda: all(state_of(stat) == "T" for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")))
            if condition():
                process.kill()
                process.wait()
                return
            process.send_signal(signal.SIGCONT)

    def log(self, process: subprocess.Popen) -> str:
        """What a part said so far."""
        return (self.root / f"log-{self.processes.index(process)}.txt").read_text()

    def explorer_of(self, process: subprocess.Popen) -> str:
        """Name of a process's run directory, by which it claims tasks; empty while there is none."""
        return next((path.name for path in self.trial.glob(f"explorer-*-{process.pid}")), "")

    def rows(self, statement: str) -> list[tuple]:
        """What the store answers to a query; nothing while there is no store."""
        file = self.trial / "experiences.db"
        if not file.exists():
            return []
        engine = create_engine(f"sqlite:///file:{file}?mode=ro&uri=true")
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(text(statement))]
        except OperationalError:  # its tables are being made
            return []
        finally:
            engine.dispose()

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def state_of(stat: Path) -> str:
    """State of a thread, as the kernel names it; T: stopped."""
    return stat.read_text().rsplit(")", 1)[1].split()[0]
