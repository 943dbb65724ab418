"""Unwraps models for sampling and scoring, and estimates batch sizes from free memory.

* DDP and ``torch.compile`` wrappers are removed, so gradients stay on this process and are not reduced.
* The adapters of a ``PeftModel`` stay in place, and the engine runs the model's own forward. They are not merged, because merged weights
  round differently and a merged copy would not follow the training.
* An FSDP model has a shard of its parameters on each process. For generation and for scoring without gradients, each process gathers a
  plain copy of the model during the call; for scoring with gradients, the wrapped model itself is used.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.loading import free_memory
from rollwright.tracking.logging import getLogger
from rollwright.training.fsdp import is_sharded

logger = getLogger(__name__)

_LAYOUT_STEP = 64  # the length of a row in the engine's cache is a multiple of this
_USED_SHARE = 0.5  # share of free memory to use; the rest is for everything that the estimates leave out
_MOST_SEQUENCES = {"cpu": 256, "cuda": 1024}  # larger batches are no faster


def unwrapped(model: nn.Module) -> Any:
    """Return the Hugging Face model inside DDP, FSDP, ``torch.compile`` and PEFT wrappers.

    Raises:
        ConfigError: the adapter is a learned prompt, which is outside the model, or this is not a Hugging Face model.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):  # type: ignore[attr-defined]
                raise ConfigError(
                    f"The adapter is of type {model.active_peft_config.peft_type}, a learned prompt beside the model, which "  # type: ignore[attr-defined]
                    "the built-in engine does not compute: use LoRA or another adapter of the model's own layers."
                )
            model = model.get_base_model()  # type: ignore[operator]
        else:
            break
    if not hasattr(model, "config"):
        raise ConfigError(f"{type(model).__name__} has no config: give a Hugging Face causal language model.")
    return model


class _WholeForward(nn.Module):
    """Wraps a sharded model so that scoring calls the model's whole forward, which runs its FSDP hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = unwrapped(model).config

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


def module_with_gradients(model: nn.Module) -> nn.Module:
    """Return the module to score with if gradients must reach the caller's parameters."""
    return _WholeForward(model) if is_sharded(model) else unwrapped(model)


@contextmanager
def plain_model(model: nn.Module) -> Iterator[Any]:
    """Yield the Hugging Face model with all its weights on this process, in evaluation mode.

    Raises:
        ConfigError: an FSDP model has adapters.
    """
    inner = unwrapped(model)
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        from torch.distributed.fsdp import FSDPModule

        if any("lora_" in name for name, _ in inner.named_parameters()):
            raise ConfigError(
                "An FSDP model with adapters cannot be gathered: generate with the PeftModel before it is sharded."
            )
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        plain = next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))  # FSDP2's own class is first
        inner = plain._from_config(inner.config, dtype=inner.dtype)
        inner.to(next(iter(weights.values())).device)  # type: ignore[union-attr]
        inner.load_state_dict(weights)
        del weights  # frees the gathered tensors during the call
    with evaluation_mode(inner):
        yield inner


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside the context, so that scores belong to the distribution that was sampled from."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# ------------------------------------------------------------------ memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` or one of its causes is an out-of-memory error."""
    while error is not None:
        is_of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        if is_of_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__
    return False


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, including unused memory of torch's allocator."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return free_memory()


def cache_bytes(model: Any, rows: int, length: int) -> int | None:
    """Return the size in bytes of a cache for ``rows`` sequences of ``length`` tokens, or None if the configuration lacks it."""
    config = model.config.get_text_config()
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    if layers is None or heads is None or hasattr(config, "kv_lora_rank"):
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_token = 2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * size * model.dtype.itemsize
    return rows * -(-length // _LAYOUT_STEP) * _LAYOUT_STEP * per_token


def generation_batch_size(model: Any, sequences: int, length: int) -> int:
    """Estimate how many sequences to decode at once, such that their caches and logits take at most half of the free memory.

    Args:
        model: the Hugging Face model.
        sequences: number of sequences to generate.
        length: maximum number of tokens of a sequence, including its prompt.
    """
    config, device = model.config.get_text_config(), model.device
    cache = cache_bytes(model, 1, length) or 4 * config.hidden_size * length * model.dtype.itemsize * 32
    each = cache + 6 * 4 * config.vocab_size + 32 * config.hidden_size * model.dtype.itemsize
    return _fitting(device, sequences, each)


def scoring_batch_size(model: Any, sequences: int, length: int, with_grad: bool) -> int:
    """Estimate how many sequences to score in one teacher-forced pass, such that activations take at most half of the free memory.

    Args:
        model: the Hugging Face model.
        sequences: number of sequences to score.
        length: number of tokens of the longest sequence.
        with_grad: True if every layer's activations are kept for the backward pass.
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


def halved_after(error: BaseException, size: int, what: str, may_halve: bool) -> int:
    """Return half of ``size`` if ``error`` says that memory ran out, and free the failed attempt's memory; otherwise raise ``error``.

    Args:
        error: the error of a batch.
        size: size of that batch.
        what: name of the setting, for the log.
        may_halve: if False, raise every error.

    Raises:
        BaseException: ``error``, if a smaller batch would not help or is not allowed.
    """
    if not (may_halve and size > 1 and is_out_of_memory(error)):
        raise error
    logger.warning("Out of memory at %s=%d (%s): going on with %d.", what, size, str(error)[:120], size // 2)
    held: BaseException | None = error
    while held is not None:
        held.__traceback__, held = None, held.__cause__  # the traceback's frames hold the tensors of the failed step
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return size // 2
