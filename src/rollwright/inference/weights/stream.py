"""Weights that are read one tensor at a time, in a known order: what goes from a trainer to engines and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

Pairs = Iterable[tuple[str, Tensor]]


class WeightStream:
    """Named tensors that exist only when their turn comes. It may be read again.

    Attributes:
        described: names with tensors on the meta device (shape and type, no memory), in the order in which they are read:
            wider types first, so that each is aligned in a file.
    """

    def __init__(self, described: Pairs, read: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """Args:
        described: what is read; sorted here by the width of their types.
        read: yields the tensors in the order of ``described``, each only until the next is asked for.
        """
        self.described = sorted(described, key=lambda pair: -pair[1].itemsize)
        self._read = read

    @classmethod
    def of(cls, weights: Mapping[str, Tensor] | Pairs | WeightStream) -> WeightStream:
        """A stream over tensors that exist; those that are another one's memory (tied weights) only under their first name."""
        if isinstance(weights, WeightStream):
            return weights
        named = sorted(distinct_weights(weights), key=lambda pair: -pair[1].itemsize)
        return cls([(name, torch.empty_like(tensor, device="meta")) for name, tensor in named], lambda: iter(named))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._read()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.described)


def distinct_weights(weights: Mapping[str, Tensor] | Pairs) -> list[tuple[str, Tensor]]:
    """Named tensors without those that are another one's memory (tied weights), whose first name counts."""
    pairs = cast("Pairs", weights.items() if isinstance(weights, Mapping) else weights)
    seen: set[tuple[object, ...]] = set()
    distinct: list[tuple[str, Tensor]] = []
    for name, tensor in pairs:
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        distinct.append((name, tensor))
    return distinct
