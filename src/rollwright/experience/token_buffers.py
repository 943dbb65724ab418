"""Token ids of conversations, kept once: one growing buffer for each conversation, of which requests and records hold a length.

The prompts of a conversation extend one another. A buffer holds the longest of them, as the ints that were given and packed; a
prompt is ``Tokens``, the first so many tokens of its conversation's buffer. So a turn costs what it adds, and a record of a hundred
turns is as long as the last of them.

A prompt that is no beginning or extension of what its conversation's buffer holds begins a buffer of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

#: Type of packed token ids.
TOKEN_TYPE = np.dtype("<i4")
LARGEST_TOKEN = 2**31 - 1


class TokenBuffer:
    """The tokens of one conversation; it only grows.

    Attributes:
        objects: the ids as ints, the very objects that were given: a list that holds the same ones compares at under 1 ns a token.
        array: the same, packed; the memory behind its end is spare.
    """

    def __init__(self) -> None:
        self.objects: list[int] = []
        self.array = np.empty(64, dtype=TOKEN_TYPE)

    def append(self, ids: list[int]) -> None:
        """Add tokens, which are checked."""
        begin, end = len(self.objects), len(self.objects) + len(ids)
        if end > len(self.array):
            grown = np.empty(max(end, len(self.array) * 3 // 2), dtype=TOKEN_TYPE)
            grown[:begin] = self.array[:begin]
            self.array = grown
        self.array[begin:end] = ids
        self.objects += ids

    def agrees(self, ids: list[Any]) -> bool:
        """True where ``ids`` begin with all tokens of the buffer, or the buffer begins with them."""
        known = self.objects
        if len(ids) <= len(known):
            return known[: len(ids)] == ids
        # Lists compare item by item until two differ, identical ones without a call. Whether the comparison comes to the end is
        # what is asked, so a mark is put there. A slice of ``ids`` to compare with would cost four times as much.
        mark = _Mark()
        known.append(mark)  # type: ignore[arg-type]
        try:
            known < ids  # type: ignore[operator]  # noqa: B015
        except TypeError:  # they hold what cannot be compared with a number, and is refused as a token soon
            return False
        finally:
            known.pop()
        return mark.was_reached


class _Mark:
    """Notes that a comparison came to it; different from everything, and less."""

    def __init__(self) -> None:
        self.was_reached = False

    def __eq__(self, other: object) -> bool:
        self.was_reached = True
        return False

    def __lt__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Tokens:
    """The first ``length`` tokens of a buffer. Immutable."""

    __slots__ = ("buffer", "length")

    def __init__(self, buffer: TokenBuffer, length: int) -> None:
        self.buffer = buffer
        self.length = length

    @classmethod
    def of(cls, ids: list[int]) -> Tokens:
        """These tokens, in a buffer of their own."""
        buffer = TokenBuffer()
        buffer.append(ids)
        return cls(buffer, len(ids))

    @property
    def array(self) -> np.ndarray:
        """``[length]`` int32; not to be written to."""
        return self.buffer.array[: self.length]

    def tolist(self) -> list[int]:
        """A list of its own."""
        return self.buffer.objects[: self.length]

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Tokens({self.tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokens.of, (self.tolist(),)

    def equals(self, ids: list[Any]) -> bool:
        """True where the list holds these tokens."""
        return len(ids) == self.length and self.buffer.agrees(ids)

    def begins_with(self, other: Tokens) -> bool:
        """True where ``other`` is a beginning of these."""
        if self.length < other.length:
            return False
        return self.buffer is other.buffer or bool(np.array_equal(self.array[: other.length], other.array))

    def continues(self, prompt: Tokens, output: bytes) -> bool:
        """True where these begin with ``prompt`` and, behind it, the packed tokens ``output``."""
        end = prompt.length + len(output) // TOKEN_TYPE.itemsize
        return self.length >= end and self.buffer.array[prompt.length : end].tobytes() == output and self.begins_with(prompt)

    def shared_with(self, other: np.ndarray) -> int:
        """How many tokens these have in common with ``other`` from the first on."""
        count = min(self.length, len(other))
        differs = self.array[:count] != other[:count]
        return int(differs.argmax()) if differs.any() else count


_BUFFERS: weakref.WeakValueDictionary[str, TokenBuffer] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def conversation_tokens(conversation: str, ids: list[Any], check: Callable[[list[Any], int], list[int]]) -> Tokens:
    """``ids`` as tokens of a conversation, whose buffer they extend where they can. The list is only read.

    A conversation's buffer lives as long as one of its requests or records.

    Args:
        conversation: its id.
        ids: token ids.
        check: given the tokens that are not in the buffer yet and the place of the first; returns them as ints, or raises.
    """
    with _LOCK:
        buffer = _BUFFERS.get(conversation)
        if buffer is None or not buffer.agrees(ids):
            buffer = TokenBuffer()
        known = len(buffer.objects)
        if len(ids) > known:
            buffer.append(check(ids[known:], known))
        _BUFFERS[conversation] = buffer
        return Tokens(buffer, len(ids))
