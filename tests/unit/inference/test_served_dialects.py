"""``rollwright serve-model`` answers chat, responses and messages alike, each with its vendor's client."""

from __future__ import annotations

import anthropic
import openai
import pytest
from server_parts import tiny_engine

from rollwright.inference.server.application import create_application
from rollwright.inference.server.service import ServerThread
from rollwright.inference.server.settings import ServerSettings


@pytest.fixture(scope="module")
def url():
    settings = ServerSettings(port=0, api_key="secret")
    with tiny_engine() as engine:
        thread = ServerThread(create_application(engine, settings), settings)
        yield thread.url
        thread.stop()


def test_the_same_question_has_the_same_answer_in_every_dialect(url):
    first = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    other = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
    model, ask = first.models.list().data[0].id, [{"role": "user", "content": "hi"}]
    chat = first.chat.completions.create(model=model, messages=ask, max_tokens=6, temperature=0)
    response = first.responses.create(model=model, input="hi", max_output_tokens=6, temperature=0)
    greedy = {"temperature": 0}
    message = other.messages.create(model=model, messages=ask, max_tokens=6, extra_body=greedy)
    assert chat.choices[0].message.content == response.output_text == message.content[0].text
    with other.messages.stream(model=model, messages=ask, max_tokens=6, extra_body=greedy) as stream:
        assert stream.get_final_text() == message.content[0].text
    assert other.messages.count_tokens(model=model, messages=ask).input_tokens == chat.usage.prompt_tokens
    again = first.responses.create(model=model, input="more", previous_response_id=response.id, max_output_tokens=6)
    assert again.usage.input_tokens > response.usage.total_tokens


def test_every_dialect_wants_the_key(url):
    ask = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0).responses.create(model="m", input="hi")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="x", max_retries=0).messages.create(model="m", messages=ask, max_tokens=6)
