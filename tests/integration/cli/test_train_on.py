"""A run that finished is made longer with recover.mode=resume, as its message says."""

import json

import pytest

from rollwright.cli.main import main

SINGLE = """\
experiment_name: longer
cluster: {fileroot: ROOT, threads: 1}
actor: {path: MODEL}
train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1, size: 16}}
workflow: rlvr
reward_fn: numeric_reward
gconfig: {n_samples: 2, max_new_tokens: 4}
total_train_steps: 2
stats_logger: {display: none}
"""
STAGES = """\
experiment_name: longer
cluster: {fileroot: ROOT, threads: 1}
workflow: rlvr
reward_fn: numeric_reward
stats_logger: {display: none}
stages:
  - {kind: sft, name: warmup, model: {path: MODEL}, train_dataset: {path: arithmetic, batch_size: 2}, total_train_steps: 1}
  - kind: rl
    name: rl
    actor: {path: "${run_dir}/warmup/checkpoints/final"}
    train_dataset: {path: arithmetic, batch_size: 2, kwargs: {digits: 1, size: 16}}
    gconfig: {n_samples: 2, max_new_tokens: 4}
    total_train_steps: 1
  - {kind: eval, name: after, path: "${run_dir}/rl/checkpoints/final", dataset: {path: arithmetic, limit: 2}}
"""


@pytest.fixture
def written(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(text):
        file = tmp_path / "run.yaml"
        file.write_text(text.replace("ROOT", str(tmp_path / "runs")).replace("MODEL", str(tiny_model)))
        return str(file), tmp_path / "runs" / "longer" / "trial"

    return write


def steps(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return sorted({record["step"] for record in map(json.loads, lines) if "reward" in record})


def learned(directory):
    """What each update was, as it was made last."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    made = {record["step"]: record for record in records if "reward" in record}
    kept = ("reward", "actor/loss", "actor/grad_norm", "actor/kl", "actor/entropy")
    return [{name: record.get(name) for name in kept} for record in made.values()]


def test_a_finished_run_trains_on(written, capsys, caplog):
    file, run = written(SINGLE)
    assert main(["run", file]) == 0
    assert steps(run) == [1, 2]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != "run.lock"}
    capsys.readouterr()
    assert main(["run", file]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing to do: ")
    assert "has finished" in line
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["run", file, "total_train_steps=3"]) == 1  # more than there is, and mode auto trains no finished run on
    assert "or recover.mode=resume with more total_train_steps to train on" in capsys.readouterr().err
    assert main(["run", file, "recover.mode=resume", "total_train_steps=3"]) == 0
    assert steps(run) == [1, 2, 3]
    assert json.loads((run / "summary.json").read_text())["stages"]["rl"]["steps"] == 3
    caplog.clear()
    assert main(["run", file, "recover.mode=resume", "total_train_steps=3"]) == 0
    assert "every stage was finished before, and none is asked for more: give total_train_steps" in caplog.text
    assert steps(run) == [1, 2, 3]


def test_damaged_checkpoints_stop_a_run_unless_it_may_begin_again_from_its_journal(written, capsys, caplog):
    file, run = written(SINGLE)
    assert main(["run", file]) == 0
    before = learned(run)
    checkpoints = sorted((run / "recover").iterdir())
    for checkpoint in checkpoints:
        (file_of_it,) = (checkpoint / "parts").iterdir()
        content = bytearray(file_of_it.read_bytes())
        content[-5] ^= 1
        file_of_it.write_bytes(content)
    again = ["run", file, "recover.mode=resume", "total_train_steps=3"]
    assert main(again) == 1
    assert (
        "are all damaged, so the run cannot continue from them; set recover.if_damaged=begin_again" in capsys.readouterr().err
    )
    assert main([*again, "recover.if_damaged=begin_again"]) == 0
    assert "restarts from its initial weights, with its journal's episodes" in caplog.text
    assert [path.name for path in sorted((run / "attempts" / "1").iterdir())] == [path.name for path in checkpoints]
    assert steps(run) == [1, 2, 3]
    assert "going on from the journal: 8 episodes have a past" in caplog.text
    assert "4 groups were taken after the checkpoint, and are again" in caplog.text
    assert learned(run)[:2] == before


def test_one_stage_of_several_trains_on_and_is_evaluated_again(written, capsys, caplog):
    file, run = written(STAGES)
    assert main(["run", file]) == 0
    first = json.loads((run / "stages.json").read_text())
    assert main(["run", file, "recover.mode=resume", "stages.rl.total_train_steps=2"]) == 0
    second = json.loads((run / "stages.json").read_text())
    assert steps(run / "rl") == [1, 2]
    assert second["warmup"] == first["warmup"]
    assert (first["rl"]["steps"], second["rl"]["steps"]) == (1, 2)
    assert second["after"]["total_seconds"] != first["after"]["total_seconds"]
    caplog.clear()
    assert main(["run", file, "recover.mode=resume", "stages.warmup.total_train_steps=2", "stages.rl.total_train_steps=2"]) == 0
    assert "stage rl began from what warmup had made before, and is not repeated" in caplog.text
    assert json.loads((run / "stages.json").read_text())["warmup"]["steps"] == 2


def test_a_run_without_checkpoints_says_that_it_cannot(written, capsys):
    file, _ = written(SINGLE)
    assert main(["run", file, "recover.mode=off"]) == 0
    for mode in ("auto", "resume"):
        assert main(["run", file, f"recover.mode={mode}", "total_train_steps=3"]) == 1
        err = capsys.readouterr().err
        assert "has finished: set another trial_name for a new run; it left no recovery checkpoint" in err
