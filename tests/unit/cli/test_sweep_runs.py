"""Sweeps from the command line: which runs are started, what happens after one fails or a signal, and what the end says."""

import json
import os
import signal
from pathlib import Path

import pytest

from rollwright.cli.main import main
from rollwright.cli.sweep import _Signals
from rollwright.config.loading import load_stages
from rollwright.tracking.run_directory import RunDirectory

CONFIG = """\
experiment_name: sums
cluster: {fileroot: ROOT/runs}
kind: eval
path: MODEL
workflow: rlvr
reward_fn: numeric_reward
dataset: {path: arithmetic, split: test, limit: 2, kwargs: {digits: 1}}
gconfig: {max_new_tokens: 2}
samples: 1
"""


@pytest.fixture
def sweep(tmp_path, tiny_model, monkeypatch):
    """Runs a sweep whose runs are stood in for: each makes its directory and reaches a tenth of its seed."""
    file = tmp_path / "sums.yaml"
    file.write_text(CONFIG.replace("ROOT", str(tmp_path)).replace("MODEL", str(tiny_model)))
    started: list[str] = []
    outcome: dict[str, int] = {}

    def run(self, words):
        stages = load_stages(words[1], words[2:])
        config = stages[0].config
        started.append(config.trial_name)
        if status := outcome.get(config.trial_name, 0):
            if status < 0:
                os.kill(os.getpid(), -status)
            return abs(status)
        with RunDirectory(config.cluster.fileroot, "sums", config.trial_name).claim(
            {"stages": [stage.to_dict() for stage in stages]}
        ) as directory:
            result = {"kind": "eval", "label": "test", "greedy": config.seed / 10 + (config.gconfig.temperature > 0.5)}
            directory.summary_file.write_text(json.dumps({"stages": {"eval": result}}))
            directory.finish()
        return 0

    monkeypatch.setattr(_Signals, "run", run)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        started.clear()
        return main(["run", str(file), *words]), list(started)

    call.outcome, call.path = outcome, tmp_path / "runs" / "sums" / "trial.sweep.json"
    return call


def states(path: Path):
    return {run["trial"]: run["state"] for run in json.loads(path.read_text())["runs"]}


def test_runs_are_made_one_after_the_other_and_end_with_a_table(sweep, capsys):
    status, started = sweep("--seeds", "1,2", "gconfig.temperature=0.1,1.0")
    assert status == 0
    assert started == [f"trial-temperature={t}-seed={s}" for t in ("0.1", "1.0") for s in (1, 2)]
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "temperature" in line and "…" in line]
    assert rows == [
        ["test", "greedy", "temperature=0.1", "0.150", "-0.485", "…", "0.785", "0.100", "0.200"],
        ["temperature=1.0", "1.150", "0.515", "…", "1.785", "1.100", "1.200"],
    ]
    assert set(states(sweep.path).values()) == {"finished"}


def test_the_same_command_makes_only_what_is_missing(sweep, capsys):
    sweep.outcome["trial-seed=2"] = 3
    status, _ = sweep("--seeds", "1,2,3")
    assert status == 1
    out = capsys.readouterr().out
    assert "failed with status 3; the others go on" in out
    assert "failed: seed=2" in out
    assert states(sweep.path) == {"trial-seed=1": "finished", "trial-seed=2": "failed", "trial-seed=3": "finished"}
    del sweep.outcome["trial-seed=2"]
    assert sweep("--seeds", "1,2,3,4") == (0, ["trial-seed=2", "trial-seed=4"])
    assert "seed=1 has finished before" in capsys.readouterr().out


def test_a_run_that_finished_with_another_config_is_left_to_decide_itself(sweep):
    sweep("--seeds", "1,2")
    assert sweep("--seeds", "1,2", "gconfig.max_new_tokens=3")[1] == ["trial-seed=1", "trial-seed=2"]


def test_a_signal_ends_the_sweep_after_the_run(sweep, capsys):
    sweep.outcome["trial-seed=2"] = -signal.SIGINT
    assert sweep("--seeds", "1,2,3") == (130, ["trial-seed=1", "trial-seed=2"])
    assert states(sweep.path) == {"trial-seed=1": "finished", "trial-seed=2": "stopped", "trial-seed=3": "stopped"}
    assert "the same command again goes on" in capsys.readouterr().out


def test_a_dry_run_lists_the_runs_and_starts_none(sweep, capsys):
    sweep("--seeds", "1")
    assert sweep("--seeds", "1,2", "--dry-run") == (0, [])
    out = capsys.readouterr().out
    assert "1. trial-seed=1: finished" in out
    assert "2. trial-seed=2: new" in out


def test_a_value_that_one_run_cannot_have_is_told_before_any_starts(sweep, capsys):
    assert sweep("gconfig.temperature=0.1,-2") == (1, [])
    assert "the run with temperature=-2" in capsys.readouterr().err


def test_torchrun_makes_one_run(sweep, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert sweep("--seeds", "1,2") == (1, [])
    assert "cluster.processes" in capsys.readouterr().err
