"""Supervised training that stops by what the model answers: its weights go to an engine, which is audited like any other."""

from types import SimpleNamespace

import pytest
import torch

from rollwright import load_stages
from rollwright.config.tasksets import DatasetConfig
from rollwright.inference.weights.stream import WeightStream
from rollwright.placement.ray_ranks import RayRanks
from rollwright.trainers.loops import supervised
from rollwright.trainers.stages import run_config

CONFIG = """\
experiment_name: supervised
cluster: {fileroot: FILEROOT, threads: 1}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: numeric_reward
stages:
  - kind: sft
    name: warmup
    model: {path: MODEL}
    train_dataset: {path: arithmetic, batch_size: 4, kwargs: {digits: 1}}
    valid_dataset: {path: arithmetic, split: valid, kwargs: {digits: 1}}
    total_train_steps: 2
    evaluator: {every_steps: 1, limit: 2, gconfig: {greedy: true, max_new_tokens: 4}}
    stop_accuracy: ACCURACY
"""


@pytest.mark.parametrize(("accuracy", "steps"), [("1.0", 2), ("0.0", 1)])
def test_it_evaluates_as_it_trains_and_stops_when_it_is_accurate_enough(tmp_path, tiny_model, accuracy, steps):
    config = tmp_path / "supervised.yaml"
    text = CONFIG.replace("FILEROOT", str(tmp_path)).replace("MODEL", str(tiny_model)).replace("ACCURACY", accuracy)
    config.write_text(text)
    assert run_config(load_stages(config, ["stats_logger.display=none"])) == 0
    metrics = (tmp_path / "supervised" / "trial" / "metrics.jsonl").read_text()
    assert metrics.count('"eval/reward"') == steps
    assert list(tmp_path.glob("supervised/trial/checkpoints/final/*.safetensors"))


def test_what_was_opened_is_closed_where_the_rest_fails(tmp_path, tiny_model, monkeypatch):
    closed = []
    make = supervised.make_local_engine

    def make_watched(*arguments):
        rollout = make(*arguments)
        destroy = rollout.destroy
        monkeypatch.setattr(rollout, "destroy", lambda: (closed.append("rollout"), destroy()))
        return rollout

    def fail(*arguments):
        raise OSError("no weights")

    monkeypatch.setattr(supervised, "make_local_engine", make_watched)
    monkeypatch.setattr(supervised, "publisher_for", fail)
    config = tmp_path / "supervised.yaml"
    config.write_text(CONFIG.replace("FILEROOT", str(tmp_path)).replace("MODEL", str(tiny_model)).replace("ACCURACY", "1.0"))
    with pytest.raises(OSError, match="no weights"):
        run_config(load_stages(config, ["stats_logger.display=none"]))
    assert closed == ["rollout"]


def test_each_evaluation_on_a_cluster_has_a_version_of_its_own_and_leaves_no_weights_behind(tmp_path, monkeypatch):
    trainer, seen = object.__new__(supervised.SFTTrainer), []
    trainer.ranks = object.__new__(RayRanks)
    trainer.model = trainer.ranks.engine = SimpleNamespace(version=0)
    trainer.weights, trainer.valid_dataset, trainer.tokenizer = None, [], None
    trainer.directory = SimpleNamespace(path=tmp_path)
    trainer.config = SimpleNamespace(
        rollout=SimpleNamespace(logprob_tolerance=None),
        evaluator=SimpleNamespace(gconfig=None),
        train_dataset=DatasetConfig(),
        workflow=None,
        workflow_kwargs={},
    )
    trainer.rollout = SimpleNamespace(version=0, get_version=lambda: trainer.rollout.version)

    def call(name, first_rank):
        first_rank["use"](WeightStream.of({"a": torch.ones(2)}))
        trainer.model.version = 0  # as each answer of a rank says

    def give(rollout, weights, version, tolerance):
        rollout.version = version
        seen.append((version, dict(weights)["a"].tolist()))

    trainer.ranks.call = call
    monkeypatch.setattr(supervised, "load_and_audit", give)
    monkeypatch.setattr(supervised, "workflow_arguments", lambda *arguments: {})
    monkeypatch.setattr(supervised, "evaluate", lambda *arguments: None)
    (tmp_path / ".weights").mkdir()
    (tmp_path / ".weights" / "model.safetensors").write_bytes(b"half a file of one that was killed")
    trainer.evaluate()
    trainer.evaluate()
    assert seen == [(1, [1.0, 1.0]), (2, [1.0, 1.0])]
    assert not list(tmp_path.iterdir())
