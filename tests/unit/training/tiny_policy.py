"""A tiny model and a batch that has everything: several rows a sample, tool text, different lengths and temperatures."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from rollwright.config.experiment import FinetuneSpec
from rollwright.config.sections import MicroBatchSpec, OptimizerConfig, PPOActorConfig
from rollwright.training.actor import FSDPPPOActor

VOCABULARY = 31


@lru_cache
def _initial_weights(architecture: str) -> Any:
    import tempfile

    from rollwright.training.model import new_model

    with tempfile.TemporaryDirectory() as directory:
        return new_model(
            f"{directory}/model",
            architecture,
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )


def tiny_model(architecture: str = "qwen3", dtype: torch.dtype = torch.float64) -> Any:
    """A model of a few thousand parameters; the same weights at every call."""
    import copy

    return copy.deepcopy(_initial_weights(architecture)).to(dtype)


def tiny_actor(*, dtype: torch.dtype = torch.float64, max_tokens: int = 8192, lr: float = 1e-3, **keys: Any) -> FSDPPPOActor:
    """An initialised actor over the tiny model, on the CPU."""
    keys = {"optimizer": OptimizerConfig(lr=lr), "mb_spec": MicroBatchSpec(max_tokens_per_mb=max_tokens), **keys}
    actor = FSDPPPOActor(PPOActorConfig(device="cpu", **keys), model=tiny_model(dtype=dtype))
    actor.initialize(None, FinetuneSpec(1, 100, 10))
    return actor


def tiny_batch(seed: int = 0, rows: int = 12, length: int = 14) -> dict[str, torch.Tensor]:
    """A batch of three groups as the executor would give it, with log-probabilities of nobody in particular."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(6, length + 1, rows)
    lengths[0] = length
    columns = torch.arange(length)[None]
    attention = columns < lengths[:, None]
    tool_text = (columns == 6) | (columns == 7)
    loss_mask = attention & (columns >= 3) & ~tool_text
    return {
        "input_ids": draw(1, VOCABULARY, rows, length) * attention,
        "attention_mask": attention,
        "loss_mask": loss_mask.int(),
        "logprobs": -torch.rand(rows, length, generator=generator) * 3 * loss_mask,
        "versions": torch.where(loss_mask, 0, -1).int(),
        "rewards": torch.rand(rows, generator=generator),
        "temperature": torch.where(torch.arange(rows) % 2 == 0, 0.7, 1.0),
        "truncated": torch.arange(rows) == 1,
        "group_ids": torch.arange(rows) // 4,
        "sample_ids": torch.arange(rows) // 2,
    }


def grouped_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """The same three groups, with a prompt of five tokens each that their four rows share."""
    batch = tiny_batch(seed)
    batch["input_ids"][:, :5] = batch["input_ids"][::4, :5].repeat_interleave(4, 0).clamp(min=1)
    return batch


def gradients(actor: FSDPPPOActor) -> dict[str, torch.Tensor]:
    """Catch the gradient of the next optimizer step, before clipping, instead of making the step."""
    caught: dict[str, torch.Tensor] = {}

    def catch(loss: float) -> dict[str, float]:
        for name, parameter in actor.model.named_parameters():
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            caught[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            parameter.grad = None
        return {"loss": loss, "grad_norm": 0.0, "skipped_steps": 0.0}

    actor._step = catch
    return caught
