"""Dialects of chat: how a request in another protocol becomes a chat request, and how its answer is written from the chat's.

One prompt, one sampler and one recorder serve every dialect, so a conversation may go from one to the other. An answer that is
sent whole is written from the same pieces as one that is streamed.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from fastapi import Request, Response

from rollwright.inference.server.bodies import Chat
from rollwright.inference.server.exchange import RequestError, as_request_error, event_stream, read_object
from rollwright.inference.server.openai_answer import CHAT, OpenAICall
from rollwright.inference.server.prompts import Prompts

Event = dict[str, Any]

#: A chat's message in a refusal, and what of it is meant.
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.\w+(?:\[\d+\])?)*")


class ChatProtocol(Protocol):
    """What a dialect needs of the protocol that serves chats."""

    tokenizer: Any
    model_name: str
    kept: KeptAnswers

    async def open_chat(
        self, request: Request, chat: dict[str, Any], size: int, prefix: str, warnings: Sequence[str]
    ) -> OpenAICall: ...

    async def complete(self, request: Request, call: OpenAICall) -> None: ...

    def chunks(self, call: OpenAICall) -> AsyncGenerator[dict[str, Any], None]: ...

    async def read_prompts(self, request: Request, endpoint: str, fields: dict[str, Any], size: int) -> Prompts: ...


class KeptAnswer(NamedTuple):
    """A stored answer and its conversation.

    Attributes:
        messages: the chat's messages; the last is the answer's.
        answer: the answer as sent.
        size: bytes of the whole conversation as JSON.
        fixed: fields of the first request that apply to the whole conversation.
    """

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    size: int
    fixed: dict[str, Any]


class KeptAnswers:
    """The newest answers by id, so that a request can continue from one without resending the conversation."""

    #: Most answers kept, and most bytes of their conversations together.
    MOST, BYTES = 1000, 64 << 20
    #: The same in words.
    LIMITS = f"the newest {MOST} are kept, up to {BYTES >> 20} MiB"

    def __init__(self) -> None:
        self._kept: OrderedDict[str, KeptAnswer] = OrderedDict()
        self._size = 0

    def keep(
        self, messages: list[dict[str, Any]], answer: dict[str, Any], size: int = 0, fixed: dict[str, Any] | None = None
    ) -> None:
        """Keep an answer to ``size`` bytes of messages. The oldest are dropped above the limits; an answer over them is not kept."""
        size += len(json.dumps(answer))
        self._kept[answer["id"]] = KeptAnswer(messages, answer, size, fixed or {})
        self._size += size
        while self._kept and (len(self._kept) > self.MOST or self._size > self.BYTES):
            self._size -= self._kept.popitem(last=False)[1].size

    def get(self, identifier: Any) -> KeptAnswer | None:
        """Look up an answer by id; None if it is not kept."""
        return self._kept.get(identifier) if isinstance(identifier, str) else None

    def newest_first(self) -> Iterable[KeptAnswer]:
        """All kept answers, newest first."""
        return reversed(self._kept.values())

    def forget(self, identifier: str) -> None:
        """Drop a kept answer."""
        self._size -= self._kept.pop(identifier).size


class Dialect(ABC):
    """One call of another API, translated to the chat request ``chat`` and back into that API's events and answer.

    A reply arrives in pieces of one kind at a time: ``reasoning``, ``text``, and whole tool calls.

    Attributes:
        chat: the translated chat request.
        places: the field of the dialect's request that each chat message came from.
        warnings: parts of the request that were left out.
        size: bytes of the request.
    """

    prefix: ClassVar[str]  #: what the ids of answers begin with
    names: ClassVar[dict[str, str]] = {}  #: chat field -> the field of this API that it comes from
    chat: dict[str, Any]
    size = 0

    def __init__(self) -> None:
        self.places: list[str] = []
        self.warnings: list[str] = []
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

    def in_its_words(self, refusal: RequestError) -> RequestError:
        """Reword a refusal of the chat request with the field names of this dialect's API."""
        param = refusal.param or ""
        if _MESSAGE.match(param):
            moved = _MESSAGE.sub(lambda match: self.places[int(match[1])], f"{param}\0{refusal}")
            refusal.param, _, said = moved.partition("\0")
        else:
            refusal.param = self.names.get(param, param)
            said = str(refusal).replace(param, refusal.param) if param else str(refusal)
        refusal.args = (said,)
        return refusal

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
    try:
        call = await protocol.open_chat(request, dialect.chat, size, dialect.prefix, dialect.warnings)
    except RequestError as refusal:
        raise dialect.in_its_words(refusal) from None
    if body.get("stream"):
        return await event_stream(request, _events(protocol, dialect, call))
    await protocol.complete(request, call)
    for events in (dialect.start(call), dialect.push(call.choices[0]), dialect.finish(call)):
        for _ in events:
            pass
    return dialect.answer()


async def count_tokens(
    protocol: ChatProtocol, request: Request, make: Callable[[ChatProtocol, dict[str, Any]], Dialect]
) -> int:
    """Number of prompt tokens of a dialect's request; nothing is sampled."""
    body, size = await read_object(request)
    dialect = make(protocol, body)
    try:
        prompts = await protocol.read_prompts(request, CHAT, Chat.of(dialect.chat).given(), size)
    except RequestError as refusal:
        raise dialect.in_its_words(refusal) from None
    return len(prompts.ids[0])


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


class OfferedTool(NamedTuple):
    """A tool of a request, in the chat's form.

    Attributes:
        name: the name that the model sees.
        function: ``function`` field of the chat's tool.
        namespace: its namespace, in dialects that have them; empty if none.
        own_name: its name in the namespace.
    """

    name: str
    function: dict[str, Any]
    namespace: str = ""
    own_name: str = ""


def chat_tools(tools: Sequence[OfferedTool], param: str = "tools") -> list[dict[str, Any]] | None:
    """Tools in the chat's form; None if there are none.

    Raises:
        RequestError: two tools have the same name.
    """
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{param} has two tools named {twice!r}; give each its own name.", param=param)
    return [{"type": "function", "function": tool.function} for tool in tools] or None


def refuse_tool_choice(given: Any, tools: Iterable[str], forms: str) -> RequestError:
    """Error for a ``tool_choice`` that has none of the ``forms`` or requests a tool that is not offered."""
    offered = ", ".join(tools) or "(none)"
    said = f"tool_choice={given!r:.200} cannot be honoured with the tools {offered}: use {forms} with the name of one of them."
    return RequestError(said, param="tool_choice")


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
