"""A call of the OpenAI protocol and its answer: choices, log-probabilities, usage, and the chunks of a stream."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
import uuid
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from rollwright.data.chat_template import without_end
from rollwright.inference.request import ModelRequest, ModelResponse, version_spans
from rollwright.inference.server.text_stream import ReasoningSplit, TextStream, completion_text, held_back
from rollwright.inference.server.tool_calls import ToolCall, ToolConvention

CHAT, COMPLETION = "chat", "completion"


@dataclass
class OpenAICall:
    """One call of the OpenAI protocol, with everything that was asked and answered.

    Attributes:
        endpoint: ``"chat"`` or ``"completion"``.
        body: the request, as a chat's or completion's.
        messages: of a chat, as its template was given them.
        requests: one for each choice, in the order of the choices.
        responses: what the engine answered to each; complete when ``on_call`` sees the call.
        choices: the choices of the answer, in the protocol's form.
        started: ``time.time()`` at arrival.
    """

    endpoint: str
    body: dict[str, Any]
    requests: list[ModelRequest]
    responses: list[ModelResponse] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    messages: list[dict[str, Any]] = field(default_factory=list)

    # How the answer is written.
    prefix: str = ""  # of its id
    samples: int = 1
    malformed_tool_calls: int = 0
    tools: bool = False
    begun: str = ""  # text that every reply begins with, given and not sampled: of a forced tool call
    logprobs: bool = False
    echo: bool = False  # the prompt stands before each completion
    samples_nothing: bool = False  # the prompt is scored, and nothing more
    return_token_ids: bool = False
    keep_stop: bool = False
    separates_reasoning: bool = False
    begins_reasoning: bool = False  # the prompt has opened it

    @property
    def is_chat(self) -> bool:
        """True for ``/v1/chat/completions``."""
        return self.endpoint == CHAT

    def echoed(self, index: int, tokenizer: Any) -> str:
        """The text of the prompt that stands before a completion."""
        return tokenizer.decode(self.requests[index].input_ids, skip_special_tokens=True) if self.echo else ""

    @property
    def answer_id(self) -> str:
        """The id of the answer, as the client sees it."""
        return self.prefix + self.id


def usage_of(call: OpenAICall) -> dict[str, Any]:
    """Tokens of a call; a prompt that is sampled several times counts once."""
    prompt_tokens = sum(len(request.input_ids) for request in call.requests) // call.samples
    completion_tokens = sum(len(response.output_tokens) for response in call.responses)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if call.separates_reasoning:
        reasoning = sum(map(_reasoning_tokens, call.requests, call.responses, call.choices))
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def _reasoning_tokens(request: ModelRequest, response: ModelResponse, choice: dict[str, Any]) -> int:
    """How many tokens end with the one that closes the reasoning; all where none does."""
    if "reasoning_content" not in choice["message"]:
        return 0
    tokenizer, tokens = request.tokenizer, response.output_tokens

    def closed(count: int) -> bool:
        return ReasoningSplit.CLOSING in tokenizer.decode(tokens[:count], skip_special_tokens=False)

    mark = tokenizer.convert_tokens_to_ids(ReasoningSplit.CLOSING)
    if mark in tokens and tokenizer.decode([mark], skip_special_tokens=False) == ReasoningSplit.CLOSING:
        return tokens.index(mark) + 1  # a long reply is not decoded again
    return bisect.bisect_left(range(len(tokens)), True, key=closed)


def logprobs_of(
    call: OpenAICall, response: ModelResponse, tokenizer: Any, start: int = 0, *, echo: bool = False
) -> dict[str, Any]:
    """Log-probabilities of the output tokens from ``start`` on, in the endpoint's form; with ``echo`` behind the prompt's."""

    def text_of(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    every_text = list(map(text_of, (response.input_tokens if call.echo else []) + response.output_tokens))
    values, tops = response.output_logprobs[start:], (response.output_top_logprobs or [])[start:]
    if echo:
        values, tops = [*(response.input_logprobs or ()), *values], [*(response.input_top_logprobs or ()), *tops]
    begin = len(every_text) - len(values)
    texts, tops = every_text[begin:], tops or [None] * len(values)
    if not call.is_chat:
        offsets = list(itertools.accumulate(map(len, every_text), initial=0))[begin:-1]
        named = [None if top is None else {text_of(token): p for token, p in reversed(top)} for top in tops]
        for text, value, alternatives in zip(texts, values, named, strict=True):
            if alternatives is not None:  # the token itself is among them, as in OpenAI's protocol
                alternatives.setdefault(text, value)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": named if any(named) else None,
            "text_offset": offsets,
        }

    def entry(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {
        "content": [
            entry(text, value) | {"top_logprobs": [entry(text_of(other), logprob) for other, logprob in top or ()]}
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
    }


_special_texts_of: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def _special_texts(tokenizer: Any) -> list[str]:
    """What special tokens are decoded to, longest first."""
    if tokenizer not in _special_texts_of:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        _special_texts_of[tokenizer] = sorted(texts, key=len, reverse=True)
    return _special_texts_of[tokenizer]


def _without(text: str, marks: list[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _split_of(call: OpenAICall, special: list[str]) -> ReasoningSplit | None:
    return ReasoningSplit(call.begins_reasoning, special) if call.separates_reasoning else None


def answer_choice(
    call: OpenAICall, index: int, response: ModelResponse, tokenizer: Any, convention: ToolConvention
) -> dict[str, Any]:
    """One choice of an answer that is not streamed.

    Marks of some conventions are special tokens, so tool calls are looked for before special tokens are left out.
    """
    request, calls = call.requests[index], list[ToolCall]()
    skips = request.gconfig.skip_special_tokens
    choice: dict[str, Any] = {"index": index, "finish_reason": response.stop_reason, "stop_reason": response.stop_match}
    choice["logprobs"] = logprobs_of(call, response, tokenizer, echo=call.echo) if call.logprobs else None
    if call.return_token_ids:
        choice |= {"token_ids": response.output_tokens, "weight_versions": version_spans(response.output_versions)}
    text = completion_text(
        tokenizer,
        response.output_tokens,
        skip_special_tokens=skips and not call.tools,
        stop_match=None if call.keep_stop else response.stop_match,
    )
    if not call.is_chat:
        text = call.echoed(index, tokenizer) + text
        return choice | ({"prompt_token_ids": request.input_ids} if call.return_token_ids else {}) | {"text": text}
    split = _split_of(call, _special_texts(tokenizer) if call.tools and skips else [])
    if split is not None:
        _, text = split.push(text, is_last=True)
    if call.tools:
        reply = call.begun + without_end(text, tokenizer)
        text, calls, malformed = convention.parse(reply, call.body.get("tools"))
        call.malformed_tool_calls += len(malformed) if response.stop_reason == "stop" else 0  # a limit cut it otherwise
        text = _without(text, _special_texts(tokenizer)) if skips else text
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if split is not None and split.reasoning:
        message["reasoning_content"] = split.reasoning
    if calls:
        message["tool_calls"] = [tool_call.as_openai() for tool_call in calls]
        if response.stop_reason == "stop":
            choice["finish_reason"] = "tool_calls"
    return choice | {"message": message}


class ChoiceStream:
    """The chunks of one choice: text as it becomes certain, tool calls when they are whole."""

    def __init__(self, call: OpenAICall, index: int, tokenizer: Any, convention: ToolConvention) -> None:
        self.call, self.index, self.tokenizer, self.convention = call, index, tokenizer, convention
        gconfig = call.requests[index].gconfig
        self.text = TextStream(
            tokenizer,
            skip_special_tokens=gconfig.skip_special_tokens and not call.tools,  # which may be the marks of tool calls
            stop=None if call.keep_stop else gconfig.stop,
        )
        self.special = _special_texts(tokenizer) if call.tools and gconfig.skip_special_tokens else []
        self.split = _split_of(call, self.special)
        self.sent_tokens = 0
        self.sent_text = self.sent_reasoning = ""
        self.held = ""
        self.echo = call.echoed(index, tokenizer)  # not sent yet
        self.scores_prompt = call.echo

    def advance(self, response: ModelResponse) -> dict[str, Any] | None:
        """A chunk with what is new in ``response``; None where nothing is certain yet."""
        reasoning, piece = "", self._echo() + self.text.push(response.output_tokens[self.sent_tokens :])
        if self.split is not None:
            reasoning, piece = self.split.push(piece)
            self.sent_reasoning += reasoning
        piece = self._release(piece)
        if not piece and not reasoning and not self.call.return_token_ids and not self.call.logprobs:
            self.sent_tokens = len(response.output_tokens)
            return None
        delta = {"reasoning_content": reasoning} if reasoning else {}
        if piece or not reasoning:
            delta["content" if self.call.is_chat else "text"] = piece
        return self._chunk(response, delta)

    def last(self, response: ModelResponse, complete: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks that end the choice; ``complete`` is the choice as it would stand in one answer."""
        chunks: list[dict[str, Any]] = []
        if not self.call.is_chat:
            rest = complete["text"][len(self.sent_text) :]
            chunks.append(self._chunk(response, {"text": rest}, complete["finish_reason"]))
        else:
            message = complete["message"]
            content = message["content"] or ""
            rest = content[len(self.sent_text) :] if content.startswith(self.sent_text) else ""
            thought = message.get("reasoning_content", "")
            delta: dict[str, Any] = {"content": rest} if rest else {}
            if thought != self.sent_reasoning and thought.startswith(self.sent_reasoning):
                delta["reasoning_content"] = thought[len(self.sent_reasoning) :]
            if message.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **tool_call} for i, tool_call in enumerate(message["tool_calls"])]
            if delta or self.sent_tokens < len(response.output_tokens):
                chunks.append(self._chunk(response, delta))
            chunks.append(self._chunk(response, {}, complete["finish_reason"]))
        chunks[-1]["stop_reason"] = response.stop_match
        if self.call.return_token_ids:
            chunks[-1]["weight_versions"] = complete["weight_versions"]
        return chunks

    def _echo(self) -> str:
        echo, self.echo = self.echo, ""
        return echo

    def _release(self, piece: str) -> str:
        if not self.call.tools:
            self.sent_text += piece
            return piece
        self.held += piece
        if self.call.begun:
            return ""  # the reply is a call, which is sent when it is whole
        marks = list(self.convention.marks)
        found = [position for mark in marks if (position := self.held.find(mark)) >= 0]
        cut = min(found) if found else len(self.held) - held_back(self.held, marks)
        cut -= held_back(self.held[:cut], self.special)
        cut = len(self.held[:cut].rstrip())  # white space before a call is not text
        released, self.held = self.held[:cut], self.held[cut:]
        released = _without(released, self.special)
        self.sent_text += released
        return released

    def _chunk(self, response: ModelResponse, content: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        start, self.sent_tokens = self.sent_tokens, len(response.output_tokens)
        chunk: dict[str, Any] = {"index": self.index, "finish_reason": finish_reason, "logprobs": None}
        chunk |= {"delta": content} if self.call.is_chat else content
        if self.call.logprobs and (start < self.sent_tokens or self.scores_prompt):
            chunk["logprobs"] = logprobs_of(self.call, response, self.tokenizer, start, echo=self.scores_prompt)
            self.scores_prompt = False
        if self.call.return_token_ids:
            chunk["token_ids"] = response.output_tokens[start:]
        return chunk


async def partial_responses(engine: Any, requests: list[ModelRequest]) -> AsyncGenerator[tuple[int, ModelResponse], None]:
    """The responses to several requests as they grow, each with its request's index; the first failure ends all."""
    queue: asyncio.Queue[tuple[int, ModelResponse | Exception | None]] = asyncio.Queue(maxsize=64)

    async def follow(index: int, request: ModelRequest) -> None:
        try:
            async for partial in engine.astream(request):
                await queue.put((index, partial))
        except Exception as error:  # whatever it is, the reader of the queue raises it
            await queue.put((index, error))
        await queue.put((index, None))

    tasks = [asyncio.create_task(follow(index, request)) for index, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
