"""A recorded call is sampled again by an engine that a POST to the viewer starts, with its reward, and nothing else is let in."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from rollwright.config.experiment import GRPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, MicroBatchSpec, OptimizerConfig, PPOActorConfig, StatsLoggerConfig
from rollwright.config.tasksets import DatasetConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.trainers import drawn_tasks
from rollwright.trainers.loops.rl import PPOTrainer
from rollwright.viewer.server import make_app

TASKS = [{"messages": [{"role": "user", "content": f"{number}+1="}], "answer": str(number + 1)} for number in range(4)]


@pytest.fixture(scope="module")
def client(tmp_path_factory, tiny_model):
    """A viewer of a run of one step, whose samples the model that it began with has made."""
    root = tmp_path_factory.mktemp("again")
    config = GRPOConfig(
        experiment_name="again",
        trial_name="run",
        workflow="rlvr",
        reward_fn="format_reward",
        workflow_kwargs={"get_input_ids_fn": "test_sampling_again:plain_ids"},
        cluster=ClusterConfig(fileroot=str(root / "runs")),
        stats_logger=StatsLoggerConfig(display="none"),
        gconfig=GenerationHyperparameters(max_new_tokens=8, n_samples=4),
        actor=PPOActorConfig(path=str(tiny_model), optimizer=OptimizerConfig(lr=1e-3), mb_spec=MicroBatchSpec()),
        train_dataset=DatasetConfig(batch_size=4),
        total_train_steps=1,
    )
    kwargs = drawn_tasks.workflow_arguments(config, config.workflow, config.workflow_kwargs, load_tokenizer(tiny_model))
    with PPOTrainer(config, TASKS) as trainer:
        trainer.train(workflow=config.workflow, workflow_kwargs=kwargs)
    app = make_app([root / "runs"])
    (entry,) = app.state.pages.entries()
    app.state.pages.runs.get(entry["id"]).refresh()
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        client.entry, client.run = entry, app.state.pages.runs.get(entry["id"])
        yield client
    assert app.state.engines.end() is False  # it ended with the viewer


def plain_ids(prompt, tokenizer, enable_thinking):
    return tokenizer.encode(prompt[-1]["content"])


def asked(client, **changes):
    sample = client.run.search(limit=1, order="-tokens")["samples"][0]["key"]
    return {"sample": sample, "call": 0, "token": 0, "model": "model that it began with", **changes}


def test_the_page_offers_each_token_and_the_models(client):
    body = asked(client)
    page = client.get(f"{client.entry['url']}/again/{body['sample']}?token=2").text
    assert "Sample from token 2" in page
    assert "<option>model that it began with</option>" in page
    call = client.run.sample(body["sample"])["calls"][0]
    assert page.count('title="token ') == len(call["output"])
    assert f"/again/{body['sample']}?call=0" in client.get(f"{client.entry['url']}/sample/{body['sample']}?view=requests").text


def test_the_same_seed_and_weights_give_the_same_answer_and_reward(client):
    body, address = asked(client, same_seed=True), f"{client.entry['url']}/again"
    answer = client.post(address, json=body)
    assert answer.status_code == 200, answer.text
    assert "The same answer" in answer.text
    rewards = re.findall(r"reward\s+<b>(.*?)</b>", answer.text)
    assert len(rewards) == 2
    assert rewards[0] == rewards[1]
    kept = client.post(address, json=asked(client, token=3)).text
    recorded, again = kept.split("Sampled again")
    assert recorded.count(" kept") == again.count(" kept") == 3
    assert client.post(address, json={}).status_code == 204  # ends the engine


def test_nothing_else_is_let_in(client):
    body, address = asked(client), f"{client.entry['url']}/again"
    assert client.post(address, content=b"run=1", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post(address).status_code == 415
    assert client.post(address, json=body, headers={"Origin": "https://example.com"}).status_code == 403
    assert client.post(client.entry["url"], json=body).status_code == 405
    assert client.put(address, json=body).status_code == 405
    assert client.post(address, json={**body, "model": "/etc"}).status_code == 404
    assert client.post(address, json={**body, "call": 7}).status_code == 404
    assert client.post(address, json={**body, "more": 1}).status_code in (400, 422)
