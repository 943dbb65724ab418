"""Reasoning at the front: apart in every dialect, and one sequence however a client sends it back."""

from __future__ import annotations

import asyncio

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts import TOOL_TEMPLATE
from test_messages_dialect import FUNCTIONS as TOOLS_OF_MESSAGES
from test_messages_dialect import checked as checked_message
from test_messages_dialect import client_of
from test_openai_front import TOOL_CALL, TOOLS, Script, StreamingScript, plain_client, sample_engine
from test_responses_dialect import FUNCTIONS, checked

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.openai_answer import OpenAICall, usage_of
from rollwright.inference.server.text_stream import ReasoningSplit

THINKING = TOOL_TEMPLATE.replace(
    "{%- for call in message.tool_calls",
    "{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}"
    "{%- for call in message.tool_calls",
)
OPENED = THINKING.replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}")
THOUGHT = "<think>\n1 and 2\n</think>\n\n"
ASK = [{"role": "user", "content": "1+2?"}]


@pytest.fixture(scope="module", params=[THINKING, OPENED], ids=["closed", "opened"])
def setting(request):
    """A tokenizer, the front over it, and how a reply of the model begins."""
    tokenizer = build_character_tokenizer(chat_template=request.param)
    with OpenAIFront(tokenizer, "policy") as front:
        yield tokenizer, front, THOUGHT if request.param is THINKING else THOUGHT.removeprefix("<think>")


@pytest.mark.parametrize(
    ("back", "experiences"),
    [
        ({"content": "3", "reasoning_content": "1 and 2"}, 1),
        ({"content": "3", "reasoning_content": "\n1 and 2\n\n"}, 1),
        ({"content": "\n3", "reasoning_content": "1 and 2"}, 1),
        ({"content": "<think>1 and 2</think>3"}, 1),
        ({"content": "<think>\n\n1 and 2\n</think>\n3"}, 1),
        ({"content": "3"}, 1),
        ({"content": "3", "reasoning_content": "2 and 1"}, 2),
        ({"content": "4", "reasoning_content": "1 and 2"}, 2),
    ],
)
async def test_a_reply_goes_on_however_its_reasoning_is_sent_back(setting, back, experiences):
    tokenizer, front, thought = setting

    def agent(client):
        message = client.chat.completions.create(model="policy", messages=ASK).choices[0].message
        assert (message.reasoning_content, message.content) == ("1 and 2", "3")
        more = [*ASK, {"role": "assistant", **back}, {"role": "user", "content": "sure?"}]
        client.chat.completions.create(model="policy", messages=more)

    with front.episode(sample_engine(Script(tokenizer, thought + "3"))) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    assert len(episode.experiences(reward=1.0)) == experiences


@pytest.mark.parametrize("rest", ["it is 3", TOOL_CALL, "so " + TOOL_CALL, ""])
async def test_streams_have_it_apart_in_every_dialect(setting, rest):
    tokenizer, front, thought = setting

    def agent(episode):
        client, other = plain_client(episode), client_of(episode)
        arguments = {"model": "policy", "messages": ASK, "tools": TOOLS}
        whole = client.chat.completions.create(**arguments)
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**arguments, stream=True)]
        message = whole.choices[0].message
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "1 and 2"
        assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
        assert message.reasoning_content == "1 and 2"
        count = whole.usage.completion_tokens_details.reasoning_tokens
        assert count == len(thought.rstrip())  # one token a character
        with client.responses.stream(model="policy", input="1+2?", tools=FUNCTIONS) as stream:
            response = checked(stream.get_final_response())
        assert response.output[0].content[0].text == "1 and 2"
        assert response.usage.output_tokens_details.reasoning_tokens == count
        with other.messages.stream(model="policy", max_tokens=99, messages=ASK, tools=TOOLS_OF_MESSAGES) as stream:
            answer = checked_message(stream.get_final_message())
        assert answer.content[0].thinking == "1 and 2"
        return response, answer

    with front.episode(sample_engine(StreamingScript(tokenizer, thought + rest))) as episode:
        await asyncio.to_thread(agent, episode)


async def test_items_and_blocks_that_come_back_go_on(setting):
    tokenizer, front, thought = setting

    def agent(episode):
        client = plain_client(episode)
        items = [{"role": "user", "content": "1+2?"}]
        items += [item.to_dict() for item in client.responses.create(model="policy", input=items).output]
        client.responses.create(model="policy", input=[*items, {"role": "user", "content": "sure?"}])
        other: anthropic.Anthropic = client_of(episode)
        answer = other.messages.create(model="policy", max_tokens=99, system="x", messages=ASK)
        history = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "sure?"}]
        other.messages.create(model="policy", max_tokens=99, system="x", messages=history)

    with front.episode(sample_engine(Script(tokenizer, thought + "3"))) as episode:
        await asyncio.to_thread(agent, episode)
    assert len(episode.experiences(reward=1.0)) == 2  # one of each dialect


@pytest.mark.parametrize(("back", "experiences"), [("<think>1 and 2</think> 3", 1), ("3", 2)])
async def test_it_stays_in_the_text_where_that_is_asked_for(setting, back, experiences):
    tokenizer, front, thought = setting

    def agent(client):
        ask = {"model": "policy", "extra_body": {"separate_reasoning": False}}
        assert client.chat.completions.create(messages=ASK, **ask).choices[0].message.content == thought + "3"
        more = [*ASK, {"role": "assistant", "content": back}, {"role": "user", "content": "sure?"}]
        client.chat.completions.create(messages=more, **ask)

    with front.episode(sample_engine(Script(tokenizer, thought + "3"))) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    assert len(episode.experiences(reward=1.0)) == experiences


def test_reasoning_is_counted_by_the_token_that_closes_it():
    class OneToken:
        """Decodes nothing but the mark, as decoding a long reply takes milliseconds."""

        def convert_tokens_to_ids(self, text):
            return {"</think>": 7}[text]

        def decode(self, tokens, skip_special_tokens):
            return {(7,): "</think>"}[tuple(tokens)]

    request = ModelRequest(input_ids=[1], tokenizer=OneToken())
    response = ModelResponse([1], [3, 4, 7, 5], [0.0] * 4, [0] * 4)
    choices = [{"message": {"reasoning_content": "x"}}]
    call = OpenAICall("chat", {}, [request], [response], choices, separates_reasoning=True)
    assert usage_of(call)["completion_tokens_details"] == {"reasoning_tokens": 3}


@given(
    st.text("<think>/ \nab", max_size=30).map(lambda text: text.replace("</think>", "")),
    st.text("<think>/ \nab", max_size=30),
    st.booleans(),
    st.data(),
)
def test_any_cuts_of_a_text_give_the_same_parts(inside, after, is_open, data):
    text = ("" if is_open else "<think>") + inside + "</think>" + after
    whole = ReasoningSplit(is_open)
    expected = whole.push(text, is_last=True)
    assert expected == (inside.strip(), after.lstrip())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    split, pieces = ReasoningSplit(is_open), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces.append(split.push(text[start:end], is_last=end == len(text) and start == (cuts or [0])[-1]))
    assert tuple("".join(part) for part in zip(*pieces, strict=True)) == expected
