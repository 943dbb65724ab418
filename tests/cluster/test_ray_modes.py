"""What a run on a Ray cluster can be told beside the plain one: sampling that runs ahead, evaluation, what joins later, tasksets."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks_runs import LIMIT, metrics, run, start, trial

from rollwright.experience.journal.files import read_records
from rollwright.experience.journal.records import Begin, GroupEnd
from rollwright.training.checkpoint import RecoverCheckpoints

pytest.importorskip("ray", reason="the extra `ray` is not installed")

PLACED = ("cluster.kind=ray", "cluster.workers=2", "rollout.backend=builtin_process")
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
def test_sampling_runs_ahead_and_evaluates_while_workers_and_servers_join(grpo, cluster):
    held_out, ahead = "{path: arithmetic, split: test, limit: 6, kwargs: {digits: 2}}", 2
    arguments = (
        *(
            "total_train_steps=1000",
            f"rollout.max_head_offpolicyness={ahead}",
            "cluster.max_workers=3",
            "cluster.max_servers=2",
        ),
        *(f"valid_dataset={held_out}", "evaluator={every_steps: 2, at_start: true, gconfig: {max_new_tokens: 8}}"),
    )
    process = start(grpo, "grpo.yaml", *PLACED, f"cluster.address={cluster}", *arguments)
    directory = trial(grpo, "trial")
    try:
        wait_until(grpo, process, lambda said: "worker 2 runs" in said and "server 1 runs" in said)
        enough = max(4, dumped(directory) + 3)
        wait_until(grpo, process, lambda said: dumped(directory) >= enough)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT) == 128 + signal.SIGINT
    finally:
        process.kill()
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
    assert len(begun[False]) == 3  # the worker that joined, too
    assert not begun[True] & begun[False]  # held-out tasks are run by the process that decides


def dumped(directory: Path) -> int:
    """Steps that a run has made so far."""
    return len(list(directory.glob("rollouts/step-*.txt")))


def wait_until(directory: Path, process, is_so) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_so(said := (directory / "said.txt").read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasksets_with_a_judge_and_openai_clients(grpo, cluster, tiny_model):
    plain = (grpo / "grpo.yaml").read_text().splitlines()
    kept = [line for line in plain if not line.startswith(("workflow:", "reward_fn:", "train_dataset:"))]
    (grpo / "judged.yaml").write_text("\n".join([*kept, JUDGED.format(model=tiny_model)]))
    run(grpo, "judged.yaml", *PLACED, f"cluster.address={cluster}", "total_train_steps=2")
    directory = trial(grpo, "trial")
    made = metrics(directory)
    assert all(made[step]["samples"] == 20 for step in (1, 2))  # five tasks, four samples of each
    assert "eval/reward" in made[2]
    _, state = RecoverCheckpoints(directory / "recover").load()
    assert len(state["loader"]["selectors"][0]["means"]) == 10  # rewards of workers reach the selector here
