"""Stop strings: finds the token that completes a stop string in a growing output."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "�"  # what tokenizers decode an unfinished multi-byte character to


class StopStrings:
    """Finds stop strings in the decoded text of one growing output. Both stop strings and characters may span several tokens.

    Tokens are decoded together with the tokens before them, and the text of the latter is cut off, because some tokenizers lose spaces
    when they decode single tokens. Special tokens are decoded, too, because their text may be a stop string.
    """

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._overlap = max((len(text) for text in self._stop), default=1) - 1
        self._pending: list[int] = []  # the last complete piece, as context, and the tokens after it
        self._known = ""  # text of the last complete piece
        self._known_tokens = 0
        self._tail = ""  # the last characters of the known text, where a stop string may have begun

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def find(self, token: int, may_stop: bool = True) -> str | None:
        """Return the stop string that the next output token completes, if any and if ``may_stop``."""
        self._pending.append(token)
        text = self._decode(self._pending)
        new, before = text[len(self._known) :], len(self._tail)
        searched = self._tail + new.rstrip(_INCOMPLETE)
        if not text.endswith(_INCOMPLETE):
            searched = self._tail + new
            self._pending = self._pending[self._known_tokens :]
            self._known_tokens = len(self._pending)
            self._known = self._decode(self._pending)
            self._tail = searched[-self._overlap :] if self._overlap else ""
        if not may_stop:
            return None
        # stop strings that an earlier token completed do not count: the output was shorter than ``min_new_tokens``
        found = [(searched.find(text, max(0, before - len(text) + 1)), text) for text in self._stop]
        return min((match for match in found if match[0] >= 0), default=(0, None))[1]
