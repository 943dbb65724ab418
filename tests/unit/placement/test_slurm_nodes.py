"""The nodes of a job of Slurm, with programs that say what the real ones say (tests/cluster has those)."""

from __future__ import annotations

import pytest

from rollwright.errors import ClusterError
from rollwright.placement import slurm_nodes


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Sets the variables of a job's first node; the directory of what ``srun`` was told."""
    programs = {
        "scontrol": 'if [ "$2" = hostnames ]; then printf "n1\\nn2\\nn3\\n"; else echo "NodeName=$3 NodeAddr=$(cat '
        f'{tmp_path}/address) NodeHostName=h"; fi',
        "srun": f'echo "$@" > {tmp_path}/srun; exec sleep $(cat {tmp_path}/seconds)',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "address").write_text("10.0.0.5")
    (tmp_path / "seconds").write_text("60")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name, value in {"SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "6", "SLURM_JOB_NUM_NODES": "3"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_ray_has_what_the_job_was_given(job, monkeypatch):
    assert slurm_nodes.nodes() == 3
    assert slurm_nodes.resources() == {"num_cpus": 6, "_node_ip_address": "10.0.0.5"}
    (job / "address").write_text("n1")  # a name, which a node may take for its loopback interface
    assert slurm_nodes.resources() == {"num_cpus": 6, "_node_ip_address": None}
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert slurm_nodes.resources() == {"num_cpus": 6}
    monkeypatch.delenv("SLURMD_NODENAME")  # a shell of salloc, on a machine that is no node of the job
    assert (slurm_nodes.nodes(), slurm_nodes.resources()) == (1, {})


def test_the_other_nodes_join_and_end(job):
    others = slurm_nodes.OtherNodes("10.0.0.5:6379", job / "logs")
    counts = iter((1, 2, 3))
    others.wait(lambda: next(counts))
    others.close()
    others.close()
    told = (job / "srun").read_text().split()
    assert {"--nodes=2", "--nodelist=n2,n3", "--cpus-per-task=6", "--overlap"} <= set(told)
    assert told[-3:] == ["-m", "rollwright.placement.slurm_nodes", "10.0.0.5:6379"]


def test_nodes_that_end_are_an_error(job):
    (job / "seconds").write_text("0")
    others = slurm_nodes.OtherNodes("10.0.0.5:6379", job / "logs")
    with pytest.raises(ClusterError, match=r"has ended on the other nodes of the job \(srun: status 0\).*ray-\*\.log"):
        others.wait(lambda: 1)
