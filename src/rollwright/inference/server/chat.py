"""Chats in the OpenAI protocol: messages as chat templates want them, and the tools that are offered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.tool_calls import ToolConvention

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


#: The text that stands for an image, of its part and the part's place in the request.
Place = Callable[[dict[str, Any], str], str]


def no_image(part: dict[str, Any], where: str) -> str:
    """The ``Place`` of models that read text only: it refuses."""
    said = f"{where} is an image; this server's model reads text only."
    raise RequestError(said, param=where.rpartition("[")[0])


def template_messages(messages: list[Any], place: Place = no_image) -> list[dict[str, Any]]:
    """Messages whose content is text and whose tool calls carry their arguments as objects, as chat templates expect.

    Args:
        messages: as they stand in a request; content may be a list of ``{"type": "text", "text": ...}`` and ``image_url`` parts.
        place: what stands for an image.

    Returns:
        New dicts; the request's are left as they are.

    Raises:
        RequestError: a message is malformed, or holds what the model cannot see.
    """
    return [_template_message(message, f"messages[{index}]", place) for index, message in enumerate(messages)]


def has_images(messages: list[Any]) -> bool:
    """Whether a part of a message is an image."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def tools_of(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a request's ``fields`` offer; None: none.

    Raises:
        RequestError: one has no name, or parameters that are no JSON Schema.
    """
    tools = fields.get("tools") or []
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, dict) else type(tool).__name__
        if kind != "function":
            said = f"tools[{index}] is of type {kind!r}, which chat templates do not support: offer it as a function with parameters."
            raise RequestError(said, param="tools")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"tools[{index}] has no function with a name.", param="tools")
        check_function(function.get("name"), function.get("parameters"), f"tools[{index}].function", "parameters")
    return tools if tools and fields.get("tool_choice") != "none" else None


def check_function(name: Any, parameters: Any, where: str, of_parameters: str) -> str:
    """Validate a function that a template shows, and return its name.

    Args:
        name: name of the function.
        parameters: JSON Schema of an object; None if the function takes no arguments.
        where: location of the function in the request.
        of_parameters: name of the field with the parameters.

    Raises:
        RequestError: the function has no name, or its parameters are not a JSON Schema.
    """
    if not name or not isinstance(name, str):
        raise RequestError(f"{where} has no name; give it one.", param="tools")
    if not isinstance(parameters or {}, dict) or not isinstance((parameters or {}).get("properties") or {}, dict):
        raise RequestError(f"{where}.{of_parameters} is not a JSON Schema of an object.", param="tools")
    return name


def beginning_of_reply(fields: dict[str, Any], convention: ToolConvention) -> str:
    """What the reply is made to begin with: a tool call where ``tool_choice`` asks for one.

    Raises:
        RequestError: it names a tool that is not offered.
    """
    choice = fields.get("tool_choice") or "auto"
    if choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools_of(fields) or []]
    if choice == "required" and names:
        return convention.beginning_of_call(None)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise RequestError(
            f"tool_choice={choice!r} cannot be honoured with the tools {', '.join(names) or '(none)'}: use auto, none, required, "
            "or {'type': 'function', 'function': {'name': …}} with the name of one of them.",
            param="tool_choice",
        )
    return convention.beginning_of_call(name)


def _template_message(message: Any, where: str, place: Place) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise RequestError(f"{where} has role {role!r}; roles are {', '.join(ROLES)}.", param=where)
    rendered = {key: value for key, value in message.items() if value is not None}
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    rendered["content"] = _text(message.get("content"), where, place, required=not message.get("tool_calls"))
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise RequestError(f"{where}.tool_calls has to be a list of calls.", param=where)
        rendered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    return rendered


def _text(content: Any, where: str, place: Place, required: bool) -> str:
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
        if isinstance(block, dict) and kind == "image_url":
            text = place(block, f"{where}.content[{index}]")
        elif kind not in (None, "text", "input_text", "output_text") or not isinstance(text, str):
            said = f"{where}.content[{index}] is of type {kind!r}; parts are text and image_url."
            raise RequestError(said, param=f"{where}.content")
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
