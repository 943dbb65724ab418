"""What a dry run finds before anything runs: datasets, models, tokenizers, batches, and arguments of losses."""

import json
from pathlib import Path

import pytest

from rollwright import load_stages
from rollwright.cli.main import main
from rollwright.errors import ConfigError
from rollwright.trainers.checks.missing_inputs import refuse_missing_inputs
from rollwright.trainers.checks.unknown_names import refuse_unknown_names

TEXT = """\
cluster: {fileroot: ROOT/runs}
actor: {path: MODEL}
train_dataset: {path: arithmetic, batch_size: 4, kwargs: {size: 16}}
workflow: rlvr
reward_fn: numeric_reward
gconfig: {n_samples: 2}
"""
STAGES = """\
cluster: {fileroot: ROOT/runs}
workflow: rlvr
reward_fn: numeric_reward
train_dataset: {path: arithmetic, kwargs: {size: 16}}
stages:
  - {kind: model, name: model, path: "${run_dir}/model"}
  - {kind: sft, name: warmup, model: {path: "${run_dir}/model"}, total_train_steps: 1}
  - {kind: rl, name: rl, actor: {path: "${run_dir}/warmup/checkpoints/final"}, total_train_steps: 1}
  - {kind: eval, name: eval, path: "${run_dir}/rl/checkpoints/final", dataset: {path: arithmetic}}
"""


@pytest.fixture
def file(tmp_path, tiny_model):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT.replace("ROOT", str(tmp_path)).replace("MODEL", str(tiny_model)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tiny_model / "config.json").read_text())
    (tmp_path / "broken.jsonl").write_text('{"question": "1+1="\n')
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" for _ in range(2)))
    (tmp_path / "seven.jsonl").write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" for _ in range(7)))
    return path


def refusal(file, *overrides):
    try:
        stages = load_stages(file, [text.replace("ROOT", str(file.parent)) for text in overrides])
        refuse_unknown_names(stages)
        refuse_missing_inputs(stages)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ""),
        (["train_dataset.path=ROOT/nowhere.jsonl"], "train_dataset.path: cannot be read: ROOT/nowhere.jsonl is read from files, which take no kwargs"),
        (["train_dataset={path: ROOT/broken.jsonl, kwargs: {}}"], "train_dataset.path: cannot be read: "),
        (["train_dataset={path: ROOT/broken.jsonl, kwargs: null}"], "train_dataset.kwargs: expected a mapping"),
        (["train_dataset.kwargs.sizes=4"], "train_dataset.path: cannot be read: dataset 'arithmetic' was given"),
        (["valid_dataset.path=./nowhere"], "valid_dataset.path: cannot be read: there is no file or directory"),
        (["valid_dataset={kind: harbor, path: ./nowhere}"], "valid_dataset.path: cannot be read: ./nowhere: there is no such directory of task folders"),
        (["actor.path=ROOT/nowhere"], "actor.path: is ROOT/nowhere, and there is no such directory"),
        (["actor.path=ROOT/empty"], "actor.path: is ROOT/empty, a directory that is empty: it has no config.json"),
        (["actor.path=ROOT/bare"], "actor.path: is ROOT/bare, which has a configuration and no weights"),
        (["actor.path=nobody/has-this"], "actor.path: is nobody/has-this, which is neither a directory (looked from"),
        (["actor.kl_ctl=0.1", "ref.path=ROOT/empty"], "ref.path: is ROOT/empty, a directory that is empty"),
        (["tokenizer_path=ROOT/empty"], "tokenizer_path: cannot load a tokenizer from ROOT/empty"),
        (["mode=bench", "bench.samples=1", "eval_tasksets=[{path: arithmetic, workflow: math_workflow}]", "auxiliary_models=[{model_path: ROOT/empty}]"], "auxiliary_models.0.model_path: is ROOT/empty, a directory"),
        (["actor.ppo_n_minibatches=5"], "actor.ppo_n_minibatches: is 5, but a batch has 4 groups of samples, which are not divided"),
        (["actor.ppo_n_minibatches=4"], ""),
        (["train_dataset.kwargs.size=3"], "train_dataset.batch_size: is 4, but there are 3 tasks, so no batch would ever be full"),
        (
            ["train_dataset={path: ROOT/seven.jsonl, kwargs: {}, drop_last: false}", "actor.ppo_n_minibatches=4"],
            "train_dataset.path: cannot be read: ROOT/seven.jsonl is read from files, which take no kwargs",
        ),
        (["actor={policy_loss: cispo, policy_loss_kwargs: {weight_high: -1}}"], "weight_high: must be greater than 0.0, got -1."),
        (["actor={policy_loss: cispo, policy_loss_kwargs: {weight_low: 6}}"], "weight_low is 6, more than weight_high (5.0)"),
        (["actor={policy_loss: sapo, policy_loss_kwargs: {tau_positive: a}}"], "tau_positive: expected a number, got 'a' (text)"),
        (["actor={policy_loss: sapo, policy_loss_kwargs: {tau: 1}}"], "which the loss 'sapo' does not take"),
        (["actor={policy_loss: opmd, policy_loss_kwargs: {tau: -1.5}}"], "tau: must be at least 0.0, got -1.5"),
        (["actor={policy_loss: opmd, policy_loss_kwargs: {weight_high: null}}"], ""),
        (["actor={adv_estimator: builtins.sorted}"], "actor.adv_estimator: actor.adv_estimator_kwargs has no arguments"),
    ],
)  # fmt: skip
def test_what_is_found(file, overrides, told):
    found = refusal(file, *overrides)
    assert told.replace("ROOT", str(file.parent)) in found
    assert bool(found) == bool(told)
    assert not told or "override" in found


def test_the_last_batch_of_an_epoch_is_divided_too(file):
    text = file.read_text().replace("path: arithmetic", f"path: {file.parent}/seven.jsonl").replace(", kwargs: {size: 16}", "")
    file.write_text(text)
    assert refusal(file, "actor.ppo_n_minibatches=4") == ""
    found = refusal(file, "actor.ppo_n_minibatches=4", "train_dataset.drop_last=false")
    assert (
        "train_dataset.drop_last: is false, and the last batch of 3 tasks cannot be divided into actor.ppo_n_minibatches (4)"
        in found
    )


def test_what_an_earlier_stage_makes_is_not_looked_for(tmp_path):
    file = tmp_path / "stages.yaml"
    file.write_text(STAGES.replace("ROOT", str(tmp_path)))
    assert refusal(file) == ""
    assert "actor.path: is ./else, and there is no such directory" in refusal(file, "stages.rl.actor.path=./else")
    assert not (tmp_path / "runs").exists()


def test_a_run_names_files_that_are_not_there_before_its_first_stage(tmp_path, capsys):
    """Not after the stages that make and warm up a model."""
    path = tmp_path / "stages.yaml"
    path.write_text(STAGES.replace("ROOT", str(tmp_path)))
    faults = ["stages.rl.train_dataset={path: rows.jsonl, kwargs: {}}", "stages.eval.path=./nowhere"]
    assert main(["run", str(path), *faults]) == 1
    told = capsys.readouterr().err
    assert f"train_dataset.path: is rows.jsonl, and there is no such file or directory (looked from {Path.cwd()})" in told
    assert "path: is ./nowhere, and there is no such directory" in told
    assert not (tmp_path / "runs").exists()


def test_a_loss_of_a_users_own_is_tried(file, monkeypatch):
    from rollwright.config.recipes import POLICY_LOSSES

    def broken(logp_BL, old_logp_BL, advantages_BL, mask_BL, *, strength: float = 1.0):
        raise ValueError("strength is wrong")

    POLICY_LOSSES["test_broken"] = broken
    try:
        assert "the loss 'test_broken' cannot be computed: ValueError: strength is wrong" in refusal(
            file, "actor.policy_loss=test_broken"
        )
        assert "strength: expected a number" in refusal(
            file, "actor={policy_loss: test_broken, policy_loss_kwargs: {strength: x}}"
        )
    finally:
        del POLICY_LOSSES["test_broken"]


def test_the_command_names_all_at_once_and_writes_nothing(file, capsys, tmp_path):
    assert main(["run", "--dry-run", str(file)]) == 0
    assert "This would run 1 stage" in capsys.readouterr().out
    assert main(["run", "--dry-run", str(file), "actor.path=./nowhere", "train_dataset.path=./nothing.jsonl"]) == 1
    err = capsys.readouterr().err
    assert "2 faults:" in err
    assert "actor.path: is ./nowhere" in err
    assert "train_dataset.path: cannot be read" in err
    assert not (tmp_path / "runs").exists()
