"""The recorder: whole, in order, unchanged by what a workflow does afterwards, and safe from several threads."""

from __future__ import annotations

import threading

import pytest

from rollwright import GenerationHyperparameters, ModelRequest, ModelResponse
from rollwright.errors import EngineError
from rollwright.experience.recorder import Recorder


def request(rid="r", ids=(1, 2)) -> ModelRequest:
    return ModelRequest(input_ids=list(ids), rid=rid, gconfig=GenerationHyperparameters(temperature=0.7, stop=["x"]), seed=5)


def response(**changes) -> ModelResponse:
    values = {
        "input_tokens": [1, 2],
        "output_tokens": [3, 4],
        "output_logprobs": [-0.1, -0.2],
        "output_versions": [7, 8],
        "temperature": 0.7,
        "stop_reason": "length",
        "latency": 2.0,
        "ttft": 0.5,
    }
    return ModelResponse(**{**values, **changes})


def test_a_record_holds_what_a_replay_needs():
    record = Recorder().record(request(), response(stop_match="x"), finished=100.0)
    assert (record.prompt_ids, record.output_ids) == ([1, 2], [3, 4])
    assert (record.logprobs, record.versions, record.temperature) == ([-0.1, -0.2], [7, 8], 0.7)
    assert (record.stop_reason, record.stop_match, record.truncated, record.seed) == ("length", "x", True, 5)
    assert (record.started, record.finished, record.ttft) == (98.0, 100.0, 0.5)
    assert (record.conversation, record.turn, record.index) == (0, 0, 0)
    assert (record.gconfig.temperature, record.gconfig.stop) == (0.7, ["x"])


def test_later_changes_by_the_workflow_do_not_reach_the_record():
    recorder, asked, answered = Recorder(), request(), response()
    record = recorder.record(asked, answered)
    asked.input_ids.append(9)
    asked.gconfig.temperature = 2.0
    asked.gconfig.stop.append("y")
    answered.output_tokens.append(9)
    answered.output_logprobs[0] = 0.0
    assert record.prompt_ids == [1, 2]
    assert record.output_ids == [3, 4]
    assert record.logprobs == [-0.1, -0.2]
    assert (record.gconfig.temperature, record.gconfig.stop) == (0.7, ["x"])


def test_conversations_and_turns_are_counted_in_the_order_they_are_asked():
    recorder = Recorder()
    places = [recorder.open_turn(rid) for rid in ("a", "b", "a", "b", "a")]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    late = recorder.record(request("a"), response(), place=places[2])
    early = recorder.record(request("a"), response(), place=places[0])
    assert (late.turn, late.index, early.turn, early.index) == (1, 0, 0, 1)


@pytest.mark.parametrize("missing", ["output_logprobs", "output_versions"])
def test_an_engine_that_does_not_cover_its_tokens_is_refused(missing):
    with pytest.raises(EngineError, match="returned 2 tokens with"):
        Recorder().record(request(), response(**{missing: [0]}))


def test_threads_lose_and_mix_nothing():
    recorder = Recorder()

    def work(name: str) -> None:
        for turn in range(200):
            recorder.record(request(name), response(output_tokens=[turn, 1]))

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = recorder.records
    assert [record.index for record in records] == list(range(800))
    for name in range(4):
        own = [record for record in records if record.rid == f"t{name}"]
        assert [record.turn for record in own] == [record.output_ids[0] for record in own] == list(range(200))


def test_turns_of_a_conversation_share_their_tokens():
    recorder, ids = Recorder(), [1, 2]
    records = []
    for turn in range(3):
        records.append(recorder.record(ModelRequest(input_ids=ids, rid="one"), response(input_tokens=[])))
        ids += [3, 4, 10 + turn]
    assert len({id(record.prompt.buffer) for record in records}) == 1
    assert [record.prompt_ids for record in records] == [ids[:2], ids[:5], ids[:8]]


@pytest.mark.parametrize("other", [[1, 9, 3], [1], [9, 2, 3, 4]])
def test_a_prompt_that_goes_another_way_has_tokens_of_its_own(other):
    first = ModelRequest(input_ids=[1, 2, 3], rid="one")
    second = ModelRequest(input_ids=other, rid="one")
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3], other)
    third = ModelRequest(input_ids=[*other, 5], rid="one")
    assert (first.input_ids, second.input_ids, third.input_ids) == ([1, 2, 3], other, [*other, 5])


def test_what_is_changed_in_a_request_before_it_is_sent_is_what_is_recorded():
    asked = ModelRequest(input_ids=[1, 2], rid="one")
    asked.input_ids.append(9)
    assert Recorder().record(asked, response(input_tokens=[])).prompt_ids == [1, 2, 9]
    asked.input_ids = [7]
    assert Recorder().record(asked, response(input_tokens=[])).prompt_ids == [7]


def test_only_new_ids_are_checked_and_a_wrong_one_is_named_by_its_place():
    kept = ModelRequest(input_ids=[1, 2, 3], rid="one")
    with pytest.raises(EngineError, match=r"input_ids\[4\] is 'x'"):
        ModelRequest(input_ids=[1, 2, 3, 4, "x"], rid="one")
    with pytest.raises(EngineError, match=r"input_ids\[3\] is 4294967296: token ids are at most"):
        ModelRequest(input_ids=[1, 2, 3, 2**32], rid="one")
    assert ModelRequest(input_ids=[1, 2, 3, 4], rid="one").tokens.begins_with(kept.tokens)
