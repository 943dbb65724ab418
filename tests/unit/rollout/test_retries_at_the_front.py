"""Requests that clients send again, and conversations that programs hold beside their task."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import httpx2
import openai
import pytest
from test_openai_front import Script, StreamingScript, front, plain_client, sample_engine, tokenizer

from rollwright.errors import ConfigError
from rollwright.inference.front.side_conversations import SideConversation, side_conversations

__all__ = ["front", "tokenizer"]
ASK = [{"role": "user", "content": "1+2?"}]


def losing_answers(http, losses):
    """A client that loses the first answers on their way: the server has answered, and the caller never learns."""

    class Transport(http.HTTPTransport):
        def handle_request(self, request):
            nonlocal losses
            response = super().handle_request(request)
            if losses:
                losses -= 1
                response.read()
                raise http.ReadError("connection reset", request=request)
            return response

    return http.Client(transport=Transport())


def ask_openai(episode, losses, stream):
    base_url, key = episode
    http = losing_answers(httpx, losses)
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=3, http_client=http)
    answer = client.chat.completions.create(model="policy", messages=ASK, stream=stream)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else answer.choices[0].message.content


def ask_anthropic(episode, losses, stream):
    base_url, key = episode
    http = losing_answers(httpx2, losses)
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=3, http_client=http)
    arguments = {"model": "policy", "max_tokens": 9, "messages": ASK}
    if stream:
        with client.messages.stream(**arguments) as answer:
            return answer.get_final_text()
    return client.messages.create(**arguments).content[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
async def test_a_call_whose_answer_was_lost_is_sampled_and_recorded_once(front, tokenizer, ask, stream):
    engine = StreamingScript(tokenizer, "three", "four", "five")
    sample = sample_engine(engine)
    with front.episode(sample) as episode:
        assert await asyncio.to_thread(ask, episode, 2, stream) == "three"
    assert len(sample.recorder.records) == len(episode.calls) == 1
    assert episode.retries.count == 2


async def post(episode, body, retry=0):
    headers = {"Authorization": f"Bearer {episode.api_key}", **({"x-stainless-retry-count": str(retry)} if retry else {})}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)
    return answer.json()["choices"][0]["message"]["content"]


async def test_an_equal_request_is_sampled_anew_unless_it_is_a_retry(front, tokenizer):
    body = {"model": "policy", "messages": ASK}
    with front.episode(sample_engine(Script(tokenizer, "a", "b", "c"))) as episode:
        assert [await post(episode, body) for _ in range(2)] == ["a", "b"]  # two samples of one prompt
        assert await post(episode, body, retry=1) == "b"
        assert await post(episode, {**body, "temperature": 0.5}, retry=1) == "c"  # of no answered request
    assert len(episode.calls) == 3


async def test_programs_that_never_sample_a_prompt_twice_need_not_mark_their_retries(front, tokenizer):
    body = {"model": "policy", "messages": ASK}
    sample = sample_engine(Script(tokenizer, "a", "b"))
    with front.episode(sample, resamples_equal=False) as episode:
        assert await asyncio.gather(*(post(episode, body) for _ in range(3))) == ["a"] * 3  # also while it is answered
        assert await post(episode, {**body, "messages": [*ASK, {"role": "assistant", "content": "a"}, *ASK]}) == "b"
    assert len(sample.recorder.records) == 2
    (row,) = episode.experiences(reward=1.0)
    assert int(row.action_mask.sum()) == sum(len(record.output_ids) for record in sample.recorder.records)


# -- side conversations ------------------------------------------------------------------------------------------------

RULES = (
    SideConversation("title", system="title generator"),
    SideConversation("background", model="small"),
    SideConversation("completion", route="/v1/completions"),
)


async def test_side_conversations_are_answered_and_recorded_but_not_trained(front, tokenizer):
    sample = sample_engine(Script(tokenizer, "it is", "A sum", "topic", "more", "so"))

    def program(episode):
        client = plain_client(episode)
        said = client.chat.completions.create(model="policy", messages=ASK).choices[0].message.content
        system = {"role": "system", "content": "You are a title generator."}
        titled = client.chat.completions.create(model="policy", messages=[system, *ASK]).choices[0].message.content
        client.chat.completions.create(model="small", messages=ASK)
        client.completions.create(model="policy", prompt="1+2")
        history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        client.chat.completions.create(model="policy", messages=history)
        return titled

    with front.episode(sample, side_conversations=RULES) as episode:
        assert await asyncio.to_thread(program, episode) == "A sum"
        episode.set_reward(1.0)
    records = sample.recorder.records
    assert [record.metadata.get("side_conversation") for record in records] == [None, "title", "background", "completion", None]
    assert len(episode.calls) == 2
    assert episode.side_calls == 3
    (row,) = episode.experiences()
    assert int(row.action_mask.sum()) == len(records[0].output_ids) + len(records[4].output_ids)
    assert records[4].rid == records[0].rid, "the equal prompt of the small model did not take the conversation's place"
    assert [message["content"] for message in episode.conversations[0]] == ["1+2?", "it is", "and?", "so"]


async def test_sub_agents_are_trained_in_rows_of_their_own_that_have_their_name(front, tokenizer):
    rules = (
        SideConversation("background", model="small"),
        SideConversation("explorer", header="X-Agent-Id", trained=True),
        SideConversation("writer", system="You write", trained=True),
    )
    sample = sample_engine(Script(tokenizer, "explore!", "found", "no title", "written", "so"))

    def program(episode):
        create = plain_client(episode).chat.completions.create
        said = create(model="policy", messages=ASK).choices[0].message.content
        of_agent = {"x-agent-id": "a7"}
        found = create(model="policy", messages=[*ASK, *ASK], extra_headers=of_agent).choices[0].message.content
        create(model="small", messages=ASK, extra_headers=of_agent)  # the first rule that holds counts
        create(model="policy", messages=[{"role": "system", "content": "You write."}, *ASK])
        history = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": found}]
        create(model="policy", messages=history)

    with front.episode(sample, side_conversations=rules) as episode:
        await asyncio.to_thread(program, episode)
        episode.set_reward(1.0)
    records = sample.recorder.records
    assert [record.metadata.get("sub_agent") for record in records] == [None, "explorer", None, "writer", None]
    assert (len(episode.calls), episode.side_calls, episode.sub_agents) == (4, 1, 2)
    assert records[4].rid == records[0].rid
    rows = episode.experiences()
    assert [row.info for row in rows] == [{}, {"sub_agent": "explorer"}, {"sub_agent": "writer"}]
    assert [int(row.action_mask.sum()) for row in rows] == [
        len(records[0].output_ids) + len(records[4].output_ids),
        len(records[1].output_ids),
        len(records[3].output_ids),
    ]
    assert [messages[0]["content"] for messages in episode.conversations] == ["1+2?", "1+2?", "You write."]


async def test_only_the_models_of_rules_are_further_names(front, tokenizer):
    refused = pytest.raises(openai.NotFoundError, match="also as default and policy and small")
    with front.episode(sample_engine(Script(tokenizer, "a")), side_conversations=RULES) as episode, refused:
        await asyncio.to_thread(plain_client(episode).chat.completions.create, model="large", messages=ASK)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"name": "title"}, "at least one of system, model, route and header"),
        ({"system": "x"}, "give it a name"),
        ({"name": "a", "route": "/v1/chat"}, "has no route"),
        ({"name": "a", "system": "("}, "no regular expression"),
        ({"name": "a", "prompt": "x"}, "a mapping of name, system, model, route, header, trained"),
        ("title", "a mapping of"),
        ({"name": "a", "model": "x", "trained": "no"}, "has to be true or false"),
    ],
)
def test_rules_that_cannot_hold_are_refused(rule, said):
    with pytest.raises(ConfigError, match=said):
        side_conversations([rule])
