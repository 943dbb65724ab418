"""Every field, tool and item that the vendors' packages can send: honoured, ignored, left out with a warning, or refused by name.

The packages' own types say what there is, so a new version of one of them that adds a field fails here.
"""

from __future__ import annotations

import typing
from types import SimpleNamespace

import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.beta import BetaContentBlockParam, BetaToolUnionParam
from anthropic.types.beta import MessageCountTokensParams as BetaMessageCountTokensParams
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageCreateParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatCreateParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from typing_extensions import is_typeddict

from rollwright.inference.server.bodies import Chat, Completion
from rollwright.inference.server.dialects import AnswerStore
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.messages import MessagesDialect
from rollwright.inference.server.responses import ResponsesDialect

PROTOCOL = SimpleNamespace(
    tokenizer=SimpleNamespace(chat_template="enable_thinking"), answers=AnswerStore(), model_name="policy"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
HONOURED, IGNORED, LEFT_OUT, REFUSED = "honoured", "ignored", "left out", "refused"

CHAT = {
    HONOURED: {
        "messages": [{"role": "user", "content": "other"}],
        "model": "policy",
        "frequency_penalty": 0.5,
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "max_completion_tokens": 9,
        "max_tokens": 9,
        "n": 2,
        "parallel_tool_calls": False,
        "presence_penalty": 0.5,
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        "seed": 3,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": FUNCTION}],
        "top_logprobs": 2,
        "top_p": 0.5,
    },
    IGNORED: {
        "audio": {"voice": "alloy", "format": "wav"},
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "auto"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "user": "u",
        "verbosity": "low",
    },
    LEFT_OUT: {"moderation": {"model": "m"}, "web_search_options": {}},
    REFUSED: {"function_call": {"name": "add"}, "functions": [FUNCTION], "modalities": ["text", "audio"]},
}
COMPLETION = {
    HONOURED: {
        "model": "policy",
        "prompt": "other",
        "best_of": 1,
        "echo": True,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": 1.0},
        "logprobs": 2,
        "max_tokens": 9,
        "n": 2,
        "presence_penalty": 0.5,
        "seed": 3,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
    },
    IGNORED: {"user": "u"},
    LEFT_OUT: {},
    REFUSED: {"suffix": "end"},
}
RESPONSES = {
    HONOURED: {
        "input": "other",
        "include": ["message.output_text.logprobs"],
        "instructions": "be brief",
        "max_output_tokens": 9,
        "model": "policy",
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "reasoning": {"effort": "low"},
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "none",
        "tools": [{"type": "function", **FUNCTION}],
        "top_logprobs": 2,
        "top_p": 0.5,
    },
    IGNORED: {
        "access_programs": {},
        "image": {"context_compression": "enabled"},
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "auto"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "flex",
        "stream_options": {"include_obfuscation": False},
        "user": "u",
    },
    LEFT_OUT: {"moderation": {"model": "m"}, "personality": "friendly"},
    REFUSED: {
        "background": True,
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "conversation": "conv_1",
        "prompt": {"id": "pmpt_1"},
        "truncation": "auto",
    },
}
MESSAGES = {
    HONOURED: {
        "messages": [{"role": "user", "content": "other"}],
        "max_tokens": 9,
        "model": "policy",
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "system": "be brief",
        "temperature": 0.5,
        "thinking": {"type": "disabled"},
        "thread": {"type": "create"},
        "tool_choice": {"type": "none"},
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "top_k": 5,
        "top_p": 0.5,
    },
    IGNORED: {
        "betas": ["x"],
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": None},
        "fallback_credit_token": "t",
        "fallbacks": [{"model": "m"}],
        "inference_geo": "eu",
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "fast",
        "user_profile_id": "p",
        "workspace_id": "w",
    },
    LEFT_OUT: {"container": "c", "mcp_servers": [{"type": "url", "name": "s", "url": "https://example.com"}]},
    REFUSED: {
        "compaction": {"type": "compact"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
    },
}


def asked_chat(body):
    return Chat.of({"messages": [{"role": "user", "content": "hi"}], **body})


def asked_completion(body):
    return Completion.of({"prompt": "hi", **body})


def asked_response(body):
    PROTOCOL.answers.add([{"role": "user", "content": "before"}], {"id": "resp_1", "output": []})
    return ResponsesDialect(PROTOCOL, {"input": "hi", "tools": [], **body})


def asked_message(body):
    return MessagesDialect(PROTOCOL, {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **body})


def taken(asked):
    """What of a request reaches the engine or the answer."""
    if not isinstance(asked, ResponsesDialect | MessagesDialect):
        return asked.given()
    fields = {
        name: getattr(asked.fields, name) for name in asked.fields.model_fields_set if name in ("store", "include", "thread")
    }
    return {name: value for name, value in asked.chat.items() if value is not None} | fields


APIS = {
    "chat": (CHAT, asked_chat, [ChatCreateParams], {"stream"}),
    "completions": (COMPLETION, asked_completion, [CompletionCreateParamsBase], {"stream"}),
    "responses": (RESPONSES, asked_response, [ResponseCreateParamsBase, InputTokenCountParams], {"stream"}),
    "messages": (
        MESSAGES,
        asked_message,
        [MessageCreateParamsBase, BetaMessageCreateParams, MessageCountTokensParams, BetaMessageCountTokensParams],
        {"stream"},
    ),
}
FIELDS = [(api, fate, name) for api, (table, *_) in APIS.items() for fate, names in table.items() for name in names]


@pytest.mark.parametrize("api", APIS)
def test_the_table_has_every_field_of_the_api(api):
    table, _, types, elsewhere = APIS[api]
    known = {name for names in table.values() for name in names} | elsewhere
    of_types = set().union(*(typing.get_type_hints(kind) for kind in types))
    assert not of_types - known, f"fields of {api} that the table lacks"
    older = {"output_format", "temperature", "top_k", "top_p"}  # that earlier versions of the packages sent to Messages
    assert not known - of_types - elsewhere - older, f"fields of the table that {api} has no more"


@pytest.mark.parametrize(("api", "fate", "name"), FIELDS)
def test_a_field_has_the_fate_of_the_table(api, fate, name):
    table, asked, *_ = APIS[api]
    value = table[fate][name]
    # what needs another field beside it
    more = {"function": {"tool_choice": {}}}.get(name, {})
    tools = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
    if name == "tool_choice":
        more = {"tools": tools[api][HONOURED]["tools"]}
    before = taken(asked({name: value for name, value in more.items()}))
    if fate == REFUSED:
        with pytest.raises(RequestError, match=f"^{name}=.*(cannot be honoured)") as caught:
            asked({**more, name: value})
        assert caught.value.param == name
        return
    after = asked({**more, name: value})
    assert (taken(after) != before) == (fate == HONOURED), taken(after)
    assert [warning.partition(" ")[0] for warning in after.warnings] == ([name] if fate == LEFT_OUT else [])


@pytest.mark.parametrize("asked", [asked_chat, asked_completion, asked_response, asked_message])
def test_what_is_no_field_of_the_api_is_refused_with_those_that_are(asked):
    with pytest.raises(RequestError, match=r"Unknown .*'colour'; known are .*temperature|top_p") as caught:
        asked({"colour": 1})
    said = str(caught.value)
    if asked is asked_message:
        assert "stop_sequences" in said
        assert "max_completion_tokens" not in said
    if asked is asked_response:
        assert "max_output_tokens" in said
        assert "max_completion_tokens" not in said


@pytest.mark.parametrize(
    ("asked", "name", "value", "said"),
    [
        (asked_response, "max_tokens", 5, "it is max_output_tokens"),
        (asked_response, "response_format", {"type": "text"}, "it is text.format"),
        (asked_response, "messages", [], "it is input"),
        (asked_message, "stop", ["x"], "it is stop_sequences"),
        (asked_message, "response_format", {"type": "text"}, "it is output_config.format"),
    ],
)
def test_a_name_of_the_chat_is_told_its_own(asked, name, value, said):
    with pytest.raises(RequestError, match=said):
        asked({name: value})


def types_of(union):
    """The ``type`` values of a union of typed dicts, each once."""
    found = []
    for kind in typing.get_args(union):
        if typing.get_origin(kind) is not None:
            found += types_of(kind)
        elif is_typeddict(kind) and "type" in (hints := typing.get_type_hints(kind)):
            literal = hints["type"]
            for part in typing.get_args(literal) if typing.get_origin(literal) is typing.Union else [literal]:
                found += [value for value in typing.get_args(part) if isinstance(value, str)]
    return sorted(set(found))


@pytest.mark.parametrize("kind", types_of(ToolParam))
def test_a_tool_of_the_responses_api(kind):
    inside = {"tools": [{"type": "function", **FUNCTION}]}
    tool = {"type": kind, "name": "x", "parameters": SCHEMA, **(inside if kind == "namespace" else {})}
    if kind in ("custom", "local_shell", "shell", "apply_patch", "computer", "computer_use_preview"):
        with pytest.raises(RequestError, match=rf"tools\[0\] is of type '{kind}'.*offer it as a function"):
            asked_response({"tools": [tool]})
        return
    asked = asked_response({"tools": [tool]})
    named = [each["function"]["name"] for each in asked.chat["tools"] or []]
    assert named == {"function": ["x"], "namespace": ["x__add"]}.get(kind, [])
    assert asked.warnings == ([] if named else [f"The tool {kind} is left out: OpenAI's own servers run it."])
    if not named:
        with pytest.raises(RequestError, match=r"tool_choice=.*with the tools \(none\)"):
            asked_response({"tools": [tool], "tool_choice": {"type": kind}})


@pytest.mark.parametrize("kind", types_of(BetaToolUnionParam))
def test_a_tool_of_the_messages_api(kind):
    tool = {"type": kind, "name": "x", "input_schema": SCHEMA}
    if kind.startswith(("bash_", "text_editor_", "computer_", "browser_", "memory_")):
        with pytest.raises(RequestError, match=rf"tools\[0\] is of type '{kind}'.*offer a tool with a name"):
            asked_message({"tools": [tool]})
        return
    asked = asked_message({"tools": [tool]})
    assert bool(asked.chat["tools"]) == (kind == "custom")
    assert asked.warnings == ([] if kind == "custom" else [f"The tool {kind} is left out: Anthropic's own servers run it."])


@pytest.mark.parametrize("kind", types_of(ResponseInputItemParam))
def test_an_item_of_the_responses_api_is_taken_or_refused_by_its_place(kind):
    item = {"type": kind, "role": "user", "content": "x", "name": "add", "arguments": "{}", "output": "1", "call_id": "c"}
    if kind in ("message", "function_call", "function_call_output", "reasoning"):
        asked = asked_response({"input": [{"role": "user", "content": "?"}, {**item, "content": [], "output": "1"}]})
        assert len(asked.chat["messages"]) == len(asked.places)
        return
    with pytest.raises(RequestError, match=r"^input\[0\] ") as caught:
        asked_response({"input": [item]})
    assert caught.value.param == "input[0]"


@pytest.mark.parametrize("kind", types_of(BetaContentBlockParam))
def test_a_block_of_the_messages_api_is_taken_or_refused_by_its_place(kind):
    block = {"type": kind, "text": "x", "thinking": "x", "id": "i", "tool_use_id": "i", "name": "add", "input": {}}
    block |= {"source": {"type": "url", "url": "https://example.com/a.png"}, "content": "3"}
    role = "assistant" if kind in ("thinking", "tool_use") else "user"
    if kind in ("text", "image", "thinking", "tool_use", "tool_result"):
        assert asked_message({"messages": [{"role": role, "content": [block]}]}).chat["messages"]
        return
    with pytest.raises(RequestError, match=rf"^messages\[0\]\.content\[0\] is of type '{kind}'"):
        asked_message({"messages": [{"role": role, "content": [block]}]})
