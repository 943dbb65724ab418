from __future__ import annotations

import json

import pytest

from rollwright.inference.server.chat import HERMES, LLAMA, MISTRAL, template_messages, tool_convention
from rollwright.inference.server.exchange import RequestError


def calls(convention, text):
    rest, found = convention.parse(text)
    return rest, [(call.name, json.loads(call.arguments)) for call in found]


def test_tagged_calls_are_taken_out_of_the_text():
    text = 'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "rain"}}\n</tool_call>\n'
    text += '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert calls(HERMES, text) == ("I look.", [("search", {"query": "rain"}), ("add", {"a": 1})])


def test_a_call_cut_by_the_end_counts_only_when_it_is_whole():
    assert calls(HERMES, '<tool_call>{"name": "f", "arguments": {}}')[1] == [("f", {})]
    broken = 'text <tool_call>{"name": "f", "argu'
    assert calls(HERMES, broken) == (broken, [])


@pytest.mark.parametrize("text", ["plain", "<tool_call>not json</tool_call>", '<tool_call>{"no": "name"}</tool_call>', ""])
def test_what_is_no_call_stays_as_the_model_wrote_it(text):
    assert calls(HERMES, text) == (text, [])


def test_other_families():
    assert calls(MISTRAL, 'Well.[TOOL_CALLS] [{"name": "f", "arguments": {"x": 2}}]') == ("Well.", [("f", {"x": 2})])
    assert calls(LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 2}}') == ("", [("f", {"x": 2})])
    assert calls(LLAMA, '{"answer": 4}') == ('{"answer": 4}', [])


def test_the_chat_template_names_the_convention():
    assert tool_convention("... <tool_call> ...") is HERMES
    assert tool_convention("... [TOOL_CALLS] ...") is MISTRAL
    assert tool_convention("... <|python_tag|> ...") is LLAMA
    assert tool_convention("nothing") is HERMES


def test_messages_become_what_templates_expect():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "name": "Ada", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    rendered = template_messages(messages)
    assert rendered[0] == {"role": "system", "content": "ab"}
    assert rendered[1]["name"] == "Ada"
    assert rendered[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "robot", "content": "x"}], "robot"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": 3}], "text or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function"),
    ],
)
def test_malformed_messages_are_refused_with_the_place(messages, said):
    with pytest.raises(RequestError, match=said):
        template_messages(messages)
