"""``/v1/responses``: OpenAI's Responses API as a dialect of chat.

Items are converted to chat messages and back. Answers are stored as chat messages, for ``previous_response_id`` and item
references.

The model sees a function in a namespace as ``namespace__function``; calls of it are returned with the two parts separate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from rollwright.inference.server.bodies import SAMPLING_OF_CHAT, Body
from rollwright.inference.server.dialects import (
    AnswerStore,
    ChatProtocol,
    Dialect,
    Event,
    OfferedTool,
    StoredAnswer,
    chat_content,
    chat_function,
    chat_tools,
    count_tokens,
    refuse_tool_choice,
    serve,
)
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.openai_answer import OpenAICall, usage_of
from rollwright.inference.server.prompts import check_function
from rollwright.inference.server.tool_calls import openai_tool_call

#: Types of tools that the API's own servers run.
_HOSTED = frozenset(
    [
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
        *("code_interpreter", "image_generation", "mcp", "tool_search", "programmatic_tool_calling"),
    ]
)


class ResponsesBody(Body):
    """``/v1/responses``. Parameters of the chat request that this API lacks (``top_k``, ``seed``, ``stop``, …) are accepted too."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    noun = "field of /v1/responses"
    ignored = frozenset(
        [
            "user",
            "metadata",
            "client_metadata",  # Codex: which turn the request belongs to
            "service_tier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "access_programs",
            "image",  # how images are compressed in transit
            "max_tool_calls",  # limits built-in tools, which this server does not have
            "stream_options",  # include_obfuscation
        ]
    )
    left_out: ClassVar[dict[str, str]] = {
        "moderation": "this server does not moderate",
        "personality": "chat templates do not support it",
    }
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "context_management": (([],), "this server does not compact the history"),
        "background": ((False,), "an answer is given at once"),
        "conversation": ((), "conversations are kept by previous_response_id"),
        "prompt": ((), "this server keeps no prompts"),
        "truncation": (("disabled",), "a history is not cut"),
        "n": ((1,), "a response is one sample"),
    }
    of_chat = SAMPLING_OF_CHAT - {"reasoning_effort"}
    renamed: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs, or include=['message.output_text.logprobs'],",
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


class ResponsesDialect(Dialect):
    """One call of ``/v1/responses``."""

    prefix = "resp_"
    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, protocol: ChatProtocol, body: dict[str, Any]) -> None:
        super().__init__(protocol)
        self.body = body
        self.fields = fields = ResponsesBody.of(body)
        previous = fields.previous_response_id
        before = stored_response(protocol.answers, previous) if previous else None
        items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
        new, places = messages_of(items, protocol.answers)
        #: The conversation without instructions, which do not apply to later responses.
        self.messages = [*(before.messages if before else []), *new]
        self.size_before = before.size if before else 0
        instructions = [{"role": "system", "content": fields.instructions}] if fields.instructions is not None else []
        earlier = len(self.messages) - len(new)
        self.places = ["instructions"] * len(instructions) + ["previous_response_id"] * earlier + places
        tools, self.warnings = offered_tools(fields.tools)
        self.warnings += fields.warnings
        for name, usual in (("context", (None, "auto")), ("mode", (None, "standard"))):
            if fields.reasoning.get(name) not in usual:
                self.warnings.append(
                    f"reasoning.{name} is left out: the model's chat template decides how much reasoning it shows."
                )
        self.tools = {tool.name: tool for tool in tools}
        self.chat = {
            **(fields.model_extra or {}),
            "messages": [*instructions, *self.messages],
            "stream": fields.stream,
            "tools": chat_tools(tools),
            "tool_choice": _chat_tool_choice(fields.tool_choice, tools),
            "max_completion_tokens": fields.max_output_tokens,
            "response_format": _chat_format(fields.text.get("format")),
            "reasoning_effort": fields.reasoning.get("effort"),
            "top_logprobs": fields.top_logprobs,
            "logprobs": True if fields.top_logprobs or "message.output_text.logprobs" in fields.include else None,
        }
        self.output: list[dict[str, Any]] = []
        self.logprobs: list[Any] = []
        self.events = 0

    # -- pieces ----------------------------------------------------------------------------------------------------------

    def start(self, call: OpenAICall) -> Iterator[Event]:
        self.call = call
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
        tool = self.tools.get(function["name"])
        own_name = {"name": function["name"]}
        if tool is not None and tool.namespace:
            own_name = {"name": tool.own_name, "namespace": tool.namespace}
        yield from self._add({"type": "function_call", "call_id": tool_call["id"], **own_name, "arguments": ""})
        yield self._at("response.function_call_arguments.delta", delta=function["arguments"])
        yield self._at("response.function_call_arguments.done", name=own_name["name"], arguments=function["arguments"])
        yield from self._done(arguments=function["arguments"])

    def end(self, call: OpenAICall) -> Iterator[Event]:
        status = "incomplete" if call.choices[0]["finish_reason"] == "length" else "completed"
        if status == "incomplete" and self.output[-1]["type"] == "message":
            self.output[-1]["status"] = status
        self.answer = self._response(status)
        if self.fields.store:
            self.protocol.answers.add([*self.messages, call.choices[0]["message"]], self.answer, self.size_before + self.size)
        yield self._event(f"response.{status}", response=self.answer)

    def failed(self, refusal: RequestError) -> Event:
        error = {"code": "server_error", "message": str(refusal)}
        return self._event("response.failed", response={**self._response("failed"), "error": error})

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        mark = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        self.output.append({"id": f"{mark}_{self.call.id}_{len(self.output)}", **item, "status": "in_progress"})
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _done(self, **values: Any) -> Iterator[Event]:
        self.output[-1] |= {**values, "status": "completed"}
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=dict(self.output[-1]))

    def _at(self, kind: str, **values: Any) -> Event:
        """Build an event of the newest item."""
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
            "tools": [
                {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool
                for tool in fields.tools
            ],
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


def stored_response(answers: AnswerStore, identifier: str, param: str = "previous_response_id") -> StoredAnswer:
    """Look up a stored response; ``param`` is the field that refers to it.

    Raises:
        RequestError: there is no such stored response (404).
    """
    if (found := answers.get(identifier)) is None:
        raise RequestError(
            f"There is no response {identifier!r} here: of responses with store=true, {answers.LIMITS}. Send the items "
            "of the conversation in input.",
            status=404,
            param=param,
        )
    return found


def _stored_item(answers: AnswerStore, identifier: Any, where: str) -> dict[str, Any]:
    for stored in answers.newest_first():
        for item in stored.answer.get("output", ()):
            if item["id"] == identifier:
                return item
    raise RequestError(f"{where} refers to {identifier!r}, which is not an item of a stored response.", status=404, param=where)


def messages_of(items: list[dict[str, Any]], answers: AnswerStore) -> tuple[list[dict[str, Any]], list[str]]:
    """Convert input items to chat messages. Consecutive reasoning, text and calls become one assistant message.

    Returns:
        The messages, and for each the location of its first item.

    Raises:
        RequestError: an item is malformed, or of a kind that the model cannot read.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []

    def assistant(name: str) -> dict[str, Any]:
        """Return the assistant message for the field ``name`` (content, reasoning_content or tool_calls), a new one if necessary."""
        last = messages[-1] if messages else {}
        later = {"reasoning_content": 0, "content": 1, "tool_calls": 2}
        in_order = all(later.get(key, -1) < later[name] or key == name == "tool_calls" for key in last)
        if last.get("role") != "assistant" or not in_order:
            messages.append({"role": "assistant"})
        return messages[-1]

    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.get("type") == "item_reference":
            item = _stored_item(answers, item.get("id"), where)
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant":
                assistant("content")["content"] = _content(item.get("content"), where)
            case "message":
                messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
            case "reasoning":
                content = _content(item.get("content") or item.get("summary") or [], where)
                assistant("reasoning_content")["reasoning_content"] = content
            case "function_call":
                name = _shown_name(item.get("namespace"), item.get("name"))
                call = openai_tool_call(item.get("call_id", ""), name, item.get("arguments", ""))
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
        places += [where] * (len(messages) - len(places))
    return messages, places


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    def convert(part: Any, index: int) -> dict[str, Any]:
        match part:
            case {"type": "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text", "text": str(text)}:
                return {"type": "text", "text": text}
            case {"type": "refusal"}:
                return {"type": "text", "text": part.get("refusal", "")}
            case {"type": "input_image", "image_url": str(url)}:
                return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}}
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(
            f"{where}.content[{index}] is of type {kind!r}; it has to be input_text, output_text, or input_image with an "
            "image_url.",
            param=f"{where}.content",
        )

    return chat_content(content, convert)


def _shown_name(namespace: Any, name: Any) -> Any:
    """Return the name under which the model sees a function."""
    return f"{namespace}__{name}" if namespace else name


def offered_tools(tools: list[dict[str, Any]]) -> tuple[list[OfferedTool], list[str]]:
    """Return the functions among a request's tools, and a warning for each tool that is left out.

    A namespace's description is prepended to the description of its first function.

    Raises:
        RequestError: a tool runs on the client but is not a function.
    """
    offered: list[OfferedTool] = []
    warnings: list[str] = []
    for index, tool in enumerate(tools):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind in _HOSTED:
            warnings.append(f"The tool {kind} is left out: OpenAI's own servers run it.")
        elif kind == "namespace":
            name, inside = tool.get("name"), tool.get("tools")
            if not name or not isinstance(name, str) or not isinstance(inside, list):
                raise RequestError(f"{where} has to be a namespace with a name and a list of tools.", param="tools")
            about = tool.get("description") or ""
            offered += [
                _offered(each, f"{where}.tools[{number}]", name, "" if number else about) for number, each in enumerate(inside)
            ]
        else:
            offered.append(_offered(tool, where))
    return offered, warnings


def _offered(tool: Any, where: str, namespace: str = "", about: str = "") -> OfferedTool:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if kind != "function":
        raise RequestError(
            f"{where} is of type {kind!r}, which chat templates do not support: offer it as a function with parameters.",
            param="tools",
        )
    parameters = tool.get("parameters")
    name = check_function(tool.get("name"), parameters, where, "parameters")
    shown = _shown_name(namespace, name)
    described = "\n\n".join(text for text in (about, tool.get("description")) if text)
    function = chat_function(shown, described or None, parameters, tool.get("strict"))
    return OfferedTool(shown, function, namespace, name)


def _chat_tool_choice(choice: str | dict[str, Any], tools: list[OfferedTool]) -> Any:
    match choice:
        case "auto" | "none":
            return choice if tools else None
        case "required" if tools:
            return choice
        case {"type": "function", "name": name}:
            wanted = choice.get("namespace") or ""
            named = [tool for tool in tools if name in (tool.own_name, tool.name) and wanted in ("", tool.namespace)]
            if len(named) == 1:
                return {"type": "function", "function": {"name": named[0].name}}
    raise refuse_tool_choice(choice, tools, "auto, none, required, or {'type': 'function', 'name': …}")


def _chat_format(given: Any) -> Any:
    match given:
        case None | {"type": "text" | "json_object"}:
            return given
        case {"type": "json_schema", "schema": dict(), **rest}:
            return {"type": "json_schema", "json_schema": {"schema": given["schema"], **rest}}
    raise RequestError(
        f"text.format={given!r:.200} cannot be honoured: it has to be {{'type': 'text'}}, {{'type': 'json_object'}} or "
        "{'type': 'json_schema', 'name': …, 'schema': {…}}.",
        param="text.format",
    )


# -- routes --------------------------------------------------------------------------------------------------------------


async def create_response(protocol: ChatProtocol, request: Request) -> Response | dict[str, Any]:
    """``POST /v1/responses``."""
    return await serve(protocol, request, ResponsesDialect)


async def count_input_tokens(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``POST /v1/responses/input_tokens``: the number of prompt tokens."""
    return {"object": "response.input_tokens", "input_tokens": await count_tokens(protocol, request, ResponsesDialect)}


async def get_response(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``GET /v1/responses/ID``."""
    return stored_response(protocol.answers, request.path_params["id"], "response_id").answer


async def delete_response(protocol: ChatProtocol, request: Request) -> dict[str, Any]:
    """``DELETE /v1/responses/ID``."""
    stored_response(protocol.answers, request.path_params["id"], "response_id")
    protocol.answers.delete(request.path_params["id"])
    return {"id": request.path_params["id"], "object": "response", "deleted": True}


RESPONSES_ROUTES = (
    ("POST", "/v1/responses", create_response, ResponsesBody),
    ("POST", "/v1/responses/input_tokens", count_input_tokens, ResponsesBody),
    ("GET", "/v1/responses/{id}", get_response, None),
    ("DELETE", "/v1/responses/{id}", delete_response, None),
)
