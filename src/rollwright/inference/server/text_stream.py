"""Text of tokens that arrive one by one: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


def held_back(text: str, marks: list[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``marks``."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class TextStream:
    """Decodes a growing token sequence.

    A piece of text is the difference between decoding from a settled token on with and without the new tokens: decoding
    tokens one at a time loses spaces in some tokenizers and breaks characters that span tokens.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool = True, stop: list[str] | None = None, keep_stop: bool = False
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = [] if keep_stop else list(stop or [])
        self._tokens: list[int] = []
        self._settled = 0
        self._read = 0
        self._pending = ""
        self._ended = False

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=self._skip_special_tokens)

    def push(self, tokens: list[int]) -> str:
        """Take new tokens; returns the text that is certain now."""
        self._tokens.extend(tokens)
        known = self._decode(self._settled, self._read)
        text = self._decode(self._settled, len(self._tokens))
        if text.endswith(_INCOMPLETE):
            return ""
        self._settled, self._read = self._read, len(self._tokens)
        return self._release(text[len(known) :], final=False)

    def finish(self) -> str:
        """The rest of the text: a stop string and all after it is left out."""
        known = self._decode(self._settled, self._read)
        text = self._decode(self._settled, len(self._tokens))
        self._settled, self._read = self._read, len(self._tokens)
        return self._release(text[len(known) :], final=True)

    def _release(self, piece: str, final: bool) -> str:
        if self._ended:
            return ""
        self._pending += piece
        found = [position for mark in self._stop if (position := self._pending.find(mark)) >= 0]
        if found:
            self._ended = True
            released, self._pending = self._pending[: min(found)], ""
            return released
        keep = 0 if final else held_back(self._pending, self._stop)
        cut = len(self._pending) - keep
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released


def completion_text(
    tokenizer: Any,
    tokens: list[int],
    *,
    skip_special_tokens: bool = True,
    stop: list[str] | None = None,
    keep_stop: bool = False,
) -> str:
    """The text of a finished completion, cut before its first stop string unless ``keep_stop``."""
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    if keep_stop:
        return text
    found = [position for mark in stop or [] if (position := text.find(mark)) >= 0]
    return text[: min(found)] if found else text
