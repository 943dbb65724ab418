"""A tiny model that answers in the character tokenizer, and an independent reference for what is computed about it."""

from __future__ import annotations

import functools

import torch
import transformers

from rollwright.data.tokenizer import build_character_tokenizer


@functools.cache
def tokenizer():
    return build_character_tokenizer("abcdefghij +=?", pieces=["</answer>"])


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0, context: int = 96, **changes):
    """A random Qwen3 of two layers whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
        bos_token_id=None,
        **changes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def reference(model, tokens: list[int], start: int, temperature: float = 1.0):
    """Log-probabilities and entropies of ``tokens[start:]`` in float64, by one plain forward of one sequence."""
    logits = model(torch.tensor([tokens])).logits[0, start - 1 : len(tokens) - 1].double() / temperature
    logprobs = logits.log_softmax(-1)
    labels = torch.tensor(tokens[start:])[:, None]
    return logprobs.gather(1, labels).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
