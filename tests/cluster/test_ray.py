"""One config in one process and on a Ray cluster of three nodes: the same samples and updates, also where processes are killed."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")

from faults.proof import History
from faults.proof import compare as proved
from ranks_runs import LIMIT, compare, metrics, process_of, run, start, trial, wait_until
from ray_machine import start_ray

from rollwright.config.sections import ClusterConfig
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import GroupEnd, Trained
from rollwright.placement.ray_cluster import RayCluster

STEPS = 10  # that are compared: those of the fixture ``alone``
#: Of a Ray that knows of a lost node after seconds.
SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 10}
PLACED = (
    "cluster.kind=ray",
    "cluster.processes=2",
    "cluster.workers=2",
    "cluster.nodes=3",
    "rollout.backend=builtin_process",
    "rollout.servers=2",
    "recover.every_steps=3",
)


def trained_ordinals(directory: Path) -> list[int]:
    """The ordinals of the groups that steps trained on, in their order."""
    ordinals: dict[int, int] = {}
    groups: list[int] = []
    for _, record in read_records(directory / "journal"):
        if isinstance(record, GroupEnd) and record.state == "delivered":
            ordinals[record.group] = record.ordinal
        elif isinstance(record, Trained):
            groups.append(record.group)
    return [ordinals[group] for group in dict.fromkeys(groups)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_cluster_is_one_process_also_where_processes_are_killed(grpo, alone, cluster, tiny_model, pytestconfig):
    """A server that starts, a rank, a worker and a server are killed in turn; tokens, rewards and updates are those of one process that was left alone."""
    for seed in (1, 2, 3)[: pytestconfig.getoption("--seeds")]:
        directory = trial(grpo, f"ray-{seed}")
        arguments = (f"seed={seed}", f"trial_name=ray-{seed}", "total_train_steps=1000", f"cluster.address={cluster}")
        process = start(grpo, "grpo.yaml", *arguments, *PLACED)
        try:
            kill_in_turn(grpo, directory, process)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(120) == 128 + signal.SIGINT
        finally:
            process.kill()
        assert "(raylet)" not in (grpo / "said.txt").read_text()  # what Ray has to say is in the run's log
        made = list(metrics(directory))
        assert made == list(range(1, made[-1] + 1))
        assert trained_ordinals(directory) == list(range(5 * made[-1]))
        flips = compare(alone(seed), directory, steps=STEPS, seed=seed, model=tiny_model)
        print(f"seed {seed}: {flips or 'no flip'}")


def kill_in_turn(grpo: Path, directory: Path, process) -> None:
    """Kill a server while it starts, a process of each kind within the steps that are compared, and wait until it was replaced."""

    def made(step: int) -> bool:
        return (directory / "rollouts" / f"step-{step:06d}.txt").exists()

    log = directory / "logs" / "server-1.log"
    wait_until(grpo, process, lambda said: log.exists() and "is process" in log.read_text())
    os.kill(process_of(directory, "server-1"), signal.SIGKILL)  # while it starts
    wait_until(grpo, process, lambda said: re.search(r"server 1 was lost.*; trying again", said) is not None)
    replaced = []
    for step, name, words in (
        (4, "rank-1", "the run goes on from its newest recovery checkpoint and its journal"),
        (6, "worker-0", "worker 0 runs again"),  # after the loss of the rank, which ends what was started before
        (8, "server-1", "server 1 runs again, at"),
    ):
        wait_until(grpo, process, lambda said, step=step: made(step))
        os.kill(process_of(directory, name), signal.SIGKILL)
        replaced.append((name, words, time.monotonic()))
    for name, words, killed in replaced:
        wait_until(grpo, process, lambda said, words=words: words in said)
        print(f"{name}: replaced within {time.monotonic() - killed:.1f} s")
    wait_until(grpo, process, lambda said: made(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_loses_rays_head_goes_on_on_another_ray(grpo, another_ray, pytestconfig):
    """The long form has this: the run says what was lost, and the same command goes on from the newest checkpoint."""
    if pytestconfig.getoption("--seeds") < 2:
        pytest.skip("the long form has this: --seeds 2 or 3")
    arguments = ("grpo.yaml", "trial_name=head", "total_train_steps=1000", *PLACED)
    directory, first = trial(grpo, "head"), another_ray(5)

    def last_step() -> int:
        return max((int(path.stem[5:]) for path in (directory / "rollouts").glob("step-*.txt")), default=0)

    process = start(grpo, *arguments, f"cluster.address={first.address}")
    wait_until(grpo, process, lambda said: last_step() >= 5)
    killed = time.monotonic()
    first.head_node.kill_gcs_server()
    assert process.wait(60) == 1
    told, made = time.monotonic() - killed, last_step()
    said = (grpo / "said.txt").read_text()
    assert re.search(r"^error: .*Ray's head at 127\.0\.0\.5:\d+ has not answered", said, re.MULTILINE), said[-6000:]
    second = another_ray(8)
    began = time.monotonic()
    process = start(grpo, *arguments, f"cluster.address={second.address}")
    try:
        wait_until(grpo, process, lambda said: last_step() > made)
        print(
            f"the head: named after {told:.1f} s, the next step {time.monotonic() - began:.1f} s after the start on another Ray"
        )
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 128 + signal.SIGINT
    finally:
        process.kill()
    proof = proved(History([directory / "journal"]), steps=last_step(), batch=5, samples=4, slack=0)
    assert (proof.lost, proof.duplicated) == (0, 0), proof
    assert all("Ray's head" in words for words in proof.wrong), proof  # what failed with it began anew


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_with_a_worker_is_lost_while_sampling_runs_ahead(grpo, pytestconfig):
    """Rows travel to the controller, so those of the lost node's finished episodes are still trained, each once."""
    if pytestconfig.getoption("--seeds") < 2:
        pytest.skip("the long form has this: --seeds 2 or 3")
    nodes = start_ray(41, max_direct_call_object_size=100, **SOON)
    directory, halves = trial(grpo, "lost"), [f"cluster.cpus_per_{role}=0.5" for role in ("rank", "server", "worker")]
    ahead = (
        "trial_name=lost",
        "total_train_steps=1000",
        "rollout.max_head_offpolicyness=2",
        f"cluster.address={nodes.address}",
    )
    process = start(grpo, "grpo.yaml", *PLACED, *ahead, *halves)

    def dumped() -> int:
        return len(list((directory / "rollouts").glob("step-*.txt")))

    try:
        wait_until(grpo, process, lambda _: dumped() >= 6)
        others = [node for node in nodes.list_all_nodes() if node is not nodes.head_node]
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in others}
        parents = [psutil.Process(process_of(directory, name)).ppid() for name in ("worker-0", "worker-1")]
        nodes.remove_node(next(raylets[parent] for parent in parents if parent in raylets), allow_graceful=False)
        enough = dumped() + 3
        wait_until(grpo, process, lambda _: dumped() >= enough)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 128 + signal.SIGINT
    finally:
        process.kill()
        nodes.shutdown()
    trained = trained_ordinals(directory)
    assert sorted(trained) == list(range(len(trained)))
    proof = proved(History([directory / "journal"]), steps=max(metrics(directory)), batch=5, samples=4, slack=0)
    assert (proof.lost, proof.duplicated, proof.wrong) == (0, 0, []), proof


class Maker:
    """Makes bytes in a placed process, and sums those that it is given."""

    def __init__(self, where):
        pass

    def make(self, size):
        return b"\1" * size

    def sum(self, parts):
        return [int(part.sum()) for part in parts]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_a_process_answered_outlives_its_node_and_reaches_another(tmp_path):
    first = start_ray(31, **SOON)
    cluster = RayCluster(ClusterConfig(kind="ray", address=first.address), tmp_path)
    try:
        maker, other = (cluster.process(name, "test_ray:Maker", lambda: (), cpus=3, gpus=0) for name in ("maker 0", "maker 1"))
        maker.wait_started(60)
        made = maker.call("make", 2**20).result(60)
        other.wait_started(60)
        lost = next(node for node in first.list_all_nodes() if node.node_ip_address == maker.place.result().address)
        assert lost.node_ip_address != other.place.result(60).address
        first.remove_node(lost, allow_graceful=False)
        assert other.call("sum", [np.frombuffer(made, np.uint8)]).result(60) == [2**20]
    finally:
        cluster.close()
        first.shutdown()


@pytest.mark.slow
def test_what_the_cluster_has_no_room_for_is_refused_before_anything_starts(grpo, cluster):
    process = start(grpo, "grpo.yaml", f"cluster.address={cluster}", *PLACED, "cluster.processes=9")
    assert process.wait(LIMIT) == 1
    assert re.search(r"rank \d needs 1 CPUs and 0 GPUs, and no node has them left", (grpo / "said.txt").read_text())


@pytest.mark.slow
def test_a_dry_run_says_who_goes_where(grpo, cluster):
    said = run(grpo, "grpo.yaml", "--dry-run", f"cluster.address={cluster}", *PLACED)
    assert re.search(r"rank 0 \(1 CPUs, 0 GPUs\): \d+\.\d+\.\d+\.\d+", said)
    assert "worker 1 (1 CPUs, 0 GPUs)" in said
