"""``/v1/responses`` at the front: the real ``openai`` client, its types as the oracle, and one recorder."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from test_openai_front import TOOL_CALL, TOOLS, Script, StreamingScript, front, plain_client, sample_engine, tokenizer

__all__ = ["front", "tokenizer"]
FUNCTIONS = [{"type": "function", **tool["function"], "strict": None} for tool in TOOLS]


def checked(response):
    """The response, after OpenAI's own types have accepted the JSON that was sent."""
    sent = response.to_dict(mode="json")
    TypeAdapter(Response).validate_python(sent)
    return response


def run_agent(client, **arguments):
    """An agent that sends all items back, as openai-agents does."""
    items, answers = [{"role": "user", "content": "1+2?"}], []
    while True:
        answer = checked(client.responses.create(model="policy", input=items, tools=FUNCTIONS, temperature=0.7, **arguments))
        answers.append(answer)
        items += [item.to_dict() for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answers
        for call in calls:
            numbers = json.loads(call.arguments)
            total = str(numbers["a"] + numbers["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})


async def test_an_agent_of_the_responses_api_is_recorded_token_for_token(front, tokenizer):
    sample = sample_engine(Script(tokenizer, TOOL_CALL, "it is 3"))
    with front.episode(sample) as episode:
        answers = await asyncio.to_thread(run_agent, plain_client(episode), instructions="add numbers")
        episode.set_reward(0.5, call=answers[0].id)
    assert answers[-1].output_text == "it is 3"
    assert [answer.id for answer in answers] == episode.calls
    first, second = sample.recorder.records
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]
    assert second.rid == first.rid
    (experience,) = episode.experiences(reward=1.0)
    assert int(experience.action_mask.sum()) == len(first.output_ids) + len(second.output_ids)
    usage = answers[-1].usage
    assert (usage.input_tokens, usage.output_tokens) == (len(second.prompt_ids), len(second.output_ids))
    assert answers[0].status == "completed"
    assert answers[0].temperature == 0.7


async def test_the_prompt_is_that_of_the_same_chat(front, tokenizer):
    def ask(client):
        client.responses.create(
            model="policy", instructions="be brief", input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        )
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        client.chat.completions.create(model="policy", messages=messages)

    sample = sample_engine(Script(tokenizer, "a"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(ask, plain_client(episode))
    first, second = sample.recorder.records
    assert first.prompt_ids == second.prompt_ids


async def test_a_conversation_goes_on_by_previous_response_id(front, tokenizer):
    def agent(client):
        first = client.responses.create(model="policy", input="1+2?", tools=FUNCTIONS)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        second = checked(
            client.responses.create(model="policy", input=[result], tools=FUNCTIONS, previous_response_id=first.id)
        )
        assert second.previous_response_id == first.id
        assert client.responses.retrieve(second.id).output_text == second.output_text
        before, after = ([{"type": "item_reference", "id": item.id} for item in each.output] for each in (first, second))
        ask, more = ({"role": "user", "content": text} for text in ("1+2?", "sure?"))
        third = client.responses.create(
            model="policy", input=[ask, *before, result, *after, more], tools=FUNCTIONS, store=False
        )
        for wrong in (third.id, "resp_unknown"):
            with pytest.raises(openai.NotFoundError, match="no response"):
                client.responses.create(model="policy", input="x", previous_response_id=wrong)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    sample = sample_engine(Script(tokenizer, "let me see" + TOOL_CALL, "3", "yes"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    assert len(episode.experiences(reward=1.0)) == 1


@pytest.mark.parametrize("text", ["it is three", "well: " + TOOL_CALL, TOOL_CALL + TOOL_CALL, ""])
async def test_a_stream_has_the_events_of_the_api_and_ends_in_the_same_response(front, tokenizer, text):
    def agent(client):
        events = list(client.responses.create(model="policy", input="1+2?", tools=FUNCTIONS, stream=True))
        whole = checked(client.responses.create(model="policy", input="1+2?", tools=FUNCTIONS))
        with client.responses.stream(model="policy", input="1+2?", tools=FUNCTIONS) as stream:  # checks the sequence itself
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == whole.output_text
        return events, whole

    with front.episode(sample_engine(StreamingScript(tokenizer, text))) as episode:
        events, whole = await asyncio.to_thread(agent, plain_client(episode))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict(mode="json"))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    final = checked(events[-1].response)

    def plain(response):
        drop = ("id", "call_id")
        return [{key: value for key, value in item.to_dict().items() if key not in drop} for item in response.output]

    assert plain(final) == plain(whole)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in final.output]
    assert len(episode.calls) == 3


async def test_a_reply_that_was_cut_is_incomplete(front, tokenizer):
    class Cut(Script):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            response.stop_reason = "length"
            return response

    with front.episode(sample_engine(Cut(tokenizer, "never ends"))) as episode:
        answer = await asyncio.to_thread(
            lambda: checked(plain_client(episode).responses.create(model="policy", input="?", max_output_tokens=16))
        )
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_log_probabilities_come_with_the_text(front, tokenizer):
    def ask(client):
        return checked(client.responses.create(model="policy", input="?", include=["message.output_text.logprobs"]))

    with front.episode(sample_engine(Script(tokenizer, "ab"))) as episode:
        answer = await asyncio.to_thread(ask, plain_client(episode))
    logprobs = answer.output[0].content[0].logprobs
    assert [(each.token, each.logprob) for each in logprobs[:2]] == [("a", pytest.approx(-0.01)), ("b", pytest.approx(-0.02))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0. is of type 'custom'.*offer it as a function"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "function", "name": "sub"}}, "'type': 'function', 'name': …"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.*none"),
        ({"text": {"format": {"type": "xml"}}}, "text.format="),
        ({"input": [{"role": "judge", "content": "x"}], "instructions": "add"}, "input.0. has role 'judge'"),
        ({"tools": [*FUNCTIONS, *FUNCTIONS]}, "two tools named 'add'"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input.0. is of type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
        ({"truncation": "auto"}, "a history is not cut"),
        ({"background": True}, "at once"),
        ({"extra_body": {"colour": 1}}, "Unknown field of /v1/responses 'colour'"),
        ({"extra_body": {"max_tokens": 5}}, "it is max_output_tokens here"),
        ({"max_output_tokens": 0}, "max_output_tokens=0"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(front, tokenizer, arguments, said):
    def ask(client):
        with pytest.raises(openai.BadRequestError, match=said):
            client.responses.create(**{"model": "policy", "input": "?", **arguments})

    sample = sample_engine(Script(tokenizer, "a"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(ask, plain_client(episode))
    assert not sample.recorder.records


async def test_an_engine_that_fails_in_a_stream_ends_it_with_a_failed_response(front, tokenizer):
    class Failing(StreamingScript):
        async def astream(self, request):
            async for partial in super().astream(request):
                yield partial
                if len(partial.output_tokens) == 2:
                    raise RuntimeError("the engine broke")

    def ask(client):
        return list(client.responses.create(model="policy", input="?", stream=True))

    with front.episode(sample_engine(Failing(tokenizer, "abcdef"))) as episode:
        events = await asyncio.to_thread(ask, plain_client(episode))
    assert events[-1].type == "response.failed"
    assert "the engine broke" in checked(events[-1].response).error.message
    assert not episode.calls


class Sum(BaseModel):
    total: int


async def test_structured_output_is_asked_of_the_chat(front, tokenizer):
    def ask(client):
        return client.responses.parse(model="policy", input="1+2?", text_format=Sum).output_parsed

    script = Script(tokenizer, '{"total": 3}')
    with front.episode(sample_engine(script)) as episode:
        parsed = await asyncio.to_thread(ask, plain_client(episode))
    assert parsed == Sum(total=3)
    assert json.loads(script.requests[0].gconfig.json_schema)["required"] == ["total"]


NAMESPACE = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": FUNCTIONS}
NAMESPACED_CALL = TOOL_CALL.replace('"add"', '"sums__add"')


@pytest.mark.parametrize("streams", [False, True])
async def test_a_function_of_a_namespace_is_called_and_its_namespace_goes_back(front, tokenizer, streams):
    def ask(client, items, **arguments):
        tools = [{**FUNCTIONS[0], "name": "plain"}, NAMESPACE]
        if not streams:
            return checked(client.responses.create(model="policy", input=items, tools=tools, **arguments))
        events = list(client.responses.create(model="policy", input=items, tools=tools, stream=True, **arguments))
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict(mode="json"))
        return checked(events[-1].response)

    def agent(client):
        items = [{"role": "user", "content": "1+2?"}]
        first = ask(client, items)
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, call.namespace) == ("add", "sums")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        ask(client, [*items, *(item.to_dict() for item in first.output), result])
        ask(client, [result, {"role": "user", "content": "sure?"}], previous_response_id=first.id)
        ask(client, "again", tool_choice={"type": "function", "name": "add"})

    sample = sample_engine(StreamingScript(tokenizer, NAMESPACED_CALL, "3", "yes", ' {"a": 1}}</tool_call>'))
    with front.episode(sample) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    records = sample.recorder.records
    assert records[1].rid == records[0].rid, "the call goes on from its tokens"
    assert len(experiences := episode.experiences(reward=1.0)) == 3, len(experiences)  # another question, a forced call
    prompts = [tokenizer.decode(record.prompt_ids, skip_special_tokens=False) for record in records]
    assert prompts[0].startswith("<|system|>plain sums__add ")
    assert prompts[3].endswith('"name": "sums__add", "arguments":')


async def test_hosted_tools_are_left_out_and_the_record_says_so(front, tokenizer):
    def ask(client):
        hosted = [{"type": "web_search"}, {"type": "code_interpreter", "container": "c"}]
        told = {"client_metadata": {"session": "s"}}
        answer = client.responses.create(model="policy", input="?", tools=[*FUNCTIONS, *hosted], extra_body=told)
        assert [tool.type for tool in checked(answer).tools] == ["function", "web_search", "code_interpreter"]
        client.responses.create(model="policy", input="?", tools=FUNCTIONS)

    sample = sample_engine(Script(tokenizer, "a"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(ask, plain_client(episode))
    first, second = sample.recorder.records
    said = "The tool {} is left out: OpenAI's own servers run it."
    assert first.metadata["warnings"] == [said.format("web_search"), said.format("code_interpreter")]
    assert "warnings" not in second.metadata
    assert first.prompt_ids == second.prompt_ids


async def test_input_tokens_are_counted_without_a_call(front, tokenizer):
    def ask(client):
        given = {"model": "policy", "input": "1+2?", "instructions": "add", "tools": FUNCTIONS}
        counted = client.responses.input_tokens.count(**given)
        return counted.input_tokens, client.responses.create(**given).usage.input_tokens

    sample = sample_engine(Script(tokenizer, "3"))
    with front.episode(sample) as episode:
        counted, used = await asyncio.to_thread(ask, plain_client(episode))
    assert counted == used == len(sample.recorder.records[0].prompt_ids)
    assert len(sample.recorder.records) == 1
