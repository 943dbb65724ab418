"""The KV cache: slots for the keys and values of running sequences, and the prefix cache of finished ones.

``KVCache`` has one contiguous row for each running sequence, within a limit in bytes. The memory is allocated once. Its division into
rows (many short ones or few long ones) changes with the requests: if more or longer rows are needed, the cache is laid out again in the
same memory. ``PrefixIndex`` finds prefixes among running sequences, and ``PrefixCache`` among finished ones.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.errors import ConfigError

#: Rows that are computed together.
ROW_BLOCK = 8
#: Rows that are computed together if a row's bits must not depend on other rows: in float32 on CPU a linear layer gives a row the
#: same bits in any number of whole blocks of 16, but the library multiplies a single block of 8 differently.
INVARIANT_ROWS = 16
KEY_BLOCK = 32  # attention reads whole blocks of this many cache columns
LENGTH_STEP = 64
_BLOCK = 16
_ALIGNMENT = 64  # bytes; the order in which libraries sum depends on the alignment


class Shapes(enum.IntEnum):
    """Shapes in which rows are computed. The value is the number of rows computed together.

    Attributes:
        FREE: whichever shapes are fastest.
        BLOCKS: whole blocks of rows and columns, so that a row does not depend on its neighbours.
        ONE_ROW: one sequence at a time, from start to end, in a fixed memory layout, so that shapes depend only on the request.
    """

    FREE = ROW_BLOCK
    BLOCKS = INVARIANT_ROWS
    ONE_ROW = 1


def in_blocks(count: int, block: int) -> int:
    """Round ``count`` up to a multiple of ``block``."""
    return -(-count // block) * block


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's keys and values for one token."""

    heads: int
    key_size: int
    value_size: int


class KVCache:
    """Slots for keys and values of every layer.

    Args:
        layers: what each layer stores for a token.
        capacity_bytes: maximum size in bytes.
        max_rows: maximum number of sequences at once.
        dtype, device: type and device of the keys and values.
        shapes: shapes of the computation. ``BLOCKS`` also allocates padding rows.
        record: number of entries and type of each token's record of experts (``inference/routed_experts.py``); None keeps no records.

    Attributes:
        row_block: number of rows that are computed together.
        rows, length: the current layout.
        keys, values: one tensor for each layer, ``[rows, heads, length, size]``.
        routed: records of experts, ``[rows, length, W]``; None if none are kept.
        layouts: number of times that the cache was laid out.
        flat: the memory of all keys and values as ``[vectors, size]``; used if all have the same shape. Writing whole vectors at flat
            indices takes half the time of indexing by row and column, and writes keys and values together.
    """

    def __init__(
        self,
        layers: SequenceOf[LayerShape],
        capacity_bytes: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Shapes = Shapes.FREE,
        record: tuple[int, torch.dtype] | None = None,
    ) -> None:
        self._record = record
        self.shapes = shapes
        self.invariant = shapes is Shapes.BLOCKS
        self.row_block = int(shapes)
        self.bytes_per_token = sum(s.heads * (s.key_size + s.value_size) for s in layers) * dtype.itemsize
        if record is not None:
            self.bytes_per_token += record[0] * record[1].itemsize
        self.capacity_tokens = capacity_bytes // self.bytes_per_token
        if self.capacity_tokens < 1:
            raise ConfigError(
                f"kv_cache_bytes leaves {capacity_bytes} bytes for running sequences, and one token of this model takes "
                f"{self.bytes_per_token}: raise it, or leave it out."
            )
        self.max_rows = max_rows
        self.rows = self.length = 0
        # A layer's keys are one slab, its values another. All slabs of one shape share a flat buffer, so an operation on all layers
        # is one call if the layers have equal shapes. The buffer starts as zeros, because a masked column's weight of 0 times an
        # uninitialised NaN would be NaN. On CPU these are zero pages, which take no memory until they are written.
        of_slabs = [(s.heads, s.key_size) for s in layers] + [(s.heads, s.value_size) for s in layers]
        slabs: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(of_slabs):
            slabs.setdefault(shape, []).append(index)
        self._slab_of = [(shape, slabs[shape].index(index)) for index, shape in enumerate(of_slabs)]
        self._sizes = {
            (heads, size): (len(members), self.capacity_tokens * heads * size) for (heads, size), members in slabs.items()
        }
        self._dtype, self._device = dtype, device
        self._released_length = 0  # of the rows before ``release``, which the next ones have again
        self.layouts = 0
        self._allocate()

    def _allocate(self) -> None:
        self._flat: dict[tuple[int, int], Tensor] = {}
        for shape, (members, columns) in self._sizes.items():
            if self._device.type == "cpu":
                count = members * columns * self._dtype.itemsize
                zeros = np.zeros(count + _ALIGNMENT, dtype=np.uint8)
                zeros = zeros[-zeros.ctypes.data % _ALIGNMENT :][:count]
                self._flat[shape] = torch.from_numpy(zeros).view(self._dtype).view(members, columns)
            else:
                self._flat[shape] = torch.zeros(members, columns, dtype=self._dtype, device=self._device)
        if self._record is not None:
            width, kind = self._record
            self._records = torch.zeros(self.capacity_tokens * width, dtype=kind, device=self._device)
        self._views: dict[tuple[int, int] | str, Tensor] = {}
        self.keys = self.values = list[Tensor]()
        self.flat = next(iter(self._flat.values())).view(-1, next(iter(self._sizes))[1])
        self._offsets = torch.empty(0)
        self._read: tuple[tuple[int, int], list[tuple[Tensor, Tensor]]] = (0, 0), []

    def release(self) -> None:
        """Free the memory. No row may be in use; ``make_room`` allocates it again, with rows of the same length."""
        self._released_length = self.length or self._released_length
        self.rows = self.length = 0
        self._flat, self._views, self.keys, self.values = {}, {}, [], []
        self.flat = self._offsets = self._records = torch.empty(0)
        self._read = (0, 0), []
        self.layouts += 1

    def bytes_for(self, length: int) -> int:
        """Return the size in bytes of the smallest possible number of rows of ``length`` tokens."""
        return (self.row_block * in_blocks(length, LENGTH_STEP) if self.invariant else length) * self.bytes_per_token

    @property
    def longest_row(self) -> int:
        """Maximum number of tokens of a sequence."""
        if not self.invariant:
            return self.capacity_tokens
        return self.capacity_tokens // self.row_block // LENGTH_STEP * LENGTH_STEP

    def make_room(self, rows: int, length: int, used: SequenceOf[int]) -> bool:
        """Ensure that ``rows`` rows of ``length`` tokens exist, and preserve the rows in use.

        Args:
            rows, length: required layout.
            used: number of tokens to preserve in each of rows 0, 1, ...

        Returns:
            True if the rows exist. If ``max_rows`` or the memory limit does not allow them, nothing changes.
        """
        if not self._flat:
            self._allocate()
            if self._released_length:
                self.make_room(1, self._released_length, [])
        if rows > self.max_rows:
            return False
        rows = in_blocks(rows, self.row_block) if self.invariant else rows
        if rows <= self.rows and length <= self.length:
            return True
        least = self.length if used else 0
        wanted = max(least, in_blocks(length, LENGTH_STEP))
        if rows * wanted > self.capacity_tokens and not self.invariant:
            wanted = max(least, length)
        if rows * wanted > self.capacity_tokens:
            return False
        old_views, rows = self._views, min(in_blocks(self.max_rows, self.row_block), self.capacity_tokens // wanted)
        self.rows, self.length = rows, wanted
        self.layouts += 1
        self._views = {
            (heads, size): flat[:, : rows * heads * wanted * size].view(-1, rows, heads, wanted, size)
            for (heads, size), flat in self._flat.items()
        }
        if self._record is not None:  # stored like the keys of one head, so records move together with their rows
            width = self._record[0]
            self._views["records"] = self._records[: rows * wanted * width].view(1, rows, 1, wanted, width)
        slabs = [self._views[shape][index] for shape, index in self._slab_of]
        self.keys, self.values = slabs[: len(slabs) // 2], slabs[len(slabs) // 2 :]
        self._read = (0, 0), []
        if len(self._flat) == 1:  # the slabs of all layers' keys come before the slabs of all layers' values
            heads = self.keys[0].shape[1]
            slab_ids = torch.arange(len(slabs)).view(2, -1).t().flatten()
            starts = slab_ids[:, None] * (self.capacity_tokens * heads) + torch.arange(heads) * wanted
            self._offsets = starts.view(len(self.keys), 1, -1).to(self.flat.device)
        # Rows only move up, so in descending order no row is overwritten before it has moved.
        for row in reversed(range(len(used))):
            for shape, view in self._views.items():
                view[:, row, :, : used[row]] = old_views[shape][:, row, :, : used[row]].clone()
        return True

    @property
    def routed(self) -> Tensor | None:
        return None if self._record is None else self._views["records"][0, :, 0]

    def places(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
        """Return the indices of tokens in ``flat`` for each layer, ``[T * 2 * heads]``, a token's keys before its values.

        Args:
            rows, columns: row and column of each token, ``[T]``.
        """
        heads = self._offsets.shape[2] // 2
        places = (rows * (heads * self.length) + columns)[:, None] + self._offsets
        return places.view(len(self.keys), -1).unbind(0)

    def read(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of the first rows per layer: keys ``[rows * heads, size, length]``, values ``[rows * heads, length, size]``."""
        if self._read[0] != (rows, length):
            views = [
                (keys[:rows].flatten(0, 1)[:, :length].transpose(1, 2), values[:rows].flatten(0, 1)[:, :length])
                for keys, values in zip(self.keys, self.values, strict=True)
            ]
            self._read = (rows, length), views
        return self._read[1]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        for view in self._views.values():
            view[:, destination, :, :length] = view[:, source, :, :length]

    def extract(self, row: int, length: int) -> list[Tensor]:
        """Return copies of the first ``length`` tokens of a row."""
        return [view[:, row, :, :length].clone() for view in self._views.values()]

    def insert(self, row: int, tensors: SequenceOf[Tensor], length: int) -> None:
        """Write the first ``length`` tokens that ``extract`` returned into a row."""
        for view, tensor in zip(self._views.values(), tensors, strict=True):
            view[:, row, :, :length] = tensor[:, :, :length]


class PrefixIndex:
    """Finds the longest common prefix among token sequences, by chained hashes of blocks, and confirms it token by token.

    Sequences of different adapters have different keys and values, so they are kept apart by the adapter's ``key`` (0: the base alone).

    Attributes:
        bytes: total size of the holders.
    """

    def __init__(self) -> None:
        self._holders: dict[int, dict[Any, None]] = {}  # block hash -> holders in order of insertion
        self._known: dict[
            Any, tuple[SequenceOf[int], list[int], int, int]
        ] = {}  # holder -> its tokens, block hashes, bytes and key
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forget everything."""
        self._holders.clear()
        self._known.clear()
        self.bytes = 0

    @staticmethod
    def _chain(tokens: SequenceOf[int], key: int) -> list[int]:
        chain, previous = [], key
        for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
            previous = hash((previous, *tokens[end - _BLOCK : end]))
            chain.append(previous)
        return chain

    def add(self, holder: Any, tokens: SequenceOf[int], size: int = 0, key: int = 0) -> None:
        """Register ``holder`` as having the keys and values of ``tokens`` under the adapter of ``key``, which take ``size`` bytes."""
        chain = self._chain(tokens, key)
        self._known[holder] = tokens, chain, size, key
        self.bytes += size
        for block in chain:
            self._holders.setdefault(block, {})[holder] = None

    def discard(self, holder: Any) -> None:
        """Forget ``holder``."""
        _, chain, size, _ = self._known.pop(holder, ((), (), 0, 0))
        self.bytes -= size
        for block in chain:
            if holders := self._holders.get(block):
                holders.pop(holder, None)
                if not holders:
                    del self._holders[block]

    def discard_keys(self, keys: set[int]) -> None:
        """Forget all that was computed with the adapters of these keys."""
        for holder in [holder for holder, known in self._known.items() if known[3] in keys]:
            self.discard(holder)

    def find(self, tokens: SequenceOf[int], key: int = 0) -> tuple[Any, int]:
        """Return the holder that shares the longest prefix with ``tokens``, and the prefix's length, or ``(None, 0)``."""
        best: dict[Any, None] | None = None
        for block in self._chain(tokens, key):
            if block not in self._holders:
                break
            best = self._holders[block]
        if not best:
            return None, 0
        holder = next(reversed(best))
        of_holder, *_, own_key = self._known[holder]
        if own_key != key:  # equal hashes of other sequences
            return None, 0
        pairs = zip(tokens, of_holder, strict=False)
        return holder, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(eq=False)
class KeptPrefix:
    """Keys and values of a finished sequence."""

    tokens: list[int]
    tensors: list[Tensor]


class PrefixCache(PrefixIndex):
    """Keys and values of finished sequences; the least recently used are dropped first.

    Args:
        capacity_bytes: maximum size in bytes; 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes

    def keep(self, tokens: list[int], tensors: list[Tensor], key: int = 0) -> None:
        """Keep a sequence under its adapter's key, and drop the entry that the sequence extends, if any."""
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > self.capacity_bytes:
            return
        holder, length = super().find(tokens, key)
        if holder is not None and length == len(holder.tokens):
            self.discard(holder)
        while self.bytes + size > self.capacity_bytes:
            self.discard(next(iter(self._known)))
        self.add(KeptPrefix(tokens, tensors), tokens, size, key)

    def find(self, tokens: SequenceOf[int], key: int = 0) -> tuple[KeptPrefix | None, int]:
        """Return the kept sequence that shares the longest prefix with ``tokens``, and the prefix's length, or ``(None, 0)``."""
        entry, length = super().find(tokens, key)
        if entry is not None:
            self._known[entry] = self._known.pop(entry)  # evicted in this order, so this entry is now the last
        return entry, length
