"""The prompts of requests: token ids within the limits, and no more work than the limits allow to find out."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from rollwright.inference.server.exchange import CONTEXT_LENGTH_EXCEEDED, RequestError

#: Characters that are encoded at a time to find out whether a long text can fit.
_PIECE = 1 << 15
#: A text of fewer characters for each token of the limit is encoded at once.
_USUAL_CHARACTERS = 8
#: A normalizer may make one character of up to four.
_NORMALIZED = 4

_longest_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass
class Prompts:
    """What a request asks the model to go on from.

    Attributes:
        ids: of each prompt.
        messages: of a chat, as its template was given them.
        inputs: further fields of the ``ModelRequest``: the images.
    """

    ids: list[list[int]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)


def longest_token(tokenizer: Any) -> int:
    """Most characters that one token of ``tokenizer`` stands for."""
    if tokenizer not in _longest_tokens:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        factor = 1 if backend is not None and backend.normalizer is None else _NORMALIZED
        _longest_tokens[tokenizer] = factor * max(map(len, tokenizer.get_vocab()))
    return _longest_tokens[tokenizer]


class PromptReader:
    """Encodes and checks prompts.

    Args:
        tokenizer: the model's; None: prompts are ids only.
        context_length: prompt and new tokens together; None: not known.
        max_prompt_tokens: a longer prompt is refused; None: what the context holds.
        max_samples: most completions of one request.
    """

    def __init__(
        self, tokenizer: Any, context_length: int | None, max_prompt_tokens: int | None = None, max_samples: int = 256
    ) -> None:
        self.tokenizer = tokenizer
        self.max_samples = max_samples
        self.limit = min((limit for limit in (context_length, max_prompt_tokens) if limit), default=None)
        self._vocabulary = None if tokenizer is None else len(tokenizer)

    def check_number(self, asked: int, param: str) -> None:
        """Refuse a request for too many completions.

        Raises:
            RequestError: ``asked`` is over the limit.
        """
        if asked > self.max_samples:
            raise RequestError(
                f"{asked} completions are over the limit of {self.max_samples} (--max-samples); send fewer in one request.",
                param=param,
            )

    def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        A text that cannot fit is refused after at most twice the limit was encoded, as encoding costs time and memory.

        Raises:
            RequestError: the text is empty or too long.
        """
        if self.limit is not None and len(text) > _USUAL_CHARACTERS * self.limit:
            if len(text) > longest_token(self.tokenizer) * self.limit:
                raise self._too_long(f"{len(text)} characters", param)
            counted = 0
            for start in range(0, len(text), _PIECE):
                counted += len(self.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
                if counted > 2 * self.limit:  # the pieces' ends may have split tokens, but not every second one
                    raise self._too_long(f"over {counted // 2} tokens", param)
        return self.checked(self.tokenizer.encode(text, add_special_tokens=add_special_tokens), param)

    def checked(self, ids: list[int], param: str) -> list[int]:
        """The ids, which the model can read.

        Raises:
            RequestError: there are none or too many, or one is outside the vocabulary.
        """
        if not ids:
            raise RequestError(f"{param} is empty: there is no token to continue from.", param=param)
        if min(ids) < 0 or (self._vocabulary is not None and max(ids) >= self._vocabulary):
            raise RequestError(f"{param} holds token ids outside 0 to {(self._vocabulary or 0) - 1}.", param=param)
        if self.limit is not None and len(ids) > self.limit:
            raise self._too_long(f"{len(ids)} tokens", param)
        return ids

    def _too_long(self, size: str, param: str) -> RequestError:
        return RequestError(
            f"The prompt has {size}, longer than the limit of {self.limit} tokens (the context, or --max-prompt-tokens).",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
