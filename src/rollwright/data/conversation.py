"""The tokens of a conversation that goes on: what was sampled is kept as it was sampled, never decoded and encoded again.

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

_SENTINEL = "⁂"


class ConversationTokens:
    """Turns messages into token ids, going on from the tokens of earlier replies.

    Attributes:
        continued: requests whose ids went on from a remembered reply.
        encoded: requests that were encoded as a whole (the first of each conversation, and histories that were rewritten).
    """

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]] | None = None, **template_kwargs: Any) -> None:
        """Args:
        tokenizer: with the chat template.
        encode: the ids of rendered text; None: the tokenizer's.
        template_kwargs: variables of the template.
        """
        self.tokenizer = tokenizer
        self._encode = encode or functools.partial(tokenizer.encode, add_special_tokens=False)
        self.template_kwargs = template_kwargs
        self.continued = 0
        self.encoded = 0
        self._first: tuple[Any, Any, str] = (None, None, "")  # messages and tools that were encoded as a whole, and their text
        self._ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.all_special_ids}
        self._turns: dict[str, list[int]] = {}  # messages with a reply, in canonical form -> its prompt and reply, as sampled

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of ``messages`` with the generation prompt, ``[P]``."""
        messages = [plain_message(message) for message in messages]
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            ids = self._turns.get(_key(messages[:count], tools))  # with the reasoning that is given, or without any
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
        """Keep the tokens of ``reply`` to ``messages``, for the request that goes on from them.

        The request may give the reply's reasoning in a field of its own or in the text, with other white space around it. It may
        leave it out where the reply had it in a field of its own.
        """
        plain = [plain_message(message) for message in [*messages, reply]]
        forms = [plain, [*plain[:-1], {**plain[-1], "reasoning_content": ""}]] if reply.get("reasoning_content") else [plain]
        for form in forms:
            self._turns[_key(form, tools)] = [*prompt_ids, *output_ids]

    def _text_after(
        self, messages: list[dict[str, Any]], count: int, ids: list[int], tools: list[dict[str, Any]] | None
    ) -> str | None:
        """What the template puts after the sampled tokens of reply ``count - 1``; None where it rewrites what came before."""
        is_first = (messages[: count - 1], tools) == self._first[:2]  # rendering takes longest of all that a call needs
        before = self._first[2] if is_first else self._render(messages[: count - 1], tools, True)
        before = before.rstrip().removesuffix("<think>").rstrip()
        marked = [*messages[: count - 1], {"role": "assistant", "content": _SENTINEL}, *messages[count:]]
        head, sentinel, added = self._render(marked, tools, True).rpartition(_SENTINEL)
        if not sentinel or not head.startswith(before):
            return None
        if ids[-1] in self._ends:
            added = added.removeprefix(self.tokenizer.decode(ids[-1:], skip_special_tokens=False))
        return added

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.template_kwargs
        )


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: text content in one string, tool arguments as objects, nothing that is None."""
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
        with contextlib.suppress(json.JSONDecodeError):  # arguments that are no JSON are shown as the model wrote them
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _reasoning_and_text(message: dict[str, Any]) -> tuple[str, Any]:
    """The reasoning of an assistant's message, wherever it is given, and what it says."""
    reasoning, content = message.get("reasoning_content") or "", message["content"]
    if reasoning and isinstance(content, str):
        content = content.lstrip()  # Inspect begins it with a line break
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
