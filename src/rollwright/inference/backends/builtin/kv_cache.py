"""Keys and values in slots: one row for each running sequence, rows kept contiguous, within a limit in bytes.

The memory is taken once. How it is cut into rows (many short ones or few long ones) changes with the requests: the cache
is laid out anew when a longer row is needed, within the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LENGTH_STEP = 64


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
        capacity_bytes: most bytes held.
        max_rows: most sequences at once.
        dtype, device: of the keys and values.
    """

    def __init__(
        self, layers: SequenceOf[LayerShape], capacity_bytes: int, max_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bytes_per_token = sum(s.heads * (s.key_size + s.value_size) for s in layers) * dtype.itemsize
        self.capacity_tokens = capacity_bytes // self.bytes_per_token
        self.max_rows = max_rows
        self.rows = 0
        self.length = 0
        # One flat buffer for all slabs of one shape (a layer's keys are a slab, its values another): an operation on all
        # layers is one call where they are alike.
        shapes = [(s.heads, s.key_size) for s in layers] + [(s.heads, s.value_size) for s in layers]
        slabs: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(shapes):
            slabs.setdefault(shape, []).append(index)
        self._slab_of = [(shape, slabs[shape].index(index)) for index, shape in enumerate(shapes)]
        self._flat = {
            (heads, size): _zeros(len(members), self.capacity_tokens * heads * size, dtype, device)
            for (heads, size), members in slabs.items()
        }
        self._layer_count = len(layers)
        self._views: dict[tuple[int, int], Tensor] = {}
        self.keys: list[Tensor] = []  # of each layer: [rows, heads, length, size]
        self.values: list[Tensor] = []
        # The same memory as [rows * heads * length, size]: writing whole vectors at flat places takes half the time of
        # indexing by row and column.
        self.flat_keys: list[Tensor] = []
        self.flat_values: list[Tensor] = []

    def _set_layout(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._views = {
            (heads, size): flat[:, : rows * heads * length * size].view(-1, rows, heads, length, size)
            for (heads, size), flat in self._flat.items()
        }
        slabs = [self._views[shape][index] for shape, index in self._slab_of]
        self.keys, self.values = slabs[: self._layer_count], slabs[self._layer_count :]
        self.flat_keys = [slab.view(-1, slab.shape[-1]) for slab in self.keys]
        self.flat_values = [slab.view(-1, slab.shape[-1]) for slab in self.values]

    def places(self, rows_T: Tensor, columns_T: Tensor, heads: int) -> Tensor:
        """``[T * heads]``: where in ``flat_keys`` and ``flat_values`` the vectors of ``T`` tokens go, token by token."""
        first = rows_T * (heads * self.length) + columns_T
        return (first[:, None] + torch.arange(heads, device=rows_T.device) * self.length).flatten()

    def make_room(self, rows: int, length: int, used: SequenceOf[int]) -> bool:
        """See that ``rows`` rows of ``length`` tokens exist; what is in use is kept.

        Args:
            rows, length: what is needed.
            used: tokens held by rows 0, 1, ...; empty where nothing is to be kept.

        Returns:
            False where the memory limit does not allow it (then nothing has changed).
        """
        if rows <= self.rows and length <= self.length:
            return True
        wanted = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        if used:
            wanted = max(wanted, self.length)
        if rows * wanted > self.capacity_tokens:
            wanted = max(length, self.length if used else 0)
        if rows > self.max_rows or rows * wanted > self.capacity_tokens:
            return False
        old_views = self._views
        self._set_layout(min(self.max_rows, self.capacity_tokens // wanted), wanted)
        # Rows only move up, so from the last row down none is overwritten before it is moved.
        for row in reversed(range(len(used))):
            for shape, view in self._views.items():
                view[:, row, :, : used[row]] = old_views[shape][:, row, :, : used[row]].clone()
        return True

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        for view in self._views.values():
            view[:, destination, :, :length] = view[:, source, :, :length]

    def extract(self, row: int, length: int) -> list[Tensor]:
        """Copies of the first ``length`` tokens of a row, to be kept apart from it."""
        return [view[:, row, :, :length].clone() for view in self._views.values()]

    def insert(self, row: int, tensors: SequenceOf[Tensor], length: int) -> None:
        """Write the first ``length`` tokens of what ``extract`` gave into a row."""
        for view, tensor in zip(self._views.values(), tensors, strict=True):
            view[:, row, :, :length] = tensor[:, :, :length]


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, as a masked column's weight of 0 times garbage that happens to be NaN would be NaN.

    On CPU the pages are the system's untouched zero pages: they take no memory until they are written.
    """
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((rows, columns * dtype.itemsize), dtype=np.uint8)).view(dtype)
