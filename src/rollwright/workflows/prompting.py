"""From a task to a request: the defaults that the built-in workflows share, the prompt's each replaceable by a function of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwright.errors import WorkflowError

#: ``(prompt, tokenizer, enable_thinking) -> [P] token ids``; the prompt is what a ``PromptFunction`` returned.
InputIdsFunction = Callable[[Any, Any, bool], Sequence[int]]
#: ``(task) -> prompt``: by default a list of messages.
PromptFunction = Callable[[dict[str, Any]], Any]


def extract_messages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The task's ``messages``.

    Raises:
        WorkflowError: the task has none.
    """
    messages = data.get("messages")
    if not messages:
        raise WorkflowError(
            f"the task has no column 'messages' (it has {', '.join(sorted(data)) or 'none'}): prepare it with messages, or give "
            "data_extract_prompt_fn, a function from the task to its prompt."
        )
    return list(messages)


def chat_input_ids(prompt: Any, tokenizer: Any, enable_thinking: bool = False) -> list[int]:
    """Token ids ``[P]`` of messages with the generation prompt, or of plain text as it is.

    Args:
        prompt: messages, or text.
        tokenizer: a Hugging Face tokenizer.
        enable_thinking: given to chat templates, which may know it.
    """
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
        )
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def fill(template: str, **values: str) -> str:
    """Put values in a template's ``{name}`` places in one pass: braces elsewhere, in template or values, stay."""
    return re.sub("|".join(re.escape(f"{{{name}}}") for name in values), lambda match: values[match[0][1:-1]], template)


def as_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, loaded where a path or name was given."""
    if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__"):
        from rollwright.data.tokenizer import load_tokenizer

        return load_tokenizer(str(tokenizer))
    return tokenizer


def as_gconfig(gconfig: Any, tokenizer: Any) -> Any:
    """Generation arguments that also stop at the tokenizer's end and pad tokens; a mapping (from YAML) is taken too."""
    from rollwright.config.generation import GenerationHyperparameters

    if gconfig is None or isinstance(gconfig, Mapping):
        gconfig = GenerationHyperparameters.from_names(**(gconfig or {}))
    return gconfig.new_with_stop_and_pad_token_ids(tokenizer)


def stopping_at(gconfig: Any, *stops: str) -> Any:
    """Generation arguments whose requests also end at these strings."""
    return gconfig.new(stop=list(dict.fromkeys([*(gconfig.stop or []), *stops])))
