"""A model and its tokenizer for inference, from a live model or a path; its memory, and weights that fit it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import WeightUpdateError

_MOST_ON_CPU = 4 << 30


def load_model_for_inference(
    model_or_path: Any, tokenizer: Any, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any]:
    """The model, on its device, and the tokenizer, or None where none is given or found beside a live model."""
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), trust_remote_code=trust_remote_code)
    if not isinstance(model_or_path, (str, os.PathLike)):
        return model_or_path, tokenizer
    path = os.fspath(model_or_path)
    if tokenizer is None:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: Any = loader.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    return model.to(default_device(device)).eval(), tokenizer


def default_device(device: str | torch.device) -> torch.device:
    """``auto``: a GPU where there is one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cache_bytes_by_default(device: torch.device) -> int:
    """Half of a GPU's free memory; a quarter of the CPU's, at most 4 GiB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MOST_ON_CPU, free // 4)


def weight_copies(model: Any, named: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a model's own tensor and the one to be copied into it.

    Raises:
        WeightUpdateError: a name or shape is not the model's.
    """
    state = model.state_dict(keep_vars=True)
    for name, tensor in named.items():
        if name not in state or state[name].shape != tensor.shape:
            there = f"has shape {tuple(state[name].shape)}" if name in state else "is not in the model"
            raise WeightUpdateError(f"Weight {name} of shape {tuple(tensor.shape)} {there}: it belongs to another model.")
    return [(state[name], tensor) for name, tensor in named.items()]


def copy_weights(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Overwrite the first of each pair with the second."""
    with torch.no_grad():
        for destination, source in copies:
            destination.copy_(source)
