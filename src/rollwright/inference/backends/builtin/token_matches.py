"""Repeated text: finds where the last tokens of a sequence occur earlier in it."""

from __future__ import annotations

import itertools

_SHORTEST = 2  # tokens that have to match
_LONGEST = 32  # tokens that are compared
_CANDIDATES = 8  # earlier places that are compared, the newest first


class TokenMatches:
    """Finds where the last tokens of a growing sequence occur earlier in it, by chains of equal pairs as in LZ77."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}  # pair of tokens -> index after its newest occurrence
        self._earlier: list[int] = [0]  # by index: the one after the previous occurrence of the pair before it, or 0

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int]) -> None:
        """Add the next tokens of the sequence."""
        known, newest, earlier = self._tokens, self._newest, self._earlier
        for token in tokens:
            known.append(token)
            if (index := len(known)) >= _SHORTEST:
                pair = known[-2], token
                earlier.append(newest.get(pair, 0))
                newest[pair] = index
            else:
                earlier.append(0)

    def find(self, count: int) -> tuple[list[int], int]:
        """Return the ``count`` tokens that followed the longest match, and the match's length; ``([], 0)`` if nothing matches.

        A match that reaches into the last tokens is continued periodically.
        """
        tokens, end = self._tokens, len(self._tokens)
        best, longest, place = 0, 0, self._earlier[end]
        for _ in range(_CANDIDATES):
            if not place:
                break
            length = _SHORTEST
            while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == _LONGEST:
                    break
            place = self._earlier[place]
        if not best:
            return [], 0
        followed = tokens[best : best + count]
        return (followed if best + count <= end else list(itertools.islice(itertools.cycle(followed), count))), longest
