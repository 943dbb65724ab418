"""Tokens of a conversation over several requests: sampled tokens are kept, never decoded and encoded again.

A chat template turns messages into text, and text into tokens, but a model's own reply must stay the tokens that it sampled.
So each reply is remembered together with the messages that it answered; when a later request begins with the same messages,
its ids are the remembered ids followed by the encoding of only what the template adds after them.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwright.data.chat_template import SENTINEL, end_ids, render, reply_ids, turn_end
from rollwright.errors import DataError


class ConversationTokens:
    """Turns messages into token ids that continue from the sampled tokens of earlier replies.

    Attributes:
        continued: number of requests that continued from a remembered reply.
        encoded: number of requests that were encoded as a whole (first requests of conversations, and rewritten histories).
    """

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]] | None = None, **template_kwargs: Any) -> None:
        """Args:
        tokenizer: a tokenizer with a chat template.
        encode: function from rendered text to ids; by default the tokenizer's.
        template_kwargs: variables of the template.
        """
        self.tokenizer = tokenizer
        self._encode = encode or functools.partial(tokenizer.encode, add_special_tokens=False)
        self.template_kwargs = template_kwargs
        self.continued = 0
        self.encoded = 0
        self._first: tuple[Any, Any, str] = (None, None, "")  # messages and tools last encoded as a whole, and their text
        self._ends = end_ids(tokenizer)
        self._turns: dict[str, list[int]] = {}  # messages with a reply, in canonical form -> its prompt and reply, as sampled

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the token ids ``[P]`` of ``messages`` with the generation prompt."""
        messages = [plain_message(message) for message in messages]
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            ids = self._turns.get(_key(messages[:count], tools))  # with the given reasoning, or without
            added = None if ids is None else self._text_after(messages, count, ids, tools)
            if ids is not None and added is not None:
                self.continued += 1
                return [*ids, *self._encode(added)]
        self.encoded += 1
        text = self._render(messages, tools, True)
        self._first = messages, tools, text
        return self._encode(text)

    def remember(
        self,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """Remember the tokens of ``reply`` to ``messages``, for the request that continues the conversation.

        That request may give the reply's reasoning in a separate field or in the text, with different white space around it. The
        reasoning may be missing if the reply had it in a separate field.
        """
        plain = [plain_message(message) for message in [*messages, reply]]
        forms = [plain, [*plain[:-1], {**plain[-1], "reasoning_content": ""}]] if reply.get("reasoning_content") else [plain]
        for form in forms:
            self._turns[_key(form, tools)] = [*prompt_ids, *output_ids]

    def _text_after(
        self, messages: list[dict[str, Any]], count: int, ids: list[int], tools: list[dict[str, Any]] | None
    ) -> str | None:
        """Return the text that the template puts after the sampled tokens of message ``count - 1``; None if it rewrites earlier text."""
        is_first = (messages[: count - 1], tools) == self._first[:2]  # rendering is the slowest part of a call
        before = self._first[2] if is_first else self._render(messages[: count - 1], tools, True)
        before = before.rstrip().removesuffix("<think>").rstrip()
        marked = [*messages[: count - 1], {"role": "assistant", "content": SENTINEL}, *messages[count:]]
        head, sentinel, added = self._render(marked, tools, True).rpartition(SENTINEL)
        if not sentinel or not head.startswith(before):
            return None
        if ids[-1] in self._ends:
            space, found, rest = added.partition(self.tokenizer.decode(ids[-1:], skip_special_tokens=False))
            added = rest if found and not space.strip() else added
        return added

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        return render(self.tokenizer, messages, tools, add_generation_prompt=generation_prompt, **self.template_kwargs)


def worked_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    replies: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    **template_kwargs: Any,
) -> list[tuple[list[int], list[int]]]:
    """Build sequences that train every assistant message in ``replies``, each after the prompt that sampling would give it.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: the conversation before ``replies``, which is not trained.
        replies: the assistant's messages, with user and tool messages between them.
        tools: functions that the template offers.
        template_kwargs: variables of the template.

    Returns:
        Token ids and loss mask of each sequence: one for the whole conversation or, if the template rewrites earlier turns (by dropping
        their reasoning, say), one for each part that it leaves unchanged.

    Raises:
        DataError: the template does not render a reply as a continuation of its prompt.
    """
    conversation = ConversationTokens(tokenizer, **template_kwargs)
    sequences: list[tuple[list[int], list[int]]] = []
    past = list(messages)
    for message in replies:
        if message["role"] == "assistant":
            prompt = conversation.encode(past, tools)
            text = _reply_text(tokenizer, past, message, tools, template_kwargs)
            output = reply_ids(tokenizer, text, prompt, **template_kwargs)
            if not sequences or prompt[: len(sequences[-1][0])] != sequences[-1][0]:
                sequences.append(([], []))
            ids, mask = sequences[-1]
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(output)
            ids += [*prompt[len(ids) :], *output]
            conversation.remember(past, message, prompt, output, tools)
        past.append(message)
    return sequences


def _reply_text(
    tokenizer: Any,
    past: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any],
) -> str:
    """Return the text that a model would write for ``message``, with tool calls and reasoning as the template renders them."""
    plain = plain_message(message)
    if not plain.get("tool_calls") and not plain.get("reasoning_content"):
        return plain["content"]
    before = [plain_message(each) for each in past]
    prompt = render(tokenizer, before, tools, add_generation_prompt=True, **template_kwargs)
    whole = render(tokenizer, [*before, plain], tools, add_generation_prompt=False, **template_kwargs)
    if not whole.startswith(prompt):
        raise DataError(
            f"the chat template does not put the reply {str(dict(message))[:80]} after its prompt: if it has reasoning, set "
            "format.enable_thinking: true; otherwise write the reply's text as content, or the episode as segments."
        )
    end = tokenizer.decode(turn_end(tokenizer, **template_kwargs), skip_special_tokens=False)
    text, found, _ = whole[len(prompt) :].rpartition(end) if end else (whole[len(prompt) :], "end", "")
    return text if found else whole[len(prompt) :]


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: content as one string, tool arguments as objects, and no None values."""
    plain = {key: value for key, value in message.items() if value is not None and key in _TEMPLATE_KEYS}
    content = message.get("content")
    if isinstance(content, list) and all(block.get("type") == "text" for block in content):
        content = "".join(block["text"] for block in content)
    plain["content"] = "" if content is None else content
    if message.get("role") == "tool" and message.get("name"):
        plain["name"] = message["name"]  # some templates say which tool answered; the names of speakers are left out
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


_TEMPLATE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError):  # invalid JSON is shown as the model wrote it
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _reasoning_and_text(message: dict[str, Any]) -> tuple[str, Any]:
    """Return reasoning and text of an assistant's message, whether the reasoning is in a field or in the text."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if reasoning and isinstance(content, str):
        content = content.lstrip()  # Inspect puts a line break before the text
    if not reasoning and isinstance(content, str) and "</think>" in content:
        before, _, after = content.partition("</think>")
        before = before.strip()
        if before.startswith("<think>") or "<think>" not in before:
            reasoning, content = before.removeprefix("<think>"), after.lstrip()
    return reasoning.strip(), content


def _key(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    bare = []
    for message in messages:
        entry = {key: value for key, value in message.items() if key not in ("tool_call_id", "reasoning_content")}
        if message["role"] == "assistant":
            entry["reasoning"], entry["content"] = _reasoning_and_text(message)
        bare.append(entry)
    return json.dumps([bare, tools], sort_keys=True, ensure_ascii=False, default=str)
