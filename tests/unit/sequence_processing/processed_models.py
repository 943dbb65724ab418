"""A tiny model that answers in the character tokenizer, and an independent reference for what is computed about it."""

from __future__ import annotations

import functools

import torch
from parts import qwen3_config, random_model

from rollwright.data.tokenizer import build_character_tokenizer


@functools.cache
def tokenizer():
    return build_character_tokenizer("abcdefghij +=?", pieces=["</answer>"])


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0, context: int = 96, **changes):
    """A random Qwen3 of two layers whose distributions are far from uniform."""
    sizes = {"max_position_embeddings": context, "tie_word_embeddings": True, **changes}
    return random_model(qwen3_config(tokenizer(), **sizes), seed=seed, scale=4.0).to(dtype)


def reference(model, tokens: list[int], start: int, temperature: float = 1.0):
    """Log-probabilities and entropies of ``tokens[start:]`` in float64, by one plain forward of one sequence."""
    logits = model(torch.tensor([tokens])).logits[0, start - 1 : len(tokens) - 1].double() / temperature
    logprobs = logits.log_softmax(-1)
    labels = torch.tensor(tokens[start:])[:, None]
    return logprobs.gather(1, labels).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
