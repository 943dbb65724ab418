"""Calls of the OpenAI protocol and their answers: choices, log-probabilities, usage, and the chunks of a stream."""

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
from rollwright.inference.server.text_stream import ReasoningSplit, TextStream, completion_text, held_back, without
from rollwright.inference.server.tool_calls import ToolCall, ToolConvention

CHAT, COMPLETION = "chat", "completion"


@dataclass
class OpenAICall:
    """One call of the OpenAI protocol: request, responses and choices.

    Attributes:
        endpoint: ``CHAT`` or ``COMPLETION``.
        body: body of the request, translated to the endpoint's form if it was in a dialect.
        requests: requests to the engine, one for each choice.
        responses: responses of the engine; set before ``on_call`` is called.
        choices: choices of the answer, in the protocol's form.
        started: time of arrival, from ``time.time()``.
        id: unique id of the call.
        messages: messages of a chat, as they were passed to its template.
        prefix: prefix of the answer's id.
        samples: completions for each prompt.
        malformed_tool_calls: number of tool calls in the replies that cannot be parsed.
        tools: True if the request offers tools.
        begun: beginning of a forced tool call, which every reply begins with and which is not sampled.
        logprobs: return log-probabilities.
        echo: put the prompt in front of each completion.
        samples_nothing: only score the prompt.
        return_token_ids: return the ids of the sampled tokens.
        keep_stop: keep the stop string in the text.
        separates_reasoning: return the reasoning separately.
        begins_reasoning: True if the prompt ends inside the reasoning.
    """

    endpoint: str
    body: dict[str, Any]
    requests: list[ModelRequest]
    responses: list[ModelResponse] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    messages: list[dict[str, Any]] = field(default_factory=list)
    prefix: str = ""
    samples: int = 1
    malformed_tool_calls: int = 0
    tools: bool = False
    begun: str = ""
    logprobs: bool = False
    echo: bool = False
    samples_nothing: bool = False
    return_token_ids: bool = False
    keep_stop: bool = False
    separates_reasoning: bool = False
    begins_reasoning: bool = False

    @property
    def is_chat(self) -> bool:
        """True for ``/v1/chat/completions``."""
        return self.endpoint == CHAT

    def echoed(self, index: int, tokenizer: Any) -> str:
        """Return the prompt's text, to precede a completion, or an empty string if ``echo`` is false."""
        return tokenizer.decode(self.requests[index].input_ids, skip_special_tokens=True) if self.echo else ""

    @property
    def answer_id(self) -> str:
        """Id of the answer, as the client sees it."""
        return self.prefix + self.id


def usage_of(call: OpenAICall) -> dict[str, Any]:
    """Count the tokens of a call; a prompt counts once, even if it is sampled several times."""
    prompt_tokens = sum(len(request.input_ids) for request in call.requests) // call.samples
    completion_tokens = sum(len(response.output_tokens) for response in call.responses)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if call.separates_reasoning:
        usage["completion_tokens_details"] = {
            "reasoning_tokens": sum(map(_reasoning_tokens, call.requests, call.responses, call.choices))
        }
    return usage


def _reasoning_tokens(request: ModelRequest, response: ModelResponse, choice: dict[str, Any]) -> int:
    """Count the tokens up to the one that closes the reasoning, or all tokens if none does."""
    if "reasoning_content" not in choice["message"]:
        return 0
    tokenizer, tokens = request.tokenizer, response.output_tokens

    def closed(count: int) -> bool:
        return ReasoningSplit.CLOSING in tokenizer.decode(tokens[:count], skip_special_tokens=False)

    mark = tokenizer.convert_tokens_to_ids(ReasoningSplit.CLOSING)
    if mark in tokens and tokenizer.decode([mark], skip_special_tokens=False) == ReasoningSplit.CLOSING:
        return tokens.index(mark) + 1  # without decoding a long reply again
    return bisect.bisect_left(range(len(tokens)), True, key=closed)


def logprobs_of(
    call: OpenAICall, response: ModelResponse, tokenizer: Any, start: int = 0, *, echo: bool = False
) -> dict[str, Any]:
    """Build the log-probabilities of a choice in the endpoint's form.

    Args:
        call: the call.
        response: the engine's response, complete or partial.
        tokenizer: the model's tokenizer.
        start: index of the first output token to include.
        echo: include the prompt's tokens.
    """

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
            if alternatives is not None:  # including the token itself, as in OpenAI's protocol
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
    """Return the texts of all special tokens, longest first."""
    if tokenizer not in _special_texts_of:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        _special_texts_of[tokenizer] = sorted(texts, key=len, reverse=True)
    return _special_texts_of[tokenizer]


def _split_of(call: OpenAICall, special: list[str]) -> ReasoningSplit | None:
    return ReasoningSplit(call.begins_reasoning, special) if call.separates_reasoning else None


def answer_choice(
    call: OpenAICall, index: int, response: ModelResponse, tokenizer: Any, convention: ToolConvention
) -> dict[str, Any]:
    """Build one choice of a complete answer.

    In some formats special tokens mark tool calls, so tool calls are parsed before special tokens are removed.
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
        call.malformed_tool_calls += len(malformed) if response.stop_reason == "stop" else 0  # otherwise a limit cut the call
        text = without(text, _special_texts(tokenizer)) if skips else text
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if split is not None and split.reasoning:
        message["reasoning_content"] = split.reasoning
    if calls:
        message["tool_calls"] = [tool_call.as_openai() for tool_call in calls]
        if response.stop_reason == "stop":
            choice["finish_reason"] = "tool_calls"
    return choice | {"message": message}


class ChoiceStream:
    """Builds the chunks of one choice: text as it becomes certain, tool calls when they are complete."""

    def __init__(self, call: OpenAICall, index: int, tokenizer: Any, convention: ToolConvention) -> None:
        self.call, self.index, self.tokenizer, self.convention = call, index, tokenizer, convention
        gconfig = call.requests[index].gconfig
        self.text = TextStream(
            tokenizer,
            skip_special_tokens=gconfig.skip_special_tokens and not call.tools,  # special tokens may mark tool calls
            stop=None if call.keep_stop else gconfig.stop,
        )
        self.special = _special_texts(tokenizer) if call.tools and gconfig.skip_special_tokens else []
        self.split = _split_of(call, self.special)
        self.sent_tokens = 0
        self.sent_text = self.sent_reasoning = ""
        self.held = call.echoed(index, tokenizer)  # text that is not sent yet
        self.scores_prompt = call.echo

    def advance(self, response: ModelResponse) -> dict[str, Any] | None:
        """Build a chunk of the new part of ``response``. Returns None if nothing new is certain."""
        reasoning, piece = "", self.text.push(response.output_tokens[self.sent_tokens :])
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
        """Build the last chunks of the choice; ``complete`` is the choice of a complete answer."""
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

    def _release(self, piece: str) -> str:
        """Return the held text, as far as it cannot belong to a tool call."""
        self.held += piece
        if self.call.begun:
            return ""  # the reply is a tool call, which is sent when it is complete
        cut = len(self.held)
        if self.call.tools:
            marks = list(self.convention.marks)
            found = [position for mark in marks if (position := self.held.find(mark)) >= 0]
            cut = min(found) if found else cut - held_back(self.held, marks)
            cut -= held_back(self.held[:cut], self.special)
            cut = len(self.held[:cut].rstrip())  # white space before a call is not text
        released, self.held = without(self.held[:cut], self.special), self.held[cut:]
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
    """Yield partial responses to several requests, each with the index of its request. The first error ends all of them."""
    queue: asyncio.Queue[tuple[int, ModelResponse | Exception | None]] = asyncio.Queue(maxsize=64)

    async def follow(index: int, request: ModelRequest) -> None:
        try:
            async for partial in engine.astream(request):
                await queue.put((index, partial))
        except Exception as error:  # raised by the reader of the queue
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
