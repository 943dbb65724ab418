"""A recorded call is sampled again by an engine that a POST to the viewer starts, with its reward, and nothing else is let in."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient
from viewed_runs import headless_chromium, serve, watched_tabs

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
def runs(tmp_path_factory, tiny_model):
    """The directory of a run of one step, whose samples the model that it began with has made."""
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
    return root / "runs"


@pytest.fixture(scope="module")
def client(runs):
    """A viewer of that run."""
    app = make_app([runs])
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


def test_a_reader_samples_a_call_again_from_one_of_its_tokens(client, runs):
    key = asked(client)["sample"]
    served = serve([runs])
    engines = served.app.state.engines
    with headless_chromium() as chromium, watched_tabs(chromium, served.url) as watched:
        tab = watched(1280, "light", served.url)
        tab.visit(f"{client.entry['url']}/sample/{key}?view=requests")
        tab.follow(tab.page.get_by_role("link", name="Sample again"), "/again/")
        model, seed = tab.page.get_by_label("Model"), tab.page.get_by_label("the recorded seed")
        answers = tab.page.locator("#again-answers section")
        model.select_option("model that it began with")
        seed.check()
        tab.page.get_by_role("button", name="Sample from token 0").click()
        answers.wait_for()
        assert answers.locator("h2").inner_text() == "The same answer"
        recorded, again = answers.locator(".pair > div").all()
        assert recorded.locator("p").inner_text() == again.locator("p").inner_text()
        assert re.search(r"reward \S", again.locator("h3").inner_text())
        assert recorded.locator("h3 b").inner_text() == again.locator("h3 b").inner_text()
        tab.follow(tab.page.locator("main .tokens a").nth(3), "token=3$")
        model.select_option("model that it began with")
        tab.page.get_by_role("button", name="Sample from token 3").click()
        answers.wait_for()
        assert [side.locator(".kept").count() for side in answers.locator(".pair > div").all()] == [3, 3]
        assert engines.is_running
        tab.follow(tab.page.get_by_role("link", name="Rollwright: all runs"), "/$")
        tab.page.wait_for_timeout(1_000)
    assert not engines.is_running  # it ended with the page
    served.stop()
