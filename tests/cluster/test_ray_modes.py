"""What a run on a Ray cluster can be told beside the plain one: sampling that runs ahead, evaluation, what joins later, tasksets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ranks_runs import LIMIT, metrics, process_of, start, trial, wait_until
from ray_machine import add_node

from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Begin, GroupEnd
from rollwright.training.recovery_checkpoint import RecoverCheckpoints

pytest.importorskip("ray", reason="the extra `ray` is not installed")

PLACED = ("cluster.kind=ray", "cluster.workers=2", "rollout.backend=builtin_process")
#: An address of this machine that no other Ray of the tests has.
ANOTHER_NODE = "127.0.0.11"
#: In place of the workflow and the dataset: tasks whose workflow asks the policy through the front, and a judge that is served beside it.
JUDGED = """
train_dataset: {{batch_size: 5}}
rollout: {{openai_front: true}}
auxiliary_models: [{{model_path: {model}, device: cpu, threads: 1, kv_cache_bytes: 4194304}}]
tasksets: [{{path: arithmetic, kwargs: {{digits: 2}}, workflow: parts_of_ranks.Judged, selector: difficulty}}]
eval_tasksets: [{{path: arithmetic, split: test, limit: 4, workflow: parts_of_ranks.Judged, group_size: 1}}]
evaluator: {{every_steps: 2}}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sampling_runs_ahead_and_evaluates_while_workers_and_servers_join(grpo, shared_ray):
    """A worker and a server find no room until the cluster is given another node."""
    held_out, ahead = "{path: arithmetic, split: test, limit: 6, kwargs: {digits: 2}}", 2
    arguments = (
        *(
            "total_train_steps=1000",
            f"rollout.max_head_offpolicyness={ahead}",
            *(f"cluster.{key}=2" for key in ("cpus_per_rank", "cpus_per_server", "cpus_per_worker")),  # one on each node
            *("cluster.workers=1", "cluster.max_workers=2", "cluster.max_servers=2"),
        ),
        *(f"valid_dataset={held_out}", "evaluator={every_steps: 2, at_start: true, gconfig: {max_new_tokens: 8}}"),
    )
    process = start(grpo, "grpo.yaml", *PLACED, f"cluster.address={shared_ray.address}", *arguments)
    directory, node = trial(grpo, "trial"), None
    try:
        wait_until(grpo, process, lambda said: dumped(directory) >= 1)
        assert "worker 1 runs" not in (grpo / "said.txt").read_text()
        node = add_node(shared_ray, ANOTHER_NODE, 4)
        wait_until(grpo, process, lambda said: "worker 1 runs" in said and "server 1 runs" in said)
        enough = max(4, dumped(directory) + 3)
        wait_until(grpo, process, lambda said: dumped(directory) >= enough)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT) == 128 + signal.SIGINT
    finally:
        process.kill()
        if node is not None:
            shared_ray.remove_node(node)
    made = metrics(directory)
    steps = [step for step, values in made.items() if "reward" in values]
    assert 0 < max(made[step]["actor/staleness/max"] for step in steps) <= ahead
    evaluated = [step for step, values in made.items() if "eval/reward" in values]
    assert evaluated == list(range(0, steps[-1] + 1, 2))
    ends, begun = [], {}
    for place, record in read_records(directory / "journal"):
        if isinstance(record, GroupEnd):
            ends.append(record)
        elif isinstance(record, Begin):
            begun.setdefault(record.is_eval, set()).add(place.writer)
    delivered = [end.ordinal for end in ends if end.state == "delivered" and not end.is_eval]
    assert len(delivered) == len(set(delivered)) == 5 * len(steps)
    assert sorted(end.ordinal for end in ends if end.is_eval) == sorted([*range(6)] * len(evaluated))
    assert len(begun[False]) == 2  # the worker that joined, too
    assert begun[True] <= begun[False]  # workers run held-out tasks as well


def dumped(directory: Path) -> int:
    """Steps that a run has made so far."""
    return len(list(directory.glob("rollouts/step-*.txt")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasksets_with_a_judge_that_is_lost_and_openai_clients(grpo, cluster, tiny_model):
    plain = (grpo / "grpo.yaml").read_text().splitlines()
    kept = [line for line in plain if not line.startswith(("workflow:", "reward_fn:", "train_dataset:"))]
    (grpo / "judged.yaml").write_text("\n".join([*kept, JUDGED.format(model=tiny_model)]))
    process, directory = (
        start(grpo, "judged.yaml", *PLACED, f"cluster.address={cluster}", "total_train_steps=2"),
        trial(grpo, "trial"),
    )
    try:
        wait_until(grpo, process, lambda said: dumped(directory) >= 1)
        os.kill(process_of(directory, "auxiliary-0"), signal.SIGKILL)
        wait_until(grpo, process, lambda said: "auxiliary 0 runs again, at" in said)
        assert process.wait(LIMIT) == 0, (grpo / "said.txt").read_text()[-6000:]
    finally:
        process.kill()
    made = metrics(directory)
    assert all(made[step]["samples"] == 20 for step in (1, 2))  # five tasks, four samples of each
    assert "eval/reward" in made[2]
    _, state = RecoverCheckpoints(directory / "recover").load()
    assert len(state["loader"]["selectors"][0]["means"]) == 10  # rewards of workers reach the selector here
