"""Dialects of chat: other chat APIs, translated to OpenAI chat requests and back.

All dialects share the prompt rendering, the sampler and the recorder, so a conversation may switch between dialects. Complete and
streamed answers are built from the same events.
"""

from __future__ import annotations

import contextlib
import itertools
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

#: Location of a chat message, or of a part of one, in an error message.
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.\w+(?:\[\d+\])?)*")


class ChatProtocol(Protocol):
    """The part of ``OpenAIProtocol`` that dialects use."""

    tokenizer: Any
    model_name: str
    answers: AnswerStore

    async def open_call(
        self, request: Request, endpoint: str, body: dict[str, Any], size: int, prefix: str, warnings: Sequence[str] = ()
    ) -> OpenAICall: ...

    async def complete(self, request: Request, call: OpenAICall) -> None: ...

    def chunks(self, call: OpenAICall) -> AsyncGenerator[dict[str, Any], None]: ...

    async def read_prompts(self, request: Request, endpoint: str, fields: dict[str, Any], size: int) -> Prompts: ...


class StoredAnswer(NamedTuple):
    """An answer and its conversation.

    Attributes:
        messages: the chat's messages; the last one is the answer.
        answer: the answer as it was sent.
        size: bytes of the whole conversation as JSON.
        fixed: fields of the first request that apply to the whole conversation.
    """

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    size: int
    fixed: dict[str, Any]


class AnswerStore:
    """The newest answers by id, so that a request can continue a conversation without sending it again."""

    #: Maximum number of answers, and of bytes of their conversations together.
    MOST, BYTES = 1000, 64 << 20
    #: The same in words.
    LIMITS = f"the newest {MOST} are kept, up to {BYTES >> 20} MiB"

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredAnswer] = OrderedDict()
        self._size = 0

    def add(
        self, messages: list[dict[str, Any]], answer: dict[str, Any], size: int = 0, fixed: dict[str, Any] | None = None
    ) -> None:
        """Store an answer, and drop the oldest ones above the limits. An answer that is larger than the limit is not stored.

        Args:
            messages: the conversation, including the answer.
            answer: the answer as it was sent.
            size: bytes of the conversation without the answer.
            fixed: fields of the request that apply to the whole conversation.
        """
        size += len(json.dumps(answer))
        self._stored[answer["id"]] = StoredAnswer(messages, answer, size, fixed or {})
        self._size += size
        while self._stored and (len(self._stored) > self.MOST or self._size > self.BYTES):
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, identifier: Any) -> StoredAnswer | None:
        """Look up an answer by id. Returns None if it is not stored."""
        return self._stored.get(identifier) if isinstance(identifier, str) else None

    def newest_first(self) -> Iterable[StoredAnswer]:
        """Return all stored answers, newest first."""
        return reversed(self._stored.values())

    def delete(self, identifier: str) -> None:
        """Delete a stored answer."""
        self._size -= self._stored.pop(identifier).size


class Dialect(ABC):
    """One call of another API. The request is translated to ``chat``, and the reply to that API's events and ``answer``.

    A reply consists of pieces: reasoning, text, and tool calls. Reasoning and text grow; a tool call arrives whole.

    Args:
        protocol: serves the chat request.

    Attributes:
        chat: the translated chat request.
        answer: the complete answer; available after ``end``.
        places: for each chat message, the field of the dialect's request that it came from.
        warnings: descriptions of the parts of the request that were left out.
        size: bytes of the request.
    """

    prefix: ClassVar[str]  #: prefix of the ids of answers
    names: ClassVar[dict[str, str]] = {}  #: chat field -> the field of this API that it comes from
    chat: dict[str, Any]
    answer: dict[str, Any]
    size = 0

    def __init__(self, protocol: ChatProtocol) -> None:
        self.protocol = protocol
        self.places: list[str] = []
        self.warnings: list[str] = []
        self.kind, self.text = "", ""  # of the open piece
        self.has_piece = False

    @abstractmethod
    def start(self, call: OpenAICall) -> Iterator[Event]:
        """Yield the first events, after the engine has accepted the request."""

    @abstractmethod
    def open_piece(self, kind: str) -> Iterator[Event]:
        """Yield the events that open a piece of reasoning or text."""

    @abstractmethod
    def grow(self, kind: str, more: str, logprobs: list[Any]) -> Iterator[Event]:
        """Yield the events that append ``more`` to the open piece."""

    @abstractmethod
    def close_piece(self, kind: str, text: str) -> Iterator[Event]:
        """Yield the events that close the open piece, whose whole text is ``text``."""

    @abstractmethod
    def tool_call(self, tool_call: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a tool call, which is given in the form of OpenAI chat."""

    @abstractmethod
    def end(self, call: OpenAICall) -> Iterator[Event]:
        """Set ``answer`` and yield the last events; all pieces are closed."""

    @abstractmethod
    def failed(self, refusal: RequestError) -> Event:
        """Build the last event of a stream that cannot be completed."""

    @contextlib.contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Rewrite errors about the chat request to use the field names of this dialect's API."""
        try:
            yield
        except RequestError as refusal:
            param = refusal.param or ""
            if _MESSAGE.match(param):
                moved = _MESSAGE.sub(lambda match: self.places[int(match[1])], f"{param}\0{refusal}")
                refusal.param, _, said = moved.partition("\0")
            else:
                refusal.param = self.names.get(param, param)
                said = str(refusal).replace(param, refusal.param) if param else str(refusal)
            refusal.args = (said,)
            raise

    def push(self, choice: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a chat's choice, or of the ``delta`` that a chunk adds to it."""
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
        """Close the open piece and end the reply; an empty reply gets one empty piece of text."""
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
    """Answer a request in the dialect that ``make`` creates."""
    body, size = await read_object(request)
    dialect = make(protocol, body)
    dialect.size = size
    with dialect.in_its_words():
        call = await protocol.open_call(request, CHAT, dialect.chat, size, dialect.prefix, dialect.warnings)
    if body.get("stream"):
        return await event_stream(
            request, _events(protocol, dialect, call), lambda error: _line(dialect.failed(as_request_error(error)))
        )
    await protocol.complete(request, call)
    for _ in itertools.chain(dialect.start(call), dialect.push(call.choices[0]), dialect.finish(call)):
        pass  # the events build the answer
    return dialect.answer


async def count_tokens(
    protocol: ChatProtocol, request: Request, make: Callable[[ChatProtocol, dict[str, Any]], Dialect]
) -> int:
    """Count the prompt tokens of a dialect's request without sampling."""
    body, size = await read_object(request)
    dialect = make(protocol, body)
    with dialect.in_its_words():
        prompts = await protocol.read_prompts(request, CHAT, Chat.of(dialect.chat).given(), size)
    return len(prompts.ids[0])


async def _events(protocol: ChatProtocol, dialect: Dialect, call: OpenAICall) -> AsyncGenerator[str, None]:
    opening: Iterable[Event] = dialect.start(call)  # sent with the first chunk: errors before it get a status
    async with contextlib.aclosing(protocol.chunks(call)) as chunks:
        async for chunk in chunks:
            for event in itertools.chain(opening, dialect.push(chunk["choices"][0])):
                yield _line(event)
            opening = ()
    for event in dialect.finish(call):
        yield _line(event)


def _line(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


class OfferedTool(NamedTuple):
    """A tool of a request.

    Attributes:
        name: the name that the model sees.
        function: the ``function`` field of the tool in a chat request.
        namespace: namespace of the tool, in dialects that have them; empty if none.
        own_name: name of the tool within its namespace.
    """

    name: str
    function: dict[str, Any]
    namespace: str = ""
    own_name: str = ""


def chat_tools(tools: Sequence[OfferedTool], param: str = "tools") -> list[dict[str, Any]] | None:
    """Convert tools to the form of OpenAI chat. Returns None if there are none.

    Raises:
        RequestError: two tools have the same name.
    """
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{param} has two tools named {twice!r}; give each its own name.", param=param)
    return [{"type": "function", "function": tool.function} for tool in tools] or None


def chat_function(name: str, description: Any, parameters: Any, strict: Any) -> dict[str, Any]:
    """Build the ``function`` field of a tool in a chat request, without fields that are None."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {key: value for key, value in given.items() if value is not None}


def refuse_tool_choice(given: Any, tools: Sequence[OfferedTool], forms: str) -> RequestError:
    """Build the error for a ``tool_choice`` that has none of the ``forms``, or that requests a tool that is not offered."""
    offered = ", ".join(tool.name for tool in tools) or "(none)"
    return RequestError(
        f"tool_choice={given!r:.200} cannot be honoured with the tools {offered}: use {forms} with the name of one of them.",
        param="tool_choice",
    )


def object_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a tool call; text that is not a JSON object is returned under an empty name."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"": text}


def chat_content(content: Any, convert: Callable[[Any, int], dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Build the content of a chat message: one string if all parts are text, else the list of parts.

    Args:
        content: a string, a part or a list of parts in the form of the dialect.
        convert: ``(part, index) -> part of a chat message``.
    """
    if isinstance(content, str):
        return content
    parts = [convert(part, index) for index, part in enumerate(content if isinstance(content, list) else [content])]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
