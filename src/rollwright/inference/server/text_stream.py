"""Text of tokens that arrive one by one: whole characters only, nothing that may turn out to be a stop string, reasoning apart."""

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

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, stop: list[str] | None = None) -> None:
        """Args:
        tokenizer: decodes ids.
        skip_special_tokens: leave special tokens out.
        stop: strings that may end the completion, and are left out of its text then.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = list(stop or [])
        self._tokens: list[int] = []
        self._settled = 0
        self._read = 0
        self._pending = ""

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=self._skip_special_tokens)

    def push(self, tokens: list[int]) -> str:
        """Take new tokens; returns the text that is certain now."""
        if not tokens:
            return ""
        self._tokens.extend(tokens)
        known = self._decode(self._settled, self._read)
        text = self._decode(self._settled, len(self._tokens))
        if text.endswith(_INCOMPLETE):
            return ""
        self._settled, self._read = self._read, len(self._tokens)
        return self._release(text[len(known) :])

    def _release(self, piece: str) -> str:
        """All of the text but what may be the stop string that ends it: one in the newest piece, or its beginning.

        An older one has ended nothing (it came before ``min_new_tokens``), as newer tokens follow it.
        """
        before = len(self._pending)
        self._pending += piece
        newest = [self._pending.find(mark, max(0, before - len(mark) + 1)) for mark in self._stop]
        cut = min([len(self._pending) - held_back(self._pending, self._stop), *(at for at in newest if at >= 0)])
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released


class ReasoningSplit:
    """Divides a growing text into the model's reasoning, between ``<think>`` and ``</think>``, and what it says then.

    The white space around both is left out.

    Args:
        is_open: the prompt ends with ``<think>``, so that the text begins inside.
        special: texts of special tokens that are left out of the reasoning.
    """

    OPENING, CLOSING = "<think>", "</think>"

    def __init__(self, is_open: bool, special: list[str] | None = None) -> None:
        self._place = "inside" if is_open else "before"
        self._special = special or []
        self._held = ""
        self.reasoning = ""  # so far

    def push(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """Take more text; returns what is certain now, of the reasoning and of what is said."""
        self._held += piece
        known = len(self.reasoning)
        if self._place == "before":
            begun = self._held.lstrip()
            if begun.startswith(self.OPENING):
                self._place, self._held = "inside", begun[len(self.OPENING) :]
            elif is_last or not self.OPENING.startswith(begun):
                self._place = "said"
        if self._place == "inside":
            inside, closing, after = self._held.partition(self.CLOSING)
            if not closing and not is_last:
                cut = len(inside) - held_back(inside, [self.CLOSING, *self._special])
                inside, after = inside[: len(inside[:cut].rstrip())], inside[len(inside[:cut].rstrip()) :]
            for mark in self._special:
                inside = inside.replace(mark, "")
            self.reasoning += inside if self.reasoning else inside.lstrip()
            self._held = after
            if closing or is_last:
                self.reasoning = self.reasoning.rstrip()
                self._place = "behind"
        if self._place == "behind" and (said := self._held.lstrip()):
            self._place, self._held = "said", said
        said = ""
        if self._place == "said":
            said, self._held = self._held, ""
        return self.reasoning[known:], said


def completion_text(
    tokenizer: Any, tokens: list[int], *, skip_special_tokens: bool = True, stop_match: str | int | None = None
) -> str:
    """The text of a completion.

    Args:
        tokenizer: decodes ids.
        tokens: all that were sampled.
        skip_special_tokens: leave special tokens out.
        stop_match: the stop string that ended it, which is left out; None or a token: nothing is.
    """
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    if not isinstance(stop_match, str):
        return text
    before_the_last = tokenizer.decode(tokens[:-1], skip_special_tokens=skip_special_tokens).rstrip(_INCOMPLETE)
    found = text.find(stop_match, max(0, len(before_the_last) - len(stop_match) + 1))
    return text[:found] if found >= 0 else text
