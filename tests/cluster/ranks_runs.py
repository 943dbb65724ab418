"""Runs of ``rollwright run`` in one process and in several, for tests: started, ended, and compared number by number."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from warm import WarmProcess, shared_warm

from rollwright.inference.backends.builtin.sampling import counter_uniforms
from rollwright.rollout.seeds import SampleName, request_seed
from rollwright.rollout.task_group import SAMPLE_BITS
from rollwright.viewer.run import Run

LIMIT = 300.0
TEMPERATURE = 0.8
#: How far the drawn number may be from the border between two tokens for a flip to count as equal.
FLIP = 1e-5

GRPO = f"""
experiment_name: ranks
cluster: {{{{fileroot: {{root}}, threads: 1}}}}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: parts_of_ranks.share_of_digits
gconfig: {{{{n_samples: 4, max_new_tokens: 8, temperature: {TEMPERATURE}}}}}
actor:
  path: {{model}}
  dtype: float32
  device: cpu
  kl_ctl: 0.05
  ppo_n_minibatches: 2
  mb_spec: {{{{max_tokens_per_mb: 256}}}}
  optimizer: {{{{lr: 1.0e-3}}}}
train_dataset: {{{{path: arithmetic, split: train, batch_size: 5, kwargs: {{{{digits: 2}}}}}}}}
total_train_steps: 10
saver: {{{{every_steps: 1}}}}
stats_logger: {{{{display: none, dump_rollouts: -1}}}}
"""

PARTS = """
import os

from rollwright import POLICY_LOSSES, Workflow


def share_of_digits(prompt, completion, prompt_ids, completion_ids, **data):
    return sum(character.isdigit() for character in completion) / 8


class Judged(Workflow):
    def run(self):
        answered = [self.model.get_openai_client(), self.auxiliary_models[0]]
        said = [
            client.chat.completions.create(model=client.model_path, messages=self.task.messages(), max_tokens=8)
            for client in answered
        ]
        assert said[1].usage.completion_tokens
        self.model.set_reward(sum(character.isdigit() for character in said[0].choices[0].message.content) / 8)
        return self.model.extract_experience_from_history()


@POLICY_LOSSES.register("fails_on_one_rank")
def fails_on_one_rank(logp_BL, old_logp_BL, advantages_BL, mask_BL):
    if os.environ.get("RANK") == "1" and logp_BL.requires_grad:  # not where a config is checked
        raise ValueError("the second rank has had enough")
    return -advantages_BL * logp_BL
"""


def write_parts(directory: Path) -> None:
    """Put the module that configs name where ``environment`` finds it."""
    (directory / "parts_of_ranks.py").write_text(PARTS)


def write_grpo(directory: Path, model: Path) -> Path:
    """Write ``grpo.yaml``, the config of a GRPO run below ``directory/runs``; returns the directory."""
    write_parts(directory)
    (directory / "grpo.yaml").write_text(GRPO.format(root=directory / "runs", model=model))
    return directory


def environment(directory: Path) -> dict[str, str]:
    """In which ``rollwright`` is started."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


def start(directory: Path, *arguments: str, program: tuple[str, ...] = ()) -> subprocess.Popen | WarmProcess:
    """Start ``rollwright run`` with the arguments; what it says goes to ``said.txt``.

    Args:
        directory: in which it runs.
        arguments: of ``rollwright run``.
        program: starts it in place of this interpreter.
    """
    (directory / "said.txt").write_text("")
    if not program:
        return shared_warm().start(["run", *arguments], directory, directory / "said.txt", environment(directory))
    with (directory / "said.txt").open("w") as said:
        command = [*program, "run", *arguments]
        return subprocess.Popen(
            command, cwd=directory, env=environment(directory), stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )


def run(directory: Path, *arguments: str, **options) -> str:
    """Run ``rollwright run`` to its end; returns what it said."""
    process = start(directory, *arguments, **options)
    try:
        status = process.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    said = (directory / "said.txt").read_text()
    assert status == 0, said[-6000:]
    return said


def wait_until(directory: Path, process: subprocess.Popen | WarmProcess, is_so: Callable[[str], bool]) -> None:
    """Wait while a run goes on; ``is_so`` is given what it has said so far."""
    deadline = time.monotonic() + LIMIT
    while not is_so(said := (directory / "said.txt").read_text()):
        assert process.poll() is None, said[-6000:]
        assert time.monotonic() < deadline, said[-6000:]
        time.sleep(0.05)


def process_of(directory: Path, name: str) -> int:
    """Process id of the newest process of a name."""
    return int(re.findall(r"is process (\d+)", (directory / "logs" / f"{name}.log").read_text())[-1])


def metrics(directory: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step of a run."""
    steps: dict[int, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return steps


def samples(directory: Path, step: int) -> dict[int, dict]:
    """The rows that a step trained on, by sample, as the journal has them."""
    found = {}
    with Run(directory) as run:
        run.refresh()
        for sample in run.search(step=step, limit=-1)["samples"]:
            (row,) = run.sample(sample["key"])["rows"]
            number = (sample["ordinal"] << SAMPLE_BITS) + sample["index"]
            found[number] = {
                "sample_ids": number,
                "input_ids": row["ids"],
                "loss_mask": row["mask"],
                "rewards": row["reward"],
                "advantages": [value or 0.0 for value in row["advantages"]],
                "prompt_tokens": sample["prompt_tokens"],
            }
    return found


def compare(one: Path, other: Path, *, steps: int, seed: int, model: Path) -> list[str]:
    """Assert that two runs made the same samples and the same updates.

    Returns:
        The flips that count as equal. Runs part at the first one, so nothing is compared from its step on.
    """
    ours, theirs = metrics(one), metrics(other)
    for step in range(1, steps + 1):
        mine, its = samples(one, step), samples(other, step)
        assert mine
        assert mine.keys() == its.keys()
        flips = []
        for sample, row in mine.items():
            if row["input_ids"] != its[sample]["input_ids"]:
                weights = one / "checkpoints" / f"step-{step - 1:06d}" if step > 1 else model
                flips.append(_flip(row, its[sample], weights, seed, step))
            else:
                assert row["rewards"] == its[sample]["rewards"], (step, sample)
                assert row["loss_mask"] == its[sample]["loss_mask"]
                assert row["advantages"] == _about(its[sample]["advantages"], 1e-3), (step, sample)
        if flips:
            return flips
        for name in ("actor/loss", "actor/grad_norm", "actor/kl"):
            assert ours[step][name] == _about(theirs[step][name], 1e-4), (step, name)
    return []


def _about(value, relative):
    import pytest

    return pytest.approx(value, rel=relative, abs=1e-6)


def _flip(row: dict, other: dict, weights: Path, seed: int, step: int) -> str:
    """Assert that the first token that differs was drawn next to the border between the two."""
    from transformers import AutoModelForCausalLM

    ids, its = row["input_ids"], other["input_ids"]
    at = next(index for index, (mine, yours) in enumerate(zip(ids, its, strict=False)) if mine != yours)
    ordinal, index = row["sample_ids"] >> SAMPLE_BITS, row["sample_ids"] & ((1 << SAMPLE_BITS) - 1)
    drawn = np.array([request_seed(seed, SampleName(ordinal, index), 0, 0)], dtype=np.uint64)
    uniform = float(counter_uniforms(drawn, np.array([at - row["prompt_tokens"]]))[0])
    loaded = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
    with torch.no_grad():
        logits_V = loaded(torch.tensor([ids[:at]])).logits[0, -1] / TEMPERATURE
    running_V = logits_V.softmax(-1).cumsum(-1)
    low, high = sorted((ids[at], its[at]))
    distance = max(abs(float(running_V[low]) - uniform), abs(float(running_V[high - 1]) - uniform))
    assert distance < FLIP, f"step {step}: tokens {low} and {high} at {at}, the border is {distance:.2e} from what was drawn"
    return f"step {step}, sample {row['sample_ids']}, token {at}: {distance:.1e} from the border"


def trial(directory: Path, name: str) -> Path:
    """The directory of a trial of the runs that the fixture ``grpo`` configures."""
    return directory / "runs" / "ranks" / name
