"""Batch sizes from free memory, and telling an out-of-memory error from another."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

_LAYOUT_STEP = 64  # the engine's cache lays rows out in such steps
_USED_SHARE = 0.5  # of free memory: the rest is for what the estimates leave out
_MOST_SEQUENCES = {"cpu": 256, "cuda": 1024}  # beyond these a batch is no faster


def is_out_of_memory(error: BaseException | None) -> bool:
    """True where ``error``, or what caused it, says that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # the CPU allocator's words
            return True
        error = error.__cause__
    return False


def release() -> None:
    """Give back what a failed attempt held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory that a device has free, with what its allocator holds unused."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cache_bytes_per_token(model: Any) -> int | None:
    """Bytes of keys and values of one token; None where the configuration does not say."""
    config = model.config.get_text_config()
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or hasattr(config, "kv_lora_rank"):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * size * model.dtype.itemsize


def cache_bytes(model: Any, rows: int, length: int) -> int | None:
    """Bytes of a cache that holds ``rows`` sequences of ``length`` tokens; None where the configuration does not say."""
    per_token = cache_bytes_per_token(model)
    return None if per_token is None else rows * -(-length // _LAYOUT_STEP) * _LAYOUT_STEP * per_token


def generation_batch_size(model: Any, sequences: int, length: int) -> int:
    """Sequences of ``length`` tokens to decode at once: their caches and logits take half of what is free.

    Args:
        model: the Hugging Face model.
        sequences: how many there are.
        length: most tokens of one, prompt included.
    """
    config, device = model.config.get_text_config(), model.device
    cache = cache_bytes(model, 1, length) or 4 * config.hidden_size * length * model.dtype.itemsize * 32
    each = cache + 6 * 4 * config.vocab_size + 32 * config.hidden_size * model.dtype.itemsize
    return _fitting(device, sequences, each)


def scoring_batch_size(model: Any, sequences: int, length: int, with_grad: bool) -> int:
    """Sequences of ``length`` tokens for one teacher-forced pass, by a count of the activations that it holds at once.

    Args:
        model: the Hugging Face model.
        sequences: how many there are.
        length: tokens of the longest.
        with_grad: every layer's activations are kept for the backward pass.
    """
    config = model.config.get_text_config()
    width = config.hidden_size * 16 + 4 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    layers = config.num_hidden_layers if with_grad else 1
    return _fitting(model.device, sequences, length * width * layers * model.dtype.itemsize)


def _fitting(device: torch.device, sequences: int, each: int) -> int:
    fits = int(free_bytes(device) * _USED_SHARE) // each
    size = max(1, min(fits, sequences, _MOST_SEQUENCES.get(device.type, 256)))
    logger.info("Batch size from free memory: %d (%d would fit at %.1f MiB each).", size, fits, each / 2**20)
    return size


def halved(size: int, what: str, error: BaseException) -> int:
    """The next smaller batch size after ``error``, told in the log."""
    logger.warning("Out of memory at %s=%d (%s): going on with %d.", what, size, str(error)[:120], size // 2)
    return size // 2
