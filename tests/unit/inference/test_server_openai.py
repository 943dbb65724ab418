"""The OpenAI protocol over a real engine, asked by the openai package where that is how users ask."""

from __future__ import annotations

import copy
import functools
import json
import operator

import httpx
import openai
import pytest
from fastapi import FastAPI
from parts import FixedEngine
from server_parts import served, tiny_engine

from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.inference.server.bodies import Chat, Completion
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.openai_answer import OpenAICall

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "hi"}]


class Scripted(FixedEngine):
    """Answers with fixed texts, token by token, and keeps what it was asked."""

    version = 4

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []
        self.context_length = 256

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        tokens = self.tokenizer.encode(self.texts[len(self.requests) - 1], add_special_tokens=False)
        tokens.append(self.tokenizer.eos_token_id)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5] * len(tokens),
            output_versions=[3] * (len(tokens) - 1) + [4],
            stop_match=tokens[-1],
        )

    async def astream(self, request):
        whole = await self.agenerate(request)
        for end in range(1, len(whole.output_tokens) + 1):
            yield ModelResponse(
                input_tokens=whole.input_tokens,
                output_tokens=whole.output_tokens[:end],
                output_logprobs=whole.output_logprobs[:end],
                output_versions=whole.output_versions[:end],
                stop_match=whole.stop_match,
            )


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine()
    yield engine
    engine.destroy()


@pytest.fixture(scope="module")
def address(engine):
    app = FastAPI()
    app.include_router(OpenAIProtocol(engine, engine.tokenizer, "tiny", max_samples=8).router)
    with served(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0)


@pytest.fixture
def scripted(engine):
    """A protocol over scripted answers: ``start(texts) -> (openai client, engine, calls)``."""
    stack = []

    def start(*texts, **settings):
        script, calls = Scripted(engine.tokenizer, texts), []
        app = FastAPI()
        app.include_router(OpenAIProtocol(script, engine.tokenizer, "tiny", on_call=calls.append, **settings).router)
        server = served(app)
        stack.append(server)
        return openai.OpenAI(base_url=f"http://{server.__enter__()}/v1", api_key="key-1", max_retries=0), script, calls

    yield start
    for server in stack:
        server.__exit__(None, None, None)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_answer_carries_its_tokens_and_their_logprobs(client, engine):
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=6, seed=1, logprobs=True, temperature=0.7, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert answer.prompt_token_ids == engine.tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert engine.tokenizer.decode(choice.token_ids, skip_special_tokens=True) == choice.message.content
    assert len(choice.logprobs.content) == len(choice.token_ids) == answer.usage.completion_tokens
    assert choice.weight_versions == [{"version": "0", "start": 0, "end": len(choice.token_ids)}]
    response = engine.generate(
        [ModelRequest(input_ids=answer.prompt_token_ids, gconfig=_gconfig(max_new_tokens=6, temperature=0.7, seed=1))]
    )[0]
    assert response.output_tokens == choice.token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(response.output_logprobs, abs=1e-6)


def _gconfig(**values):
    from rollwright.config.generation import GenerationHyperparameters

    return GenerationHyperparameters(**values)


def test_completions_of_texts_and_ids(client):
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=3, n=2, seed=1, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 12
    assert len(answer.choices[0].logprobs.token_logprobs) == 3
    ids = client.completions.create(model="tiny", prompt=[10, 11], max_tokens=3, seed=1, extra_body={"return_token_ids": True})
    assert ids.choices[0].prompt_token_ids == [10, 11]


def test_a_stream_is_the_answer_in_pieces(client):
    arguments = {"model": "tiny", "messages": ASK, "max_tokens": 12, "seed": 2}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_streamed_token_ids_join_to_the_sampled_ones(client):
    arguments = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "seed": 2}
    whole = client.completions.create(**arguments, extra_body={"return_token_ids": True})
    chunks = list(client.completions.create(**arguments, stream=True, logprobs=1, extra_body={"return_token_ids": True}))
    assert functools.reduce(operator.iadd, (chunk.choices[0].token_ids for chunk in chunks), []) == whole.choices[0].token_ids
    assert (
        functools.reduce(operator.iadd, (c.choices[0].logprobs.token_logprobs for c in chunks if c.choices[0].logprobs), [])
        != []
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_tool_calls_that_cannot_be_read_stay_text_and_are_counted(scripted):
    text = 'I look.<tool_call>{"name": "search", "arguments": {"q": }}</tool_call>'
    client, _, calls = scripted(text)
    choice = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    assert calls[0].malformed_tool_calls == 1


def test_tool_calls_are_parsed_and_their_text_left_out(scripted):
    text = 'I look.<tool_call>{"name": "search", "arguments": {"q": "rain"}}</tool_call>'
    client, engine, calls = scripted(text, text)
    arguments = {"model": "tiny", "messages": ASK, "tools": TOOLS}
    message = client.chat.completions.create(**arguments).choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content == "I look."
    call = message.message.tool_calls[0]
    assert call.function.name == "search"
    assert json.loads(call.function.arguments) == {"q": "rain"}
    assert "search" in engine.tokenizer.decode(engine.requests[0].input_ids)  # the template saw the tools
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "I look."
    streamed = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
    assert streamed[0][0].function.name == "search"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len(calls) == 2  # a streamed call is shown too


@pytest.mark.parametrize(
    ("choice", "goes_on", "begun"),
    [
        ({"type": "function", "function": {"name": "search"}}, ' {"q": "sun"}}</tool_call>', '"search", "arguments":'),
        ("required", 'search", "arguments": {"q": "sun"}}</tool_call>', '<tool_call>\n{"name": "'),
    ],
)
def test_a_forced_call_is_begun_and_the_model_goes_on(scripted, choice, goes_on, begun):
    client, engine, calls = scripted(goes_on, goes_on)
    arguments = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": choice}
    answer = client.chat.completions.create(**arguments)
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"q": "sun"})
    assert engine.tokenizer.decode(engine.requests[0].input_ids).endswith(begun)
    assert (
        engine.tokenizer.decode(calls[0].responses[0].output_tokens, skip_special_tokens=True) == goes_on
    )  # only this is sampled
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [c.choices[0].delta.tool_calls[0].function.name for c in chunks if c.choices[0].delta.tool_calls] == ["search"]


def test_without_tools_the_text_stays_and_history_goes_back_to_the_template(scripted):
    text = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    client, engine, _ = scripted(text, "fine")
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.tool_calls is None
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "rain"}]},
    ]  # fmt: skip
    client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    assert 'search{"q": 1}' in engine.tokenizer.decode(engine.requests[1].input_ids)


def test_the_hook_sees_key_requests_and_responses(scripted):
    client, _, calls = scripted("one", "two")
    client.chat.completions.create(model="tiny", messages=ASK, n=2, max_tokens=9, temperature=0.7)
    (call,) = calls
    assert isinstance(call, OpenAICall)
    assert call.is_chat
    assert [request.gconfig.temperature for request in call.requests] == [0.7, 0.7]
    assert [response.output_versions[-1] for response in call.responses] == [4, 4]
    assert [choice["message"]["content"] for choice in call.choices] == ["one", "two"]


def test_stop_strings_are_left_out_of_the_text(client):
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=2).choices[0].text
    mark = whole[4]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=2, stop=[mark]).choices[0]
    assert cut.text == whole[: whole.index(mark)]
    assert cut.finish_reason == "stop"
    kept = client.completions.create(
        model="tiny", prompt="abc", max_tokens=12, seed=2, stop=mark, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == cut.text + mark
    streamed = client.completions.create(model="tiny", prompt="abc", max_tokens=12, seed=2, stop=[mark], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("chat/completions", {"messages": ASK, "model": "other"}, 404, "other"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"messages": ASK, "surprise": 1}, 400, "surprise"),
        ("chat/completions", {"messages": ASK, "temperature": "hot"}, 400, "temperature"),
        ("chat/completions", {"messages": ASK, "temperature": True}, 400, "temperature"),
        ("chat/completions", {"messages": ASK, "top_p": 1.5}, 400, "top_p"),
        ("chat/completions", {"messages": ASK, "n": 9}, 400, "limit"),
        ("chat/completions", {"messages": ASK, "top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ("chat/completions", {"messages": ASK, "top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ("chat/completions", {"messages": ASK, "max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"messages": ASK, "presence_penalty": 5}, 400, "presence_penalty"),
        ("completions", {"prompt": "hi", "logit_bias": {"hi": 1}}, 400, "logit_bias"),
        ("chat/completions", {"messages": ASK, "response_format": {"type": "xml"}}, 400, "response_format"),
        ("chat/completions", {"messages": ASK, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ("chat/completions", {"messages": ASK, "tool_choice": "required"}, 400, "tool_choice"),
        (
            "chat/completions",
            {"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "find"}}},
            400,
            "tool_choice",
        ),
        ("chat/completions", {"messages": ASK, "tools": [{"type": "function"}]}, 400, "tools[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}, 400, "context"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": [[]]}, 400, "prompt"),
        ("completions", {"prompt": [10**6]}, 400, "outside"),
        ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
        ("completions", {"prompt": "a", "stop": [1]}, 400, "stop"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 samples nothing"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ],
)
def test_a_wrong_request_is_refused_by_parameter(address, path, body, status, said):
    answer = httpx.post(f"http://{address}/v1/{path}", json=body, timeout=120)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_a_stream_that_cannot_start_has_an_error_status(address):
    body = {"prompt": [10] * 300, "stream": True}
    assert httpx.post(f"http://{address}/v1/completions", json=body, timeout=120).status_code == 400


#: A value of each honoured parameter.
GIVEN = {
    **dict.fromkeys(("model", "stop", "rid", "prompt"), "x"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "n", "seed"), 3),
    **dict.fromkeys(("temperature", "top_p", "min_p"), 0.5),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), 0.5),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "stream", "logprobs"), True),
    **dict.fromkeys(("return_token_ids", "add_generation_prompt", "continue_final_message", "echo"), True),
    "top_logprobs": 4,
    **dict.fromkeys(("parallel_tool_calls", "separate_reasoning"), False),
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    **{"messages": ASK, "stop_token_ids": [1], "tools": TOOLS, "tool_choice": "auto", "best_of": 1, "reasoning_effort": "low"},
    **{"stream_options": {"include_usage": True}, "chat_template_kwargs": {"x": 1}, "logit_bias": {"3": 1.0}},
}
#: The OpenAI parameters that each endpoint alone takes.
ALONE = {
    Chat: {
        *("messages", "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "top_logprobs", "parallel_tool_calls", "response_format", "functions", "function_call"),
        *("modalities", "separate_reasoning", "reasoning_effort"),
    },
    Completion: {"prompt", "best_of", "echo", "suffix"},
}


@pytest.mark.parametrize(("body", "other"), [(Chat, Completion), (Completion, Chat)])
def test_every_parameter_is_honoured_ignored_or_refused(body, other):
    base = {"messages": ASK} if body is Chat else {"prompt": "x"}
    assert {*body.model_fields, *body.neutral} - {*other.model_fields, *other.neutral} == ALONE[body]
    for name in body.model_fields:
        read = {
            "logit_bias": {3: 1.0},
            "response_format": ("json_schema", '{"type": "object"}', "response_format"),
            "structured_outputs": ("regex", "a+", "structured_outputs"),
        }.get(name, GIVEN[name])
        assert body.of({**base, name: GIVEN[name]}).given()[name] == read
        with pytest.raises(RequestError, match=name):
            body.of({**base, name: object()})
        assert name in base or name not in body.of({**base, name: None}).given()
    for name in body.ignored:
        assert body.of({**base, name: object()}).given().keys() == base.keys()
    for name, (neutral, _) in body.neutral.items():
        for value in neutral:
            assert body.of({**base, name: value}).given().keys() == base.keys()
        with pytest.raises(RequestError, match=name):
            body.of({**base, name: 7})
    for name in body.left_out:
        asked = body.of({**base, name: object()})
        assert asked.given().keys() == base.keys()
        assert asked.warnings[0].startswith(f"{name} is left out: ")
    for name in ALONE[other] - {"best_of"}:
        with pytest.raises(RequestError, match=f"Unknown parameter '{name}'"):
            body.of({**base, name: 1})


def test_fields_that_change_nothing_here_are_taken_and_others_refused(client):
    harmless = {
        "verbosity": "low",
        "reasoning_effort": "minimal",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "user-1",
        "service_tier": "auto",
        "store": False,
        "prediction": {"type": "content", "content": "yes"},
        "metadata": {"a": "b"},
        "audio": {"voice": "a"},
        "web_search_options": {},
    }
    answer = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2, extra_body=harmless)
    assert answer.usage.completion_tokens == 2
    options = {"include_usage": True, "include_obfuscation": False}
    *_, last = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=2, stream=True, stream_options=options, **{"verbosity": "high"}
    )
    assert last.usage.completion_tokens == 2
    for name, value in {"modalities": ["audio"], "truncate_prompt_tokens": 5}.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(model="tiny", messages=ASK, extra_body={name: value})


def test_a_template_that_reads_the_effort_is_given_it(engine):
    tokenizer = copy.copy(engine.tokenizer)
    tokenizer.chat_template = "{{ reasoning_effort | default('none') }}{{ messages[0].content }}"
    protocol = OpenAIProtocol(Scripted(tokenizer, ["x"]), tokenizer, "tiny")
    fields = {"messages": [{"role": "user", "content": "q"}]}
    assert tokenizer.decode(protocol.chat_prompts({**fields, "reasoning_effort": "low"}).ids[0]) == "lowq"
    assert tokenizer.decode(protocol.chat_prompts(fields).ids[0]) == "noneq"
