"""Finding keys and values that were computed before: of running rows, and of finished sequences that are kept a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import Any

from torch import Tensor

BLOCK = 16


class PrefixIndex:
    """Longest common prefix among token sequences, found by chained hashes of blocks and confirmed token by token."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[Any, None]] = {}  # block hash -> holders in order of insertion
        self._hashes: dict[Any, list[int]] = {}
        self._tokens: dict[Any, SequenceOf[int]] = {}

    @staticmethod
    def _chain(tokens: SequenceOf[int]) -> list[int]:
        chain, previous = [], 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            previous = hash((previous, *tokens[end - BLOCK : end]))
            chain.append(previous)
        return chain

    def add(self, holder: Any, tokens: SequenceOf[int]) -> None:
        """Register ``holder`` as having the keys and values of ``tokens``."""
        self._hashes[holder] = chain = self._chain(tokens)
        self._tokens[holder] = tokens
        for block in chain:
            self._holders.setdefault(block, {})[holder] = None

    def discard(self, holder: Any) -> None:
        """Forget ``holder``."""
        self._tokens.pop(holder, None)
        for block in self._hashes.pop(holder, ()):
            if holders := self._holders.get(block):
                holders.pop(holder, None)
                if not holders:
                    del self._holders[block]

    def find(self, tokens: SequenceOf[int]) -> tuple[Any, int]:
        """The holder that shares the longest prefix with ``tokens``, and that prefix's length; ``(None, 0)`` if none does."""
        best: dict[Any, None] | None = None
        for block in self._chain(tokens):
            if block not in self._holders:
                break
            best = self._holders[block]
        if not best:
            return None, 0
        holder = next(reversed(best))
        length = 0
        for own, other in zip(tokens, self._tokens[holder], strict=False):
            if own != other:
                break
            length += 1
        return holder, length


class KeptPrefix:
    """Keys and values of a finished sequence."""

    def __init__(self, tokens: list[int], tensors: list[Tensor]) -> None:
        self.tokens = tokens
        self.tensors = tensors
        self.bytes = sum(t.numel() * t.element_size() for t in tensors)


class PrefixCache:
    """Finished sequences' keys and values, the least recently used given up first.

    Args:
        capacity_bytes: most bytes kept; 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self._entries: OrderedDict[KeptPrefix, None] = OrderedDict()
        self._index = PrefixIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, tokens: list[int], tensors: list[Tensor]) -> None:
        """Keep a sequence; entries that it extends are dropped, as it holds all they hold."""
        entry = KeptPrefix(tokens, tensors)
        if entry.bytes > self.capacity_bytes:
            return
        holder, length = self._index.find(tokens)
        if holder is not None and length == len(holder.tokens):
            self._drop(holder)
        while self.bytes + entry.bytes > self.capacity_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[entry] = None
        self.bytes += entry.bytes
        self._index.add(entry, tokens)

    def _drop(self, entry: KeptPrefix) -> None:
        del self._entries[entry]
        self.bytes -= entry.bytes
        self._index.discard(entry)

    def find(self, tokens: list[int]) -> tuple[KeptPrefix | None, int]:
        """The kept sequence that shares the longest prefix with ``tokens``, and that prefix's length."""
        entry, length = self._index.find(tokens)
        if entry is not None:
            self._entries.move_to_end(entry)
        return entry, length

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._entries.clear()
        self._index = PrefixIndex()
        self.bytes = 0
