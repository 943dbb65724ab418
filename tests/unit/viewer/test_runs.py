"""The runs below a directory, their states, and what changes while they go on."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time

import pytest

from rollwright.atomic import line_with_checksum
from rollwright.errors import DataError
from rollwright.tracking.run_directory import RunDirectory, is_claimed
from rollwright.tracking.sinks import JSONLSink
from rollwright.viewer.run import Run
from rollwright.viewer.runs import Runs, config_difference


def claimed(root, trial, *, finish=False, release=True):
    """A run of two stages, of which one wrote metrics."""
    run = RunDirectory(root, "made", trial).claim({"stages": [{"kind": "rl", "name": "grpo"}]})
    stage = run.stage("grpo")
    sink = JSONLSink(stage.metrics_file)
    for step in (1, 2, 3):
        sink.write(step, {"reward": step / 10})
    sink.close()
    if finish:
        run.finish()
    if release:
        run.release()
    return stage.path


def test_runs_are_listed_with_their_state_and_curve(tmp_path, recorded_run):
    claimed(tmp_path / "runs", "done", finish=True)
    claimed(tmp_path / "runs", "killed")
    (tmp_path / "runs" / "made" / "done" / "attempts" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "made" / "done" / "attempts" / "1" / "metrics.jsonl").write_text("")
    os.symlink(recorded_run, tmp_path / "runs" / "link")
    listed = {run["id"]: run for run in Runs([tmp_path / "runs", recorded_run]).list()}
    assert {name: run["state"] for name, run in listed.items()} == {
        "made/done/grpo": "finished",
        "made/killed/grpo": "stopped",
        "run": "finished",
    }
    done = listed["made/done/grpo"]
    assert (done["name"], done["kind"], done["last_step"], done["sparkline"]) == ("made/done/grpo", "rl", 3, [0.1, 0.2, 0.3])
    assert json.dumps(list(listed.values()))
    with pytest.raises(DataError, match="no run made/other"):
        Runs(tmp_path / "runs").get("made/other")
    with pytest.raises(DataError, match="no directory"):
        Runs(tmp_path / "nowhere")


def _hold(root, ready):
    run = RunDirectory(root, "made", "held").claim({})
    (run.path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    ready.set()
    time.sleep(60)


def test_a_run_runs_while_its_process_holds_the_directory(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    path = tmp_path / "made" / "held"
    assert is_claimed(path)
    assert Run(path).info()["state"] == "running"
    process.kill()
    process.join()
    assert not is_claimed(path)
    assert Run(path).info()["state"] == "stopped"
    RunDirectory(tmp_path, "made", "held").claim({}).release()  # looking did not take the lock


def test_what_is_written_is_seen_and_the_stamp_changes(tmp_path):
    path = claimed(tmp_path, "live")
    run = Run(path)
    before = run.stamp
    assert [step["step"] for step in run.steps()] == [1, 2, 3]
    assert run.stamp == before
    sink = JSONLSink(path / "metrics.jsonl", resume_step=2)  # a resume cuts step 3
    sink.write(3, {"reward": 0.9, "odd": float("nan")})
    assert run.stamp != before
    assert run.metrics(["reward", "odd"])["series"] == {"reward": [[1, 0.1], [2, 0.2], [3, 0.9]], "odd": []}
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"no json\n" + line_with_checksum({"step": 4, "reward": 1.0}, 5).encode() + b'{"step": 5, "rew')
    assert run.curves.last("reward") == 1.0
    damaged, tail = (each["message"] for each in run.missing() if each["file"].endswith("metrics.jsonl"))
    assert "a line is damaged" in damaged
    assert "after that of step 3: b'no json'" in damaged
    assert "the last 16 bytes are an incomplete line" in tail
    sink.close()


def test_curves_are_thinned_without_losing_a_peak(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    for step in range(5_000):
        sink.write(step, {"reward": 9.0 if step == 2_345 else 0.0})
    sink.close()
    run = Run(tmp_path)
    points = run.metrics(points=200)["series"]["reward"]
    assert len(points) <= 210
    assert [2_345, 9.0] in points
    smooth = run.metrics(points=5_000, smoothing=0.9)["series"]["reward"]
    assert max(value for _, value in smooth) == pytest.approx(0.9)


def test_an_index_is_built_in_the_background_while_a_run_is_followed(copied_run, tmp_path):
    data = next((copied_run / "journal").glob("*.journal")).read_bytes()
    live = shutil.copytree(copied_run, tmp_path / "live", ignore=shutil.ignore_patterns("journal"))
    (live / "journal").mkdir()
    file = live / "journal" / "000000-0000.journal"
    file.write_bytes(data[: len(data) // 2])
    with Run(live) as run:
        run.follow()
        _wait(lambda: run.progress()["is_complete"] and run.progress()["samples"])
        before, stamp = run.progress()["samples"], run.stamp
        with file.open("ab") as grown:
            grown.write(data[len(data) // 2 :])
        _wait(lambda: run.progress()["samples"] > before and run.progress()["text"] == 1.0)
        assert run.stamp != stamp
        assert len(run.steps()) == 3


def _wait(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_keys_in_which_configs_differ(copied_run, recorded_run):
    file = copied_run / "config.yaml"
    file.write_text(file.read_text().replace("seed: 1", "seed: 7"))
    assert ("seed", 1, 7) in config_difference(Run(recorded_run), Run(copied_run))
    assert config_difference(Run(recorded_run), Run(recorded_run)) == []


def test_a_run_of_several_stages_names_them(tmp_path, recorded_run):
    for name in ("first", "second"):
        shutil.copytree(recorded_run, tmp_path / name)
    with pytest.raises(DataError, match=r"several stages or processes: give one of .*first, .*second"):
        Run(tmp_path)
    with pytest.raises(DataError, match="is no run"):
        Run(tmp_path / "first" / "checkpoints")
