"""Generation in a process of its own: training goes on beside it, and both compute the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from real_servers import write_model

from rollwright import PPOTrainer
from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, NormConfig, OptimizerConfig, PPOActorConfig, RolloutConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import EngineError, RollwrightError, WeightUpdateError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.launcher import Launcher
from rollwright.inference.request import ModelRequest
from rollwright.inference.weights.group import WeightGroup
from rollwright.inference.weights.server_weights import ServerWeights
from rollwright.training.actor import FSDPPPOActor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def reward(prompt, completion, prompt_ids, completion_ids, **data) -> float:
    return float(len(set(completion_ids)))


def config_of(tmp_path: Path, init_from_scratch: bool = False, **rollout) -> PPOConfig:
    model = write_model(tmp_path / "model")
    return PPOConfig(
        experiment_name="apart",
        actor=PPOActorConfig(
            path=str(model),
            init_from_scratch=init_from_scratch,
            optimizer=OptimizerConfig(lr=1e-3),
            adv_norm=NormConfig(mean_level="batch", std_level="batch"),
        ),
        rollout=RolloutConfig(backend="builtin_process", max_head_offpolicyness=1, setup_timeout=300, **rollout),
        train_dataset=DatasetConfig(batch_size=4),
        gconfig=GenerationHyperparameters(n_samples=2, max_new_tokens=12, temperature=0.7),
        total_train_steps=3,
        cluster=ClusterConfig(fileroot=str(tmp_path / "runs")),
    )


#: Where a server is killed, by how weights travel, and how often.
DURING_PUBLICATIONS = [
    ("auto", SGLangBackend, "load_from_disk", 1),
    ("disk", ServerWeights, "confirm", 2),
    ("xccl", WeightGroup, "send", 1),
]
ROWS = [{"messages": [{"role": "user", "content": f"task {index}"}], "answer": "x"} for index in range(16)]


def servers_of_this_process() -> list[psutil.Process]:
    """The servers and their supervisors; other children score rewards."""
    return [child for child in psutil.Process().children(recursive=True) if "serve-model" in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
        return []


def wait_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 120
    while any(map(command_of, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


@pytest.mark.parametrize("init_from_scratch", [False, True])
def test_a_run_trains_with_generation_in_a_process_of_its_own(tmp_path, init_from_scratch):
    with PPOTrainer(config_of(tmp_path, init_from_scratch), ROWS) as trainer:
        client = trainer.rollout.client
        assert trainer.actor._publisher.agreements[0].mean < 1e-4  # compared before the first token
        children = servers_of_this_process()
        assert len(children) == 2  # the server and its supervisor
        (server,) = client.servers.router.servers
        assert httpx.post(f"{server.url}/pause_generation", timeout=60).status_code == 401  # nobody else has its key
        key = client.config.api_key
        assert not any(key in argument for child in children for argument in command_of(child))
        assert not any(key in path.read_text(errors="replace") for path in trainer.directory.path.rglob("*") if path.is_file())
        summary = trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
        assert summary["steps"] == 3
        assert client.get_version() == 3
        assert trainer.actor._publisher.agreements[0].mean < 1e-3
        log = trainer.directory.logs / "builtin_process-0.log"
        assert log.exists()
    wait_gone(children)


def test_a_run_starts_several_servers_and_publishes_to_them_by_files_where_it_is_told_to(tmp_path):
    weights = tmp_path / "weights"
    config = config_of(tmp_path, servers=2, weight_update="disk", weight_update_path=str(weights))
    with PPOTrainer(config, ROWS) as trainer:
        client = trainer.rollout.client
        assert len(servers_of_this_process()) == 4
        assert trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})["steps"] == 3
        assert len(trainer.actor._publisher.agreements) == 2
        assert all(server.served for server in client.servers.router.servers)
        assert sorted(path.name for path in weights.iterdir()) == ["v2", "v3"]


def server_at(address: str) -> psutil.Process:
    """The process of the server that listens at an address, without its guard."""
    (server,) = [
        child
        for child in servers_of_this_process()
        if command_of(child)[1:3] == ["-m", "rollwright"] and address.rpartition(":")[2] in command_of(child)
    ]
    return server


def train_while(trainer: PPOTrainer, killed: threading.Thread, version: int) -> dict:
    """Train; what comes after a version is published when the thread that kills has ended."""

    def publish_when_killed() -> None:
        if trainer.actor.version == version:
            killed.join(60)
        publish()

    publish, trainer.actor.update_weights = trainer.actor.update_weights, publish_when_killed
    killed.start()
    summary = trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
    assert not killed.is_alive()
    return summary


def assert_nothing_was_lost(trainer: PPOTrainer, steps: int) -> None:
    counters = trainer.rollout.counters()
    assert counters["samples/failed"] == 0
    assert not [name for name in counters if name.startswith("groups/dropped")]
    state = trainer.rollout.state_dict()
    # Each task that was trained is one of the first that were drawn.
    assert state["frontier"] + len(state["beyond"]) == steps * 4


@pytest.mark.parametrize(("count", "transport"), [(2, "auto"), (1, "auto"), (1, "xccl")])
def test_a_run_goes_on_when_one_of_its_servers_is_killed_or_its_only_one(tmp_path, count, transport):
    """Whatever it was doing: nothing is dropped, no group is trained twice, and the server comes back with the current weights."""
    config = config_of(tmp_path, servers=count, weight_update=transport)
    config.total_train_steps = 8
    with PPOTrainer(config, ROWS) as trainer:
        client = trainer.rollout.client
        first = client.addresses[0]
        server = server_at(first)

        def kill_the_first() -> None:
            while client.get_version() < 2:
                time.sleep(0.01)
            server.kill()

        summary = train_while(trainer, threading.Thread(target=kill_the_first, daemon=True), 4)
        assert summary["steps"] == 8
        assert client.get_version() == 8
        assert_nothing_was_lost(trainer, 8)
        deadline = time.monotonic() + 120
        while len(client.servers.router.in_service()) < count or first in client.addresses:
            assert time.monotonic() < deadline, client.servers.router.describe()
            time.sleep(0.05)
            trainer.rollout.executor.while_waiting()  # proves a server that came back after the last step
        assert all(map(client.weights.proofs.admit, client.servers.router.servers))
        answers = trainer.rollout.sampler.probe(ModelRequest(input_ids=[6, 7, 8], gconfig=config.gconfig))
        assert len(answers) == count
        assert {version for answer in answers.values() for version in answer.output_versions} == {8}
    wait_gone(servers_of_this_process())


@pytest.mark.parametrize(("transport", "target", "method", "count"), DURING_PUBLICATIONS)
def test_a_run_goes_on_when_its_only_server_is_killed_in_a_publication(tmp_path, monkeypatch, transport, target, method, count):
    """The restarted server is waited for and given the version, also if it is lost again."""
    path = str(tmp_path / "weights") if transport == "disk" else None
    config = config_of(tmp_path, weight_update=transport, weight_update_path=path)
    config.total_train_steps = 4
    kills, transfer = ["kill"] * count, getattr(target, method)

    with PPOTrainer(config, ROWS) as trainer:
        client = trainer.rollout.client

        def kill_and_transfer(*arguments, **named):
            if client.get_version() == 2 and kills:
                kills.pop()
                server_at(client.addresses[0]).kill()
            return transfer(*arguments, **named)

        monkeypatch.setattr(target, method, kill_and_transfer)
        assert trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})["steps"] == 4
        assert not kills
        assert client.get_version() == 4
        assert_nothing_was_lost(trainer, 4)
        assert trainer.actor._publisher.agreements[0].mean < 1e-3
    wait_gone(servers_of_this_process())


def test_a_server_that_cannot_be_restarted_ends_the_run_with_the_cause(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    config.total_train_steps = 8
    with PPOTrainer(config, ROWS) as trainer:
        client = trainer.rollout.client
        server = server_at(client.addresses[0])
        monkeypatch.setattr(Launcher, "restart", cannot_restart)
        killed = threading.Thread(target=server.kill, daemon=True)
        with pytest.raises(
            RollwrightError, match=r"No inference server is left: server 0 was started 4 times[\s\S]*out of memory"
        ):
            train_while(trainer, killed, 1)


def test_a_server_that_does_not_start_again_is_waited_for_once(tmp_path, monkeypatch):
    """With no server left, the run fails after one start timeout, not after four."""
    config = config_of(tmp_path)
    with PPOTrainer(config, ROWS) as trainer:
        trainer.rollout.watch._supervisor._timeout = 2.0

        def hang(self, place: int, timeout: float) -> None:
            starts.append(place)
            time.sleep(2.5)
            raise EngineError("The server was not healthy in time")

        starts = []
        monkeypatch.setattr(Launcher, "restart", hang)
        server_at(trainer.rollout.client.addresses[0]).kill()
        with pytest.raises(
            RollwrightError, match=r"No inference server is left: server 0 could not be started again within 2 s"
        ):
            trainer.train("rollwright.workflows.rlvr.RLVRWorkflow", {"reward_fn": reward})
        assert starts == [0]


def cannot_restart(self, place: int, timeout: float) -> None:
    raise EngineError("The server ended with status 1: out of memory")


def test_a_run_that_cannot_begin_leaves_no_server_and_its_directory_free(tmp_path, monkeypatch):
    """Python calls no __exit__ where __enter__ fails, here because an engine does not compute what the actor computes."""
    config = config_of(tmp_path)
    trainer = PPOTrainer(config, ROWS)
    begun = []

    def other_weights(self):
        begun.extend(servers_of_this_process())
        raise WeightUpdateError("it does not compute with the published weights")

    monkeypatch.setattr(FSDPPPOActor, "prove_publication", other_weights)
    with pytest.raises(WeightUpdateError), trainer:
        raise AssertionError("it began")
    assert len(begun) == 2
    wait_gone(begun)
    monkeypatch.undo()
    with PPOTrainer(config, ROWS) as again:
        assert again.rollout.client.get_version() == 0


def test_servers_that_take_turns_with_the_trainer_learn_the_same(tmp_path, monkeypatch):
    """With rollout.colocate, the server frees its cache for each update, and everything else is as without it."""
    released, release = [], SGLangBackend.release_memory
    monkeypatch.setattr(
        SGLangBackend, "release_memory", lambda *given, **named: [released.append(given), release(*given, **named)]
    )
    learned = {}
    for colocate in (False, True):
        config = config_of(tmp_path / str(colocate))
        config.rollout.max_head_offpolicyness, config.rollout.colocate = 0, colocate
        config.deterministic = True
        with PPOTrainer(config, ROWS) as trainer:
            trainer.train(workflow="rlvr", workflow_kwargs={"reward_fn": reward})
            learned[colocate] = {name: each.detach().clone() for name, each in trainer.actor.model.named_parameters()}
        assert len(released) == (config.total_train_steps if colocate else 0)
    assert all(learned[True][name].equal(each) for name, each in learned[False].items())
