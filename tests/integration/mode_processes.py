"""Parts of one run as processes of ``rollwright run``, for tests: an explorer, a trainer, whatever else there is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from warm import Warm, WarmProcess

#: Seconds for a part to end, on a machine that is busy with other things.
LIMIT = 250.0

#: Groups of a training step.
BATCH = 4

CONFIG = """
experiment_name: modes
trial_name: trial
cluster: {{fileroot: {root}}}
actor: {{path: {model}, optimizer: {{lr: 1.0e-3}}}}
gconfig: {{n_samples: 4, max_new_tokens: 8}}
train_dataset: {{path: arithmetic, split: train, batch_size: {batch}, kwargs: {{digits: 1}}}}
valid_dataset: {{path: arithmetic, split: valid, limit: 4, kwargs: {{digits: 1}}}}
workflow: parts_of_modes.Gated
workflow_kwargs: {{gate: {root}/gate}}
reward_fn: parts_of_modes.share_of_digits
total_train_steps: {steps}
recover: {{every_steps: 2}}
saver: {{every_steps: 2}}
evaluator: {{every_steps: 4, gconfig: {{greedy: false, max_new_tokens: 8}}}}
bench: {{samples: 2}}
stats_logger: {{display: none, dump_rollouts: 0}}
"""

PARTS = """
import asyncio
from pathlib import Path

from rollwright import RLVRWorkflow


class Gated(RLVRWorkflow):
    '''Begins a task that an explorer claimed only when the test lets it.'''

    def __init__(self, gate, reward_fn, gconfig, tokenizer):
        super().__init__(reward_fn, gconfig, tokenizer)
        self.gate = Path(gate)

    async def arun_episode(self, engine, data):
        while self.gate.exists() and data.get("ordinal", -1) >= len(self.gate.read_bytes()):
            await asyncio.sleep(0.02)
        return await super().arun_episode(engine, data)


def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
"""


class Run:
    """Starts parts of one run, and looks at what they wrote."""

    def __init__(self, warm: Warm, root: Path, model: Path, steps: int) -> None:
        self.warm, self.root = warm, root
        self.file = root / "modes.yaml"
        self.file.write_text(CONFIG.format(root=root / "runs", model=model, steps=steps, batch=BATCH))
        (root / "parts_of_modes.py").write_text(PARTS)
        self.gate = root / "gate"
        self.trial = root / "runs" / "modes" / "trial"
        self.processes: list[WarmProcess] = []

    def start(self, *overrides: str) -> WarmProcess:
        """Start a part, or another process of the run."""
        path = {"PYTHONPATH": f"{self.root}:{os.environ.get('PYTHONPATH', '')}"}
        process = self.warm.start(["run", str(self.file), *overrides], self.root, self._log(len(self.processes)), path)
        self.processes.append(process)
        return process

    def let_tasks(self, count: int) -> None:
        """Explorers begin no task but the run's first ``count``: nothing goes on behind a test that is late to look."""
        with self.gate.open("ab") as file:
            file.write(bytes(max(0, count - file.tell())))

    def finished(self, *processes: WarmProcess) -> None:
        """Let all tasks through, and wait until parts have ended well."""
        self.gate.unlink(missing_ok=True)
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

    def until(self, condition: Callable[[], object], *living: WarmProcess) -> None:
        """Wait until a condition holds, while these parts live."""
        started = time.monotonic()
        while not condition():
            for process in living:
                assert process.poll() is None, self.log(process)
            assert time.monotonic() - started < LIMIT
            time.sleep(0.01)

    def kill_while(self, process: WarmProcess, condition: Callable[[], object]) -> None:
        """Kill a process at a moment at which a condition surely holds: it is stopped first, and looked at again.

        Tasks are let through one by one, the next when all before are stored and no batch of them waits to be trained, so
        that no moment passes unseen, however long this process is kept from looking.
        """
        advanced = time.monotonic()

        def holds() -> bool:
            nonlocal advanced
            if condition():
                return True
            let = self.gate.stat().st_size
            groups = self.rows("select total(state > 0), total(state = 1 and uses = 0) from groups")
            is_quiet = any(stored >= let and waiting < BATCH for stored, waiting in groups)
            if is_quiet or time.monotonic() - advanced > 5:  # a trainer may be waiting for a task that is not let through
                self.let_tasks(let + 1)
                advanced = time.monotonic()
            return False

        while True:
            self.until(holds, process)
            process.send_signal(signal.SIGSTOP)
            self.until(lambda: is_stopped(process), process)
            if condition():
                process.kill()
                process.wait()
                return
            process.send_signal(signal.SIGCONT)

    def log(self, process: WarmProcess) -> str:
        """What a part said so far."""
        return self._log(self.processes.index(process)).read_text()

    def _log(self, number: int) -> Path:
        return self.root / f"log-{number}.txt"

    def rows(self, statement: str) -> list[tuple]:
        """What the store answers to a query; nothing while there is no store."""
        file, started = self.trial / "experiences.db", time.monotonic()
        while file.exists():
            engine = create_engine(f"sqlite:///file:{file}?mode=ro&uri=true")
            try:
                with engine.connect() as connection:
                    return [tuple(row) for row in connection.execute(text(statement))]
            except OperationalError as error:  # its tables are being made, or a part that is busy holds it
                if "no such table" in str(error):
                    return []
                if time.monotonic() - started > LIMIT:
                    raise
            finally:
                engine.dispose()
        return []

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def is_stopped(process: WarmProcess) -> bool:
    """True where the kernel has stopped every thread of a process."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # of a thread that has just ended
        return False
    return all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)
