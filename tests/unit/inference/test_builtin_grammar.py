"""Outputs that follow a grammar, with the log-probabilities of the contract; and how both protocols ask for them."""

from __future__ import annotations

import json
import re
import sys

import httpx
import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import tokenizers
import torch
import transformers
from builtin_models import byte_tokenizer, reference_logprobs, tiny_model
from server_parts import served, tiny_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin import adjustments
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.application import create_application
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.response_format import Structure, reply_grammar
from rollwright.inference.server.settings import ServerSettings

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def byte_engine():
    tokenizer = byte_tokenizer()
    model = tiny_model("qwen3", vocab_size=len(tokenizer) + 7, eos_token_id=0)  # more rows than tokens, as models have
    with BuiltinEngine(model, tokenizer, context_length=200, kv_cache_bytes=8 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.mark.parametrize("which", ["engine", "byte_engine"])
def test_outputs_follow_a_schema_and_keep_the_contracts_logprobs(which, request):
    engine = request.getfixturevalue(which)
    gconfig = GenerationHyperparameters(
        max_new_tokens=120, temperature=0.7, top_p=0.9, json_schema=SCHEMA, presence_penalty=0.5
    )
    requests = [ModelRequest([5, 9, 11], gconfig, seed=seed) for seed in range(6)]
    texts = set()
    for response in engine.generate(requests):
        assert response.stop_reason == "stop"
        text = engine.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), SCHEMA)
        texts.add(text)
        expected = reference_logprobs(engine.model, [5, 9, 11], response.output_tokens, 0.7)
        torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)
    assert len(texts) > 3


def test_tokens_are_drawn_from_what_the_grammar_leaves(engine):
    letters = "abcdef"
    ids = [engine.tokenizer.convert_tokens_to_ids(letter) for letter in letters]
    gconfig = GenerationHyperparameters(max_new_tokens=1, regex=f"[{letters}]")
    count = 2000
    responses = engine.generate([ModelRequest([5, 9], gconfig, seed=seed) for seed in range(count)])
    with torch.no_grad():
        expected = engine.model(torch.tensor([[5, 9]])).logits[0, -1].double()[ids].softmax(-1).numpy()
    tokens = [response.output_tokens[0] for response in responses]
    shares = np.array([tokens.count(token) for token in ids]) / count
    assert shares.sum() == 1.0
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected * (1 - expected) / count) + 1e-3).all()


def test_neighbours_of_a_grammar_are_free(engine):
    plain = GenerationHyperparameters(max_new_tokens=12, temperature=0.8)
    mine = [ModelRequest([7, 8, i], plain, seed=i) for i in range(4)]
    alone = [response.output_tokens for response in engine.generate(mine)]
    bound = [ModelRequest([7, 8, i], plain.new(regex="[0-9]{3}"), seed=i) for i in range(4)]
    together = engine.generate([request for pair in zip(mine, bound, strict=True) for request in pair])
    assert [response.output_tokens for response in together[::2]] == alone
    for response in together[1::2]:
        assert re.fullmatch("[0-9]{3}", engine.tokenizer.decode(response.output_tokens, skip_special_tokens=True))


def test_a_grammar_goes_on_after_a_preemption():
    tokenizer = byte_tokenizer()
    model = tiny_model("qwen3", vocab_size=len(tokenizer), eos_token_id=0)
    gconfig = GenerationHyperparameters(max_new_tokens=180, regex="[a-f]{150}")
    with BuiltinEngine(model, tokenizer, kv_cache_bytes=1 << 16, prefix_cache=False, context_length=200) as engine:
        responses = engine.generate([ModelRequest([5, 6, 7], gconfig, seed=i) for i in range(8)])
        assert engine.stats()["preemptions"] > 0
    assert all(re.fullmatch("[a-f]{150}", tokenizer.decode(r.output_tokens, skip_special_tokens=True)) for r in responses)


def test_a_grammar_that_breaks_ends_its_request_alone(engine, monkeypatch):
    taken = adjustments.Grammar.take
    monkeypatch.setattr(
        adjustments.Grammar, "take", lambda self, token: taken(self, engine.tokenizer.eos_token_id)
    )  # not allowed
    gconfig = GenerationHyperparameters(max_new_tokens=5)
    futures = engine.submit([ModelRequest([5, 6], gconfig.new(regex="[ab]{4}")), ModelRequest([5, 6], gconfig)])
    with pytest.raises(EngineError, match="cannot be followed further"):
        futures[0].result(60)
    assert futures[1].result(60).output_len > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"json_schema": "{", "regex": None}, "json_schema='{' cannot be honoured"),
        ({"json_schema": '{"type": "wrong"}'}, "Invalid type"),
        ({"regex": "a["}, "regex='a\\[' cannot be honoured"),
        ({"grammar": "start: nothing"}, "grammar='start: nothing' cannot be honoured"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex cannot be honoured with grammar"),
        ({"regex": "a", "ignore_eos": True}, "regex cannot be honoured with ignore_eos"),
        ({"regex": "a", "min_new_tokens": 3}, "regex cannot be honoured with min_new_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(engine, settings, said):
    with pytest.raises(EngineError, match=said):
        engine.generate([ModelRequest([5], GenerationHyperparameters(max_new_tokens=4, **settings))])


def test_an_engine_without_a_tokenizer_or_the_package_says_what_it_needs(engine, monkeypatch):
    bound = GenerationHyperparameters(max_new_tokens=4, regex="ab")
    with (
        BuiltinEngine(tiny_model("qwen3")) as bare,
        pytest.raises(EngineError, match="regex cannot be honoured without a tokenizer"),
    ):
        bare.generate([ModelRequest([5], bound)])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    adjustments._tokens.cache_clear()
    with pytest.raises(EngineError, match=r"rollwright\[grammar\]"):
        engine.generate([ModelRequest([5], bound.new(regex="abc"))])


def test_added_tokens_that_are_text_may_stand_for_it():
    """As Qwen's ``<think>`` and ``<tool_call>``, which are in angle brackets and not special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    mark = tokenizer.convert_tokens_to_ids("<tool_call>")
    gconfig = GenerationHyperparameters(grammar='start: /[0-9]+/ | "<tool_call>" "ab" "</tool_call>"')
    scores = torch.zeros(len(tokenizer))
    asked = adjustments.grammar_of(gconfig, tokenizer, len(tokenizer), {0})
    asked.mask(scores)
    allowed = {tokenizer.decode([token]) for token in scores.isfinite().nonzero().flatten().tolist()}
    assert allowed == {*"0123456789", "<", "<tool_call>"}
    for token in (mark, *tokenizer.encode("ab"), mark + 1):
        asked.take(token)
        assert not asked.error
    spelled = GenerationHyperparameters(regex="<tool_call>!")  # nothing else may follow: no choice of tokens is left
    asked = adjustments.grammar_of(spelled, tokenizer, len(tokenizer), {0})
    text = ""
    while not text.endswith("!"):
        scores = torch.zeros(len(tokenizer))
        asked.mask(scores)
        token = int(scores.isfinite().nonzero()[0])
        asked.take(token)
        assert not asked.error
        text += tokenizer.decode([token])
    assert text == "<tool_call>!"


def test_a_tokenizer_whose_texts_cannot_be_joined_is_refused():
    words = {"<eos>": 0, "<unk>": 1, "one": 2, "two": 3}
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, unk_token="<unk>")
    )  # it decodes with blanks between words
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    with pytest.raises(EngineError, match="cannot be honoured with this tokenizer"):
        adjustments.grammar_of(GenerationHyperparameters(regex="one"), tokenizer, len(tokenizer), {0})


# ------------------------------------------------------------------ the protocols


@pytest.fixture(scope="module")
def address(engine):
    with served(create_application(engine, ServerSettings(model_name="tiny"))) as address:
        yield address


class Thing(pydantic.BaseModel):
    """What a client wants to read."""

    name: str = pydantic.Field(max_length=5)
    size: int = pydantic.Field(ge=0, le=9)


def test_the_openai_package_parses_what_it_asked_for(address):
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0)
    for seed in range(3):
        answer = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Thing, seed=seed, max_tokens=150)
        assert isinstance(answer.choices[0].message.parsed, Thing)
    streamed = client.chat.completions.create(
        model="tiny", messages=ASK, response_format={"type": "json_object"}, stream=True, max_tokens=150, temperature=0
    )
    chunks = list(streamed)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("{")
    assert chunks[-1].choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)
    free = client.chat.completions.create(model="tiny", messages=ASK, response_format={"type": "text"}, max_tokens=4, seed=1)
    assert free.choices[0].message.content == (
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, seed=1).choices[0].message.content
    )


def test_sglangs_fields(address):
    for sampling in ({"json_schema": json.dumps(SCHEMA)}, {"regex": "[xyz]{2,4}"}):
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 120, "sampling_seed": 1, **sampling}}
        text = httpx.post(f"http://{address}/generate", json=body, timeout=120).json()["text"]
        if "regex" in sampling:
            assert re.fullmatch(sampling["regex"], text)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)


CALL = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'


def protocol(engine, **defaults):
    from fastapi import FastAPI

    app = FastAPI()
    given = GenerationHyperparameters(max_new_tokens=200, **defaults)
    app.include_router(OpenAIProtocol(engine, engine.tokenizer, "tiny", defaults=given, context_length=256).router)
    return app


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_ends_a_reply_after_its_first_call(engine, stream):
    with served(
        protocol(engine, grammar=f"start: {json.dumps(CALL)} {json.dumps(CALL)}")
    ) as address:  # a model that calls twice
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0)
        for parallel in (True, False):
            settings = {"model": "tiny", "messages": ASK, "tools": TOOLS, "parallel_tool_calls": parallel, "max_tokens": 150}
            if stream:
                with client.chat.completions.stream(**settings) as events:
                    answer = events.get_final_completion()
            else:
                answer = client.chat.completions.create(**settings)
            assert len(answer.choices[0].message.tool_calls) == (2 if parallel else 1)
            assert answer.choices[0].finish_reason == "tool_calls"


def test_beside_tools_a_reply_is_a_call_or_an_answer_in_the_format(engine):
    seen = []

    class Watched(BuiltinEngine):
        async def agenerate_batch(self, requests):
            seen.extend(requests)
            return await super().agenerate_batch(requests)

    body = {"messages": ASK, "tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    watched = Watched(engine.model, engine.tokenizer, kv_cache_bytes=8 << 20)
    with watched, served(protocol(watched)) as address:
        answer = httpx.post(f"http://{address}/v1/chat/completions", json=body | {"seed": 1}, timeout=120)
        assert answer.status_code == 200
        forced = httpx.post(f"http://{address}/v1/chat/completions", json=body | {"tool_choice": "required"}, timeout=120)
        assert (forced.status_code, "tool_choice forces a call" in forced.text) == (400, True)
    (request,) = seen
    matcher = adjustments._matcher("grammar", request.gconfig.grammar, engine.tokenizer, 102, (2,))
    for text, follows in ((CALL, True), (CALL + "\n" + CALL, True), ("{}", False), ("hello", False)):
        copy = matcher.deep_copy()
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
        assert (copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()) == follows
    example = '{"name":"x","size":4,"kind":"a"}'
    copy = matcher.deep_copy()
    assert copy.consume_tokens(engine.tokenizer.encode(example, add_special_tokens=False))
    assert copy.is_accepting()


OPENED = (
    "{%- for message in messages -%}{{- '<|user|>' + (message['content'] or '') + '<|end|>' -}}{%- endfor -%}"
    "{%- if tools -%}{{- '<tool_call></tool_call>' -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def thinking_engine():
    tokenizer = build_character_tokenizer(pieces=["</think>"], chat_template=OPENED)
    model = tiny_model("qwen3", vocab_size=len(tokenizer), tie_word_embeddings=False)
    with BuiltinEngine(model, tokenizer, kv_cache_bytes=8 << 20) as engine:
        yield engine


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "beside tools"])
def test_the_answer_follows_a_schema_behind_reasoning_that_the_prompt_opens(thinking_engine, tools):
    """Reasoning is free and apart, what is said is JSON, and the tokens and log-probabilities are the engine's."""
    tokenizer = thinking_engine.tokenizer
    bias = {str(tokenizer.convert_tokens_to_ids("</think>")): 3.0, str(tokenizer.convert_tokens_to_ids("<")): -100.0}
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    ask = {"model": "tiny", "messages": ASK, "max_tokens": 220, "temperature": 0.7, "response_format": schema}
    more = {"logit_bias": bias, "return_token_ids": True}
    thoughts = set()
    with served(protocol(thinking_engine)) as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0)
        for seed in range(4):
            given = {**ask, "seed": seed} | ({"tools": tools} if tools else {})
            answer = client.chat.completions.create(**given, logprobs=True, extra_body=more)
            choice = answer.choices[0]
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
            thoughts.add(getattr(choice.message, "reasoning_content", ""))
            assert choice.finish_reason == "stop"
            assert tokenizer.decode(answer.prompt_token_ids).endswith("<think>")
            expected = reference_logprobs(thinking_engine.model, answer.prompt_token_ids, choice.token_ids, 0.7)
            given_logprobs = torch.tensor([entry.logprob for entry in choice.logprobs.content]).double()
            torch.testing.assert_close(given_logprobs, expected, atol=1e-4, rtol=0)
            chunks = list(client.chat.completions.create(**given, stream=True, extra_body=more))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == choice.message.content
        format = {"type": "json_schema", "name": "thing", "schema": SCHEMA}
        response = client.responses.create(
            model="tiny", input="hi", text={"format": format}, max_output_tokens=220, extra_body={"logit_bias": bias, "seed": 1}
        )
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
        assert response.output[0].type == "reasoning"
    assert len(thoughts) > 1


def test_a_mark_that_is_a_special_token_ends_the_reasoning():
    tokenizer = build_character_tokenizer(chat_template=OPENED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    model = tiny_model("qwen3", vocab_size=len(tokenizer), tie_word_embeddings=False)
    closing = tokenizer.convert_tokens_to_ids("</think>")
    wanted = Structure("json_schema", json.dumps(SCHEMA), "response_format")
    asked = reply_grammar(wanted, tokenizer, convention=None, begins_reasoning=True)
    gconfig = GenerationHyperparameters(max_new_tokens=220, temperature=0.7, logit_bias={closing: 5.0}, **asked)
    with BuiltinEngine(model, tokenizer, kv_cache_bytes=8 << 20) as engine:
        for response in engine.generate([ModelRequest([5, 9, 11], gconfig, seed=seed) for seed in range(3)]):
            said = response.output_tokens[response.output_tokens.index(closing) + 1 :]
            jsonschema.validate(json.loads(tokenizer.decode(said, skip_special_tokens=True)), SCHEMA)
