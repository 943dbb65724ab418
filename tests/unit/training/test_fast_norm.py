"""The faster RMSNorm is the same function, and is used only where it is."""

import pytest
import torch
from tiny_policy import tiny_model

from rollwright.training.logprobs import _RMSNorm, use_fast_norms


def test_value_and_gradient_against_autograd():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(_RMSNorm.apply(x, weight, 1e-3), expected)
    torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, 1e-3), (x, weight))


@pytest.mark.parametrize(("architecture", "per_layer"), [("qwen3", 4), ("qwen2", 2), ("llama", 2)])
def test_a_model_computes_the_same_with_it(architecture, per_layer):
    plain, fast = (tiny_model(architecture, torch.float32) for _ in range(2))
    assert use_fast_norms(fast) == 2 * per_layer + 1
    ids = torch.arange(12).view(2, 6)
    for model in (plain, fast):
        model(ids).logits.square().sum().backward()
    for (name, mine), theirs in zip(fast.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_another_kind_of_norm_is_left_alone():
    class OffsetRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4))
            self.variance_epsilon = 1e-6

        def forward(self, x):
            return (1 + self.weight) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    model = torch.nn.Sequential(OffsetRMSNorm())
    assert use_fast_norms(model) == 0
