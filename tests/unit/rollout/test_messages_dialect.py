"""``/v1/messages`` at the front: the real ``anthropic`` client, its types as the oracle, and one recorder."""

from __future__ import annotations

import asyncio

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from test_openai_front import TOOL_CALL, TOOLS, Script, StreamingScript, front, plain_client, sample_engine, tokenizer

__all__ = ["front", "tokenizer"]
FUNCTIONS = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
ASK = [{"role": "user", "content": "1+2?"}]
IMAGE = [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]


def client_of(episode) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=episode.base_url.removesuffix("/v1"), api_key=episode.api_key, max_retries=0)


def checked(message):
    """The message, after Anthropic's own types have accepted the JSON that was sent."""
    TypeAdapter(Message).validate_python(message.to_dict(mode="json"))
    return message


def run_agent(client, **arguments):
    """The loop of Anthropic's documentation for tools."""
    messages, answers = list(ASK), []
    while True:
        answer = client.messages.create(
            model="policy", max_tokens=100, messages=messages, tools=FUNCTIONS, extra_body={"temperature": 0.7}, **arguments
        )
        answers.append(checked(answer))
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answers
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


async def test_an_agent_of_the_messages_api_is_recorded_token_for_token(front, tokenizer):
    sample = sample_engine(Script(tokenizer, "so: " + TOOL_CALL + TOOL_CALL, "it is 3"))
    with front.episode(sample) as episode:
        answers = await asyncio.to_thread(run_agent, client_of(episode), system="add numbers")
        episode.set_reward(0.5, call=answers[0].id)
    assert [block.type for block in answers[0].content] == ["text", "tool_use", "tool_use"]
    assert (answers[1].content[0].text, answers[1].stop_reason) == ("it is 3", "end_turn")
    assert [answer.id for answer in answers] == episode.calls
    first, second = sample.recorder.records
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]
    assert second.rid == first.rid
    assert second.temperature == 0.7
    (experience,) = episode.experiences(reward=1.0)
    assert int(experience.action_mask.sum()) == len(first.output_ids) + len(second.output_ids)
    usage = answers[1].usage
    assert (usage.input_tokens, usage.output_tokens) == (len(second.prompt_ids), len(second.output_ids))


async def test_one_conversation_goes_through_all_dialects(front, tokenizer):
    def agent(episode):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1"}]
        other = plain_client(episode)
        said = other.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "2"}]
        answer = client_of(episode).messages.create(
            model="policy", max_tokens=50, system=[{"type": "text", "text": "be brief"}], messages=messages[1:]
        )
        messages += [{"role": "assistant", "content": answer.content[0].text}, {"role": "user", "content": "3"}]
        other.responses.create(model="policy", instructions="be brief", input=messages[1:])

    sample = sample_engine(Script(tokenizer, "a", "b", "c"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(agent, episode)
    assert len(sample.recorder.records) == 3
    assert len(episode.experiences(reward=1.0)) == 1


@pytest.mark.parametrize("text", ["it is three", "well: " + TOOL_CALL, TOOL_CALL + TOOL_CALL, ""])
async def test_a_stream_has_the_events_of_the_api_and_ends_in_the_same_message(front, tokenizer, text):
    def agent(client):
        arguments = {"model": "policy", "max_tokens": 100, "messages": ASK, "tools": FUNCTIONS}
        events = list(client.messages.create(**arguments, stream=True))
        whole = checked(client.messages.create(**arguments))
        with client.messages.stream(**arguments) as stream:
            return events, whole, checked(stream.get_final_message())

    with front.episode(sample_engine(StreamingScript(tokenizer, text))) as episode:
        events, whole, final = await asyncio.to_thread(agent, client_of(episode))
    for event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event.to_dict(mode="json"))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]

    def plain(message):
        return [{key: value for key, value in block.to_dict().items() if key != "id"} for block in message.content]

    assert plain(final) == plain(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert len(episode.calls) == 3


async def test_stop_sequences_limits_and_a_begun_reply(front, tokenizer):
    class Cut(Script):
        async def agenerate(self, request):
            response = await super().agenerate(request)
            if request.gconfig.stop:
                response.stop_match = request.gconfig.stop[0]
            else:
                response.stop_reason = "length"
            return response

    def agent(client):
        stopped = client.messages.create(model="policy", max_tokens=9, messages=ASK, stop_sequences=["!"])
        cut = client.messages.create(model="policy", max_tokens=9, messages=[*ASK, {"role": "assistant", "content": "It is"}])
        return checked(stopped), checked(cut)

    sample = sample_engine(Cut(tokenizer, " three!"))
    with front.episode(sample) as episode:
        stopped, cut = await asyncio.to_thread(agent, client_of(episode))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "!")
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    begun = tokenizer.decode(sample.recorder.records[1].prompt_ids, skip_special_tokens=False)
    assert begun.endswith("<|assistant|>It is")


async def test_tokens_are_counted_without_a_call(front, tokenizer):
    def ask(client):
        counted = client.messages.count_tokens(model="policy", messages=ASK, system="add", tools=FUNCTIONS)
        answer = client.messages.create(model="policy", max_tokens=9, messages=ASK, system="add", tools=FUNCTIONS)
        return counted.input_tokens, answer.usage.input_tokens

    sample = sample_engine(Script(tokenizer, "3"))
    with front.episode(sample) as episode:
        counted, used = await asyncio.to_thread(ask, client_of(episode))
    assert counted == used == len(sample.recorder.records[0].prompt_ids)
    assert len(sample.recorder.records) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0. is of type 'bash_20250124'.*offer a tool with a name",
        ),
        (
            {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
            "does not change the history",
        ),
        ({"extra_body": {"stop": ["x"]}}, "it is stop_sequences here"),
        ({"stop_sequences": [""]}, "stop_sequences="),
        ({"system": "add", "messages": [{"role": "user", "content": IMAGE}]}, "^(?!.*image_url).*messages.0. is an image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "of type 'document'"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "has role 'judge'"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"extra_body": {"colour": 1}}, "Unknown field of /v1/messages 'colour'"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_in_the_form_of_the_api(front, tokenizer, arguments, said):
    def ask(client):
        with pytest.raises(anthropic.BadRequestError, match=said) as caught:
            client.messages.create(**{"model": "policy", "max_tokens": 9, "messages": ASK, **arguments})
        return caught.value

    sample = sample_engine(Script(tokenizer, "a"))
    with front.episode(sample) as episode:
        error = await asyncio.to_thread(ask, client_of(episode))
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"
    assert not sample.recorder.records


async def test_keys_and_names_that_nobody_was_given(front, tokenizer):
    def ask(episode):
        with pytest.raises(anthropic.NotFoundError, match="no model 'judge'"):
            client_of(episode).messages.create(model="judge", max_tokens=9, messages=ASK)
        stranger = anthropic.Anthropic(base_url=episode.base_url.removesuffix("/v1"), api_key="x", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(model="policy", max_tokens=9, messages=ASK)
        with_v1 = anthropic.Anthropic(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
        return with_v1.messages.create(model="default", max_tokens=9, messages=ASK)

    with front.episode(sample_engine(Script(tokenizer, "a"))) as episode:
        assert (await asyncio.to_thread(ask, episode)).content[0].text == "a"


async def test_an_engine_that_fails_in_a_stream_is_an_error_event(front, tokenizer):
    class Failing(StreamingScript):
        async def astream(self, request):
            async for partial in super().astream(request):
                yield partial
                if len(partial.output_tokens) == 2:
                    raise RuntimeError("the engine broke")

    def ask(client):
        with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
            list(client.messages.create(model="policy", max_tokens=9, messages=ASK, stream=True))

    with front.episode(sample_engine(Failing(tokenizer, "abcdef"))) as episode:
        await asyncio.to_thread(ask, client_of(episode))
    assert not episode.calls


async def test_what_claude_code_asks_of_the_history_is_what_happens_anyway(front, tokenizer):
    def ask(client):
        keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        more = {"context_management": keep, "output_config": {"effort": "high"}, "speed": "fast", "betas": ["x"]}
        given = {"model": "policy", "max_tokens": 9, "messages": ASK}
        checked(client.messages.create(**given, tools=[*FUNCTIONS, hosted], extra_body=more))
        client.messages.create(**given, tools=FUNCTIONS)

    sample = sample_engine(Script(tokenizer, "a"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(ask, client_of(episode))
    first, second = sample.recorder.records
    assert first.prompt_ids == second.prompt_ids
    assert first.metadata["warnings"] == ["The tool web_search_20250305 is left out: Anthropic's own servers run it."]
    assert "warnings" not in second.metadata


async def test_a_thread_is_kept_with_its_system_prompt_and_tools(front, tokenizer):
    def ask(client):
        create = client.beta.messages.create
        given = {"model": "policy", "max_tokens": 50}
        first = create(**given, system="add numbers", tools=FUNCTIONS, messages=ASK, thread={"type": "create"})
        (use,) = [block for block in first.content if block.type == "tool_use"]
        result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "3"}]}]
        goes_on = {"type": "continue", "previous_message_id": first.id}
        second = create(**given, messages=result, thread=goes_on)
        create(**given, messages=[{"role": "user", "content": "sure?"}], thread={**goes_on, "previous_message_id": second.id})
        with pytest.raises(anthropic.NotFoundError, match="no thread") as caught:
            create(**given, messages=ASK, thread={"type": "continue", "previous_message_id": "msg_lost"})
        assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}
        with pytest.raises(anthropic.BadRequestError, match="tools is fixed by the thread"):
            create(**given, messages=ASK, tools=FUNCTIONS, thread=goes_on)

    sample = sample_engine(Script(tokenizer, TOOL_CALL, "3", "yes"))
    with front.episode(sample) as episode:
        await asyncio.to_thread(ask, client_of(episode))
    (row,) = episode.experiences(reward=1.0)
    assert int(row.action_mask.sum()) == sum(len(record.output_ids) for record in sample.recorder.records)
    prompt = tokenizer.decode(sample.recorder.records[-1].prompt_ids, skip_special_tokens=False)
    assert prompt.startswith("<|system|>add <tool_call></tool_call><|end|><|system|>add numbers<|end|>")


async def test_the_tool_runner_goes_on_in_its_thread(front, tokenizer):
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two."""
        return str(a + b)

    def ask(client):
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=50, messages=ASK, tools=[add])
        return runner.until_done().content[0].text

    sample = sample_engine(Script(tokenizer, TOOL_CALL, "it is 3"))
    with front.episode(sample) as episode:
        assert await asyncio.to_thread(ask, client_of(episode)) == "it is 3"
    assert len(sample.recorder.records) == 2
    assert len(episode.experiences(reward=1.0)) == 1
