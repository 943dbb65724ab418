"""Stop strings, found in decoded text as it grows, also where they span tokens or characters span tokens."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "�"  # what tokenizers decode an unfinished multi-byte character to


class StopStrings:
    """Watches the output of one sequence.

    Text is decoded a few tokens at a time: each new piece is the difference between decoding from a settled token on with
    and without the new tokens, as decoding single tokens loses spaces in some tokenizers. Special tokens are decoded too,
    so that a special token's text may be a stop string.

    Args:
        tokenizer: decodes ids.
        stop: the strings that end the sequence.
    """

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._overlap = max((len(text) for text in self._stop), default=1) - 1
        self._settled = 0  # decoding begins here: tokens before it no longer change how later ones read
        self._read = 0  # tokens whose text is known
        self._tail = ""  # the last characters of the known text, in which a stop string may have begun

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def find(self, output_tokens: list[int], may_stop: bool = True) -> str | None:
        """The stop string that the newest tokens complete, if any.

        Args:
            output_tokens: all output so far, new tokens at the end.
            may_stop: False below ``min_new_tokens``: the text is followed but no match is reported.
        """
        if self._read >= len(output_tokens):
            return None
        known = self._decode(output_tokens[self._settled : self._read]) if self._read > self._settled else ""
        text = self._decode(output_tokens[self._settled :])
        if text.endswith(_INCOMPLETE):
            new = text[len(known) :].rstrip(_INCOMPLETE)
            searched = self._tail + new
        else:
            new = text[len(known) :]
            searched = self._tail + new
            self._settled, self._read = self._read, len(output_tokens)
            self._tail = searched[-self._overlap :] if self._overlap else ""
        if not may_stop:
            return None
        matches = [(searched.find(text), text) for text in self._stop if text in searched]
        return min(matches)[1] if matches else None
