from __future__ import annotations

import json

import pytest

from rollwright.inference.server import tool_calls
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.prompts import template_messages
from rollwright.inference.server.tool_calls import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GLM,
    HERMES,
    KIMI,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    tool_convention,
)

#: A function whose schema says which of its arguments are text.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"zip": {"type": "string"}, "count": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]
ARGUMENTS = {"zip": "02134", "count": 3, "tags": ["a", "b"]}
JSON = json.dumps(ARGUMENTS)

#: Convention, what its chat template holds, one call, a call that cannot be read.
FORMS = {
    "hermes": (
        HERMES,
        "<tool_call>\\n{'name': ...}</tool_call>",
        f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": {"zip": }}\n</tool_call>',
    ),
    "qwen3-coder": (
        QWEN_CODER,
        "<tool_call>\n<function=example>\n<parameter=one>\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n<parameter=zip>\n02134\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        "<tool_call>\n<function=find>\n<parameter=zip\n02134\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
        "<tool_call>find\n<arg_key>zip</arg_key>\n<arg_value>02134</arg_value>\n<arg_key>count</arg_key>\n"
        '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>',
        "<tool_call>find\n<arg_key>zip</arg_key>\n</tool_call>",
    ),
    "deepseek v3": (
        DEEPSEEK_FENCED,
        "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{\n```<｜tool▁call▁end｜>",
    ),
    "deepseek v3.1": (
        DEEPSEEK,
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        KIMI,
        "<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{<|tool_call_end|>",
    ),
    "mistral": (
        MISTRAL,
        "[TOOL_CALLS] [",
        f'[TOOL_CALLS] [{{"name": "find", "arguments": {JSON}}}]',
        '[TOOL_CALLS] [{"name": "find"',
    ),
    "mistral small": (MISTRAL_ARGS, "[TOOL_CALLS]name[ARGS]", f"[TOOL_CALLS]find[ARGS]{JSON}", "[TOOL_CALLS]find[ARGS]{"),
    "llama": (
        LLAMA,
        '<|python_tag|> {"name": function name, "parameters": ...}',
        f'{{"name": "find", "parameters": {JSON}}}',
        '{"name": "find", "parameters": {',
    ),
}


def calls(convention, text):
    rest, found, _ = convention.parse(text)
    return rest, [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize(("convention", "template", "call", "broken"), FORMS.values(), ids=FORMS)
class TestForms:
    def test_its_template_is_known(self, convention, template, call, broken):
        assert tool_convention(template) is convention

    def test_a_call_is_read_with_the_types_of_its_schema(self, convention, template, call, broken):
        text, (found,), malformed = convention.parse(call, TOOLS)
        assert (text, found.name, json.loads(found.arguments), malformed) == ("", "find", ARGUMENTS, [])

    def test_several_calls_and_text_before(self, convention, template, call, broken):
        if convention in (LLAMA, MISTRAL):  # the whole reply is the calls; one list of calls
            return
        text, found, malformed = convention.parse(f"I look.\n{call}\n{call}", TOOLS)
        assert (text, [each.name for each in found], malformed) == ("I look.", ["find", "find"], [])

    def test_a_call_that_cannot_be_read_is_counted_and_stays(self, convention, template, call, broken):
        text, found, malformed = convention.parse(broken, TOOLS)
        assert (text, found, len(malformed)) == (broken, [], 1)
        assert malformed[0]

    def test_a_stream_holds_it_back_from_its_mark(self, convention, template, call, broken):
        assert any(call.startswith(mark) for mark in convention.marks)

    def test_a_forced_call_begins_as_the_model_would_begin_it(self, convention, template, call, broken):
        beginning = convention.beginning_of_call("find")
        squeezed = "".join(call.split())
        assert squeezed.startswith("".join(beginning.split()))
        assert beginning.startswith(convention.beginning_of_call(None))


def test_an_unknown_template_is_warned_of_once_where_tools_are_offered(caplog):
    tool_calls._warn_of_unknown_template.cache_clear()
    convention = tool_convention("{{ messages }}")
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert calls(convention, '<tool_call>{"name": "f", "arguments": {}}</tool_call>') == ("", [("f", {})])
    assert caplog.text.count("shows no form of tool calls that is known") == 1


def test_kimi_keeps_the_number_of_a_call():
    (call,) = KIMI.parse("<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>").calls
    assert call.as_openai()["id"] == "functions.f:7"


def test_qwen_coder_may_forget_the_tag_around_a_call():
    reply = QWEN_CODER.parse("Well.\n<function=f>\n<parameter=x>\nTrue\n</parameter>\n</function>\n</tool_call>")
    assert (reply.text, [(call.name, call.arguments) for call in reply.calls]) == ("Well.", [("f", '{"x": true}')])
    assert len(QWEN_CODER.parse('<tool_call>{"name": "f"}</tool_call>').malformed) == 1


@pytest.mark.parametrize("text", ['{"answer": 4}', "4", '{"answer": 4', ""])
def test_llama_may_answer_in_json(text):
    assert LLAMA.parse(text) == (text, [], [])


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
    assert not tool_convention("nothing").is_known


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
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\] is an image"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function"),
    ],
)
def test_malformed_messages_are_refused_with_the_place(messages, said):
    with pytest.raises(RequestError, match=said):
        template_messages(messages)
