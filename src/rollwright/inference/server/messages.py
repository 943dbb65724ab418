"""``/v1/messages``: Anthropic's Messages API as a dialect of chat.

Content blocks are converted to chat messages and back. Errors have the API's own form. A thread is a conversation whose messages,
system prompt and tools the server stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from rollwright.inference.server.bodies import SAMPLING_OF_CHAT, Body, NotEmpty
from rollwright.inference.server.dialects import (
    ChatProtocol,
    Dialect,
    Event,
    OfferedTool,
    StoredAnswer,
    chat_content,
    chat_function,
    chat_tools,
    count_tokens,
    object_arguments,
    refuse_tool_choice,
    serve,
)
from rollwright.inference.server.exchange import RequestError, as_request_error
from rollwright.inference.server.openai_answer import OpenAICall, usage_of
from rollwright.inference.server.prompts import check_function
from rollwright.inference.server.tool_calls import openai_tool_call

#: Finish reason of a chat -> stop reason of this API. A stop string gives ``stop_sequence`` instead.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
#: HTTP status -> the API's type of error.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: Prefixes of the types of tools that the API's own servers run.
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def _error(error: Exception) -> dict[str, Any]:
    refusal = as_request_error(error)
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    details = {"details": {"error_code": refusal.code}} if refusal.code else {}
    return {"type": "error", "error": {"type": kind, "message": str(refusal), **details}}


class MessagesBody(Body):
    """``/v1/messages``. Parameters of the chat request that this API lacks (``seed``, ``min_p``, …) are accepted too."""

    @staticmethod
    def error_response(error: Exception) -> Response:
        """Build the response that reports ``error`` in Anthropic's form."""
        return JSONResponse(_error(error), status_code=as_request_error(error).status)

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
            "betas",  # a header, which some clients send as a field
            "billing_policy",
            "fallbacks",  # models to ask if this one declines
            "fallback_credit_token",
        ]
    )
    left_out: ClassVar[dict[str, str]] = {
        "container": "this server does not run code",
        "mcp_servers": "this server does not call MCP servers; clients can, and offer their tools as functions",
    }
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "compaction": ((), "this server does not summarise: ask the model for a summary in a message"),
        "output_format": ((), "it is now called output_config.format"),
        "n": ((1,), "an answer is one sample"),
    }
    of_chat = (
        SAMPLING_OF_CHAT
        - {"stop", "reasoning_effort", "parallel_tool_calls", "add_generation_prompt"}
        - {"continue_final_message"}
    )
    renamed: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    messages: list[dict[str, Any]] = Field(description="a list with at least one message")
    context_management: dict[str, Any] = Field({})
    thread: dict[str, Any] = Field({})
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] = Field({})
    stop_sequences: list[NotEmpty] = Field([], description="a list of texts that are not empty")
    thinking: dict[str, Any] = Field({})
    output_config: dict[str, Any] = Field({})
    stream: bool = False


class MessagesDialect(Dialect):
    """One call of ``/v1/messages``."""

    prefix = "msg_"
    names: ClassVar[dict[str, str]] = {
        "prompt": "messages",
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "parallel_tool_calls": "tool_choice",
    }

    def __init__(self, protocol: ChatProtocol, body: dict[str, Any]) -> None:
        super().__init__(protocol)
        self.fields = fields = self._of_thread(MessagesBody.of(body))
        if not fields.messages:
            raise RequestError("messages=[]; it has to be a list with at least one message.", param="messages")
        _refuse_other_edits(fields.context_management)
        before = self.before.messages if self.before else []
        tools, self.warnings = offered_tools(fields.tools)
        self.warnings += fields.warnings
        if "task_budget" in fields.output_config:
            self.warnings.append("output_config.task_budget is left out: chat templates do not support it.")
        system = [{"role": "system", "content": _texts(fields.system, "system")}] if fields.system else []
        new: list[dict[str, Any]] = []
        self.places = ["system"] * len(system) + ["thread"] * len(before)
        for index, message in enumerate(fields.messages):
            converted = _chat_messages(message, f"messages[{index}]")
            new += converted
            self.places += [f"messages[{index}]"] * len(converted)
        #: The conversation without the system prompt.
        self.messages = [*before, *new]
        is_prefilled = bool(new) and new[-1]["role"] == "assistant"  # the request holds the beginning of the reply
        self.chat = {
            **(fields.model_extra or {}),
            "messages": [*system, *self.messages],
            "stream": fields.stream,
            "max_completion_tokens": fields.max_tokens,
            "stop": fields.stop_sequences or None,
            "tools": chat_tools(tools),
            "tool_choice": _chat_tool_choice(fields.tool_choice, tools),
            "parallel_tool_calls": False if fields.tool_choice.get("disable_parallel_tool_use") else None,
            "response_format": _chat_format(fields.output_config.get("format")),
            "reasoning_effort": fields.output_config.get("effort"),
            "continue_final_message": True if is_prefilled else None,
            "add_generation_prompt": False if is_prefilled else None,
        }
        if fields.thinking and "enable_thinking" in str(protocol.tokenizer.chat_template):
            self.chat["chat_template_kwargs"] = {
                "enable_thinking": fields.thinking.get("type") != "disabled",
                **(self.chat.get("chat_template_kwargs") or {}),
            }
        self.content: list[dict[str, Any]] = []

    def _of_thread(self, fields: MessagesBody) -> MessagesBody:
        """Store the thread that the request continues in ``self.before``, and return the request's fields completed from that thread."""
        self.before: StoredAnswer | None = None
        match fields.thread:
            case {"type": "continue", "previous_message_id": identifier}:
                self.before = self.protocol.answers.get(identifier)
                if self.before is None:
                    raise RequestError(
                        f"There is no thread with the message {identifier!r} here: {self.protocol.answers.LIMITS}. Send the whole "
                        "conversation with thread={'type': 'create'}.",
                        status=404,
                        param="thread",
                        code="thread_not_found",
                    )
                if again := next((name for name in ("system", "tools") if getattr(fields, name)), None):
                    raise RequestError(f"{again} is fixed by the thread: leave it out, or create another thread.", param=again)
                return fields.model_copy(update=self.before.fixed)
            case {"type": "create"} | {}:
                return fields
        raise RequestError(
            f"thread={fields.thread!r:.100}; it has to be {{'type': 'create'}} or {{'type': 'continue', 'previous_message_id': …}}.",
            param="thread",
        )

    # -- pieces ----------------------------------------------------------------------------------------------------------

    def start(self, call: OpenAICall) -> Iterator[Event]:
        self.answer = {
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
        yield {"type": "message_start", "message": self.answer}

    def open_piece(self, kind: str) -> Iterator[Event]:
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        yield self._open(thinking if kind == "reasoning" else {"type": "text", "text": ""})

    def grow(self, kind: str, more: str, logprobs: list[Any]) -> Iterator[Event]:
        name = "thinking" if kind == "reasoning" else "text"
        yield self._delta({"type": f"{name}_delta", name: more})

    def close_piece(self, kind: str, text: str) -> Iterator[Event]:
        self.content[-1]["thinking" if kind == "reasoning" else "text"] = text
        if kind == "reasoning":
            self.content[-1]["signature"] = self.answer["id"]  # not checked when a client sends it back
            yield self._delta({"type": "signature_delta", "signature": self.answer["id"]})
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
        usage = {**self.answer["usage"], "output_tokens": usage_of(call)["completion_tokens"]}
        self.answer |= {**delta, "content": self.content, "usage": usage}
        if self.fields.thread:
            fixed = {"system": self.fields.system, "tools": self.fields.tools}
            size = self.size + (self.before.size if self.before else 0)
            self.protocol.answers.add([*self.messages, call.choices[0]["message"]], self.answer, size, fixed)
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, refusal: RequestError) -> Event:
        return _error(refusal)

    def _open(self, block: dict[str, Any]) -> Event:
        self.content.append(block)
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self.content) - 1}


# -- requests ------------------------------------------------------------------------------------------------------------


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert one message to chat messages. Tool results become separate messages before the user's text."""
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
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id", ""),
                        "content": _texts(block.get("content") or "", at),
                    }
                )
            case "tool_use" if role == "assistant":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append(openai_tool_call(block.get("id", ""), block.get("name"), arguments))
            case "thinking" if role == "assistant":
                reasoning.append(str(block.get("thinking", "")))
            case kind:
                raise RequestError(
                    f"{at} is of type {kind!r}; blocks of {role} are text, "
                    f"{'thinking and tool_use' if role == 'assistant' else 'image and tool_result'}.",
                    param=at,
                )
    said: dict[str, Any] = {"role": role, "content": chat_content(parts, lambda part, _: part)}
    said |= {"tool_calls": calls} if calls else {}
    said |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return [*results, said] if parts or calls or reasoning or not results else results


def _chat_part(block: Any, where: str) -> dict[str, Any]:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "url", **source}}:
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        case {"type": "image", "source": {"type": "base64", **source}}:
            return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}
    kind = block.get("type") if isinstance(block, dict) else None
    raise RequestError(f"{where} has a part of type {kind!r}; it has to be text, or an image as base64 or url.", param=where)


def _texts(content: Any, where: str) -> str | list[dict[str, Any]]:
    return chat_content(content, lambda block, _: _chat_part(block, where))


def offered_tools(tools: list[dict[str, Any]]) -> tuple[list[OfferedTool], list[str]]:
    """Return the functions among a request's tools, and a warning for each tool that is left out.

    Raises:
        RequestError: a tool has a schema that is built into the API's own models.
    """
    offered: list[OfferedTool] = []
    warnings: list[str] = []
    for index, tool in enumerate(tools):
        where, kind = f"tools[{index}]", tool.get("type") or "custom"
        if str(kind).startswith(_HOSTED):
            warnings.append(f"The tool {kind} is left out: Anthropic's own servers run it.")
            continue
        if kind != "custom":
            raise RequestError(
                f"{where} is of type {kind!r}, whose schema only the API's own models know: offer a tool with a name, a description "
                "and an input_schema.",
                param="tools",
            )
        check_function(tool.get("name"), tool.get("input_schema"), where, "input_schema")
        function = chat_function(tool["name"], tool.get("description"), tool.get("input_schema"), tool.get("strict"))
        offered.append(OfferedTool(tool["name"], function))
    return offered, warnings


def _refuse_other_edits(management: dict[str, Any]) -> None:
    """Raise a ``RequestError`` for edits of the history, except those that keep everything."""
    for edit in management.get("edits") or []:
        keep = edit.get("keep") if isinstance(edit, dict) else None
        if keep not in ("all", {"type": "all"}) or not str(edit.get("type")).startswith("clear_thinking_"):
            raise RequestError(
                f"context_management={management!r:.200} cannot be honoured: this server does not change the history, and accepts "
                "only clear_thinking with keep='all'. Leave the other edits out, or edit the messages.",
                param="context_management",
            )


def _chat_tool_choice(choice: dict[str, Any], tools: list[OfferedTool]) -> Any:
    match choice.get("type", "auto"):
        case "auto" | "none" as kind:
            return kind if tools else None
        case "any" if tools:
            return "required"
        case "tool" if choice.get("name") in [tool.name for tool in tools]:
            return {"type": "function", "function": {"name": choice["name"]}}
    raise refuse_tool_choice(
        choice, tools, "{'type': 'auto'}, {'type': 'none'}, {'type': 'any'}, or {'type': 'tool', 'name': …}"
    )


def _chat_format(given: Any) -> dict[str, Any] | None:
    match given:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise RequestError(
        f"output_config.format={given!r:.200} cannot be honoured: it has to be {{'type': 'json_schema', 'schema': {{…}}}}.",
        param="output_config.format",
    )


# -- routes --------------------------------------------------------------------------------------------------------------


async def create_message(protocol: ChatProtocol, request: Request) -> Response | dict[str, Any]:
    """``POST /v1/messages``."""
    return await serve(protocol, request, MessagesDialect)


async def count_message_tokens(protocol: ChatProtocol, request: Request) -> dict[str, int]:
    """``POST /v1/messages/count_tokens``."""
    return {"input_tokens": await count_tokens(protocol, request, MessagesDialect)}


#: Anthropic's clients add /v1 to their base_url, OpenAI's do not: an agent that is given one base_url reaches both.
MESSAGES_ROUTES = tuple(
    ("POST", f"{prefix}/messages{rest}", handler, MessagesBody)
    for prefix in ("/v1", "/v1/v1")
    for rest, handler in (("", create_message), ("/count_tokens", count_message_tokens))
)
