"""The open runs of mode serve: feedback is stored once, and a feedback that could not be stored may be given again."""

from __future__ import annotations

import asyncio

import openai
import pytest

pytest.importorskip("sqlalchemy")

from rollwright import GRPOConfig
from rollwright.config.modes import OperatorConfig, StoreConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import StoreError
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.exchange import RequestError
from rollwright.rollout.openai_front import OpenAIFront
from rollwright.store import ExperienceStore
from rollwright.trainers.serve import Feedback, RunBook


class Yes(InferenceEngine):
    """Answers every request with the same two tokens."""

    context_length = 256

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(0)
        return ModelResponse(request.input_ids, [5, 6], [-0.5, -0.25], [0, 0], "length")

    def get_version(self) -> int:
        return 0

    def set_version(self, version): ...
    def pause(self): ...
    def resume(self): ...
    def abort(self, rid=None): ...


@pytest.fixture
def book():
    config = GRPOConfig(mode="serve", store=StoreConfig(operators=[OperatorConfig("reward_filter", {"threshold": -1.0})]))
    config.gconfig = config.gconfig.new(n_samples=2)
    with OpenAIFront(build_character_tokenizer(), "policy") as front, ExperienceStore("sqlite://") as store:
        yield RunBook(front, Yes(), store, config, "service-1")


def worked(book: RunBook, task: str | None = None) -> str:
    """A run in which the agent made one call; returns its name."""
    run = book.open(task)
    with openai.OpenAI(base_url=run["base_url"], api_key=run["api_key"], max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
    return run["run"]


def told(book: RunBook, run: str, reward: float, **more) -> int:
    return book.feedback(Feedback(run=run, reward=reward, **more))


def test_feedback_that_could_not_be_stored_may_be_given_again(book, monkeypatch):
    run = worked(book, "refund")
    append = book.store.append
    monkeypatch.setattr(book.store, "append", lambda *_, **__: (_ for _ in ()).throw(StoreError("disk full")))
    with pytest.raises(StoreError):
        told(book, run, 1.0)
    monkeypatch.setattr(book.store, "append", append)
    assert told(book, run, 1.0) == 1
    with pytest.raises(RequestError, match="no open run"):
        told(book, run, 1.0)
    assert told(book, worked(book, "refund"), 0.0) == 1
    (group,) = book.store.groups()
    assert sorted((each.eid.run, each.reward) for each in group.experiences) == [(0, 1.0), (1, 0.0)]
    assert book.status() == {"opened": 2, "stored": 2, "dropped": 0, "experiences": 2, "open": 0, "version": 0}


def test_what_operators_leave_out_takes_no_place_in_its_group(book):
    assert told(book, worked(book, "refund"), -5.0) == 0
    for reward in (0.25, 0.5):
        assert told(book, worked(book, "refund"), reward) == 1
    (group,) = book.store.groups()
    assert [each.reward for each in group.experiences] == [0.25, 0.5]
    assert book.store.status().drops == {"reward_filter": 1}


def test_a_run_without_a_task_is_a_group(book):
    for reward in (0.0, 1.0):
        told(book, worked(book), reward)
    told(book, worked(book, "refund"), 1.0)  # the first of two
    assert [len(group.experiences) for group in book.store.groups()] == [1, 1]
    assert book.store.status().open_groups == 1


def test_a_turn_that_is_none_is_refused(book):
    run = worked(book)
    with pytest.raises(RequestError, match="turn='last'; it has to be a whole number"):
        Feedback.of({"run": run, "reward": 1.0, "turn": "last"})
    with pytest.raises(RequestError, match="no turn 7"):
        told(book, run, 1.0, turn=7, final=False)
    assert told(book, run, 1.0) == 1


def test_what_waits_for_more_runs_is_not_lost_when_the_service_ends(book):
    for task, reward in (("refund", 1.0), ("refund", 0.0), ("refund", 0.5), ("swap", 0.25)):
        told(book, worked(book, task), reward)
    assert book.store.status().open_groups == 2
    book.end()
    assert [[each.reward for each in group.experiences] for group in book.store.groups()] == [[1.0, 0.0], [0.5], [0.25]]
    assert book.store.status().open_groups == 0
    book.end()  # once more changes nothing
    assert not book.store.complete_group("service-1/swap/0")
