"""The faster layers are the same functions, and are used only where they are."""

import pytest
import torch
from tiny_policy import tiny_model

from rollwright.training.layers import _RMSNorm, _Rotation, use_fast_layers


def test_value_and_gradient_of_the_norm_against_autograd():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    expected = weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(_RMSNorm.apply(x, weight, 1e-3), expected)
    torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, 1e-3), (x, weight))


def test_value_and_gradient_of_the_rotation_against_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    angle = torch.randn(1, 3, 2, dtype=torch.float64, generator=generator)
    cos, sin = (torch.cat((each, each), -1)[:, None] for each in (angle.cos(), angle.sin()))
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(_Rotation.apply(x, cos, sin), torch.cat((turned.real, turned.imag), -1))
    torch.autograd.gradcheck(lambda x: _Rotation.apply(x, cos, sin), x)


@pytest.mark.parametrize(("architecture", "per_layer"), [("qwen3", 5), ("qwen2", 3), ("llama", 3)])
def test_a_model_computes_the_same_with_it(architecture, per_layer):
    plain, fast = (tiny_model(architecture, torch.float32) for _ in range(2))
    assert use_fast_layers(fast) == 2 * per_layer + 1
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
    assert use_fast_layers(model) == 0


def test_another_kind_of_rotation_is_left_alone():
    # GPT-J's kind turns neighbours, not halves.
    import transformers

    config = transformers.GlmConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(6)[None]
    before = model(ids).logits
    use_fast_layers(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    torch.testing.assert_close(model(ids).logits, before)


def test_gpt_oss_whose_rotation_takes_half_as_many_angles_keeps_its_own():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    config = transformers.GptOssConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert use_fast_layers(model) > 0  # its norms
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_a_layer_with_a_forward_pass_of_its_own_keeps_it():
    model = tiny_model(dtype=torch.float32)
    layer = model.model.layers[0].self_attn
    layer.forward = own = lambda *args, **kwargs: (torch.zeros(1), None)
    changed = use_fast_layers(model)
    assert layer.forward is own
    assert changed == use_fast_layers(tiny_model(dtype=torch.float32)) - 1
