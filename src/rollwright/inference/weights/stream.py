"""Streams of weights, which are read one tensor at a time in a known order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from rollwright.inference.weights.adapter import AdapterSpec

Pairs = Iterable[tuple[str, Tensor]]


class WeightStream:
    """Named tensors that are produced one at a time, so that the whole model never has to exist at once. Can be read repeatedly.

    Attributes:
        described: names and tensors on the meta device (shape and type, no memory), in reading order: wider types first, so that
            each tensor is aligned in a file.
        adapter: describes the adapter that the tensors are; None if they are the weights of a model.
    """

    def __init__(
        self, described: Pairs, read: Callable[[], Iterator[tuple[str, Tensor]]], adapter: AdapterSpec | None = None
    ) -> None:
        """Args:
        described: names and meta tensors; sorted here by the width of their types.
        read: yields the tensors in the order of ``described``. Each is valid only until the next one is requested.
        adapter: see above.
        """
        self.adapter = adapter
        self.described = sorted(described, key=lambda pair: -pair[1].itemsize)
        self._read = read

    @classmethod
    def of(cls, weights: Mapping[str, Tensor] | Pairs | WeightStream, adapter: AdapterSpec | None = None) -> WeightStream:
        """Stream existing tensors. Tensors that share memory (tied weights) appear once, under their first name."""
        if isinstance(weights, WeightStream):
            return weights
        named = sorted(distinct_weights(weights), key=lambda pair: -pair[1].itemsize)
        return cls([(name, torch.empty_like(tensor, device="meta")) for name, tensor in named], lambda: iter(named), adapter)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._read()

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(tensor.nbytes for _, tensor in self.described)


def distinct_weights(weights: Mapping[str, Tensor] | Pairs) -> list[tuple[str, Tensor]]:
    """Drop tensors that share memory with an earlier one (tied weights)."""
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
