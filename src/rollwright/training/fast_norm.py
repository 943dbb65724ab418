"""RMSNorm in fewer passes over memory, for training on CPUs.

On a CPU a norm is bound by memory, and the ordinary composition of operations reads and writes its input about three times as
often as needed. The norm alone takes about half the time here; an update of a 0.1 to 4 M parameter model about 7 % less.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    """``w · x / sqrt(mean(x²) + eps)`` over the last axis (arXiv 1910.07467, eq. 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        # With n = x · scale: dw = Σ g n;  dx = scale · (g w - n · mean(g w n))
        normalised = x * scale
        product = grad * normalised
        grad_weight = product.flatten(0, -2).sum(0)
        pull = (product @ weight[:, None]).div_(-x.shape[-1])
        grad_x = (grad * weight).addcmul_(normalised, pull).mul_(scale)
        return grad_x, grad_weight, None


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[return-value]


@torch.no_grad()
def use_fast_norms(model: nn.Module) -> int:
    """Replace the forward pass of a model's RMSNorm layers, in place, where it computes the same.

    Architectures differ in what they call RMSNorm (some add one to the weight), so each layer is tried on numbers first.

    Returns:
        How many layers were replaced.
    """
    replaced = 0
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if (
            not type(module).__name__.endswith("RMSNorm")
            or not isinstance(epsilon, float)
            or weight is None
            or weight.dim() != 1
        ):
            continue
        probe = torch.linspace(-2.0, 3.0, 3 * weight.shape[0], dtype=weight.dtype, device=weight.device).view(3, -1)
        if torch.allclose(module(probe), _RMSNorm.apply(probe, weight, epsilon), rtol=1e-5, atol=1e-6):
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
            replaced += 1
    return replaced
