"""Dialects of chat: how a request in another protocol becomes a chat request, and how its answer is written from the chat's.

One prompt, one sampler and one recorder serve every dialect, so a conversation may go from one to the other. An answer that is
sent whole is written from the same pieces as one that is streamed.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, ClassVar, Protocol

from fastapi import Request, Response

from rollwright.inference.server.exchange import RequestError, as_request_error, event_stream, read_object
from rollwright.inference.server.openai_answer import OpenAICall
from rollwright.inference.server.prompts import Prompts

Event = dict[str, Any]


class ChatProtocol(Protocol):
    """What a dialect needs of the protocol that serves chats."""

    tokenizer: Any
    model_name: str
    responses: Any  #: what ``/v1/responses`` keeps

    async def open_chat(self, request: Request, chat: dict[str, Any], size: int, prefix: str) -> OpenAICall: ...

    async def complete(self, request: Request, call: OpenAICall) -> None: ...

    def chunks(self, call: OpenAICall) -> AsyncGenerator[dict[str, Any], None]: ...

    async def read_prompts(self, request: Request, endpoint: str, fields: dict[str, Any], size: int) -> Prompts: ...


class Dialect(ABC):
    """One call: ``chat`` is the chat request that it makes, and its pieces become events and, at the end, an answer.

    A reply comes in pieces of one kind after another: ``reasoning``, ``text``, and whole tool calls.
    """

    prefix: ClassVar[str]  #: what the ids of answers begin with
    chat: dict[str, Any]
    size = 0  #: bytes of the request

    def __init__(self) -> None:
        self.kind, self.text = "", ""  # of the piece that grows
        self.has_piece = False

    @abstractmethod
    def start(self, call: OpenAICall) -> Iterator[Event]:
        """The engine has taken the request."""

    @abstractmethod
    def open_piece(self, kind: str) -> Iterator[Event]:
        """A piece of reasoning or text begins."""

    @abstractmethod
    def grow(self, kind: str, more: str, logprobs: list[Any]) -> Iterator[Event]:
        """The piece goes on."""

    @abstractmethod
    def close_piece(self, kind: str, text: str) -> Iterator[Event]:
        """The piece has ended with this text."""

    @abstractmethod
    def tool_call(self, tool_call: dict[str, Any]) -> Iterator[Event]:
        """A whole tool call, in the chat's form."""

    @abstractmethod
    def end(self, call: OpenAICall) -> Iterator[Event]:
        """The reply is complete, and all its pieces are closed."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def failed(self, refusal: RequestError) -> Iterator[Event]:
        """What is sent where a reply that has begun cannot be completed."""

    def push(self, choice: dict[str, Any]) -> Iterator[Event]:
        """Take a chat's choice, or what a chunk adds to it (its ``delta``)."""
        delta: dict[str, Any] = choice["delta"] if "delta" in choice else choice["message"]
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        for kind, name in (("reasoning", "reasoning_content"), ("text", "content")):
            if more := delta.get(name):
                if self.kind != kind:
                    yield from self._close()
                    self.kind, self.has_piece = kind, True
                    yield from self.open_piece(kind)
                self.text += more
                yield from self.grow(kind, more, logprobs if kind == "text" else [])
        for tool_call in delta.get("tool_calls") or []:
            yield from self._close()
            self.has_piece = True
            yield from self.tool_call(tool_call)

    def finish(self, call: OpenAICall) -> Iterator[Event]:
        """Close what is open; a reply of nothing is an empty text."""
        if not self.has_piece:
            self.kind = "text"
            yield from self.open_piece("text")
        yield from self._close()
        yield from self.end(call)

    def _close(self) -> Iterator[Event]:
        kind, text, self.kind, self.text = self.kind, self.text, "", ""
        if kind:
            yield from self.close_piece(kind, text)


async def serve(
    protocol: ChatProtocol, request: Request, make: Callable[[ChatProtocol, dict[str, Any]], Dialect]
) -> Response | dict[str, Any]:
    """Answer a request of a dialect."""
    body, size = await read_object(request)
    dialect = make(protocol, body)
    dialect.size = size
    call = await protocol.open_chat(request, dialect.chat, size, dialect.prefix)
    if body.get("stream"):
        return await event_stream(request, _events(protocol, dialect, call))
    await protocol.complete(request, call)
    for events in (dialect.start(call), dialect.push(call.choices[0]), dialect.finish(call)):
        for _ in events:
            pass
    return dialect.answer()


async def _events(protocol: ChatProtocol, dialect: Dialect, call: OpenAICall) -> AsyncGenerator[str, None]:
    has_begun = False
    try:
        async with contextlib.aclosing(protocol.chunks(call)) as chunks:
            async for chunk in chunks:
                if not has_begun:
                    has_begun = True
                    for event in dialect.start(call):
                        yield _line(event)
                for event in dialect.push(chunk["choices"][0]):
                    yield _line(event)
        for event in dialect.finish(call):
            yield _line(event)
    except Exception as error:  # of the engine or of on_call: whatever it is, the client is told
        if not has_begun:
            raise  # nothing was sent: the request gets a status
        for event in dialect.failed(as_request_error(error)):
            yield _line(event)


def _line(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def object_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call as an object; what is no JSON object stays as its text under an empty name."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"": text}


def text_or_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a chat message: one text where all parts are texts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
