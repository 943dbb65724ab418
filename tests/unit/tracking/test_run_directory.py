"""The run directory: one run, one process, never silently reused."""

import subprocess
import sys

import pytest

from rollwright.errors import CheckpointError, ConfigError
from rollwright.tracking.run_directory import RunDirectory, identity_of

CONFIG = {"seed": 1, "actor": {"lr": 1e-4}, "saver": {"keep": 2}, "total_train_steps": 20}


def claim(root, config=CONFIG, mode="auto"):
    return RunDirectory(root, "quickstart", "first").claim(config, mode)


def leave(root, *, steps: bool, checkpoint: bool, finished: bool = False):
    with claim(root) as run:
        if steps:
            run.metrics_file.write_text('{"step": 1}\n')
        if checkpoint:
            (run.recover / "step-000001").mkdir()
        if finished:
            run.finish()


def test_a_fresh_directory(tmp_path):
    with claim(tmp_path) as run:
        assert run.path == tmp_path / "quickstart" / "first"
        assert not run.resumed
        assert all(path.is_dir() for path in (run.rollouts, run.checkpoints, run.recover, run.logs))
        assert run.marker()["identity"] == identity_of(CONFIG)


def test_constructing_touches_nothing(tmp_path):
    RunDirectory(tmp_path / "runs", "a", "b")
    assert not (tmp_path / "runs").exists()


def test_a_run_with_a_checkpoint_is_resumed(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    with claim(tmp_path) as run:
        assert run.resumed
        assert run.marker()["resumes"] == 1
        assert run.metrics_file.read_text()


def test_a_run_killed_before_its_first_checkpoint_is_set_aside(tmp_path):
    for attempt in (1, 2):
        leave(tmp_path, steps=True, checkpoint=False)
        with claim(tmp_path) as run:
            assert not run.resumed
            assert not run.metrics_file.exists()
            assert (run.path / "attempts" / str(attempt) / "metrics.jsonl").read_text()


def test_a_half_written_checkpoint_does_not_count(tmp_path):
    leave(tmp_path, steps=True, checkpoint=False)
    (tmp_path / "quickstart" / "first" / "recover" / ".step-000001").mkdir(parents=True)
    with claim(tmp_path) as run:
        assert not run.resumed


def test_a_run_that_did_nothing_yet_is_begun_anew_with_any_config(tmp_path):
    leave(tmp_path, steps=False, checkpoint=False)
    with claim(tmp_path, {**CONFIG, "seed": 2}) as run:
        assert not run.resumed


def test_another_config_is_refused_and_the_keys_are_named(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    with pytest.raises(CheckpointError, match=r"actor\.lr: 0\.0001 then, 0\.1 now"):
        claim(tmp_path, {**CONFIG, "actor": {"lr": 0.1}})


def test_keys_outside_the_identity_may_change(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    with claim(tmp_path, {**CONFIG, "saver": {"keep": 5}, "total_train_steps": 40}) as run:
        assert run.resumed


def test_a_finished_run_is_resumed_only_on_request(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True, finished=True)
    with pytest.raises(CheckpointError, match=r"has finished: set another trial_name .* recover\.mode=resume"):
        claim(tmp_path)
    with claim(tmp_path, mode="resume") as run:
        assert run.resumed


@pytest.mark.parametrize("checkpoint", [True, False])
def test_off_never_touches_a_used_directory(tmp_path, checkpoint):
    leave(tmp_path, steps=True, checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match=r"recover\.mode=off starts only fresh runs"):
        claim(tmp_path, mode="off")


def test_resume_insists_on_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run"):
        claim(tmp_path, mode="resume")
    leave(tmp_path, steps=True, checkpoint=False)
    with pytest.raises(CheckpointError, match="no recover checkpoint"):
        claim(tmp_path, mode="resume")


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "quickstart" / "first").mkdir(parents=True)
    (tmp_path / "quickstart" / "first" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="was not made by a run"):
        claim(tmp_path)


def test_two_processes_do_not_write_one_run(tmp_path):
    code = (
        "import sys; from rollwright.tracking.run_directory import RunDirectory\n"
        "run = RunDirectory(sys.argv[1], 'quickstart', 'first').claim({})\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(CheckpointError, match=f"is being written by process {other.pid} on"):
            claim(tmp_path, {})
        other.kill()
        other.wait(timeout=10)
        claim(tmp_path, {}).release()
    finally:
        other.kill()
        other.communicate(timeout=10)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_names_that_are_no_directory_names(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a directory"):
        RunDirectory(tmp_path, name, "first")
