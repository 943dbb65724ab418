"""Fused projections that own the storage of a Hugging Face model's parameters.

Query, key and value weights lie in one tensor, gate and up in another; the model's own parameters become views of them.
Nothing is kept twice, an optimizer step in place is seen at once, and the model saves and loads as before: each parameter
is contiguous and overlaps no other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def fuse_rows(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor ``[sum of first axes, ...]`` that owns the parameters' storage; the parameters become its views.

    Parameters that lie fused already, in this order, are left as they are.
    """
    first = parameters[0].data
    shape = (sum(p.shape[0] for p in parameters), *first.shape[1:])
    if are_fused(parameters):
        return torch.as_strided(first, shape, first.stride(), first.storage_offset())
    with torch.inference_mode(False), torch.no_grad():
        fused = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, fused.split([p.shape[0] for p in parameters]), strict=True):
            parameter.data = part
    return fused


def are_fused(parameters: list[nn.Parameter]) -> bool:
    """True where the parameters lie one after the other in one storage."""
    expected, storage = parameters[0].data_ptr(), parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.data_ptr() != expected:
            return False
        if parameter.untyped_storage().data_ptr() != storage:
            return False
        expected += parameter.numel() * parameter.element_size()
    return True
