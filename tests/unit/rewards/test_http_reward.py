"""Rewards that a service computes, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cloudpickle
import pytest

from rollwright.errors import RewardError
from rollwright.experience.durable import EPISODE
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.rewards import http
from rollwright.rewards.http import HttpReward
from rollwright.rewards.registry import REWARD_FUNCTIONS
from rollwright.rewards.wrapper import AsyncRewardWrapper


class Service:
    """Answers each request by ``answer(body)``; notes bodies and headers."""

    def __init__(self):
        self.bodies, self.headers = [], []
        self.answer = lambda body: 1.0
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.bodies.append(body)
                service.headers.append(dict(self.headers))
                answer = service.answer(body)
                status, content = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content.encode())))
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)


def score(url, completion="it is 3", **columns):
    return AsyncRewardWrapper(url)("1+2?", completion, [1], [2], **{"answer": "3", **columns})


async def test_the_body_is_that_of_slime_s_remote_reward_model(service):
    service.answer = lambda body: 0.5
    assert await score(service.url, task_id="a", workdir=Path("/tmp"), nested={"of": [1, None]}) == 0.5
    (body,) = service.bodies
    assert body == {
        "prompt": "1+2?",
        "response": "it is 3",
        "label": "3",
        "metadata": {"task_id": "a", "nested": {"of": [1, None]}},
    }


async def test_the_body_is_the_arguments_of_verl_s_compute_score(service):
    service.answer = lambda body: {"score": 0.25, "acc": True}
    url = f"{service.url}#form=solution"
    assert await score(url, data_source="gsm8k", extra_info={"index": 7}, split="train") == 0.25
    (body,) = service.bodies
    assert body == {
        "data_source": "gsm8k",
        "solution_str": "it is 3",
        "ground_truth": "3",
        "extra_info": {"split": "train", "prompt": "1+2?", "index": 7},
    }
    assert await score(f"{url}&key=acc") == 1.0


@pytest.mark.parametrize("named", [None, "rewards"])
async def test_completions_that_wait_share_a_request_and_each_gets_its_own_reward(service, named):
    service.answer = lambda bodies: [float(body["response"]) for body in bodies]
    if named:
        plain = service.answer
        service.answer = lambda bodies: {named: plain(bodies)}
    url = f"{service.url}#batch_size=4&batch_seconds=0.1"
    rewards = await asyncio.gather(*(score(url, str(number)) for number in range(10)))
    assert rewards == [float(number) for number in range(10)]
    assert sorted(len(bodies) for bodies in service.bodies) == [2, 4, 4]


async def test_one_wrong_answer_of_a_batch_is_one_error(service):
    service.answer = lambda bodies: [1.0, "good"]
    url = f"{service.url}#batch_size=2"
    first, second = await asyncio.gather(score(url), score(url), return_exceptions=True)
    assert first == 1.0
    assert isinstance(second, RewardError)
    service.answer = lambda bodies: [1.0]
    with pytest.raises(RewardError, match="to a batch of 2; it has to answer a list of as many"):
        await asyncio.gather(score(url), score(url))


async def test_failures_that_may_pass_are_tried_again_and_others_are_not(service):
    answers = iter([(503, "busy"), (429, "slow down"), (200, "1.5")])
    service.answer = lambda body: next(answers)
    assert await score(service.url) == 1.5
    assert len(service.bodies) == 3
    service.answer = lambda body: (400, "no such task")
    with pytest.raises(RewardError, match="answered 400: no such task"):
        await score(service.url)
    assert len(service.bodies) == 4
    service.answer = lambda body: (500, "broken")
    with pytest.raises(RewardError, match="answered 500: broken, in each of 2 attempts"):
        await score(f"{service.url}#retries=1")


async def test_a_service_that_hangs_is_asked_again_after_the_time_limit(service):
    release = threading.Event()
    service.answer = lambda body: release.wait(5) and 1.0 if len(service.bodies) == 1 else 2.0
    try:
        assert await score(f"{service.url}#timeout=0.3") == 2.0
    finally:
        release.set()
    with pytest.raises(RewardError, match="did not answer"):
        await score("http://127.0.0.1:9/score#retries=0")


@pytest.mark.parametrize("answer", ["good", None, {}, {"value": 1}, [1.0], float("nan")])
async def test_an_answer_without_a_finite_number_is_an_error(service, answer):
    service.answer = lambda body: answer
    with pytest.raises(RewardError, match="it has to be a finite number"):
        await score(service.url)


async def test_the_token_comes_from_the_environment(service, monkeypatch):
    with pytest.raises(RewardError, match="RM_TOKEN is not set"):
        HttpReward(f"{service.url}#token_variable=RM_TOKEN")
    monkeypatch.setenv("RM_TOKEN", "secret")
    await score(f"{service.url}#token_variable=RM_TOKEN")
    assert service.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("fragment", "said"),
    [
        ("batch=3", "no setting 'batch'"),
        ("timeout=soon", "not of type float"),
        ("form=x", "response or solution"),
        ("retries=-1", "at least"),
    ],
)
def test_settings_that_cannot_be_are_refused(fragment, said):
    with pytest.raises(RewardError, match=said):
        REWARD_FUNCTIONS.get(f"https://example.com/score#{fragment}")


def test_callers_of_a_url_share_a_function_that_travels_to_other_processes():
    one = REWARD_FUNCTIONS.get("https://example.com/score#batch_size=3")
    assert one is REWARD_FUNCTIONS.get("https://example.com/score#batch_size=3")
    assert cloudpickle.loads(cloudpickle.dumps(one)).service == one.service


async def test_a_replayed_episode_takes_its_reward_from_the_journal(service, tmp_path):
    journal = Journal(tmp_path)
    episode = EpisodeWriter(journal)
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "W", "samples_asked": 1}
    episode.begin(ordinal=0, index=0, task=b"\x80", task_error="", **facts)

    async def scored_in(episode):
        EPISODE.set(episode)
        return await score(service.url)

    service.answer = lambda body: float(len(service.bodies))
    assert await asyncio.create_task(scored_in(episode)) == 1.0
    episode.end("accepted")
    journal.close()
    (past,) = read_episodes(tmp_path)
    assert await asyncio.create_task(scored_in(EpisodeWriter(None, past))) == 1.0
    assert len(service.bodies) == 1
    assert past.results[0].name == f"reward rollwright.rewards.http.HttpReward({service.url})"
