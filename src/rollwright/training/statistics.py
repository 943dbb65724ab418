"""Sums over tokens that become means at the end of an update, whatever micro-batches and ranks they came from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rollwright.training.parallel import summed, world_size

_NEGATED = "-"


class TokenStatistics:
    """Accumulates masked means and extremes without a device synchronisation for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def mean(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Add values to the mean called ``name``, where the mask is 1."""
        mask_BL = mask_BL.to(values_BL.dtype)
        self.add(name, (values_BL * mask_BL).sum(), mask_BL.sum())

    @torch.no_grad()
    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add a sum and the number that it is divided by."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self._sums[name] = self._sums.get(name, zero) + total.detach().double()
        self._counts[name] = self._counts.get(name, zero) + count.detach().double()

    @torch.no_grad()
    def largest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Keep the largest value where the mask is 1."""
        masked = values_BL.detach().double().masked_fill(mask_BL <= 0, -torch.inf)
        found = masked.max() if masked.numel() else torch.tensor(-torch.inf, dtype=torch.float64, device=self.device)
        self._largest[name] = torch.maximum(self._largest[name], found) if name in self._largest else found

    def smallest(self, name: str, values_BL: Tensor, mask_BL: Tensor) -> None:
        """Keep the smallest value where the mask is 1."""
        self.largest(_NEGATED + name, -values_BL, mask_BL)

    def export(self) -> dict[str, float]:
        """Every mean and extreme over all ranks; what was never seen is left out."""
        result: dict[str, float] = {}
        if self._sums:
            names = list(self._sums)
            both = torch.stack(
                [torch.stack([self._sums[name] for name in names]), torch.stack([self._counts[name] for name in names])]
            )
            for name, (total, count) in zip(names, summed(both).T.tolist(), strict=True):
                if count > 0:
                    result[name] = total / count
        if self._largest:
            names = list(self._largest)
            values = torch.stack([self._largest[name] for name in names])
            if world_size() > 1:
                dist.all_reduce(values, op=dist.ReduceOp.MAX)
            for name, value in zip(names, values.tolist(), strict=True):
                if value != -torch.inf:
                    result[name.removeprefix(_NEGATED)] = -value if name.startswith(_NEGATED) else value
        return result
