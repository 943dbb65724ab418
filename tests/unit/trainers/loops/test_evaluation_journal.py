"""Stages of kind ``eval`` and benchmarks keep the journal of their samples."""

from __future__ import annotations

import pytest

from rollwright.config.experiment import EvalConfig, GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.modes import BenchConfig
from rollwright.config.sections import EvaluatorConfig, JournalConfig, PPOActorConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import ConfigError
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.loops.evaluation import evaluate_model
from rollwright.trainers.modes.bench import bench, part_name
from rollwright.trainers.modes.recorded_runs import load_run_config
from rollwright.viewer.run import Run
from rollwright.viewer.runs import Runs

RLVR = "rollwright.workflows.rlvr.RLVRWorkflow"
SUMS = DatasetConfig(path="arithmetic", split="test", shuffle=False, drop_last=False, limit=3)


def evaluation(model, **changed) -> EvalConfig:
    config = EvalConfig(path=str(model), workflow=RLVR, reward_fn="numeric_reward", dataset=SUMS, samples=2, **changed)
    config.gconfig = GenerationHyperparameters(max_new_tokens=4)
    return config


def test_the_samples_of_each_score_are_in_the_journal_once(tiny_model, tmp_path):
    """The samples of an attempt that was interrupted are marked as undone."""
    directory = RunDirectory(tmp_path, "evaluated", "twice").claim({})
    scores = evaluate_model(evaluation(tiny_model), directory)
    assert evaluate_model(evaluation(tiny_model), directory) == scores
    directory.release()
    with Run(directory.path) as run:
        run.refresh()
        found = run.search(limit=-1)["samples"]
        assert sorted(sample["ordinal"] for sample in found) == [0, 0, 1, 1, 2, 2, 3, 4, 5]  # mean@2, then greedy
        sampled = [sample["reward"] for sample in found if sample["ordinal"] < 3]
        assert sum(sampled) / 6 == pytest.approx(scores["mean@2"])
        assert run.search(limit=-1, undone=True)["total"] == 18
        assert len(run.last_evaluation()) == 3
        assert run.missing() == []


def test_without_a_journal_nothing_is_recorded(tiny_model, tmp_path):
    directory = RunDirectory(tmp_path, "evaluated", "unrecorded").claim({})
    evaluate_model(evaluation(tiny_model, greedy=False, journal=JournalConfig(enabled=False)), directory)
    assert not directory.has_journal
    directory.release()


def test_an_evaluation_stage_is_not_replayed(tmp_path):
    (tmp_path / "config.yaml").write_text("path: model\n")
    with pytest.raises(ConfigError, match="is an evaluation stage, whose samples are not replayed"):
        load_run_config(tmp_path)


def test_a_benchmark_keeps_the_samples_of_each_checkpoint(tiny_model, tmp_path):
    config = GRPOConfig(
        experiment_name="run",
        trial_name="one",
        mode="bench",
        workflow=RLVR,
        reward_fn="numeric_reward",
        actor=PPOActorConfig(path=str(tiny_model)),
        valid_dataset=SUMS,
        evaluator=EvaluatorConfig(gconfig=GenerationHyperparameters(max_new_tokens=4)),
        bench=BenchConfig(checkpoints=[str(tiny_model)], samples=2, pass_at=[1, 2]),
    )
    config.cluster.fileroot = str(tmp_path)
    directory = RunDirectory(tmp_path, "run", "bench").claim({"mode": "bench"})
    results = bench(config, directory)
    directory.release()
    (scores,) = (each["scores"]["valid"] for each in results["benchmarks"])
    (listed,) = Runs(tmp_path).list()
    assert (listed["kind"], listed["name"]) == ("eval", f"run/bench/{part_name(str(tiny_model))}")
    with Run(listed["path"]) as run:
        run.refresh()
        assert run.search(is_eval=True)["total"] == 6
        found = run.last_evaluation()
    assert sum(found.values()) / len(found) == pytest.approx(scores["mean@2"])


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("start", "start"),
        ("grpo/checkpoints/step-000010", "grpo-step-000010"),
        ("/models/b", "models-b"),
        ("../..", "checkpoint"),
    ],
)
def test_names_of_checkpoints_are_names_of_directories(label, name):
    assert part_name(label) == name
