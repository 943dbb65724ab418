"""Which checkpoints are found and evaluated."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollwright import GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.rules import faults_of
from rollwright.config.sections import PPOActorConfig
from rollwright.config.tasksets import DatasetConfig, TasksetConfig
from rollwright.errors import ConfigError
from rollwright.tracking.run_directory import RunDirectory
from rollwright.tracking.summary import checkpoint_table
from rollwright.trainers.modes.bench import Benchmark, bench, find_checkpoints, plot_scores, step_of


def config_of(tmp_path) -> GRPOConfig:
    config = GRPOConfig(experiment_name="run", trial_name="one", actor=PPOActorConfig(path="first-model"))
    config.cluster.fileroot = str(tmp_path)
    return config


def test_checkpoints_stand_in_the_order_of_their_steps(tmp_path):
    config = config_of(tmp_path)
    for name in ("step-000100", "final", "step-000020"):
        directory = tmp_path / "run" / "one" / "trainer" / "checkpoints" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    (tmp_path / "run" / "one" / "trainer" / "checkpoints" / ".half-written").mkdir()
    assert [(each.label, each.step) for each in find_checkpoints(config)] == [
        ("start", 0),
        ("trainer/checkpoints/step-000020", 20),
        ("trainer/checkpoints/step-000100", 100),
        ("trainer/checkpoints/final", None),
    ]


def test_the_final_checkpoint_stands_at_the_last_step_and_is_evaluated_once(tmp_path):
    run = tmp_path / "run" / "one"
    for name in ("step-000002", "final"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.0}\n{"step": 3, "reward": 0.5}\n')
    assert [(each.label, each.step) for each in find_checkpoints(config_of(tmp_path))] == [
        ("start", 0),
        ("checkpoints/step-000002", 2),
        ("checkpoints/final", 3),
    ]
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.0}\n{"step": 2, "reward": 0.5}\n')
    assert [each.label for each in find_checkpoints(config_of(tmp_path))] == ["start", "checkpoints/step-000002"]


def test_samples_that_would_all_be_the_same_are_refused_before_anything_runs(tmp_path):
    config = config_of(tmp_path)
    config.mode, config.valid_dataset, config.workflow = "bench", DatasetConfig(path="arithmetic"), "rlvr"
    assert [path for path, _ in faults_of(config)] == [("bench", "samples")]
    config.evaluator.gconfig = config.evaluator.gconfig.new(greedy=False)
    assert not list(faults_of(config))
    config.bench.samples, config.evaluator.gconfig = 1, config.evaluator.gconfig.new(greedy=True)
    assert not list(faults_of(config))
    config.eval_tasksets = [TasksetConfig(gconfig=GenerationHyperparameters(temperature=0.0))]
    config.bench.samples, config.evaluator.gconfig = 2, config.evaluator.gconfig.new(greedy=False)
    assert ("bench", "samples") in [path for path, _ in faults_of(config)]


def test_nothing_to_evaluate_is_told_with_the_config(tmp_path):
    config = config_of(tmp_path)
    config.mode = "bench"
    assert [path for path, _ in faults_of(config)][:2] == [("mode",), ("workflow",)]


def test_a_run_without_checkpoints_is_told(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoints"):
        find_checkpoints(config_of(tmp_path))


def test_listed_checkpoints_are_taken_as_they_are(tmp_path):
    config = config_of(tmp_path)
    config.bench.checkpoints = ["/models/b/step-000004", "some/model"]
    assert [(each.label, each.step) for each in find_checkpoints(config)] == [
        ("/models/b/step-000004", 4),
        ("some/model", None),
    ]
    assert step_of("global_step_12") == 12


def test_the_table_and_the_plot_show_every_score(tmp_path):
    scores = {"held_out": {"mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "tasks": 4.0}}
    benchmarks = [Benchmark("start", "m", 0, scores), Benchmark("final", "n", None, scores)]
    assert [str(column.header) for column in checkpoint_table([(each.label, each.scores) for each in benchmarks]).columns] == [
        "checkpoint",
        "tasks",
        "mean@2",
        "pass@1",
        "pass@2",
    ]
    assert plot_scores(tmp_path / "bench.png", benchmarks, config_of(tmp_path)).stat().st_size > 1000


def test_no_checkpoint_s_name_is_cut_in_the_table():
    labels = ["trainer/checkpoints/step-000003", "trainer/checkpoints/step-000006"]
    scores = {"held_out": {f"pass@{k}": 0.5 for k in (1, 2, 4, 8, 16)} | {"tasks": 4.0}}
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(checkpoint_table([(label, scores) for label in labels]))
    shown = "".join(line.split("│")[1].strip() if "│" in line else "" for line in console.export_text().splitlines())
    assert "".join(labels) in shown


def test_servers_that_hold_one_model_cannot_be_benched(tmp_path):
    config = config_of(tmp_path)
    config.bench.checkpoints = ["/models/a", "/models/b"]
    config.valid_dataset, config.workflow, config.bench.samples = DatasetConfig(path="arithmetic"), "rlvr", 1
    config.rollout.backend, config.rollout.addresses = "sglang", ["127.0.0.1:30000"]
    with pytest.raises(ConfigError, match="what they hold is one model"):
        bench(config, RunDirectory(tmp_path, "run", "one"))
