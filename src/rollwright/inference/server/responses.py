"""``/v1/responses``: OpenAI's Responses API as a dialect of chat.

Items become messages and messages items. What is kept of an answer, so that ``previous_response_id`` and item references find
it, is a chat's messages: the newest thousand answers of this server, or of the run at the front, up to 64 MiB.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from rollwright.inference.server.bodies import Body
from rollwright.inference.server.dialects import ChatProtocol, Dialect, Event, serve, text_or_parts
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.openai_answer import OpenAICall, usage_of

#: Answers that are kept for ``previous_response_id``, and the bytes that their conversations may have together.
KEPT_RESPONSES, KEPT_BYTES = 1000, 64 << 20


class ResponsesBody(Body):
    """``/v1/responses``. What is no field of this API (``top_k``, ``seed``, ``stop``, …) is one of the chat request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    noun = "field of /v1/responses"
    ignored = frozenset(
        [
            "user",
            "metadata",
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "max_tool_calls",  # of built-in tools, which this server has not
            "stream_options",  # include_obfuscation
        ]
    )
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "background": ((False,), "an answer is given at once"),
        "conversation": ((), "conversations are kept by previous_response_id"),
        "prompt": ((), "this server keeps no prompts"),
        "truncation": (("disabled",), "a history is not cut"),
        "n": ((1,), "a response is one sample"),
    }

    input: str | list[dict[str, Any]] = Field([], description="text, or a list of items")
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] = Field([])
    tool_choice: str | dict[str, Any] = "auto"
    top_logprobs: int | None = None
    text: dict[str, Any] = Field({})
    reasoning: dict[str, Any] = Field({})
    include: list[str] = Field([])
    store: bool = True
    stream: bool = False


class KeptResponse(NamedTuple):
    """An answer with the chat's messages up to it and its own; ``size`` is the bytes of the whole conversation as JSON."""

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    size: int


class KeptResponses:
    """Answers by their ids."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._size = 0

    def keep(self, messages: list[dict[str, Any]], answer: dict[str, Any], size: int = 0) -> None:
        """Keep an answer behind ``size`` bytes of messages; the oldest above the limits go, and an answer that is above them."""
        size += len(json.dumps(answer["output"]))
        self._kept[answer["id"]] = KeptResponse(messages, answer, size)
        self._size += size
        while self._kept and (len(self._kept) > KEPT_RESPONSES or self._size > KEPT_BYTES):
            self._size -= self._kept.popitem(last=False)[1].size

    def find(self, identifier: str, param: str = "previous_response_id") -> KeptResponse:
        """What is kept by an id.

        Raises:
            RequestError: there is nothing (404).
        """
        if identifier not in self._kept:
            raise RequestError(
                f"There is no response {identifier!r} here: the newest {KEPT_RESPONSES} that were made with store=true are kept, up "
                f"to {KEPT_BYTES >> 20} MiB. Send the items of the conversation in input.",
                status=404,
                param=param,
            )
        return self._kept[identifier]

    def item(self, identifier: Any, where: str) -> dict[str, Any]:
        """An output item by its id.

        Raises:
            RequestError: there is none (404).
        """
        items = (item for kept in reversed(self._kept.values()) for item in kept.answer["output"])
        found = next((item for item in items if item["id"] == identifier), None)
        if found is None:
            raise RequestError(
                f"{where} refers to {identifier!r}, which is no item of a kept response.", status=404, param=where
            )
        return found

    def delete(self, identifier: str) -> None:
        """Forget an answer.

        Raises:
            RequestError: there is none (404).
        """
        self._size -= self.find(identifier, "response_id").size
        del self._kept[identifier]


class ResponsesDialect(Dialect):
    """One call of ``/v1/responses``."""

    prefix = "resp_"

    def __init__(self, protocol: ChatProtocol, body: dict[str, Any]) -> None:
        super().__init__()
        self.protocol, self.body, self.fields = protocol, body, ResponsesBody.of(body)
        fields = self.fields
        before = protocol.responses.find(fields.previous_response_id) if fields.previous_response_id else None
        items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
        #: The conversation without its instructions, which are not carried over.
        self.messages = [*(before.messages if before else []), *messages_of(items, protocol.responses)]
        self.size_before = before.size if before else 0
        instructions = [{"role": "system", "content": fields.instructions}] if fields.instructions is not None else []
        self.chat = {
            **(fields.model_extra or {}),
            "messages": [*instructions, *self.messages],
            "stream": fields.stream,
            "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)] or None,
            "tool_choice": _chat_tool_choice(fields.tool_choice) if fields.tools else None,
            "max_completion_tokens": fields.max_output_tokens,
            "response_format": _chat_format(fields.text.get("format")),
            "top_logprobs": fields.top_logprobs,
            "logprobs": True if fields.top_logprobs or "message.output_text.logprobs" in fields.include else None,
        }
        self.output: list[dict[str, Any]] = []
        self.events = 0

    # -- pieces ----------------------------------------------------------------------------------------------------------

    def start(self, call: OpenAICall) -> Iterator[Event]:
        self.call = call
        self.logprobs: list[Any] = []
        for event in ("created", "in_progress"):
            yield self._event(f"response.{event}", response=self._response("in_progress"))

    def open_piece(self, kind: str) -> Iterator[Event]:
        if kind == "text":
            self.logprobs = []
            item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item, part = {"type": "reasoning", "summary": [], "content": []}, {"type": "reasoning_text", "text": ""}
        yield from self._add(item)
        yield self._at("response.content_part.added", content_index=0, part=part)

    def grow(self, kind: str, more: str, logprobs: list[Any]) -> Iterator[Event]:
        if kind == "reasoning":
            yield self._at("response.reasoning_text.delta", content_index=0, delta=more)
            return
        self.logprobs += logprobs
        yield self._at("response.output_text.delta", content_index=0, delta=more, logprobs=logprobs)

    def close_piece(self, kind: str, text: str) -> Iterator[Event]:
        if kind == "reasoning":
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            yield self._at("response.reasoning_text.done", content_index=0, text=text)
        else:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}
            yield self._at("response.output_text.done", content_index=0, text=text, logprobs=self.logprobs)
        yield self._at("response.content_part.done", content_index=0, part=part)
        yield from self._done(content=[part])

    def tool_call(self, tool_call: dict[str, Any]) -> Iterator[Event]:
        function = tool_call["function"]
        item = {"type": "function_call", "call_id": tool_call["id"], "name": function["name"], "arguments": ""}
        yield from self._add(item)
        yield self._at("response.function_call_arguments.delta", delta=function["arguments"])
        yield self._at("response.function_call_arguments.done", name=function["name"], arguments=function["arguments"])
        yield from self._done(arguments=function["arguments"])

    def end(self, call: OpenAICall) -> Iterator[Event]:
        status = "incomplete" if call.choices[0]["finish_reason"] == "length" else "completed"
        if status == "incomplete" and self.output[-1]["type"] == "message":
            self.output[-1]["status"] = status
        response = self._response(status)
        if self.fields.store:
            self.protocol.responses.keep([*self.messages, call.choices[0]["message"]], response, self.size_before + self.size)
        yield self._event(f"response.{status}", response=response)
        self._whole = response

    def answer(self) -> dict[str, Any]:
        return self._whole

    def failed(self, refusal: RequestError) -> Iterator[Event]:
        error = {"code": "server_error", "message": str(refusal)}
        yield self._event("response.failed", response={**self._response("failed"), "error": error})

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        mark = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        self.output.append({"id": f"{mark}_{self.call.id}_{len(self.output)}", **item, "status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _done(self, **values: Any) -> Iterator[Event]:
        self.output[-1] |= {**values, "status": "completed"}
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _at(self, kind: str, **values: Any) -> Event:
        """An event of the newest item."""
        return self._event(kind, output_index=len(self.output) - 1, item_id=self.output[-1]["id"], **values)

    def _event(self, kind: str, **values: Any) -> Event:
        self.events += 1
        return {"type": kind, "sequence_number": self.events - 1, **values}

    def _response(self, status: str) -> dict[str, Any]:
        fields, gconfig = self.fields, self.call.requests[0].gconfig
        return {
            "id": self.call.answer_id,
            "object": "response",
            "created_at": int(self.call.started),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": self.body.get("metadata") or {},
            "model": self.protocol.model_name,
            "output": list(self.output),
            "parallel_tool_calls": self.chat.get("parallel_tool_calls") is not False,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **fields.reasoning},
            "store": fields.store,
            "temperature": gconfig.temperature,
            "text": {"format": {"type": "text"}, **fields.text},
            "tool_choice": fields.tool_choice,
            "tools": [{"parameters": None, "strict": None, **tool} for tool in fields.tools],
            "top_p": gconfig.top_p,
            "truncation": "disabled",
            "usage": _usage(self.call) if status in ("completed", "incomplete") else None,
        }


def _usage(call: OpenAICall) -> dict[str, Any]:
    usage = usage_of(call)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }


# -- requests ------------------------------------------------------------------------------------------------------------


def messages_of(items: list[dict[str, Any]], kept: KeptResponses) -> list[dict[str, Any]]:
    """The chat's messages of input items. Reasoning, text and calls that follow one another are one message of the assistant.

    Raises:
        RequestError: an item is malformed, or of a kind that the model cannot see.
    """
    messages: list[dict[str, Any]] = []

    def assistant(name: str) -> dict[str, Any]:
        """The message of the assistant that ``name`` (content, reasoning_content or tool_calls) goes into."""
        last = messages[-1] if messages else {}
        later = {"reasoning_content": 0, "content": 1, "tool_calls": 2}
        in_order = all(later.get(key, -1) < later[name] or key == name == "tool_calls" for key in last)
        if last.get("role") != "assistant" or not in_order:
            messages.append({"role": "assistant"})
        return messages[-1]

    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.get("type") == "item_reference":
            item = kept.item(item.get("id"), where)
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                assistant("content")["content"] = _content(item.get("content"), where)
            case "message":
                messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                assistant("reasoning_content")["reasoning_content"] = _content(parts, where)
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
                call = {"id": item.get("call_id", ""), "type": "function", "function": function}
                assistant("tool_calls").setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _content(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id", ""), "content": content})
            case kind:
                raise RequestError(
                    f"{where} is of type {kind!r}; items are message, reasoning, function_call, function_call_output and "
                    "item_reference: this server has no tools of its own.",
                    param=where,
                )
    return messages


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in ("input_text", "output_text", "text", "reasoning_text", "summary_text") and isinstance(
            part.get("text"), str
        ):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal", "")})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            image = {"url": part["image_url"], "detail": part.get("detail") or "auto"}
            parts.append({"type": "image_url", "image_url": image})
        else:
            raise RequestError(
                f"{where}.content[{index}] is of type {kind!r}; it has to be input_text, output_text, or input_image with an "
                "image_url.",
                param=f"{where}.content",
            )
    return text_or_parts(parts)


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"{where} is of type {tool.get('type')!r}; this server has no tools but functions.", param="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice  # what is none of the known is refused by the chat


def _chat_format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


# -- routes --------------------------------------------------------------------------------------------------------------


async def create_response(protocol: ChatProtocol, request: Request) -> Response | dict[str, Any]:
    """``POST /v1/responses``."""
    return await serve(protocol, request, ResponsesDialect)


async def get_response(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``GET /v1/responses/ID``."""
    return protocol.responses.find(request.path_params["id"], "response_id").answer


async def delete_response(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``DELETE /v1/responses/ID``."""
    protocol.responses.delete(request.path_params["id"])
    return {"id": request.path_params["id"], "object": "response", "deleted": True}


RESPONSES_ROUTES = (
    ("POST", "/v1/responses", create_response, ResponsesBody),
    ("GET", "/v1/responses/{id}", get_response, None),
    ("DELETE", "/v1/responses/{id}", delete_response, None),
)
