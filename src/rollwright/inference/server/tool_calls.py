"""Parse tool calls in a model's text, in the format that its family of chat templates uses.

The inference server, the OpenAI front and the workflows share this parser.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollwright.tracking.logging import getLogger

logger = getLogger("tool_calls")

#: Function -> parameter -> the parameter's JSON schema.
Types = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """One tool call; ``arguments`` is a JSON string, as in the OpenAI protocol."""

    name: str
    arguments: str
    id: str = ""  # written by the model, in some formats

    def as_openai(self) -> dict[str, Any]:
        """Convert to the form of the OpenAI protocol; an id is generated if the model wrote none."""
        return openai_tool_call(self.id or f"call_{uuid.uuid4().hex[:24]}", self.name, self.arguments)


def openai_tool_call(identity: str, name: Any, arguments: Any) -> dict[str, Any]:
    """Build a tool call in the form of the OpenAI protocol."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


class ReadReply(NamedTuple):
    """A parsed reply.

    Attributes:
        text: the reply without its tool calls; the unchanged reply if no call was parsed.
        calls: tool calls, in the order of the reply.
        malformed: the reason for each call that cannot be parsed.
    """

    text: str
    calls: list[ToolCall]
    malformed: list[str]


@dataclass(frozen=True)
class ToolConvention:
    """The format in which a family of models writes tool calls.

    Attributes:
        marks: strings that a tool call may begin with. A stream withholds all text from the first mark on.
        pattern: matches one call, or several in one body; the first group is the body.
        read: parses the calls in a body, given the types of parameters. Raises ``ValueError`` if it cannot.
        opening: text at the beginning of a call, up to the name of the function.
        after_name: text between the name and the arguments.
        closing: text at the end of each call, or None if the format has none.
        frame: matches text around the calls that does not belong to the reply, or None if the format has none.
        is_known: False if the format is a guess, because the chat template shows none.
    """

    marks: tuple[str, ...]
    pattern: re.Pattern[str]
    read: Callable[[str, Types], Sequence[ToolCall]]
    opening: str
    after_name: str
    closing: str | None = None
    frame: re.Pattern[str] | None = None
    is_known: bool = True

    def beginning_of_call(self, function: str | None) -> str:
        """Return the beginning of a reply that must call ``function``, or any function if None."""
        return self.opening + ("" if function is None else function + self.after_name)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ReadReply:
        """Parse a reply.

        Args:
            text: the reply, including special tokens.
            tools: the offered tools. Their schemas give the types of arguments in formats that write them as plain text.
        """
        if not self.is_known:
            _warn_of_unknown_template()
        calls: list[ToolCall] = []
        malformed: list[str] = []
        types = _types(tools or ())

        def read(match: re.Match[str]) -> str:
            try:
                calls.extend(self.read(match[1].strip(), types))
            except ValueError as error:
                malformed.append(str(error))
                return match[0]  # the text stays as the model wrote it
            return ""

        rest = self.pattern.sub(read, text)
        if calls and self.frame is not None:
            rest = self.frame.sub("", rest)
        return ReadReply(rest.rstrip() if calls else text, calls, malformed)


@functools.cache
def _warn_of_unknown_template() -> None:
    logger.warning(
        "tools are offered, and the chat template shows no form of tool calls that is known (Hermes, Qwen3-Coder, GLM, DeepSeek, Kimi, "
        "Mistral, Llama): replies are read as Hermes writes them, <tool_call>{…}</tool_call>. Give the tokenizer a chat template "
        "that shows tools, or the model may never call one."
    )


def _types(tools: Sequence[Mapping[str, Any]]) -> Types:
    functions = [tool.get("function", tool) for tool in tools]
    return {each.get("name", ""): (each.get("parameters") or {}).get("properties") or {} for each in functions}


def _first_json(text: str) -> tuple[Any, str]:
    """Parse the JSON value at the beginning of a text, and return it with the rest of the text."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken: {error}") from None
    return value, text[end:]


def _json(text: str) -> Any:
    value, rest = _first_json(text)
    if rest.strip("`; \n"):  # a code fence may close it
        raise ValueError(f"its JSON is broken: {rest.strip()[:40]!r} follows it")
    return value


def _call(name: str, arguments: Any, identity: str = "") -> ToolCall:
    if not re.fullmatch(r"[^\s<>{}\"]+", name):
        raise ValueError(f"{name[:40]!r} is no name of a function" if name else "it names no function")
    if not isinstance(arguments, str | dict):
        raise ValueError("its arguments are no JSON object")
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False), identity)


def _from_values(body: str, types: Types) -> list[ToolCall]:
    """Parse ``{"name", "arguments" | "parameters"}``, or a list of such objects."""
    return _calls(_json(body))


def _calls(value: Any) -> list[ToolCall]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in values):
        raise ValueError('it is no object with "name" and "arguments"')
    return [_call(each["name"], each.get("arguments", each.get("parameters", {}))) for each in values]


def _typed(text: str, schema: Any) -> Any:
    """Convert an argument that is written as plain text: a string if its schema says so or it is not JSON, else the JSON value."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return {"True": True, "False": False, "None": None}[text] if text in ("True", "False", "None") else json.loads(text)
    except json.JSONDecodeError:
        return text


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _from_function_tags(body: str, types: Types) -> list[ToolCall]:
    """Parse ``<function=name>``, then ``<parameter=key>value</parameter>`` for each argument, then ``</function>``."""
    functions = _FUNCTION.findall(body)
    if not functions or any("<parameter" in _PARAMETER.sub("", content) for _, content in functions):
        raise ValueError("a <function=…> or <parameter=…> tag is missing or broken")
    calls = []
    for name, content in functions:
        schemas = types.get(name, {})
        calls.append(_call(name, {key: _typed(value, schemas.get(key)) for key, value in _PARAMETER.findall(content)}))
    return calls


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _from_argument_tags(body: str, types: Types) -> list[ToolCall]:
    """Parse a name, then ``<arg_key>`` and ``<arg_value>`` for each argument."""
    name = body.partition("<arg_key>")[0].strip()
    if "<arg_" in _ARGUMENT.sub("", body):
        raise ValueError("an <arg_key> has no <arg_value>, or a tag is not closed")
    schemas = types.get(name, {})
    return [_call(name, {key.strip(): _typed(value, schemas.get(key.strip())) for key, value in _ARGUMENT.findall(body)})]


def _from_deepseek(body: str, types: Types) -> list[ToolCall]:
    """Parse ``name<sep>{…}`` or, before V3.1, ``function<sep>name`` and the arguments in a fenced block."""
    name, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("there is no <｜tool▁sep｜> between name and arguments")
    if name.strip() == "function":
        name, _, rest = rest.partition("\n")
    return [_call(name.strip(), _json(re.sub(r"^\s*```(?:json)?\s*", "", rest).strip()))]


def _from_kimi(body: str, types: Types) -> list[ToolCall]:
    """Parse ``functions.name:number<argument_begin>{…}``."""
    identity, separator, rest = body.partition("<|tool_call_argument_begin|>")
    if not separator:
        raise ValueError("there is no <|tool_call_argument_begin|> between name and arguments")
    name = identity.strip().removeprefix("functions.").rpartition(":")[0] or identity.strip()
    return [_call(name, _json(rest.strip()), identity.strip())]


def _from_mistral(body: str, types: Types) -> list[ToolCall]:
    """Parse a list of objects or, since Mistral Small 3.2, ``name[ARGS]{…}``, optionally with ``[CALL_ID]id``."""
    head, has_arguments, rest = body.partition("[ARGS]")
    if not has_arguments:
        return _calls(_first_json(body)[0])
    name, _, identity = head.partition("[CALL_ID]")
    return [_call(name.strip(), _json(rest.strip()), identity.strip())]


def _from_llama(body: str, types: Types) -> list[ToolCall]:
    """Parse objects separated by semicolons or line breaks."""
    calls: list[ToolCall] = []
    while body.startswith("{") or not calls:
        value, body = _first_json(body)
        calls += _calls(value)
        body = body.lstrip("; \n")
    return calls


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_TAGGED = _pattern(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)")
_OPENING = '{"name": "'
_ARGUMENTS = '", "arguments":'

#: Hermes, Qwen 2.5 and 3.
HERMES = ToolConvention(("<tool_call>",), _TAGGED, _from_values, f"<tool_call>\n{_OPENING}", _ARGUMENTS, "</tool_call>")
QWEN_CODER = ToolConvention(
    ("<tool_call>", "<function="),
    _pattern(r"(?:<tool_call>|(?=<function=))(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)"),  # the model may omit the first tag
    _from_function_tags,
    "<tool_call>\n<function=",
    ">\n",
    "</tool_call>",
)
GLM = ToolConvention(("<tool_call>",), _TAGGED, _from_argument_tags, "<tool_call>", "\n", "</tool_call>")
DEEPSEEK = ToolConvention(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    _pattern(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>)|\Z)"),
    _from_deepseek,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    frame=re.compile("<｜tool▁calls▁(?:begin|end)｜>"),
)
DEEPSEEK_FENCED = replace(DEEPSEEK, opening=f"{DEEPSEEK.opening}function<｜tool▁sep｜>", after_name="\n```json\n")
KIMI = ToolConvention(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    _pattern(r"<\|tool_call_begin\|>(.*?)(?:<\|tool_call_end\|>|(?=<\|tool_calls_section_end\|>)|\Z)"),
    _from_kimi,
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    frame=re.compile(r"<\|tool_calls_section_(?:begin|end)\|>"),
)
MISTRAL = ToolConvention(
    ("[TOOL_CALLS]",),
    _pattern(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)"),
    _from_mistral,
    f"[TOOL_CALLS][{_OPENING}",
    _ARGUMENTS,
)
MISTRAL_ARGS = replace(MISTRAL, opening="[TOOL_CALLS]", after_name="[ARGS]")
#: Llama 3: the whole reply consists of calls; JSON without a "name" is an answer.
LLAMA = ToolConvention(
    ("<|python_tag|>", "{"),
    _pattern(r"\A\s*(?:<\|python_tag\|>\s*(?=\S)|(?=\{\s*\"name\"\s*:))(.*)\Z"),
    _from_llama,
    _OPENING,
    '", "parameters":',
)

#: Text in a chat template that reveals a format, the more specific ones first.
_SIGNS = (
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<|tool_call_begin|>", KIMI),
    ("<arg_key>", GLM),
    ("<function=", QWEN_CODER),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters"', LLAMA),
)

#: Names that inference servers use for the formats.
PARSERS = {
    **dict.fromkeys(("qwen", "qwen25", "hermes"), HERMES),
    "qwen3_coder": QWEN_CODER,
    **dict.fromkeys(("glm", "glm45", "glm47"), GLM),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), DEEPSEEK),
    "kimi_k2": KIMI,
    "mistral": MISTRAL,
    "llama3": LLAMA,
}


def tool_convention(chat_template: Any) -> ToolConvention:
    """Return the format of tool calls that a chat template shows to the model, or Hermes as a guess if it shows none."""
    text = chat_template if isinstance(chat_template, str) else json.dumps(chat_template, default=str, ensure_ascii=False)
    found = next((convention for sign, convention in _SIGNS if sign in text), replace(HERMES, is_known=False))
    return DEEPSEEK_FENCED if found is DEEPSEEK and "```json" in text else found
