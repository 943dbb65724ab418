"""The run directory: one run, one process, never silently reused."""

import subprocess
import sys

import pytest

from rollwright.atomic import write_json
from rollwright.errors import CheckpointError, ConfigError
from rollwright.tracking.run_directory import RunDirectory, identity_of

CONFIG = {"seed": 1, "actor": {"lr": 1e-4}, "saver": {"keep": 2}, "total_train_steps": 20}


def claim(root, config=CONFIG, mode="auto"):
    return RunDirectory(root, "quickstart", "first").claim(config, mode)


def leave(root, *, steps: bool, checkpoint: bool, finished: bool = False, journal: bool = False):
    with claim(root) as run:
        if journal:
            run.journal.mkdir()
            (run.journal / "000000-0000.journal").write_bytes(b"")
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


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_a_run_killed_before_its_first_checkpoint_goes_on_from_its_journal(tmp_path, steps, mode):
    leave(tmp_path, steps=steps, checkpoint=False, journal=True)
    with claim(tmp_path, mode=mode) as run:
        assert run.resumed
        assert run.has_journal
        assert run.has_metrics == steps


@pytest.mark.parametrize(("seed", "mode"), [(2, "auto"), (2, "resume"), (1, "off")])
def test_a_journal_of_another_config_is_not_gone_on_from(tmp_path, seed, mode):
    leave(tmp_path, steps=False, checkpoint=False, journal=True)
    with claim(tmp_path, {**CONFIG, "seed": seed}, mode=mode) as run:
        assert not run.resumed
        assert not run.has_journal
        assert (run.path / "attempts" / "1" / "journal").is_dir()


def test_a_stage_goes_on_from_its_journal(tmp_path):
    leave_stages(tmp_path, warmup_done=True)
    journal = tmp_path / "quickstart" / "first" / "grpo" / "journal"
    journal.mkdir()
    (journal / "000000-0000.journal").write_bytes(b"")
    with claim(tmp_path, STAGES) as run:
        grpo = run.stage("grpo")
        assert grpo.resumed
        assert grpo.has_metrics


def test_what_a_killed_process_left_unfinished_is_removed_wherever_it_is(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    path = tmp_path / "quickstart" / "first"
    left = [path / place / ".draft.0123abcd.tmp" for place in (".", "recover", "grpo/recover", "weights", "checkpoints")]
    for directory in left:
        directory.mkdir(parents=True)
        (directory / "state.safetensors").write_bytes(b"half")
    (path / ".run.json.0123abcd.tmp").write_text("{")
    with claim(tmp_path) as run:
        assert run.resumed
        assert not [*path.rglob("*.tmp")]


def test_a_marker_that_is_no_object_is_damage(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    (tmp_path / "quickstart" / "first" / "run.json").write_text("[]")
    with pytest.raises(CheckpointError, match="damaged"):
        claim(tmp_path)


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


@pytest.mark.parametrize(("kind", "begins_anew"), [("model", True), ("sft", False)])
def test_another_config_begins_anew_where_only_a_random_model_was_made(tmp_path, kind, begins_anew):
    """The first mistake in a config is often told after the stage that makes the model."""
    leave(tmp_path, steps=False, checkpoint=False)
    run = RunDirectory(tmp_path, "quickstart", "first")
    write_json(run.stages_file, {"first": {"kind": kind}})
    (run.path / "model").mkdir()
    if begins_anew:
        with claim(tmp_path, {**CONFIG, "seed": 2}) as run:
            assert not run.resumed
            assert not run.stages_file.exists()
            assert (run.path / "attempts" / "1" / "model").is_dir()
    else:
        with pytest.raises(CheckpointError, match="another config"):
            claim(tmp_path, {**CONFIG, "seed": 2})


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_directory_that_cannot_be_made_names_the_key(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the run directory /proc/none/quickstart/first cannot be written: .*cluster\.fileroot"
    ):
        claim("/proc/none")


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


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_a_finished_run_without_a_checkpoint_is_never_sent_from_one_mode_to_the_other(tmp_path, mode):
    leave(tmp_path, steps=True, checkpoint=False, finished=True)
    with pytest.raises(CheckpointError, match="has finished: set another trial_name") as told:
        claim(tmp_path, mode=mode)
    assert "it left no recovery checkpoint" in str(told.value)
    assert "recover.mode" not in str(told.value)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_off_never_touches_a_used_directory(tmp_path, checkpoint):
    leave(tmp_path, steps=True, checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match=r"recover\.mode=off starts only fresh runs"):
        claim(tmp_path, mode="off")


def test_resume_insists_on_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no run"):
        claim(tmp_path, mode="resume")
    leave(tmp_path, steps=True, checkpoint=False)
    with pytest.raises(CheckpointError, match="no recovery checkpoint"):
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
        other.wait(timeout=60)
        claim(tmp_path, {}).release()
    finally:
        other.kill()
        other.communicate(timeout=60)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_names_that_are_no_directory_names(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a directory"):
        RunDirectory(tmp_path, name, "first")


STAGES = {"stages": [{"name": "warmup", "lr": 1e-3, "total_train_steps": 5}, {"name": "grpo", "lr": 1e-4}]}


def leave_stages(root, *, warmup_done: bool, checkpoint: bool = False, finished: bool = False):
    """What a run of two stages leaves that stopped in the first, or in the second."""
    with claim(root, STAGES) as run:
        warmup = run.stage("warmup")
        warmup.metrics_file.write_text('{"step": 1}\n')
        if warmup_done:
            run.stages_file.write_text("{}")
            grpo = run.stage("grpo")
            grpo.metrics_file.write_text('{"step": 1}\n')
            if checkpoint:
                (grpo.recover / "step-000001").mkdir()
        if finished:
            run.finish()


def test_a_run_of_stages_that_finished_is_not_reused(tmp_path):
    leave_stages(tmp_path, warmup_done=True, checkpoint=True, finished=True)
    with pytest.raises(CheckpointError, match="has finished"):
        claim(tmp_path, STAGES)


def test_a_run_that_stopped_in_its_first_stage_begins_anew(tmp_path):
    leave_stages(tmp_path, warmup_done=False)
    with claim(tmp_path, STAGES) as run:
        assert not run.resumed
        assert not run.stage("warmup").has_metrics
        assert (run.path / "attempts" / "1" / "warmup" / "metrics.jsonl").exists()


def test_a_run_that_stopped_in_a_later_stage_goes_on_there(tmp_path):
    leave_stages(tmp_path, warmup_done=True, checkpoint=True)
    with claim(tmp_path, STAGES) as run:
        assert run.resumed
        grpo = run.stage("grpo")
        assert grpo.resumed
        assert grpo.has_metrics


def test_a_later_stage_without_a_checkpoint_begins_anew_after_what_was_finished(tmp_path):
    leave_stages(tmp_path, warmup_done=True)
    with claim(tmp_path, STAGES) as run:
        assert run.resumed
        grpo = run.stage("grpo")
        assert not grpo.resumed
        assert not grpo.has_metrics
        assert (grpo.path / "attempts" / "1" / "metrics.jsonl").exists()
        assert run.stages_file.exists()


def test_keys_of_stages_that_may_change_and_those_that_may_not(tmp_path):
    leave_stages(tmp_path, warmup_done=True, checkpoint=True)
    longer = {"stages": [{**STAGES["stages"][0], "total_train_steps": 9}, STAGES["stages"][1]]}
    with claim(tmp_path, longer) as run:
        assert run.resumed
    other = {"stages": [STAGES["stages"][0], {**STAGES["stages"][1], "lr": 1.0}]}
    with pytest.raises(CheckpointError, match=r"stages\.1\.lr: 0\.0001 then, 1\.0 now"):
        claim(tmp_path, other)


def test_what_a_process_left_is_taken_up_with_all_that_is_in_it(tmp_path):
    first = claim(tmp_path)
    (first.path / "service.json").write_text("{}")
    first.stages_file.write_text("{}")
    first.finish()
    assert not first.was_left()
    again = RunDirectory(tmp_path, "quickstart", "first")
    assert not again.take_up(CONFIG)  # it is at work
    first.release()
    assert first.was_left()
    assert again.take_up(CONFIG)
    assert not again.was_left()
    assert (again.path / "service.json").exists()
    assert not again.stages_file.exists()  # nothing of it is done
    assert again.marker()["finished"] is False
    again.release()
    lock = again.path / "run.lock"
    lock.write_text("process 1 on another-machine\n")
    assert not again.was_left()  # whose lock may not be seen here


def test_a_lock_that_was_deleted_ends_the_run_at_its_next_checkpoint(tmp_path):
    with RunDirectory(tmp_path, "quickstart", "first").claim({}) as run:
        stage = run.stage("grpo")
        run.check_lock()
        stage.check_lock()
        (run.path / "run.lock").unlink()
        with pytest.raises(
            CheckpointError, match=r"run\.lock was deleted .* while this run wrote there, so another process may"
        ):
            stage.check_lock()
        with RunDirectory(tmp_path, "quickstart", "first").claim({}) as other:  # which nothing keeps out
            with pytest.raises(CheckpointError, match=r"run\.lock was replaced while this run wrote there"):
                run.check_lock()
            other.check_lock()
            other.path.rename(tmp_path / "elsewhere")
            with pytest.raises(CheckpointError, match="first was moved or removed"):
                other.check_lock()
            (tmp_path / "elsewhere").rename(other.path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"first": 1}'])
def test_files_of_the_run_that_are_damaged_are_named_with_what_to_do(tmp_path, content):
    with RunDirectory(tmp_path, "quickstart", "first").claim({}) as run:
        run.write_stages({"first": {"kind": "sft", "reward": 0.5}})
        assert run.finished_stages() == {"first": {"kind": "sft", "reward": 0.5}}
        run.stages_file.write_text(run.stages_file.read_text().replace("0.5", "0.7"))
        with pytest.raises(CheckpointError, match=r"stages\.json is damaged \(its checksum does not match.* or delete it"):
            run.finished_stages()
        run.stages_file.write_text(content)
        with pytest.raises(CheckpointError, match=r"stages\.json is damaged .* or delete it"):
            run.finished_stages()
        run.stages_file.unlink()
        (run.path / "run.json").write_text(content if content != '{"first": 1}' else "")
        with pytest.raises(CheckpointError, match=r"run\.json is damaged .* Restore this file from a copy, or choose another"):
            run.marker()


def test_a_run_of_a_version_without_a_key_resumes_only_while_the_key_has_its_default(tmp_path):
    leave(tmp_path, steps=True, checkpoint=True)
    with pytest.raises(CheckpointError, match=r"actor.kl_in: 'unset' then, 'reward' now"):
        claim(tmp_path, {**CONFIG, "actor": {"lr": 1e-4, "kl_in": "reward"}})
    with claim(tmp_path, {**CONFIG, "actor": {"lr": 1e-4, "kl_in": "loss"}}) as run:
        assert run.resumed


def test_a_key_that_is_new_in_a_section_that_may_be_absent_or_listed_is_no_change_either(tmp_path):
    tasks = {"path": "arithmetic"}
    with claim(tmp_path, {**CONFIG, "valid_dataset": tasks, "tasksets": [tasks]}) as run:
        run.metrics_file.write_text('{"step": 1}\n')
        (run.recover / "step-000001").mkdir()
    with pytest.raises(CheckpointError, match=r"tasksets\.0\.kind: 'unset' then, 'harbor' now"):
        claim(tmp_path, {**CONFIG, "valid_dataset": tasks, "tasksets": [{**tasks, "kind": "harbor"}]})
    today = {**tasks, "kind": None}
    with claim(tmp_path, {**CONFIG, "valid_dataset": today, "tasksets": [today]}) as run:
        assert run.resumed
