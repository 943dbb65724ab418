"""One config in one process and in two: the same samples, the same updates, and one end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks_runs import LIMIT, compare, metrics, process_of, run, start, trial, wait_until, write_parts

from rollwright.experience.experience import Experience, ExperienceId
from rollwright.processes.tree import descendants
from rollwright.store import FileStore

TWO = "cluster.processes=2"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_ranks_are_one_process(grpo, alone, tiny_model, pytestconfig, record_property):
    """GRPO with a reference, two minibatches of a batch that is not divided evenly, sampled by the first rank; and resumed."""
    for seed in (1, 2, 3)[: pytestconfig.getoption("--seeds")]:
        common = ("grpo.yaml", f"seed={seed}")
        said = run(grpo, *common, f"trial_name=two-{seed}", TWO)
        assert " ".join(said.split()).count("samples a step") == 1  # only the first rank speaks
        run(grpo, *common, f"trial_name=resumed-{seed}", "total_train_steps=3")
        run(grpo, *common, f"trial_name=resumed-{seed}", "recover.mode=resume", TWO)
        for other in ("two", "resumed"):
            flips = compare(alone(seed), trial(grpo, f"{other}-{seed}"), steps=10, seed=seed, model=tiny_model)
            record_property(f"flips of seed {seed}, {other}", flips)
            print(f"seed {seed}, {other}: {flips or 'no flip'}")


STAGES = """
experiment_name: ranks
cluster: {{fileroot: {root}, threads: 1}}
workflow: rollwright.workflows.rlvr.RLVRWorkflow
reward_fn: parts_of_ranks.share_of_digits
gconfig: {{max_new_tokens: 8}}
stats_logger: {{display: none, dump_rollouts: -1}}
stages:
  - {{kind: model, name: model, path: "${{run_dir}}/model", layers: 1, hidden_size: 32, heads: 2}}
  - kind: sft
    name: sft
    model: {{path: "${{run_dir}}/model", device: cpu, optimizer: {{lr: 1.0e-3}}}}
    train_dataset: {{path: arithmetic, batch_size: 3, kwargs: {{answer_format: "{{answer}}"}}}}
    valid_dataset: {{path: arithmetic, split: valid, limit: 4}}
    evaluator: {{every_steps: 2, gconfig: {{max_new_tokens: 8}}}}
    total_train_steps: 4
  - kind: dpo
    name: dpo
    model: {{path: "${{run_dir}}/sft/checkpoints/final", device: cpu, optimizer: {{lr: 1.0e-3}}}}
    train_dataset: {{path: {pairs}, type: preference, batch_size: 3}}
    total_train_steps: 4
  - {{kind: eval, name: after, path: "${{run_dir}}/dpo/checkpoints/final", dataset: {{path: arithmetic, limit: 4}}}}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_supervised_stages_on_two_ranks_are_those_of_one(tmp_path, request):
    """SFT with its evaluation, DPO with its reference, a stage that makes a model and one that scores it."""
    write_stages(tmp_path)
    run(tmp_path, "stages.yaml", "trial_name=one")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rollwright")
    run(tmp_path, "stages.yaml", "trial_name=two", program=torchrun)
    compare_stages(trial(tmp_path, "one"), trial(tmp_path, "two"))
    if find_spec("ray") is not None:
        address = request.getfixturevalue("cluster")
        run(tmp_path, "stages.yaml", "trial_name=ray", "cluster.kind=ray", "cluster.processes=2", f"cluster.address={address}")
        compare_stages(trial(tmp_path, "one"), trial(tmp_path, "ray"))


def write_stages(directory: Path) -> None:
    write_parts(directory)
    pairs = directory / "pairs.jsonl"
    rows = [
        {"prompt": f"{number} + 1 =", "chosen": str(number + 1), "rejected": "no" * (1 + number % 4)} for number in range(12)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "stages.yaml").write_text(STAGES.format(root=directory / "runs", pairs=pairs))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_supervised_stage_on_ray_that_loses_a_rank_and_its_controller_is_that_of_one_process(tmp_path, request, pytestconfig):
    """The long form has this: a rank is killed, then the controller, and one process goes on."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    if pytestconfig.getoption("--seeds") < 2:
        pytest.skip("the long form has this: --seeds 2 or 3")
    write_stages(tmp_path)
    common = ("stages.yaml", "stages.sft.total_train_steps=60", "recover.every_steps=5")
    run(tmp_path, *common, "trial_name=one")
    address = request.getfixturevalue("cluster")
    process = start(
        tmp_path, *common, "trial_name=ray", "cluster.kind=ray", "cluster.processes=2", f"cluster.address={address}"
    )
    stage = trial(tmp_path, "ray") / "sft"

    def wait_for_step(step: int) -> None:
        wait_until(tmp_path, process, lambda _: (stage / "metrics.jsonl").exists() and step in metrics(stage))

    try:
        wait_for_step(8)
        os.kill(process_of(stage, "rank-1"), signal.SIGKILL)
        wait_for_step(25)
    finally:
        process.kill()
        process.wait()
    run(tmp_path, *common, "trial_name=ray")
    ours, theirs = metrics(trial(tmp_path, "one") / "sft"), metrics(stage)
    assert list(ours) == list(theirs) == list(range(1, 61))
    for step in ours:
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-4), step
    assert ours[60]["eval/reward"] == theirs[60]["eval/reward"]
    assert not list(stage.glob(".weights-*"))


def compare_stages(one: Path, two: Path) -> None:
    for stage, names in (("sft", ["model/tokens"]), ("dpo", ["model/margin", "model/accuracy", "model/chosen_logp"])):
        ours, theirs = metrics(one / stage), metrics(two / stage)
        assert list(ours) == list(theirs) == [1, 2, 3, 4]
        for step in ours:
            for name in ["loss", "model/grad_norm", "model/lr", *names]:
                assert ours[step][name] == pytest.approx(theirs[step][name], rel=1e-4, abs=1e-6), (stage, step, name)
    assert metrics(one / "sft")[4]["eval/reward"] == pytest.approx(metrics(two / "sft")[4]["eval/reward"])
    scores = [json.loads((each / "summary.json").read_text())["eval"]["after"]["greedy"] for each in (one, two)]
    assert scores[0] == pytest.approx(scores[1])


def wait_for(directory: Path, process, condition) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        said = (directory / "said.txt").read_text()[-4000:]
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def ranks_of(process) -> dict[int, int]:
    """Process id of each rank that a launcher started."""
    found = {}
    for pid in descendants(process.pid):
        try:
            variables = dict(
                entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
            )
        except OSError:
            continue
        if "TORCHELASTIC_RUN_ID" in variables and "-P" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            found.setdefault(int(variables["RANK"]), pid)
    return found


def started(grpo, *arguments):
    """A run on two ranks that has made a step, its processes, and where it writes."""
    process = start(grpo, "grpo.yaml", "trial_name=ends", "total_train_steps=100000", TWO, *arguments)
    wait_for(grpo, process, lambda: (trial(grpo, "ends") / "rollouts" / "step-000001.txt").exists())
    return process, ranks_of(process), descendants(process.pid)


def assert_nothing_is_left(processes, left_before) -> None:
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert {path.name for path in Path("/tmp").glob("rollwright-ranks-*")} <= left_before


def temporary() -> set[str]:
    return {path.name for path in Path("/tmp").glob("rollwright-ranks-*")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_ends_all_ranks_after_a_step_that_is_saved(grpo):
    before = temporary()
    process, ranks, processes = started(grpo)
    assert set(ranks) == {0, 1}
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(120) == 128 + signal.SIGINT
    said = (grpo / "said.txt").read_text()
    assert "SIGINT: this step is finished and saved" in said
    assert "Traceback" not in said
    assert "error" not in said
    assert list((trial(grpo, "ends") / "recover").glob("step_*"))
    assert_nothing_is_left(processes, before)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", [0, 1, "launcher"])
def test_a_rank_that_dies_ends_everything_with_one_cause(grpo, killed):
    before = temporary()
    process, ranks, processes = started(grpo)
    os.kill(process.pid if killed == "launcher" else ranks[killed], signal.SIGKILL)
    began = time.monotonic()
    status = process.wait(60)
    assert time.monotonic() - began < 30
    said = (grpo / "said.txt").read_text()
    if killed == "launcher":
        assert status == -signal.SIGKILL
        before |= temporary()  # nobody is left who could remove it
    else:
        assert status == 128 + signal.SIGKILL
        causes = [line for line in said.splitlines() if line.startswith("error")]
        assert causes == [f"error: rank {killed} of the training (process {ranks[killed]}) was ended by SIGKILL"]
    assert "Traceback" not in said
    assert_nothing_is_left(processes, before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_fails_on_one_rank_is_told_once(grpo):
    before = temporary()
    arguments = ["actor.policy_loss=fails_on_one_rank", "plugins=[parts_of_ranks]", "trial_name=fails", TWO]
    process = start(grpo, "grpo.yaml", *arguments)
    assert process.wait(LIMIT) == 1
    said = (grpo / "said.txt").read_text()
    causes = [line for line in said.splitlines() if line.startswith("error")]
    assert len(causes) == 1, said
    assert causes[0].startswith("error: rank 1: ValueError: the second rank has had enough")
    assert_nothing_is_left([], before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["mode=explore", "store={}", TWO], {}, "cluster.processes: is 2, but mode explore is one process"),
        (["mode=explore", "store={}"], {"WORLD_SIZE": "2", "RANK": "0"}, "mode explore is one process, but WORLD_SIZE is 2"),
        (["cluster.processes=3"], {"WORLD_SIZE": "2", "RANK": "0"}, "cluster.processes is 3, but 2 were started"),
        (["cluster.kind=nomad"], {}, "cluster.kind"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(grpo, monkeypatch, arguments, variables, sentence):
    from ranks_runs import environment

    monkeypatch.setattr("ranks_runs.environment", lambda directory: {**environment(directory), **variables})
    process = start(grpo, "grpo.yaml", *arguments)
    assert process.wait(LIMIT) == 1
    assert sentence in (grpo / "said.txt").read_text()


STORE = """
experiment_name: ranks
mode: train
cluster: {{fileroot: {root}, threads: 1}}
actor: {{path: {model}, device: cpu, optimizer: {{lr: 1.0e-3}}}}
train_dataset: {{batch_size: 3}}
store: {{type: file, url: {file}}}
total_train_steps: 3
stats_logger: {{display: none, dump_rollouts: 0}}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_from_a_store_on_two_ranks_is_that_of_one(tmp_path, tiny_model):
    for name in ("one", "two"):
        with FileStore(str(tmp_path / f"{name}.jsonl")) as store:
            for number in range(9):
                samples = [
                    Experience(
                        tokens=[5, 6, *range(7, 8 + number), 8 + sample],
                        prompt_length=2,
                        reward=float(sample),
                        eid=ExperienceId(task=number, run=sample),
                        logprobs=[-4.0] * (2 + number),
                        versions=[0] * (2 + number),
                        temperature=1.0,
                        truncated=False,
                    )
                    for sample in range(2)
                ]
                store.append(samples, ordinal=number)
        text = STORE.format(root=tmp_path / "runs", model=tiny_model, file=tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(text)
        run(tmp_path, f"{name}.yaml", f"trial_name={name}", *([TWO] if name == "two" else []))
    ours, theirs = (metrics(trial(tmp_path, name) / "trainer") for name in ("one", "two"))
    assert list(ours) == list(theirs) == [1, 2, 3]
    for step in ours:
        for key in ("reward", "actor/loss", "actor/grad_norm", "actor/ratio/max"):
            assert ours[step][key] == pytest.approx(theirs[step][key], rel=1e-4, abs=1e-6), (step, key)
