"""What a run on a Ray cluster can be told beside the plain one: sampling that runs ahead, evaluation, what joins later, tasksets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from parts import qwen3_config, random_model
from ranks_runs import LIMIT, metrics, process_of, start, trial, wait_until
from ray_machine import add_node
from transformers import AutoModelForSequenceClassification

from rollwright.data.tokenizer import load_tokenizer
from rollwright.experience.journal.reading import read_records
from rollwright.experience.journal.records import Begin, GroupEnd
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.server.application import create_application
from rollwright.inference.server.service import ServerThread
from rollwright.inference.server.settings import ServerSettings
from rollwright.training.recovery_checkpoint import RecoverCheckpoints
from rollwright.viewer.run import Run

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


@pytest.fixture(scope="module")
def teacher(tiny_model):
    """The address of a server of another model, of the same tokenizer."""
    tokenizer = load_tokenizer(tiny_model)
    engine = BuiltinEngine(random_model(qwen3_config(tokenizer), seed=3, scale=3.0), tokenizer)
    settings = ServerSettings(port=0)
    thread = ServerThread(create_application(engine, settings), settings)
    yield thread.url.removeprefix("http://")
    thread.stop()
    engine.destroy()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasksets_with_a_judge_that_is_lost_a_critic_an_adapter_and_a_teacher(grpo, cluster, tiny_model, teacher):
    """A rank trains an adapter and a critic; workers ask the policy through OpenAI clients, a judge that is lost, and a teacher."""
    plain = (grpo / "grpo.yaml").read_text().splitlines()
    kept = [line for line in plain if not line.startswith(("workflow:", "reward_fn:", "train_dataset:"))]
    (grpo / "judged.yaml").write_text("\n".join([*kept, JUDGED.format(model=tiny_model)]))
    trained = (
        *("actor.recipe=ppo", "actor.lora={rank: 4}", "actor.adv_estimator_kwargs={lam: 0.9}"),
        *("actor.kl_in=reward", "actor.kl_estimator=k1", "critic={optimizer: {lr: 1.0e-2}, ppo_n_minibatches: 2}"),
        *(
            "actor.distillation={loss: advantage, weight: 0.2}",
            f"teachers=[{{addresses: ['{teacher}'], tokenizer_path: {tiny_model}}}]",
        ),
    )
    process, directory = (
        start(grpo, "judged.yaml", *PLACED, f"cluster.address={cluster}", "total_train_steps=2", *trained),
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
    for step in (1, 2):
        assert made[step]["samples"] == 20  # five tasks, four samples of each
        assert made[step]["critic/optimizer_steps"] == 2
        assert made[step]["actor/teacher/taught_share"] == 1
        assert made[step]["actor/teacher/kl"] > 0.01
        assert made[step]["actor/logprob_difference/max"] < 1e-4  # of each token against its own adapter
    assert "eval/reward" in made[2]
    assert made[2]["critic/values/mean"] != 0
    assert made[2]["actor/kl"] != 0
    final = directory / "checkpoints" / "final"
    assert {path.name for path in final.glob("**/*.safetensors")} == {"adapter_model.safetensors", "model.safetensors"}
    assert AutoModelForSequenceClassification.from_pretrained(final / "critic").score.weight.abs().max() > 0
    _, state = RecoverCheckpoints(directory / "recover").load()
    assert {"adapter", "critic"} <= state["actor"].keys()
    with Run(directory) as run:
        run.refresh()
        (row,) = run.sample(run.search(step=2, limit=1)["samples"][0]["key"])["rows"]
    assert any(row["values"]) and any(row["teacher_logprobs"])  # noqa: PT018 - both came back from the ranks
    assert len(state["loader"]["selectors"][0]["means"]) == 10  # rewards of workers reach the selector here
