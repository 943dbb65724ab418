"""A run as a job of the real Slurm, on one node and on two: equal to one process here, followed, interrupted, cancelled, and failing as itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks_runs import LIMIT, compare, run, start
from slurm_machine import slurm

from rollwright.config.sections import ClusterConfig, SlurmConfig
from rollwright.errors import ClusterError
from rollwright.placement.slurm import run_job

SLURM = ("cluster.kind=slurm", "cluster.slurm.poll_seconds=0.3", "stats_logger.display=plain")
STEPS = 2


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    # Its sockets' paths have to be short, and the daemon that is not root has to reach them.
    directory = tmp_path_factory.mktemp("slurm")
    for parent in (directory, *directory.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    with slurm(directory) as variables:
        yield variables


@pytest.fixture
def grpo(grpo, machine, monkeypatch):
    """The directory with the config of a GRPO run, from which jobs can be submitted."""
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    return grpo


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def jobs() -> str:
    return subprocess.run(["squeue", "--noheader", "--format=%i %T"], capture_output=True, text=True).stdout


def wait_until(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, jobs()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_jobs_of_one_node_and_of_two_are_one_process_here(grpo, alone, tiny_model, pytestconfig):
    """In the long form three seeds, of ten steps each."""
    seeds = (1, 2, 3)[: pytestconfig.getoption("--seeds")]
    steps, place = STEPS if len(seeds) == 1 else 10, grpo / "runs" / "ranks"
    for seed in seeds:
        common = ("grpo.yaml", f"seed={seed}", f"total_train_steps={steps}")
        text = run(grpo, *common, f"trial_name=job-{seed}", *SLURM, "cluster.processes=2")
        assert re.search(r"submitted job \d+; its output is in .*job-\d\.slurm-\d+\.log", text)
        assert f"step {steps}" in text  # what the job writes, to its last line
        (log,) = place.glob(f"job-{seed}.slurm-*.log")
        assert log.read_text().splitlines()[-1] in text
        flips = compare(alone(seed), place / f"job-{seed}", steps=steps, seed=seed, model=tiny_model)
        print(f"seed {seed}, one node: {flips or 'no flip'}")
        if find_spec("ray") is None:
            pytest.skip("the extra `ray` is not installed, by which a job has several nodes")
        placed = ("cluster.nodes=2", "cluster.slurm.cpus_per_node=2", "cluster.workers=2", "rollout.backend=builtin_process")
        text = run(grpo, *common, f"trial_name=nodes-{seed}", *SLURM, *placed)
        assert set(re.findall(r" fits on (\S+)", text)) == {"127.0.0.5", "127.0.0.6"}  # one Ray, of both nodes
        flips = compare(alone(seed), place / f"nodes-{seed}", steps=steps, seed=seed, model=tiny_model)
        print(f"seed {seed}, two nodes: {flips or 'no flip'}")
    assert jobs() == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_is_found_again_and_saves_when_it_is_interrupted(grpo):
    words = ("grpo.yaml", "total_train_steps=100000", *SLURM)
    process = start(grpo, *words)
    wait_until(lambda: "submitted job" in said(grpo), LIMIT)
    (number,) = re.findall(r"submitted job (\d+)", said(grpo))
    wait_until(lambda: "step 2" in said(grpo), LIMIT)
    process.kill()  # the job goes on
    process.wait()
    process = start(grpo, *words)
    wait_until(lambda: "step 3" in said(grpo), LIMIT)
    assert f"job {number} carries out" in said(grpo)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130
    assert f"job {number} has ended as FAILED" in said(grpo)
    assert any((grpo / "runs" / "ranks" / "trial" / "recover").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ends_of_jobs(grpo, capfd):
    waiting = start(grpo, "grpo.yaml", *SLURM, "cluster.slurm.arguments=[--hold]")
    wait_until(lambda: "is PENDING" in said(grpo), LIMIT)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(LIMIT) == 143
    assert "has ended as CANCELLED" in said(grpo)

    def job(**settings) -> int:
        cluster = ClusterConfig(kind="slurm", slurm=SlurmConfig(poll_seconds=0.3, **settings))
        return run_job(cluster, grpo / "runs" / "ranks" / "other", ["--version"])

    with pytest.raises(ClusterError, match=r"sbatch refused the job: .*partition"):
        job(partition="nowhere")
    assert job(setup=["echo before it", "exit 5"]) == 5
    shown = capfd.readouterr()
    assert "before it" in shown.out
    assert "has ended as FAILED (NonZeroExitCode)" in shown.err
    assert job(setup=["kill -KILL $$"]) == 137
    assert jobs() == ""
