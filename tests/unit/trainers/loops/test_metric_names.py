"""What a run logs is in the table of docs/tracking.md; a run that cannot learn says so in its log."""

import json
import re
from pathlib import Path

import pytest

from rollwright import load_stages
from rollwright.tracking.metrics_file import read_metrics
from rollwright.trainers.stages import run_config

TABLE = Path(__file__).parents[4] / "docs" / "tracking.md"

#: Of every record, besides metrics.
TIMES = {"step", "time", "unix_time"}

CONFIG = """\
experiment_name: names
cluster: {fileroot: FILEROOT, threads: 1}
stats_logger: {display: plain, dump_rollouts: 0}
workflow: rollwright.workflows.multi_turn.MultiTurnWorkflow
reward_fn: numeric_reward
gconfig: {n_samples: 2, max_new_tokens: 3}
stages:
  - kind: sft
    name: warmup
    model: {path: MODEL}
    train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1}}
    total_train_steps: 1
  - kind: dpo
    name: prefer
    model: {path: MODEL}
    train_dataset: {path: FILEROOT/pairs.jsonl, batch_size: 2}
    total_train_steps: 1
  - kind: rl
    name: asynchronous
    actor: {path: MODEL, kl_ctl: 0.1, use_decoupled_loss: true, reward_clip: 0.5, ppo_n_minibatches: 2, entropy_coef: 0.01}
    rollout: {max_head_offpolicyness: 1, logprob_tolerance: 1.0}
    train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1}}
    valid_dataset: {path: arithmetic, split: valid, kwargs: {digits: 1}}
    evaluator: {every_steps: 2, limit: 2}
    total_train_steps: 2
  - kind: rl
    name: hopeless
    gconfig: {n_samples: 1, greedy: true, max_new_tokens: 2}
    actor: {path: MODEL, reward_scaling: 0.0, optimizer: {lr: 1.0e3}}
    train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1}}
    total_train_steps: 1
"""


def listed_names() -> list[str]:
    section = TABLE.read_text(encoding="utf-8").split("## Metrics")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    """The run directory of one run of all kinds of stages."""
    root = tmp_path_factory.mktemp("names")
    pairs = [{"prompt": f"{number}+1=", "chosen": "yes", "rejected": "no"} for number in range(4)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    file = root / "names.yaml"
    file.write_text(CONFIG.replace("FILEROOT", str(root)).replace("MODEL", str(tiny_model)))
    assert run_config(load_stages(file)) == 0
    return root / "names" / "trial"


def records(run, stage):
    (file,) = run.glob(f"**/{stage}/metrics.jsonl")
    return read_metrics(file)


def test_a_name_stands_once_in_the_table():
    names = listed_names()
    assert len(names) == len(set(names)) > 40


@pytest.mark.parametrize("stage", ["warmup", "prefer", "asynchronous", "hopeless"])
def test_a_run_logs_only_listed_names(run, stage):
    patterns = [
        re.compile(re.sub(r"<\w+>", ".+", re.escape(name).replace("\\<", "<").replace("\\>", ">"))) for name in listed_names()
    ]
    found = {name for record in records(run, stage) for name in record} - TIMES
    assert len(found) > 5
    assert sorted(name for name in found if not any(pattern.fullmatch(name) for pattern in patterns)) == []


def test_the_reward_has_one_name(run):
    steps = records(run, "asynchronous")
    assert {name for record in steps for name in record if "reward" in name.split("/")[-1]} - {
        "actor/reward_clipped_share",
        "rollout/last_reward",
        "eval/rollout/last_reward",
    } == {"reward", "eval/reward"}


def test_sampling_beside_training_is_counted_by_the_whole_step(run):
    steps = [record for record in records(run, "asynchronous") if "samples" in record]
    assert len(steps) == 2
    for step in steps:
        seconds = sum(step[f"seconds/{phase}"] for phase in ("generate", "train", "publish"))
        expected = step["samples"] * step["response_tokens"] / seconds
        assert step["tokens_per_second/generate"] == pytest.approx(expected, rel=1e-6)


def test_a_run_that_cannot_learn_says_why(run):
    (log,) = run.glob("**/hopeless/logs/run.log")
    text = " ".join(log.read_text().split())
    for words in (
        "gconfig has greedy: true",
        "actor.optimizer.lr is 1000",
        "actor.reward_scaling is 0",
        "2 of 2 groups have one sample",
    ):
        assert text.count(words) == 1, words
    (log,) = run.glob("**/asynchronous/logs/run.log")
    assert "can hardly learn" not in log.read_text()
