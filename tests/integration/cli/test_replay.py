"""``rollwright replay`` on a run of its own: equal without a model, with a changed reward, and where something differs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from rollwright.cli.main import main
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Checkpoint, Phase, Published, Trained

CONFIG = """
experiment_name: replayed
trial_name: trial
cluster: {{fileroot: {root}}}
recover: {{every_steps: 1}}
stats_logger: {{display: none}}
plugins: ["{root}/own_rewards.py"]
stages:
  - {{name: model, kind: model, path: "${{run_dir}}/model", hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16,
     intermediate_size: 64, max_position_embeddings: 128, characters: "0123456789+-*= abcdefghijklmnopqrstuvwxyz.,ATY"}}
  - name: grpo
    kind: rl
    actor: {{path: "${{run_dir}}/model", optimizer: {{}}}}
    workflow: rollwright.workflows.multi_turn.MultiTurnWorkflow
    workflow_kwargs: {{max_turns: 2, feedback_fn: own_feedback}}
    reward_fn: judged
    gconfig: {{n_samples: 2, max_new_tokens: 6}}
    train_dataset: {{path: arithmetic, split: train, batch_size: 4, kwargs: {{digits: 1}}}}
    valid_dataset: {{path: arithmetic, split: valid, limit: 2, kwargs: {{digits: 1}}}}
    evaluator: {{every_steps: 1, gconfig: {{max_new_tokens: 6}}}}
    total_train_steps: 2
"""
OWN = """
from chances_of_replays import chance

from rollwright import REWARD_FUNCTIONS
from rollwright.workflows.registry import FUNCTIONS


@REWARD_FUNCTIONS.register_module("judged")
async def judged(prompt, completion, prompt_ids, completion_ids, **data):
    return chance() / 2


@REWARD_FUNCTIONS.register_module("halved")
async def halved(prompt, completion, prompt_ids, completion_ids, **data):
    return 0.25


@FUNCTIONS.register("own_feedback")
def feedback(completion, reward, task):
    return f"not {int(100 * chance())}"
"""
BESIDE = "import random\n\n\ndef chance():\n    return random.random()\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("replayed")
    (root / "own_rewards.py").write_text(OWN)
    (root / "chances_of_replays.py").write_text(BESIDE)
    (root / "run.yaml").write_text(CONFIG.format(root=root))
    assert main(["run", str(root / "run.yaml")]) == 0
    return root / "replayed" / "trial"


def replayed(run: Path, *arguments: str) -> tuple[int, dict]:
    target = run / "replayed.json"
    status = main(["replay", str(run), *arguments, "--json", str(target)])
    return status, json.loads(target.read_text())


def test_every_sample_is_equal_without_a_model(run):
    status, found = replayed(run)
    assert (status, found["equal"], found["differs"], found["failed"]) == (0, 20, 0, 0)  # 2 steps of 8, and 2 evaluations of 2


def test_one_sample_and_one_task(run, capsys):
    assert [replayed(run, name)[1]["episodes"] for name in ("0/1", "0", "eval:1")] == [1, 2, 2]
    assert main(["replay", str(run), "99"]) == 1
    assert "has no finished episode 99" in capsys.readouterr().err
    assert main(["replay", str(run), "first"]) == 1


def test_a_changed_reward_is_run_on_the_recorded_episodes(run):
    status, found = replayed(run, "all", "--reward-fn", "halved")
    assert (status, found["equal"]) == (0, 20)
    assert 0 < found["mean_reward"]["now"] <= 0.25
    assert found["mean_reward"]["now"] != found["mean_reward"]["recorded"]


def test_what_changed_is_said(run):
    (run / "grpo" / "config.yaml").write_text(
        (run / "grpo" / "config.yaml").read_text().replace("max_turns: 2", "max_turns: 3")
    )
    status, found = replayed(run, "0/0")
    assert (status, found["failed"]) == (1, 1)
    assert "the journal has no further call of feedback" in found["changed"][0]["why"]


def test_the_trainer_adds_what_only_it_knows_and_nothing_is_public(run):
    directory = run / "grpo" / "journal"
    records = [record for _, record in read_records(directory)]
    trained = [record for record in records if isinstance(record, Trained)]
    assert [record.step for record in trained] == [1] * 8 + [2] * 8
    assert all(record.tokens > 0 for record in trained)
    assert [record.version for record in records if isinstance(record, Published)] == [1, 2]
    assert [(record.step, record.frontier) for record in records if isinstance(record, Checkpoint)] == [(1, 4), (2, 8)]
    assert {record.name for record in records if isinstance(record, Phase)} >= {"generate", "train", "publish"}
    for file in directory.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
