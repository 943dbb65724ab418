"""The only place that renders messages to text and token ids with a chat template.

Sampling, supervised training, preference pairs, the length filter and ``SequenceProcessor`` all use ``prompt_text`` and ``prompt_ids``,
so a model is trained on the same prompts that it is sampled with. Servers, whose clients choose the template's variables, call
``render``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import DataError

Messages = Sequence[Mapping[str, Any]]

#: Placeholder reply, rendered to see the text around it.
SENTINEL = "⁂"


def render(tokenizer: Any, messages: Messages, tools: Sequence[Any] | None = None, **options: Any) -> str:
    """Render a conversation with the tokenizer's chat template.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: the conversation.
        tools: functions to offer, in OpenAI's format.
        options: ``add_generation_prompt``, ``continue_final_message``, ``chat_template``, and variables of the template.
    """
    offered = {} if tools is None else {"tools": list(tools)}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **offered, **options)


def prompt_text(
    tokenizer: Any, messages: Messages, tools: Sequence[Any] | None = None, *, enable_thinking: bool = False, **variables: Any
) -> str:
    """Render a prompt, up to the start of the model's reply.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: the conversation so far.
        tools: functions to offer.
        enable_thinking: passed to the template; templates without this variable ignore it.
        variables: ``chat_template`` to replace the tokenizer's, and further variables of the template.

    Raises:
        DataError: the tokenizer has no chat template.
    """
    if not variables.get("chat_template") and getattr(tokenizer, "chat_template", "unknown") is None:
        raise DataError(without_template(tokenizer))
    return render(tokenizer, messages, tools, add_generation_prompt=True, enable_thinking=enable_thinking, **variables)


def without_template(tokenizer: Any) -> str:
    """Return the error message for a tokenizer without a chat template."""
    return (
        f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template, so messages cannot be rendered: use the "
        "model's chat variant, set tokenizer_path to another tokenizer, or set tokenizer.chat_template and save the tokenizer."
    )


def prompt_ids(
    tokenizer: Any, messages: Messages, tools: Sequence[Any] | None = None, *, enable_thinking: bool = False, **variables: Any
) -> list[int]:
    """Return the token ids ``[P]`` of ``prompt_text``; arguments and errors are the same."""
    text = prompt_text(tokenizer, messages, tools, enable_thinking=enable_thinking, **variables)
    return list(tokenizer.encode(text, add_special_tokens=False))


def apply_chat_template(tokenizer: Any, messages: list[dict[str, Any]], *, tokenize: bool = True, **kwargs: Any) -> Any:
    """Apply the tokenizer's chat template. Returns a string, or ``list[int]`` (with every version of transformers) if ``tokenize``."""
    return tokenizer.apply_chat_template(messages, tokenize=tokenize, **{"return_dict": False, **kwargs})


# -- how a reply ends -----------------------------------------------------------------------------------------------


def turn_end(tokenizer: Any, **variables: Any) -> list[int]:
    """Return the token ids that follow a reply, up to and including the token that ends the turn.

    They are taken from the template's output between an assistant message and the next user message. Many base models have an
    end-of-document token as ``eos_token`` (``<|endoftext|>``), while their template ends turns with another token (``<|im_end|>``,
    ``<|eot_id|>``, ``<end_of_turn>``). The tokenizer's end token is used if the template shows none, or if it appears only after the
    last message (``<|return|>``, which templates of gpt-oss rewrite in earlier turns).

    Args:
        tokenizer: tokenizer with the chat template; without one, replies end with its end token.
        variables: ``chat_template`` to replace the tokenizer's, and variables of the template.
    """
    template = variables.get("chat_template") or getattr(tokenizer, "chat_template", None)
    eos = tokenizer.eos_token_id
    if template is None:
        return [] if eos is None else [eos]
    try:
        return list(_turn_end(tokenizer, str(template), eos, tuple(sorted(variables.items()))))
    except TypeError:  # the tokenizer or a variable is not hashable
        return list(_turn_end.__wrapped__(tokenizer, str(template), eos, tuple(sorted(variables.items()))))


@functools.lru_cache(maxsize=32)
def _turn_end(tokenizer: Any, template: str, eos: int | None, variables: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    question, reply = {"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}
    last, later = (
        _after_reply(tokenizer, messages, dict(variables)) for messages in ([question, reply], [question, reply, question])
    )
    if eos is not None and last and last[-1] == eos:
        return last
    return later or last or (() if eos is None else (eos,))


def _after_reply(tokenizer: Any, messages: Messages, variables: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids from the end of the reply to the first special token; empty if more than white space is between."""
    try:
        text = render(tokenizer, messages, **variables)
    except Exception:  # a template may reject such conversations with any error
        return ()
    _, found, after = text.rpartition(SENTINEL)
    ids = tokenizer.encode(after, add_special_tokens=False) if found else []
    ends = end_ids(tokenizer)
    place = next((index for index, token in enumerate(ids) if token in ends), None)
    if place is None or tokenizer.decode(ids[:place]).strip():
        return ()
    return tuple(ids[: place + 1])


def end_ids(tokenizer: Any) -> set[int]:
    """Return the ids that can end a turn: all special tokens of a tokenizer, both declared and merely added ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, entry in added.items() if entry.special}
    return special | {
        token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.all_special_ids) if token is not None
    }


def stopping_at_turn_end(gconfig: GenerationHyperparameters, tokenizer: Any, **variables: Any) -> GenerationHyperparameters:
    """Add the end token of ``turn_end`` to the stop tokens; the engine already stops at the tokenizer's own."""
    end = [token for token in turn_end(tokenizer, **variables)[-1:] if token != tokenizer.eos_token_id]
    if gconfig.ignore_eos or not end or end[0] in gconfig.stop_token_ids:
        return gconfig
    return gconfig.new(stop_token_ids=[*gconfig.stop_token_ids, *end])


def without_end(text: str, tokenizer: Any) -> str:
    """Return a reply's text without the token that ended it."""
    for token in {tokenizer.eos_token_id, *turn_end(tokenizer)[-1:]} - {None}:
        text = text.removesuffix(tokenizer.decode([token], skip_special_tokens=False))
    return text


def reply_ids(tokenizer: Any, text: str, prompt: Sequence[int] = (), **variables: Any) -> list[int]:
    """Return the token ids of a reply to train on: its text, and ``turn_end`` unless the text already ends with it.

    Args:
        tokenizer: tokenizer with the chat template.
        text: text of the reply.
        prompt: ids before the reply, to check that they allow its reasoning.
        variables: template variables that the prompt was rendered with.

    Raises:
        DataError: the reply reasons in ``<think>``, but the prompt has closed the reasoning.
    """
    if "<think>" in text and tokenizer.decode(list(prompt[-32:])).rstrip().endswith("</think>"):
        raise DataError(
            f"the reply {text[:60]!r}… reasons in <think>, but the prompt switches reasoning off (it ends with </think>); set "
            "format.enable_thinking: true (RL: enable_thinking among the workflow's arguments)."
        )
    ids, end = list(tokenizer.encode(text, add_special_tokens=False)), turn_end(tokenizer, **variables)
    return ids if end and ids[-len(end) :] == end else [*ids, *end]
