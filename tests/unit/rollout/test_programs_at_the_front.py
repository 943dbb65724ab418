"""What programs do at a server besides asking: probes, names of models, retries, connections that end, structured output of vLLM."""

from __future__ import annotations

import asyncio
import json
import threading

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ModelInfo
from openai.types import Model
from pydantic import TypeAdapter
from test_openai_front import TOOLS, Script, StreamingScript, front, plain_client, sample_engine, tokenizer

from rollwright.errors import RequestAborted

__all__ = ["front", "tokenizer"]
ASK = [{"role": "user", "content": "1+2?"}]


async def test_who_looks_whether_anybody_is_there_is_answered(front, tokenizer):
    with front.episode(sample_engine(Script(tokenizer, "a"))) as episode:
        root = episode.base_url.removesuffix("/v1")
        async with httpx.AsyncClient() as client:
            assert (await client.head(f"{root}/")).status_code == 200
            assert (await client.get(f"{root}/")).json()["service"] == "rollwright OpenAI front"
    assert not episode.calls


async def test_models_are_listed_in_the_form_of_both_vendors(front, tokenizer):
    def ask(episode):
        base_url, key = episode
        ours = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
        theirs = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0)
        return [[client.models.list().data[0], client.models.retrieve("policy")] for client in (ours, theirs)]

    with front.episode(sample_engine(Script(tokenizer, "a"))) as episode:
        openais, anthropics = await asyncio.to_thread(ask, episode)
    for model in openais:
        TypeAdapter(Model).validate_python(model.to_dict(mode="json"))
    for model in anthropics:
        checked = TypeAdapter(ModelInfo).validate_python(model.to_dict(mode="json"))
        assert (checked.id, checked.max_input_tokens) == ("policy", 512)


@pytest.mark.parametrize("name", ["default", "policy"])
async def test_two_names_mean_the_policy_at_every_front(tokenizer, name):
    from rollwright.inference.front.openai_front import OpenAIFront

    with OpenAIFront(tokenizer, "/models/own") as own, own.episode(sample_engine(Script(tokenizer, "a"))) as episode:
        client = plain_client(episode)
        for model in (name, "/models/own"):
            await asyncio.to_thread(client.chat.completions.create, model=model, messages=ASK)
        with pytest.raises(openai.NotFoundError, match="policy"):
            await asyncio.to_thread(client.chat.completions.create, model="claude-opus", messages=ASK)
    assert len(episode.calls) == 2


class Failing(StreamingScript):
    """Fails the first times, before or amid an answer."""

    def __init__(self, tokenizer, text, *, failures):
        super().__init__(tokenizer, text)
        self.failures = failures

    def _fail(self):
        if self.failures:
            self.failures -= 1
            raise RequestAborted("the engine is updated")

    async def agenerate(self, request):
        response = await super().agenerate(request)
        self._fail()
        return response

    async def astream(self, request):
        self._fail()
        async for partial in super().astream(request):
            yield partial


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
async def test_a_call_that_a_client_tries_again_is_in_the_record_once(front, tokenizer, vendor, streams):
    def ask(episode):
        if vendor == "openai":
            client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=3)
            answer = client.chat.completions.create(model="policy", messages=ASK, stream=streams)
            return (
                "".join(chunk.choices[0].delta.content or "" for chunk in answer)
                if streams
                else answer.choices[0].message.content
            )
        root = episode.base_url.removesuffix("/v1")
        client = anthropic.Anthropic(base_url=root, api_key=episode.api_key, max_retries=3)
        given = {"model": "policy", "max_tokens": 20, "messages": ASK}
        if not streams:
            return client.messages.create(**given).content[0].text
        with client.messages.stream(**given) as stream:
            return stream.get_final_text()

    sample = sample_engine(Failing(tokenizer, "it is 3", failures=1))
    with front.episode(sample) as episode:
        assert await asyncio.to_thread(ask, episode) == "it is 3"
    assert len(episode.calls) == len(episode.records) == 1
    (row,) = episode.experiences(reward=1.0)
    assert int(row.action_mask.sum()) == len(episode.records[0].output_ids)


class Slow(StreamingScript):
    """Waits amid each answer until it is told to go on, or its request is cancelled."""

    def __init__(self, tokenizer, text):
        super().__init__(tokenizer, text)
        self.begun, self.cancelled, self.goes_on = threading.Event(), 0, asyncio.Event()  # begun is seen from another loop

    async def _wait(self):
        self.begun.set()
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def agenerate(self, request):
        await self._wait()
        return await super().agenerate(request)

    async def astream(self, request):
        async for partial in super().astream(request):
            yield partial
            if len(partial.output_tokens) == 2:
                await self._wait()


PATHS = {
    "chat/completions": {"messages": ASK},
    "responses": {"input": "1+2?"},
    "messages": {"messages": ASK, "max_tokens": 20},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_goes_away_in_the_middle_leaves_no_call(front, tokenizer, path, streams):
    engine = Slow(tokenizer, "it is 3")
    with front.episode(sample_engine(engine)) as episode:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {episode.api_key}"}) as client:
            body = {"model": "policy", "stream": streams, **PATHS[path]}
            gone = asyncio.create_task(client.post(f"{episode.base_url}/{path}", json=body))
            assert await asyncio.to_thread(engine.begun.wait, 10)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            for _ in range(200):
                if engine.cancelled:
                    break
                await asyncio.sleep(0.02)
            assert engine.cancelled == 1
            assert not episode.calls
            engine.goes_on.set()
            again = await client.post(f"{episode.base_url}/{path}", json=body)
            assert again.status_code == 200
    assert len(episode.calls) == len(episode.records) == 1


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA), "disable_fallback": True}, "json_schema", json.dumps(SCHEMA)),
        ({"json_object": True, "regex": None}, "json_schema", '{"type": "object"}'),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"choice": ["yes", "no (or so)"]}, "regex", r"(yes)|(no \(or so\))"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
async def test_structured_outputs_of_vllm_are_the_grammar(front, tokenizer, given, kind, text):
    def ask(client):
        more = {"structured_outputs": given}
        client.chat.completions.create(model="policy", messages=ASK, extra_body=more)
        client.completions.create(model="policy", prompt="1+2?", extra_body=more)

    script = Script(tokenizer, "a")
    with front.episode(sample_engine(script)) as episode:
        await asyncio.to_thread(ask, plain_client(episode))
    assert [getattr(request.gconfig, kind) for request in script.requests] == [text, text]


def test_a_grammar_in_ebnf_is_rewritten():
    pytest.importorskip("llguidance")
    from llguidance import LLMatcher

    from rollwright.inference.server.response_format import outputs_structure

    structure = outputs_structure({"grammar": 'root ::= "a" digit+\ndigit ::= [0-9]'})
    assert structure.kind == "grammar"
    assert "::=" not in structure.text
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(structure.text)) == ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "it has to hold one of json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "it has to hold one of json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "combined with response_format"),
        ({"structured_outputs": {"grammar": "start: /a/"}, "tools": TOOLS}, "with tools; use json"),
        ({"guided_json": SCHEMA}, "it is now called structured_outputs.json"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0. is of type 'custom'.*offer it as a function"),
    ],
)
async def test_what_cannot_be_followed_is_refused(front, tokenizer, more, said):
    with front.episode(sample_engine(Script(tokenizer, "a"))) as episode:
        client = plain_client(episode)
        with pytest.raises(openai.BadRequestError, match=said):
            await asyncio.to_thread(client.chat.completions.create, model="policy", messages=ASK, extra_body=more)
    assert not episode.calls


async def test_more_tokens_than_the_context_has_left_are_the_rest_of_it(front, tokenizer):
    script = Script(tokenizer, "a")
    with front.episode(sample_engine(script)) as episode:
        client = plain_client(episode)
        await asyncio.to_thread(client.chat.completions.create, model="policy", messages=ASK, max_tokens=32000)
    (request,) = script.requests
    assert request.gconfig.max_new_tokens == 512 - len(request.input_ids)
