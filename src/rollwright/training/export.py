"""Merges a LoRA adapter with its base, and measures what rounding the result to bfloat16 changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.config.sections import TrainEngineConfig
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.inference.weights.adapter import CONFIG_FILE, is_adapter
from rollwright.inference.weights.files import read_stream
from rollwright.training.adapters import merged, with_adapter
from rollwright.training.hf_checkpoint import save_model
from rollwright.training.logprobs import TokenScorer
from rollwright.training.micro_batches import attended_tokens
from rollwright.training.model import load_model

#: Sampled sequences, and their length, over which the change of log-probabilities is measured.
_ROWS, _LENGTH = 8, 64


@dataclass(frozen=True)
class LogprobChange:
    """Absolute change of log-probabilities over sampled tokens."""

    mean: float
    largest: float
    tokens: int


def merge(
    checkpoint: Path, directory: Path, dtype: str, base: str | None = None, *, trust_remote_code: bool = False
) -> LogprobChange | None:
    """Write an adapter merged with its base as a model in Hugging Face form.

    Args:
        checkpoint: PEFT directory of the adapter. If it has a tokenizer, this is written too, otherwise the base's.
        directory: target directory.
        dtype: ``float32`` or ``bfloat16``. The weights are merged in float32 and then rounded.
        base: path or name of the base. If None, the adapter's description names it.
        trust_remote_code: run code that comes with the base.

    Returns:
        For bfloat16, how the rounding of all weights changes the log-probabilities of tokens that the merged model samples, computed in
        float32; otherwise None.

    Raises:
        ConfigError: there is no adapter, or no base.
    """
    if not is_adapter(checkpoint):
        raise ConfigError(f"{checkpoint} is no adapter: it has no {CONFIG_FILE}. A whole model needs no export.")
    adapter = read_stream(checkpoint)
    assert adapter.adapter is not None
    base = base or adapter.adapter.base
    if not base:
        raise ConfigError(f"{checkpoint / CONFIG_FILE} names no base model: give --base.")
    section = TrainEngineConfig(path=base, dtype="float32", device="cpu", optimizer=None, trust_remote_code=trust_remote_code)
    model = merged(with_adapter(load_model(section), adapter))
    change = None
    if dtype != "float32":
        change = _rounded(model, getattr(torch, dtype))
    has_tokenizer = (checkpoint / "tokenizer_config.json").is_file()
    save_model(model, directory, tokenizer=load_tokenizer(checkpoint if has_tokenizer else base, trust_remote_code))
    return change


def _rounded(model: Any, dtype: torch.dtype) -> LogprobChange:
    """Convert a model to ``dtype`` in place, and measure the change of log-probabilities."""
    ids_BL = _sampled(model)
    before_BL = _scored(model, ids_BL)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(parameter.dtype)
    difference = (_scored(model, ids_BL) - before_BL)[:, 1:].abs()
    for parameter in model.parameters():  # buffers keep their type
        parameter.data = parameter.data.to(dtype)
    return LogprobChange(float(difference.mean()), float(difference.max()), difference.numel())


@torch.no_grad()
def _sampled(model: Any) -> Tensor:
    """Sample rows at temperature 1, each from another first token."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids_BL = torch.arange(1, _ROWS + 1)[:, None] * 31 % vocabulary
    generator = torch.Generator().manual_seed(0)
    for _ in range(_LENGTH):
        logits = model(input_ids=ids_BL, use_cache=False).logits[:, -1].float()
        ids_BL = torch.cat([ids_BL, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return ids_BL


@torch.no_grad()
def _scored(model: nn.Module, ids_BL: Tensor) -> Tensor:
    batch = {"input_ids": ids_BL}
    return TokenScorer(model)(batch, attended_tokens(batch))[0]
