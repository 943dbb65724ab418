"""Adapters trained by nobody: random PEFT models, and what a trainer publishes of them."""

from __future__ import annotations

import copy

import peft
import torch

from rollwright.inference.weights.adapter import AdapterSpec
from rollwright.inference.weights.stream import WeightStream


def random_adapter(model, seed: int, *, rank: int = 4, targets="all-linear", scale: float = 0.2, **options):
    """An untouched PEFT model around a copy of ``model``, with random A and B."""
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return adapted


def spec_of(adapted) -> AdapterSpec:
    """Describe the adapter of a PEFT model."""
    config = adapted.peft_config["default"]
    return AdapterSpec(config.r, config.lora_alpha, tuple(sorted(config.target_modules)), config.use_rslora, config.use_dora)


def published(adapted) -> WeightStream:
    """Stream an adapter as a trainer publishes it."""
    return WeightStream.of(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False), spec_of(adapted))
