"""Jobs of Slurm with programs that say what the real ones say in moments that a test cannot bring about (tests/cluster has those)."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rollwright.config.loading import load_stages
from rollwright.config.sections import ClusterConfig, SlurmConfig
from rollwright.errors import ClusterError, ConfigError
from rollwright.placement import slurm
from rollwright.placement.placement import placement_of_stages

PROGRAMS = {
    "sbatch": 'cat > "$D/script"; env > "$D/environment"; if [ -f "$D/refusal" ]; then cat "$D/refusal" >&2; exit 1; fi; echo 7',
    "squeue": 'cat "$D/jobs" 2>/dev/null; exit 0',
    "scancel": 'echo "$*" >> "$D/cancelled"; if [ -f "$D/then" ]; then mv "$D/then" "$D/state"; fi',
    # One answer a call where there are several, the last one from then on.
    "scontrol": 'if [ -f "$D/forgotten" ]; then echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi; '
    'if [ -f "$D/silent" ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi; '
    'mapfile -t L < "$D/state"; echo "${L[0]}"; if (( ${#L[@]} > 1 )); then printf "%s\\n" "${L[@]:1}" > "$D/state"; fi',
}


def shown(name: str, code: str = "0:0", reason: str = "None", log: str = "") -> str:
    return f"JobId=7 JobName=x.y JobState={name} Reason={reason} DerivedExitCode=9:0 ExitCode={code} StdOut={log} NodeList=n\n"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """The directory in which fake programs of Slurm read what to say, and write what they were told."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in PROGRAMS.items():
        (place / name).write_text(f"#!/bin/bash\nD={tmp_path}\n{text}\n")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(programs: Path, **settings) -> int:
    cluster = ClusterConfig(kind="slurm", slurm=SlurmConfig(poll_seconds=0.01, **settings))
    return slurm.run_job(cluster, programs / "runs" / "x" / "y", ["run", "config.yaml", "seed=3"])


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 143),
        ("TIMEOUT", "0:0", 124),
        ("DEADLINE", "0:0", 124),
        ("OUT_OF_MEMORY", "0:125", 137),
        ("TIMEOUT", "0:15", 124),
        ("NODE_FAIL", "0:1", 1),
        ("OUT_OF_MEMORY", "0:0", 137),
        ("NODE_FAIL", "0:0", 1),
        ("BOOT_FAIL", "0:0", 1),
        ("PREEMPTED", "0:0", 143),
        ("REVOKED", "0:0", 1),
        ("LAUNCH_FAILED", "0:0", 1),
        ("A_STATE_OF_NEXT_YEAR", "0:0", 1),
    ],
)
def test_every_state_in_which_nothing_waits_or_runs_is_an_end(programs, monkeypatch, capsys, name, code, status):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    (programs / "state").write_text(shown("RUNNING") + shown(name, code, "SomeReason"))
    assert run(programs) == status
    assert (f"job 7 has ended as {name} (SomeReason)" in capsys.readouterr().err) == (status != 0)


def test_a_job_that_waits_or_runs_is_followed(programs, monkeypatch):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    states = ["PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "PENDING", "RUNNING", "COMPLETING", "COMPLETED"]
    (programs / "state").write_text("".join(map(shown, states)))
    assert run(programs) == 0
    assert (programs / "state").read_text() == shown("COMPLETED")


def test_what_the_job_writes_is_written_here_with_its_last_line(programs, monkeypatch, capfd):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.3)
    (programs / "state").write_text(shown("RUNNING") * 30 + shown("COMPLETED"))
    log = programs / "runs" / "x" / "y.slurm-7.log"

    def write() -> None:
        while not log.parent.is_dir():
            time.sleep(0.01)
        log.write_text("first\n")
        while (programs / "state").read_text().startswith(shown("RUNNING")):
            time.sleep(0.01)
        with log.open("a") as file:  # it arrives after the end is known
            file.write("last\n")

    writer = threading.Thread(target=write)
    writer.start()
    assert run(programs) == 0
    writer.join()
    assert capfd.readouterr().out == "first\nlast\n"


def test_the_script_says_what_is_asked_for(programs, monkeypatch):
    (programs / "state").write_text(shown("COMPLETED"))
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "3")  # submitted from inside another job, whose sizes are not this one's
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    run(
        programs,
        partition="big one",
        time="2:00:00",
        gpus_per_node=8,
        memory="64G",
        arguments=["--qos=high"],
        setup=["module load cuda"],
    )
    script = (programs / "script").read_text().splitlines()
    assert script[0] == "#!/bin/bash"
    for option in ("'big one'", "2:00:00", "B:TERM@120", "8", "64G", "high", "1", f"{programs}/runs/x/y.slurm-%j.log"):
        assert any(line.startswith("#SBATCH --") and line.endswith(f"={option}") for line in script), option
    assert script[-2] == "module load cuda"
    assert script[-1].endswith("-m rollwright run config.yaml seed=3 cluster.kind=local")
    assert not any("account" in line for line in script)
    environment = (programs / "environment").read_text().splitlines()
    assert "SLURM_CONF=/etc/slurm.conf" in environment
    assert not any(line.startswith(("SLURM_NTASKS", "SLURM_JOB_ID")) for line in environment)


def test_a_run_with_workers_has_a_ray_of_its_own_in_the_job(tmp_path):
    script = slurm.job_script(ClusterConfig(kind="slurm", workers=2), tmp_path / "r", ["run", "config.yaml"]).splitlines()
    assert script[-2] == "unset RAY_ADDRESS"
    assert script[-1].endswith("run config.yaml cluster.kind=ray")


def test_what_is_shown_of_a_script_hides_secrets(tmp_path):
    words = ["run", "config.yaml", "rollout.api_key=swordfish"]
    assert "swordfish" not in slurm.job_script(ClusterConfig(kind="slurm"), tmp_path / "r", words, hides_secrets=True)
    assert "swordfish" in slurm.job_script(ClusterConfig(kind="slurm"), tmp_path / "r", words)


def test_a_percent_sign_in_a_path_is_no_pattern_of_slurm(tmp_path):
    assert "100%%j.slurm-%j.log" in slurm.job_script(ClusterConfig(kind="slurm"), tmp_path / "100%j", ["run"])


@pytest.mark.parametrize(("state", "first"), [("PENDING", "7"), ("RUNNING", "--batch --signal=TERM 7")])
def test_a_signal_ends_the_run_and_a_second_one_the_job(programs, monkeypatch, state, first):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    (programs / "state").write_text(shown(state))

    def interrupt() -> None:
        told = programs / "cancelled"
        while not (programs / "script").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        while not told.exists():
            time.sleep(0.01)
        (programs / "then").write_text(shown("CANCELLED", "0:15"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run(programs) == 130
    thread.join()
    assert (programs / "cancelled").read_text().splitlines() == [first, "7"]


@pytest.mark.parametrize("number", ["7", "%j"])  # whether Slurm shows the file's name, or its pattern
def test_a_job_that_is_there_already_is_followed(programs, monkeypatch, number):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    (programs / "jobs").write_text("7\n")
    (programs / "state").write_text(shown("COMPLETED", log=f"{programs}/runs/x/y.slurm-{number}.log"))
    assert run(programs) == 0
    assert not (programs / "script").exists()
    (programs / "state").write_text(shown("COMPLETED", log="/elsewhere/x/y.slurm-7.log"))  # of the same name in another place
    assert run(programs) == 0
    assert (programs / "script").exists()


def test_what_slurm_refuses_or_forgets_is_an_error_that_says_so(programs, monkeypatch):
    (programs / "refusal").write_text("sbatch: error: invalid partition specified: nowhere\n")
    with pytest.raises(ClusterError, match=r"sbatch refused the job: .*invalid partition.*correct cluster\.slurm"):
        run(programs, partition="nowhere")
    (programs / "refusal").unlink()
    (programs / "forgotten").touch()
    with pytest.raises(ClusterError, match=r"knows no job 7 any more.*y\.slurm-7\.log"):
        run(programs)
    accounting = programs / "bin" / "sacct"
    accounting.write_text("#!/bin/bash\necho 'CANCELLED by 0|0:15'\n")
    accounting.chmod(0o755)
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    assert run(programs) == 143


def test_a_controller_that_does_not_answer_is_no_end_of_a_job(programs, monkeypatch):
    monkeypatch.setattr(slurm, "_LOG_SECONDS", 0.0)
    (programs / "silent").touch()
    (programs / "state").write_text(shown("COMPLETED"))
    back = threading.Timer(0.5, (programs / "silent").unlink)
    back.start()
    assert run(programs) == 0
    (programs / "silent").touch()
    monkeypatch.setattr(slurm, "_SILENCE_SECONDS", 0.1)
    with pytest.raises(ClusterError, match="job 7 may still run"):
        run(programs)


def test_slurm_has_to_be_there_and_one_process_submits(programs, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="without torchrun"):
        run(programs)
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("PATH", str(programs / "nothing"))
    with pytest.raises(ConfigError, match=r"cluster\.kind: is slurm, but there is no sbatch here"):
        run(programs)


def test_only_rollwright_run_submits(tmp_path):
    text = "experiment_name: x\ncluster: {kind: slurm}\nworkflow: rollwright.workflows.rlvr.RLVRWorkflow\n"
    text += "reward_fn: numeric_reward\ntrain_dataset: {path: arithmetic}\nactor: {path: m}\ntotal_train_steps: 1\n"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match="`rollwright run` submits"):
        placement_of_stages(load_stages(tmp_path / "run.yaml")).join([])
