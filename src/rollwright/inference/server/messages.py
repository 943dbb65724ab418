"""``/v1/messages``: Anthropic's Messages API as a dialect of chat.

Blocks become messages of the chat and back; the client's key comes as ``x-api-key`` or as a bearer token. Errors have the API's
own form.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from rollwright.inference.server.bodies import Body, Chat
from rollwright.inference.server.dialects import ChatProtocol, Dialect, Event, object_arguments, serve, text_or_parts
from rollwright.inference.server.exchange import (
    ClientGoneError,
    RequestError,
    as_request_error,
    logger,
    read_object,
)
from rollwright.inference.server.openai_answer import CHAT, OpenAICall, usage_of

#: Our finish reasons in the API's words; a stop string is told apart by its text.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
#: HTTP status to the API's type of error.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesBody(Body):
    """``/v1/messages``. What is no field of this API (``seed``, ``min_p``, …) is one of the chat request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    noun = "field of /v1/messages"
    ignored = frozenset(
        [
            "metadata",
            "service_tier",
            "cache_control",
            "diagnostics",
            "inference_geo",
            "speed",
            "user_profile_id",
            "workspace_id",
        ]
    )
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "container": ((), "this server runs no code"),
        "mcp_servers": (([],), "this server has no tools of its own"),
        "n": ((1,), "an answer is one sample"),
    }

    messages: list[dict[str, Any]] = Field(min_length=1, description="a list with at least one message")
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] = Field({})
    stop_sequences: list[str] = Field([])
    thinking: dict[str, Any] = Field({})
    output_config: dict[str, Any] = Field({})
    stream: bool = False


class MessagesDialect(Dialect):
    """One call of ``/v1/messages``."""

    prefix = "msg_"

    def __init__(self, protocol: ChatProtocol, body: dict[str, Any]) -> None:
        super().__init__()
        self.protocol = protocol
        fields = MessagesBody.of(body)
        messages: list[dict[str, Any]] = []
        if fields.system:
            messages.append({"role": "system", "content": _texts(fields.system, "system")})
        for index, message in enumerate(fields.messages):
            messages += _chat_messages(message, f"messages[{index}]")
        goes_on = messages[-1]["role"] == "assistant"  # the reply is begun
        self.chat = {
            **(fields.model_extra or {}),
            "messages": messages,
            "stream": fields.stream,
            "max_completion_tokens": fields.max_tokens,
            "stop": fields.stop_sequences or None,
            "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)] or None,
            "tool_choice": _chat_tool_choice(fields.tool_choice) if fields.tools else None,
            "parallel_tool_calls": False if fields.tool_choice.get("disable_parallel_tool_use") else None,
            "response_format": _chat_format(fields.output_config.get("format")),
            "continue_final_message": True if goes_on else None,
            "add_generation_prompt": False if goes_on else None,
        }
        if fields.thinking and "enable_thinking" in str(protocol.tokenizer.chat_template):
            wanted = {"enable_thinking": fields.thinking.get("type") != "disabled"}
            self.chat["chat_template_kwargs"] = wanted | (self.chat.get("chat_template_kwargs") or {})
        self.content: list[dict[str, Any]] = []

    # -- pieces ----------------------------------------------------------------------------------------------------------

    def start(self, call: OpenAICall) -> Iterator[Event]:
        self.message: dict[str, Any] = {
            "id": call.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.protocol.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": usage_of(call)["prompt_tokens"],
                "output_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }
        yield {"type": "message_start", "message": self.message}

    def open_piece(self, kind: str) -> Iterator[Event]:
        reasoning = {"type": "thinking", "thinking": "", "signature": ""}
        yield self._open(reasoning if kind == "reasoning" else {"type": "text", "text": ""})

    def grow(self, kind: str, more: str, logprobs: list[Any]) -> Iterator[Event]:
        name = "thinking" if kind == "reasoning" else "text"
        yield self._delta({"type": f"{name}_delta", name: more})

    def close_piece(self, kind: str, text: str) -> Iterator[Event]:
        self.content[-1]["thinking" if kind == "reasoning" else "text"] = text
        if kind == "reasoning":
            self.content[-1]["signature"] = self.message["id"]  # it is not checked when it comes back
            yield self._delta({"type": "signature_delta", "signature": self.message["id"]})
        yield self._stop()

    def tool_call(self, tool_call: dict[str, Any]) -> Iterator[Event]:
        function = tool_call["function"]
        arguments = object_arguments(function["arguments"])
        yield self._open({"type": "tool_use", "id": tool_call["id"], "name": function["name"], "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments, ensure_ascii=False)})
        self.content[-1]["input"] = arguments
        yield self._stop()

    def end(self, call: OpenAICall) -> Iterator[Event]:
        match, reason = call.responses[0].stop_match, call.choices[0]["finish_reason"]
        by_text = reason == "stop" and isinstance(match, str)
        delta = {
            "stop_reason": "stop_sequence" if by_text else _STOP_REASONS.get(reason, "end_turn"),
            "stop_sequence": match if by_text else None,
        }
        usage = {**self.message["usage"], "output_tokens": usage_of(call)["completion_tokens"]}
        self.message |= {**delta, "content": self.content, "usage": usage}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def answer(self) -> dict[str, Any]:
        return self.message

    def failed(self, refusal: RequestError) -> Iterator[Event]:
        yield _error(refusal)

    def _open(self, block: dict[str, Any]) -> Event:
        self.content.append(block)
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self.content) - 1}


# -- requests ------------------------------------------------------------------------------------------------------------


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The chat's messages of one message: the results of tools are messages of their own, before what the user says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where} has role {role!r}; roles are user, assistant and system.", param=where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content has to be text or a list of blocks.", param=where)
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text" | "image":
                parts.append(_chat_part(block, at))
            case "tool_result" if role == "user":
                text = _texts(block.get("content") or "", at)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": text})
            case "tool_use" if role == "assistant":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id", ""), "type": "function", "function": function})
            case "thinking" if role == "assistant":
                reasoning.append(str(block.get("thinking", "")))
            case kind:
                raise RequestError(
                    f"{at} is of type {kind!r}; blocks of {role} are text, "
                    f"{'thinking and tool_use' if role == 'assistant' else 'image and tool_result'}.",
                    param=at,
                )
    said: dict[str, Any] = {"role": role, "content": text_or_parts(parts)}
    said |= {"tool_calls": calls} if calls else {}
    said |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return [*results, said] if parts or calls or reasoning or not results else results


def _chat_part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    source = block.get("source") if kind == "image" else None
    if isinstance(source, dict) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    if isinstance(source, dict) and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RequestError(f"{where} has a part of type {kind!r}; it has to be text, or an image as base64 or url.", param=where)


def _texts(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return text_or_parts([_chat_part(block, where) for block in (content if isinstance(content, list) else [content])])


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {tool['type']!r}; this server has no tools of its own: give a name and an input_schema.",
            param="tools",
        )
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {"type": "function", "function": {ours: tool[theirs] for ours, theirs in names.items() if theirs in tool}}


def _chat_tool_choice(choice: dict[str, Any]) -> Any:
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            return kind  # auto or none; what is neither is refused by the chat


def _chat_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError(f"output_config.format={given!r:.100}; it has to be an object.", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema"), "strict": True}}


# -- routes --------------------------------------------------------------------------------------------------------------

Handler = Callable[[ChatProtocol, Request], Awaitable[Any]]


def _error(error: Exception) -> dict[str, Any]:
    refusal = as_request_error(error)
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _with_its_errors(handle: Handler) -> Handler:
    @wraps(handle)
    async def answer(protocol: ChatProtocol, request: Request) -> Any:
        try:
            return await handle(protocol, request)
        except ClientGoneError:
            raise
        except Exception as error:  # whatever it is, the client is told
            if as_request_error(error).status == 500:
                logger.exception("%s failed", request.url.path)
            return JSONResponse(_error(error), status_code=as_request_error(error).status)

    return answer


@_with_its_errors
async def create_message(protocol: ChatProtocol, request: Request) -> Response | dict[str, Any]:
    """``POST /v1/messages``."""
    return await serve(protocol, request, MessagesDialect)


@_with_its_errors
async def count_tokens(protocol: ChatProtocol, request: Request) -> dict[str, int]:
    """``POST /v1/messages/count_tokens``: the tokens of the prompt, as the model would read it."""
    body, size = await read_object(request)
    fields = Chat.of(MessagesDialect(protocol, body).chat).given()
    prompts = await protocol.read_prompts(request, CHAT, fields, size)
    return {"input_tokens": len(prompts.ids[0])}


#: Anthropic's clients add /v1 to their base_url, OpenAI's do not: an agent that is given one base_url reaches both.
MESSAGES_ROUTES = tuple(
    ("POST", f"{prefix}/messages{rest}", handler, MessagesBody)
    for prefix in ("/v1", "/v1/v1")
    for rest, handler in (("", create_message), ("/count_tokens", count_tokens))
)
