"""Convert a request's messages or text to the token ids of prompts. The limits on prompts also bound the cost of encoding."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollwright.inference.server.exchange import CONTEXT_LENGTH_EXCEEDED, RequestError
from rollwright.inference.server.tool_calls import ToolConvention, openai_tool_call

#: Number of characters of a long text that are encoded at a time, to find out whether the text can fit.
_PIECE = 1 << 15
#: Text of at most this many characters per token of the limit is encoded in one piece.
_USUAL_CHARACTERS = 8
#: A normalizer may merge up to four characters into one.
_NORMALIZED = 4

_longest_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class Prompts:
    """The prompts of a request.

    Attributes:
        ids: token ids of each prompt.
        messages: messages of a chat, as they were passed to its template.
        inputs: further fields of each ``ModelRequest``, such as images.
    """

    ids: list[list[int]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)


def longest_token(tokenizer: Any) -> int:
    """Return the maximum number of characters that one token represents."""
    if tokenizer not in _longest_tokens:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        factor = 1 if backend is not None and backend.normalizer is None else _NORMALIZED
        _longest_tokens[tokenizer] = factor * max(map(len, tokenizer.get_vocab()))
    return _longest_tokens[tokenizer]


class PromptReader:
    """Encodes and checks prompts.

    Args:
        tokenizer: the model's tokenizer. None accepts token ids only.
        context_length: maximum length of prompt and new tokens together, or None if it is not known.
        max_prompt_tokens: maximum length of a prompt. None sets no limit besides the context.
        max_samples: maximum number of completions for one request.
    """

    def __init__(
        self, tokenizer: Any, context_length: int | None, max_prompt_tokens: int | None = None, max_samples: int = 256
    ) -> None:
        self.tokenizer = tokenizer
        self.max_samples = max_samples
        self.limit = min((limit for limit in (context_length, max_prompt_tokens) if limit), default=None)
        self._vocabulary = None if tokenizer is None else len(tokenizer)

    def check_number(self, asked: int, param: str) -> None:
        """Check the number of completions that a request asks for.

        Raises:
            RequestError: ``asked`` exceeds the limit.
        """
        if asked > self.max_samples:
            raise RequestError(
                f"{asked} completions are over the limit of {self.max_samples} (--max-samples); send fewer in one request.",
                param=param,
            )

    def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode text.

        Encoding costs time and memory, so text that cannot fit is rejected after encoding at most twice as many tokens as the limit.

        Raises:
            RequestError: the text is empty or too long.
        """
        if self.limit is not None and len(text) > _USUAL_CHARACTERS * self.limit:
            if len(text) > longest_token(self.tokenizer) * self.limit:
                raise self._too_long(f"{len(text)} characters", param)
            counted = 0
            for start in range(0, len(text), _PIECE):
                counted += len(self.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
                if counted > 2 * self.limit:  # cutting into pieces splits some tokens, but not every second one
                    raise self._too_long(f"over {counted // 2} tokens", param)
        return self.checked(self.tokenizer.encode(text, add_special_tokens=add_special_tokens), param)

    def checked(self, ids: list[int], param: str) -> list[int]:
        """Return the ids if the model can read them.

        Raises:
            RequestError: ``ids`` is empty, too long, or contains an id outside the vocabulary.
        """
        if not ids:
            raise RequestError(f"{param} is empty: there is no token to continue from.", param=param)
        if min(ids) < 0 or (self._vocabulary is not None and max(ids) >= self._vocabulary):
            raise RequestError(f"{param} holds token ids outside 0 to {(self._vocabulary or 0) - 1}.", param=param)
        if self.limit is not None and len(ids) > self.limit:
            raise self._too_long(f"{len(ids)} tokens", param)
        return ids

    def _too_long(self, size: str, param: str) -> RequestError:
        return RequestError(
            f"The prompt has {size}, longer than the limit of {self.limit} tokens (the context length, or --max-prompt-tokens).",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )


# -- messages and tools of chats -------------------------------------------------------------------------------------

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


#: ``(image part, location in the request) -> text of the image in the prompt``.
ImageText = Callable[[dict[str, Any], str], str]


def no_image(part: dict[str, Any], where: str) -> str:
    """Raise a ``RequestError`` for an image, for models that read text only."""
    raise RequestError(f"{where} is an image; this server's model reads text only.", param=where.rpartition("[")[0])


def template_messages(messages: list[Any], image_text: ImageText = no_image) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect: content is text, and arguments of tool calls are objects.

    Args:
        messages: messages of a request. Content may be a list of ``{"type": "text", "text": ...}`` and ``image_url`` parts.
        image_text: returns the text of an image in the prompt.

    Returns:
        New dicts; the request's are unchanged.

    Raises:
        RequestError: a message is malformed, or has content that the model cannot read.
    """
    return [_template_message(message, f"messages[{index}]", image_text) for index, message in enumerate(messages)]


def has_images(messages: list[Any]) -> bool:
    """Return whether any message contains an image."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(
        isinstance(part, dict) and part.get("type") == "image_url"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def tools_of(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that a request offers to the model, or None if it offers none.

    Raises:
        RequestError: a tool has no name, or its parameters are not a JSON Schema.
    """
    tools = fields.get("tools") or []
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, dict) else type(tool).__name__
        if kind != "function":
            raise RequestError(
                f"tools[{index}] is of type {kind!r}, which chat templates do not support: offer it as a function with parameters.",
                param="tools",
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"tools[{index}] has no function with a name.", param="tools")
        check_function(function.get("name"), function.get("parameters"), f"tools[{index}].function", "parameters")
    return tools if tools and fields.get("tool_choice") != "none" else None


def check_function(name: Any, parameters: Any, where: str, of_parameters: str) -> str:
    """Validate a function that a chat template shows to the model, and return its name.

    Args:
        name: name of the function.
        parameters: JSON Schema of an object, or None if the function takes no arguments.
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
    """Return the text that the reply is forced to begin with: a tool call if ``tool_choice`` requires one, else nothing.

    Raises:
        RequestError: ``tool_choice`` names a tool that is not offered.
    """
    choice = fields.get("tool_choice") or "auto"
    if choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools_of(fields) or []]
    match choice:
        case "required" if names:
            return convention.beginning_of_call(None)
        case {"function": {"name": name}} if name in names:
            return convention.beginning_of_call(name)
    raise RequestError(
        f"tool_choice={choice!r} cannot be honoured with the tools {', '.join(names) or '(none)'}: use auto, none, required, "
        "or {'type': 'function', 'function': {'name': …}} with the name of one of them.",
        param="tool_choice",
    )


def _template_message(message: Any, where: str, image_text: ImageText) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise RequestError(f"{where} has role {role!r}; roles are {', '.join(ROLES)}.", param=where)
    rendered = {key: value for key, value in message.items() if value is not None}
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    rendered["content"] = _text(message.get("content"), where, image_text, required=not message.get("tool_calls"))
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise RequestError(f"{where}.tool_calls has to be a list of calls.", param=where)
        rendered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    return rendered


def _text(content: Any, where: str, image_text: ImageText, required: bool) -> str:
    if content is None and required:
        raise RequestError(f"{where} has no content.", param=where)
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is a {type(content).__name__}; it has to be text or a list of blocks.", param=where
        )
    parts: list[str] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(block, dict) and kind == "image_url":
            text = image_text(block, f"{where}.content[{index}]")
        elif kind not in (None, "text", "input_text", "output_text") or not isinstance(text, str):
            raise RequestError(
                f"{where}.content[{index}] is of type {kind!r}; parts are text and image_url.", param=f"{where}.content"
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
            arguments = {"": arguments}  # the model itself may have written broken JSON; the history keeps it
    return openai_tool_call(call.get("id", ""), function["name"], arguments)
