"""Sinks: flushed lines, resume, optional packages."""

import importlib
import json

import pytest

from rollwright.errors import CheckpointError, ConfigError
from rollwright.tracking import metrics_file
from rollwright.tracking.metrics_file import read_metrics
from rollwright.tracking.sinks import SINKS, JSONLSink, MetricsLogger


def test_a_line_is_readable_before_the_file_is_closed(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward": 0.5, "kl": float("nan"), "tokens": 12})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    sink.close()
    assert record["step"] == 1
    assert record["reward"] == 0.5
    assert record["kl"] is None
    assert record["tokens"] == 12


@pytest.mark.parametrize("resume_step", [0, 3, 9])
def test_a_resumed_run_leaves_one_curve(tmp_path, resume_step):
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path) as logger:
        for step in range(1, 7):
            logger.log(step, {"reward": step / 10})
            logger.log(step, {"eval/accuracy": step / 20})
    with MetricsLogger(path, resume_step=resume_step) as logger:
        for step in range(min(resume_step, 6) + 1, 9):
            logger.log(step, {"reward": step / 10})
    records = read_metrics(path)
    rewards = [record["step"] for record in records if "reward" in record]
    assert rewards == list(range(1, 9))
    assert [r["step"] for r in records if "eval/accuracy" in r] == list(range(1, min(resume_step, 6) + 1))
    times = [record["time"] for record in records]
    assert times == sorted(times)


def test_a_line_cut_off_by_a_kill_is_reported_left_out_and_overwritten(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(metrics_file.logger, "warning", lambda message, *values: warned.append(message % values))
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "reward": 0.1}\n{"step": 2, "rew')
    assert [record["step"] for record in read_metrics(path)] == [1]
    assert str(path) in warned[0]
    assert '"rew' in warned[0]
    with MetricsLogger(path, resume_step=1) as logger:
        logger.log(2, {"reward": 0.2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match="line 2 of"):
        read_metrics(path)


def test_a_new_run_does_not_write_into_an_old_ones_file(tmp_path):
    with MetricsLogger(tmp_path / "metrics.jsonl") as logger:
        logger.log(1, {"reward": 1.0})
    with pytest.raises(CheckpointError, match="choose another trial_name"):
        MetricsLogger(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    real = importlib.import_module

    def import_module(module, *args):
        if module == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match=rf"rollwright\[{name}\]"):
        MetricsLogger(tmp_path / "metrics.jsonl", [name])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_an_unknown_sink_lists_the_known(tmp_path):
    with pytest.raises(ConfigError, match="mlflow, tensorboard, trackio, wandb"):
        MetricsLogger(tmp_path / "metrics.jsonl", ["notebook"])


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLogger(tmp_path / "metrics.jsonl", ["tensorboard"]) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"reward": step / 4})
    with MetricsLogger(tmp_path / "metrics.jsonl", ["tensorboard"], resume_step=2) as logger:
        logger.log(3, {"reward": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 0.9)]


def test_a_registered_sink_is_told_of_the_run_and_gets_every_step(tmp_path):
    seen = []

    @SINKS.register("remembering")
    class Remembering:
        def __init__(self, run):
            seen.append((run.directory, run.name, run.resume_step))

        def write(self, step, metrics):
            seen.append((step, metrics["reward"]))

        def close(self):
            seen.append("closed")

    with MetricsLogger(tmp_path / "metrics.jsonl", ["remembering"], run_name="a/b") as logger:
        logger.log(1, {"reward": 0.5})
    assert seen == [(tmp_path, "a/b", None), (1, 0.5), "closed"]


def test_mlflow_keeps_one_run_over_a_resume(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    arguments = {"project": "adding", "run_name": "a/b", "config": {"seed": 3}}
    with MetricsLogger(tmp_path / "metrics.jsonl", ["mlflow"], **arguments) as logger:
        logger.log(1, {"reward": 0.25, "odd=name": 1.0, "kl": float("nan")})
    with MetricsLogger(tmp_path / "metrics.jsonl", ["mlflow"], resume_step=1, **arguments) as logger:
        logger.log(2, {"reward": 0.5})
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("adding").experiment_id])
    assert run.info.run_name == "a/b"
    assert run.info.status == "FINISHED"
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "reward")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert run.data.metrics["odd_name"] == 1.0
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["config.json"]
