"""Decode tokens that arrive one by one: whole characters only, without stop strings, and with reasoning separated."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


def held_back(text: str, marks: list[str]) -> int:
    """Count the characters at the end of ``text`` that may be the beginning of one of ``marks``."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def without(text: str, marks: list[str]) -> str:
    """Remove all occurrences of ``marks`` from a text, one mark after the other."""
    for mark in marks:
        text = text.replace(mark, "")
    return text


class TextStream:
    """Decodes a growing token sequence.

    New text is the difference between decoding the last tokens with and without the new ones. Decoding tokens one by one would lose
    spaces with some tokenizers, and break characters that span tokens.

    Args:
        tokenizer: decodes ids.
        skip_special_tokens: omit special tokens.
        stop: stop strings; the one that ends the completion is omitted.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, stop: list[str] | None = None) -> None:
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
        """Append tokens, and return the text that has become certain."""
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
        """Return the pending text up to a stop string, or up to the beginning of one, in the newest piece.

        A stop string in an earlier piece is ignored: it came before ``min_new_tokens`` and did not end the completion.
        """
        before = len(self._pending)
        self._pending += piece
        newest = [self._pending.find(mark, max(0, before - len(mark) + 1)) for mark in self._stop]
        cut = min([len(self._pending) - held_back(self._pending, self._stop), *(at for at in newest if at >= 0)])
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released


class ReasoningSplit:
    """Splits a growing text into the reasoning between ``<think>`` and ``</think>``, and the answer after it.

    White space around both is removed.

    Args:
        is_open: the prompt ends with ``<think>``, so the text begins with reasoning.
        special: texts of special tokens to remove from the reasoning.
    """

    OPENING, CLOSING = "<think>", "</think>"

    def __init__(self, is_open: bool, special: list[str] | None = None) -> None:
        self._part = "inside" if is_open else "before"
        self._special = special or []
        self._held = ""
        self.reasoning = ""  # so far

    def push(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """Append text, and return the reasoning and the part of the answer that have become certain."""
        self._held += piece
        known = len(self.reasoning)
        if self._part == "before":
            begun = self._held.lstrip()
            if begun.startswith(self.OPENING):
                self._part, self._held = "inside", begun[len(self.OPENING) :]
            elif is_last or not self.OPENING.startswith(begun):
                self._part = "answer"
        if self._part == "inside":
            inside, closing, after = self._held.partition(self.CLOSING)
            if not closing and not is_last:
                cut = len(inside[: len(inside) - held_back(inside, [self.CLOSING, *self._special])].rstrip())
                inside, after = inside[:cut], inside[cut:]
            inside = without(inside, self._special)
            self.reasoning += inside if self.reasoning else inside.lstrip()
            self._held = after
            if closing or is_last:
                self.reasoning = self.reasoning.rstrip()
                self._part = "after"
        if self._part == "after" and (answer := self._held.lstrip()):
            self._part, self._held = "answer", answer
        answer = ""
        if self._part == "answer":
            answer, self._held = self._held, ""
        return self.reasoning[known:], answer


def completion_text(
    tokenizer: Any, tokens: list[int], *, skip_special_tokens: bool = True, stop_match: str | int | None = None
) -> str:
    """Decode a complete completion.

    Args:
        tokenizer: decodes ids.
        tokens: all sampled tokens.
        skip_special_tokens: omit special tokens.
        stop_match: stop string that ended the completion; it is omitted. A token id or None omits nothing.
    """
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    if not isinstance(stop_match, str):
        return text
    before_the_last = tokenizer.decode(tokens[:-1], skip_special_tokens=skip_special_tokens).rstrip(_INCOMPLETE)
    found = text.find(stop_match, max(0, len(before_the_last) - len(stop_match) + 1))
    return text[:found] if found >= 0 else text
