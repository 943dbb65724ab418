"""A change of a model's weights that every tensor takes part in, and that is undone exactly without a copy of the model.

The change flips signs in a seeded pattern: in each dimension of a tensor, a random half of the indices negates what it selects. Flipping the
same signs again restores every bit. The magnitudes of weights and products stay as they are, so log-probabilities stay finite, but hardly
any output of the model stays. A tensor of zeros (B of a new LoRA adapter, a new bias) gets values instead, and becomes zero again.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.training import parallel
from rollwright.training.fsdp import own_tensors
from rollwright.training.parallel import local_tensor, sharded_like

#: Size of the values of a changed tensor of zeros, before division by the square root of its inputs.
_SIZE_OF_VALUES = 0.5

#: Kinds of tensors, by what their names contain; the kind of others is the last module in their name, such as ``q_proj``. Changes of
#: ``lora_A`` are visible only if ``lora_B`` is not zero, so ``lora_B`` is first.
_KINDS = (
    (r"\.lora_B\b", "LoRA B"),
    (r"\.lora_A\b", "LoRA A"),
    (r"\.lora_magnitude_vector\b", "DoRA magnitudes"),
    (r"\bexperts\b", "experts"),
    (r"\b(router|mlp\.gate|moe\.gate|feed_forward\.gate)\b", "router"),
    (r"\b(embed_tokens|embed_in|wte|wpe|embeddings?)\b", "embeddings"),
    (r"\b(lm_head|embed_out)\b", "head"),
    (r"norm\b|\bln_\w+|layernorm\w*\b", "norms"),
)


def kind_of(name: str) -> str:
    """Return the kind of a tensor, for messages."""
    known = next((kind for pattern, kind in _KINDS if re.search(pattern, name)), None)
    *modules, leaf = name.split(".")
    kind = known or (modules[-1] if modules else leaf)
    return f"{kind} (bias)" if leaf == "bias" and known != "norms" else kind


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer, or None if it is in no layer."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


class SeededChange:
    """Changes a model's tensors in place. Sharded tensors are changed alike on every rank, by their whole indices.

    Args:
        model: the model.
        names: the tensors that may be changed; floating-point parameters.
        seed: the pattern.

    Attributes:
        names: those tensors, in the order of their kinds.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], seed: int) -> None:
        self._model, self._seed = model, seed
        order = [kind for _, kind in _KINDS[:3]]
        kinds = {name: kind_of(name) for name in names}
        self.names = sorted(kinds, key=lambda name: order.index(kinds[name]) if kinds[name] in order else len(order))
        self._changed: set[str] = set()
        own = own_tensors(model)
        counts = torch.tensor([int(torch.count_nonzero(local_tensor(own[name]))) for name in self.names])
        if parallel.world_size() > 1:
            counts = parallel.summed(counts.to(next(iter(own.values())).device))
        self._zeros = {name for name, count in zip(self.names, counts.tolist(), strict=True) if count == 0}

    @torch.no_grad()
    def make(self, changed: Collection[str]) -> None:
        """Change exactly these tensors, and give all others their true values."""
        own: dict[str, Tensor] = {}
        for name in sorted(self._changed.symmetric_difference(changed)):
            own = own or own_tensors(self._model)
            self._toggle(name, own[name], to_change=name not in self._changed)
        self._changed = set(changed)

    @torch.no_grad()
    def exchange(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Exchange the contents of tensors of one shape. Exchanging them again restores them."""
        own = own_tensors(self._model)
        for first, second in pairs:
            one, other = local_tensor(own[first]), local_tensor(own[second])
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    def _toggle(self, name: str, tensor: Tensor, *, to_change: bool) -> None:
        local: Any = local_tensor(tensor)
        if name in self._zeros:
            local.fill_(_SIZE_OF_VALUES * (tensor.shape[-1] if tensor.dim() > 1 else 1) ** -0.5 if to_change else 0.0)
            if not to_change:
                return
        if tensor.numel() == 1:
            local.neg_()
            return
        for dimension, size in enumerate(tensor.shape):
            signs = self._signs(f"{name} {dimension}", size).to(tensor.device, tensor.dtype)
            if dimension == 0:  # the only dimension that FSDP shards
                signs = local_tensor(sharded_like(signs, tensor))
            local.mul_(signs.view(-1, *[1] * (tensor.dim() - dimension - 1)))

    def _signs(self, key: str, size: int) -> Tensor:
        """Return ``[size]`` random signs, with at least one of each if there is room."""
        if size == 1:
            return torch.ones(1)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {key}".encode()))
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        signs[0], signs[-1] = -1, 1
        return signs


def exchangeable(shapes: dict[str, torch.Size]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return which tensors could be mistaken for each other: names that differ in one part, and have the same shape everywhere.

    Args:
        shapes: shape of each tensor, by name.

    Returns:
        Pairs of tensors, by the parts in which their names differ, such as ``("gate_proj", "up_proj")``.
    """
    places: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
    for name in shapes:
        parts = name.split(".")
        for index, part in enumerate(parts):
            if not part.isdigit():
                places.setdefault((index, *parts[:index], "", *parts[index + 1 :]), []).append((part, name))
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for members in places.values():
        members.sort()
        for index, (part, name) in enumerate(members):
            for other_part, other in members[index + 1 :]:
                found.setdefault((part, other_part), []).append((name, other))
    return {parts: pairs for parts, pairs in found.items() if all(shapes[a] == shapes[b] for a, b in pairs)}
