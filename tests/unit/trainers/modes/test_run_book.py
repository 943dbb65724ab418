"""The open runs of mode serve: feedback is stored once, and a feedback that could not be stored may be given again."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import pytest

pytest.importorskip("sqlalchemy")

from rollwright import GRPOConfig
from rollwright.config.modes import OperatorConfig, StoreConfig
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import StoreError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.exchange import RequestError
from rollwright.store import ExperienceStore
from rollwright.trainers.modes.serve import Feedback, RunBook


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


def config() -> GRPOConfig:
    config = GRPOConfig(mode="serve", store=StoreConfig(operators=[OperatorConfig("reward_filter", {"threshold": -1.0})]))
    config.gconfig = config.gconfig.new(n_samples=2)
    return config


@pytest.fixture
def book():
    with OpenAIFront(build_character_tokenizer(), "policy") as front, ExperienceStore("sqlite://") as store:
        yield RunBook(front, Yes(), store, config(), "service-1")


@pytest.fixture
def process(tmp_path):
    """Books on one journal and one store, each in the place of a process that was killed before it."""
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(ExperienceStore("sqlite://"))
        port = 0

        def start() -> RunBook:
            nonlocal port
            front = opened.enter_context(OpenAIFront(build_character_tokenizer(), "policy", port=port))
            book = RunBook(front, Yes(), store, config(), "service-1", Journal(tmp_path / "journal"))
            book.restore(tmp_path / "journal")
            port = int(front.url.rpartition(":")[2])
            return book

        yield start


def killed(book: RunBook) -> None:
    """The book's process is gone: nothing of what a normal end does is done."""
    book.front.close()


def asked(run: dict, messages: list[dict]) -> str:
    """What an agent is answered; it is added to the messages."""
    with openai.OpenAI(base_url=run["base_url"], api_key=run["api_key"], max_retries=0) as client:
        answer = client.chat.completions.create(model="policy", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return answer.id


def worked(book: RunBook, task: str | None = None) -> str:
    """A run in which the agent made one call; returns its name."""
    run = book.open(task)
    asked(run, [{"role": "user", "content": "?"}])
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
    assert told(book, run, 1.0) == 1  # given again, it is answered as before
    with pytest.raises(RequestError, match="no open run"):
        told(book, run, 0.5)
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


# -- a service that is killed and started again ------------------------------------------------------------------------


def test_open_runs_go_on_under_their_keys_with_the_tokens_that_were_sampled(process):
    book = process()
    run, talk = book.open("refund"), [{"role": "user", "content": "?"}]
    asked(run, talk)
    told(book, run["run"], 0.5, turn=0, final=False)
    killed(book)
    for _ in range(2):  # also when that one is killed, too
        book = process()
        assert book.status()["open"] == 1
        talk.append({"role": "user", "content": "and now?"})
        asked(run, talk)
        killed(book)
    book = process()
    assert told(book, run["run"], 1.0) == 1  # the calls extend one another: the sampled tokens were never encoded again
    assert told(book, worked(book, "refund"), 0.0) == 1
    (group,) = book.store.groups()
    first, second = sorted(group.experiences, key=lambda each: each.eid.run)
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert int(first.action_mask.sum()) == 6
    assert first.tokens[first.prompt_length :][first.action_mask].tolist() == [5, 6] * 3
    assert first.token_rewards.sum() == pytest.approx(0.5)


def test_feedback_that_was_in_the_journal_when_its_process_was_killed_is_stored_once(process, monkeypatch):
    book = process()
    run = worked(book, "refund")
    append = book.store.append
    stored = []

    def die(*arguments, **named):
        stored.append(append(*arguments, **named))
        raise StoreError("killed before it was answered")

    monkeypatch.setattr(book.store, "append", die)
    with pytest.raises(StoreError):
        told(book, run, 1.0)
    assert stored == [1]
    killed(book)
    monkeypatch.setattr(book.store, "append", append)
    book = process()
    assert book.status()["open"] == 0  # what was said last is done
    assert told(book, worked(book, "refund"), 0.0) == 1  # at the place behind it
    assert told(book, run, 1.0) == 1
    killed(book)
    book = process()
    assert told(book, run, 1.0) == 1
    with pytest.raises(RequestError, match="no open run"):
        told(book, run, 0.5)
    (group,) = book.store.groups()
    assert sorted((each.eid.run, each.reward) for each in group.experiences) == [(0, 1.0), (1, 0.0)]


def test_a_group_that_was_completed_when_the_service_ended_gets_no_further_run(process):
    book = process()
    told(book, worked(book, "refund"), 1.0)
    book.end()
    killed(book)
    book = process()
    told(book, worked(book, "refund"), 0.5)
    told(book, worked(book, "refund"), 0.25)
    assert [[each.reward for each in group.experiences] for group in book.store.groups()] == [[1.0], [0.5, 0.25]]


def test_while_runs_are_restored_a_key_is_not_called_unknown(book):
    run = book.open(None)
    with book.front.holding_calls(), pytest.raises(openai.InternalServerError, match="restored"):
        asked(run, [{"role": "user", "content": "?"}])
    asked(run, [{"role": "user", "content": "?"}])


def test_runs_that_nobody_rewarded_stay_dropped(process):
    book = process()
    book.config.service.feedback_seconds = 1e-9
    run = book.open(None)
    book.drop_idle()
    killed(book)
    book = process()
    assert book.status()["open"] == 0
    with pytest.raises(openai.AuthenticationError):
        asked(run, [{"role": "user", "content": "?"}])
