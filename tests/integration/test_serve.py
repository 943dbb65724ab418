"""Mode serve: an agent's OpenAI client is recorded, feedback makes experiences of it, published weights are loaded."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("openai")
pytest.importorskip("sqlalchemy")

import openai

from rollwright import GRPOConfig
from rollwright.config.modes import StoreConfig
from rollwright.config.sections import CriticConfig, OptimizerConfig, PPOActorConfig
from rollwright.errors import ConfigError
from rollwright.inference.weights.files import write_weights
from rollwright.store import ExperienceStore
from rollwright.trainers.modes.recorded_runs import load_run_config
from rollwright.trainers.modes.serve import serve
from rollwright.trainers.modes.shared_run import claim_part, open_run_store, trial_path
from rollwright.trainers.modes.train_from_store import StoreTrainer

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tiny_model, tmp_path):
    """A service in a thread: its client and its config."""
    config = GRPOConfig(experiment_name="shop", trial_name="use", mode="serve", actor=PPOActorConfig(path=str(tiny_model)))
    config.store = StoreConfig()
    config.gconfig = config.gconfig.new(n_samples=2, max_new_tokens=4, temperature=0.7)
    config.cluster.fileroot = str(tmp_path)
    with serving(config) as client:
        yield client, config


@contextlib.contextmanager
def serving(config: GRPOConfig) -> Iterator[httpx.Client]:
    """A client of a service that runs in a thread for the time of the block."""
    directory = claim_part(config)
    file = directory.path / "service.json"
    written = file.stat().st_mtime_ns if file.exists() else 0  # by the service before
    ended = threading.Event()
    thread = threading.Thread(target=lambda: serve(config, directory, is_over=ended.is_set))
    thread.start()
    deadline = time.monotonic() + 300
    while not (file.exists() and file.stat().st_mtime_ns != written):
        assert thread.is_alive() and time.monotonic() < deadline  # noqa: PT018
        time.sleep(0.05)
    assert file.stat().st_mode & 0o077 == 0
    said = json.loads(file.read_text())
    try:
        with httpx.Client(base_url=said["url"], headers={"Authorization": f"Bearer {said['api_key']}"}, timeout=300) as client:
            yield client
    finally:
        ended.set()
        thread.join(300)
        directory.release()


def agent(run: dict) -> list[str]:
    """Two turns of an unmodified agent; returns the ids of its calls."""
    client = openai.OpenAI(base_url=run["base_url"], api_key=run["api_key"], max_retries=0)
    messages = [{"role": "user", "content": "1+1="}]
    calls = []
    for _ in range(2):
        answer = client.chat.completions.create(model="default", messages=messages, logprobs=True)
        calls.append(answer.id)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": "and now?"},
        ]
    client.close()
    return calls


def test_feedback_becomes_experiences_and_weights_are_followed(service, tiny_model):
    client, config = service
    for reward in (1.0, 0.0):
        run = client.post("/runs", json={"task": "sums"}).raise_for_status().json()
        agent(run)
        assert client.post("/feedback", json={"run": run["run"], "reward": 0.25, "turn": 0, "final": False}).json() == {
            "stored": 0
        }
        stored = client.post("/feedback", json={"run": run["run"], "reward": reward}).json()["stored"]
        assert stored >= 1
        again = client.post("/feedback", json={"run": run["run"], "reward": reward})
        assert (again.status_code, again.json()) == (200, {"stored": stored})
        assert client.post("/feedback", json={"run": run["run"], "reward": reward + 1}).status_code == 404
        refused = httpx.post(
            f"{run['base_url']}/chat/completions", headers={"Authorization": f"Bearer {run['api_key']}"}, json={}, timeout=300
        )
        assert refused.status_code == 401

    with open_run_store(config) as store:
        assert isinstance(store, ExperienceStore)
        (group,) = store.groups()  # two runs of one task
        assert {each.eid.run for each in group.experiences} == {0, 1}
        assert {each.reward for each in group.experiences} == {1.0, 0.0}
        assert all(each.temperature == pytest.approx(0.7) for each in group.experiences)
        assert all(each.logprobs[each.action_mask].lt(0).all() for each in group.experiences)

        from rollwright.training.model import load_model

        path = trial_path(config) / "weights" / "v000003"
        model = load_model(config.actor)
        write_weights(path, model.named_parameters(), 3, config=model.config)
        store.recover(None)
        store.announcements.publish(str(path), 3)
        until_version(client, 3)
        store.recover(None)  # the trainer begins again: what it publishes now is older than what samples
        path = trial_path(config) / "weights" / "v000001"
        write_weights(path, model.named_parameters(), 1, config=model.config)
        store.announcements.publish(str(path), 1)
        until_version(client, 1)
        agent(client.post("/runs", json={}).json())  # the next calls are answered with them


def test_open_runs_their_addresses_and_keys_survive_a_restart(service):
    _, config = service
    config.trial_name = "again"  # beside the one that runs
    with serving(config) as client:
        address, key = str(client.base_url), client.headers["Authorization"]
        run = client.post("/runs", json={"task": "sums"}).raise_for_status().json()
        calls = agent(run)
    with serving(config) as client:
        assert (str(client.base_url), client.headers["Authorization"]) == (address, key)
        assert client.get("/status").json()["open"] == 1
        calls += agent(run)  # at the address and with the key that it has
        for call in calls:
            given = {"run": run["run"], "reward": 0.5, "call": call, "final": False}
            assert client.post("/feedback", json=given).status_code == 200
        assert client.post("/feedback", json={"run": run["run"], "reward": 1.0}).json()["stored"] >= 1
    with open_run_store(config) as store:
        assert isinstance(store, ExperienceStore)
        (group,) = store.groups()
        assert {each.reward for each in group.experiences} == {1.0}
        assert sum(float(each.token_rewards.sum()) for each in group.experiences) == pytest.approx(0.5 * len(calls))
    (directory,) = trial_path(config).glob("service-*")  # the same one
    with pytest.raises(ConfigError, match="that of a service"):
        load_run_config(directory)


def test_runs_of_an_agent_in_use_train_a_policy_with_a_critic(service):
    """Each run is a group of one: a critic gives it an advantage, and the service follows the trainer."""
    _, config = service
    config.trial_name, config.gconfig = "alone", config.gconfig.new(n_samples=1)
    with serving(config) as client:
        for number in range(2):
            run = client.post("/runs", json={"task": f"sum {number}"}).raise_for_status().json()
            agent(run)
            assert client.post("/feedback", json={"run": run["run"], "reward": float(number)}).json()["stored"] >= 1
        training = copy.deepcopy(config)
        training.mode, training.total_train_steps, training.stats_logger.display = "train", 1, "none"
        training.actor.recipe, training.actor.optimizer = "ppo", OptimizerConfig(lr=1e-3)
        training.critic, training.train_dataset.batch_size = CriticConfig(optimizer=OptimizerConfig(lr=1e-2)), 2
        with claim_part(training) as directory, StoreTrainer(training, directory) as trainer:
            assert trainer.train()["steps"] == trainer.actor.critic.version == 1
        (step,) = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()]
        assert step["samples"] == 2
        assert step["actor/advantage/abs_mean"] > 0
        assert step["critic/optimizer_steps"] == 1
        until_version(client, 1)


def until_version(client: httpx.Client, version: int) -> None:
    deadline = time.monotonic() + 300
    while client.get("/status").json()["version"] != version:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_code_of_the_page_runs(service):
    client, config = service
    page = (Path(__file__).resolve().parents[2] / "docs" / "modes.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "/feedback" in block]
    (file,) = trial_path(config).glob("service-*/service.json")
    code, count = re.subn(r"runs/\S*/service\.json", str(file), code)
    assert count == 1
    code, count = re.subn(r"headers=key\)", "headers=key, timeout=300)", code)  # the machine may be busy
    assert count == 1
    exec(compile(code, "docs/modes.md", "exec"), {})
    assert client.get("/status").json()["stored"] == 1


def test_who_has_no_key_opens_nothing(service):
    client, _ = service
    stranger = {"Authorization": "Bearer nobody"}
    assert client.post("/runs", json={}, headers=stranger).status_code == 401
    assert client.post("/feedback", json={"run": "x", "reward": 1.0}, headers=stranger).status_code == 401
    assert client.post("/runs", json={"taks": "x"}).status_code == 400
    for task in ("", "x" * 1000, 3):
        assert client.post("/runs", json={"task": task}).status_code == 400
    run = client.post("/runs", json={}).json()
    for wrong in ({"reward": "good"}, {"reward": 1.0, "turn": "last"}, {"reward": 1.0, "final": "no"}):
        assert client.post("/feedback", json={"run": run["run"], **wrong}).status_code == 400
    assert client.post("/feedback", json={"run": run["run"], "reward": 1.0}).json() == {"stored": 0}  # it asked nothing
    assert client.get("/status").json()["dropped"] == 1
