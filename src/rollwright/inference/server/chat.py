"""Chats in the OpenAI protocol: messages as chat templates want them, and tool calls in a model's text.

A model writes tool calls by the convention of its chat template.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollwright.inference.server.exchange import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages whose content is text and whose tool calls carry their arguments as objects, as chat templates expect.

    Args:
        messages: as they stand in a request; content may be a list of ``{"type": "text", "text": ...}`` blocks.

    Returns:
        New dicts; the request's are left as they are.

    Raises:
        RequestError: a message is malformed, or holds what the model cannot see.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise RequestError(f"{where} has role {role!r}; roles are {', '.join(ROLES)}.", param=where)
    rendered = {key: value for key, value in message.items() if value is not None}
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    rendered["content"] = _text(message.get("content"), where, required=not message.get("tool_calls"))
    if message.get("tool_calls"):
        rendered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    return rendered


def _text(content: Any, where: str, required: bool) -> str:
    if content is None:
        if required:
            raise RequestError(f"{where} has no content.", param=where)
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is a {type(content).__name__}; it has to be text or a list of blocks.", param=where
        )
    parts: list[str] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get("text") if isinstance(block, dict) else block
        if kind not in (None, "text", "input_text", "output_text") or not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{index}] is of type {kind!r}; this server's model reads text only.", param=f"{where}.content"
            )
        parts.append(text)
    return "".join(parts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has no function with a name.", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {"": arguments}  # what the model once wrote may be broken JSON; the history keeps it
    return {"id": call.get("id", ""), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asked for; ``arguments`` is JSON text, as in the OpenAI protocol."""

    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """The OpenAI form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class ToolConvention:
    """How a family of models writes tool calls.

    Attributes:
        marks: texts that a tool call begins with; a stream holds its text back from the first of them on.
        parse: the text without the calls, and the calls.
        opening: how a call begins, up to its function's name.
        arguments_key: what the arguments are called.
        closing: how one call ends, whatever follows; None: there is no such mark.
    """

    marks: tuple[str, ...]
    parse: Callable[[str], tuple[str, list[ToolCall]]]
    opening: str
    arguments_key: str = "arguments"
    closing: str | None = None

    def beginning_of_call(self, function: str | None) -> str:
        """The text that a reply begins with where it has to call ``function``, or some function (None)."""
        return self.opening + ("" if function is None else f'{function}", "{self.arguments_key}":')


def _call(value: Any) -> ToolCall | None:
    """A call from ``{"name", "arguments" | "parameters"}``; None where it is something else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _first_value(text: str) -> tuple[Any, int]:
    """The JSON value that a text begins with, and where it ends; None and 0 where it begins with none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        return None, 0


_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


def _parse_tagged(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = _call(json.loads(match.group(1)))
        except json.JSONDecodeError:
            call = None
        if call is None:
            return match.group(0)  # not a call: the text stays as the model wrote it
        calls.append(call)
        return ""

    rest = _TAGGED.sub(take, text)
    return (rest.rstrip() if calls else text), calls


def _parse_bracketed(text: str) -> tuple[str, list[ToolCall]]:
    head, _, tail = text.partition("[TOOL_CALLS]")
    values, _ = _first_value(tail.strip())
    calls = [call for value in (values if isinstance(values, list) else [values]) if (call := _call(value)) is not None]
    return (head.rstrip(), calls) if calls else (text, [])


def _parse_bare(text: str) -> tuple[str, list[ToolCall]]:
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    while stripped.startswith("{"):
        value, end = _first_value(stripped)
        call = _call(value)
        if call is None:
            return text, []
        calls.append(call)
        stripped = stripped[end:].lstrip("; \n")
    return (stripped, calls) if calls else (text, [])


HERMES = ToolConvention(
    ("<tool_call>",), _parse_tagged, '<tool_call>\n{"name": "', closing="</tool_call>"
)  # Hermes, Qwen 2.5 and 3
MISTRAL = ToolConvention(("[TOOL_CALLS]",), _parse_bracketed, '[TOOL_CALLS][{"name": "')
# Llama 3: the whole answer is the JSON
LLAMA = ToolConvention(("<|python_tag|>", "{"), _parse_bare, '{"name": "', "parameters")


def tool_convention(chat_template: Any) -> ToolConvention:
    """The convention that a chat template teaches its model; Hermes where the template says nothing about tool calls."""
    text = chat_template if isinstance(chat_template, str) else json.dumps(chat_template, default=str)
    if "<tool_call>" in text:
        return HERMES
    if "[TOOL_CALLS]" in text:
        return MISTRAL
    if "<|python_tag|>" in text or '"parameters"' in text:
        return LLAMA
    return HERMES
