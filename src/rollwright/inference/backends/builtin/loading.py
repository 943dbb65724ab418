"""Loads a model for the engine, pairs its tensors with new weights, and determines how the model can be run."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError, WeightUpdateError
from rollwright.inference.backends.builtin.adapters import base_of
from rollwright.inference.backends.builtin.low_rank import is_bypassed
from rollwright.inference.model_facts import fixed_frequencies, note_attention
from rollwright.inference.weights.names import as_own
from rollwright.inference.weights.stream import WeightStream
from rollwright.tracking.logging import getLogger
from rollwright.tracking.progress import without_progress_bars

logger = getLogger(__name__)

#: Logs each message once, because sequence processing starts an engine for every call.
log_once = functools.cache(logger.log)

_LLAMA_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def load_model_for_inference(
    model_or_path: Any, tokenizer: Any, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Return the model and its tokenizer, which may be None if a model object is passed.

    A model that is loaded from a path is moved to ``device``; ``auto`` means a GPU if there is one. A model object stays on its device,
    and is copied if ``dtype`` differs from the type of its weights.
    """
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), trust_remote_code=trust_remote_code)
    if not isinstance(model_or_path, (str, os.PathLike)):
        wanted = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if isinstance(wanted, torch.dtype) and wanted != next(model_or_path.parameters()).dtype:
            return copied_in(model_or_path, wanted), tokenizer
        return model_or_path, tokenizer
    path = os.fspath(model_or_path)
    if tokenizer is None:
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    loader = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with without_progress_bars():
        model: Any = loader.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    note_attention(model, "sdpa")
    return model.to(device).eval(), tokenizer


def copied_in(model: Any, dtype: torch.dtype) -> Any:
    """Copy a model for sampling, with its floating-point weights in another type.

    Each weight is cast while it is copied, so no second copy in the model's own type exists. Buffers keep their type, because rotary
    frequencies must stay exact. A forward method set on a single layer is not copied, because it was chosen for the original type.
    """
    cast: dict[int, Any] = {}  # memo of copy.deepcopy, in which tied weights are one entry
    for parameter in model.parameters():
        values = parameter.detach().to(dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
        cast[id(parameter)] = torch.nn.Parameter(values, requires_grad=False)
    copied = copy.deepcopy(model, cast).eval()
    for module in copied.modules():
        module.__dict__.pop("forward", None)
    return copied


def has_bfloat16_instructions() -> bool:
    """Return whether this processor multiplies matrices in bfloat16. True if torch does not know."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities or any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def cache_bytes_by_default(device: torch.device) -> int:
    """Return half of a GPU's free memory, or on CPU a quarter of the free memory, at most 4 GiB."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return min(4 << 30, free_memory() // 4)


def free_memory() -> int:
    """Return the bytes of this machine's memory that nothing uses; half of the memory where the system does not say (macOS)."""
    page = os.sysconf("SC_PAGE_SIZE")
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * page
    return os.sysconf("SC_PHYS_PAGES") * page // 2


def paired(model: Any, weights: WeightStream) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each of a model's tensors with its new value, lazily.

    Args:
        model: a Hugging Face model.
        weights: new tensors under their names in the model's ``state_dict`` or in its checkpoints.

    Raises:
        WeightUpdateError: a name or shape does not match the model.
    """
    state, weights = model.state_dict(keep_vars=True), as_own(model, weights)
    for name, tensor in weights.described:
        if name not in state or state[name].shape != tensor.shape:
            there = f"has shape {tuple(state[name].shape)}" if name in state else "is not in the model"
            raise WeightUpdateError(f"Weight {name} of shape {tuple(tensor.shape)} {there}: it belongs to another model.")
    return ((state[name], tensor) for name, tensor in weights)


def position_limit(model: Any, limit: int, context_length: int | None) -> int:
    """Return the maximum length, up to ``limit``, at which a row's rotary positions do not depend on its final length.

    Raises:
        ConfigError: ``context_length`` exceeds this maximum.
    """
    kind, fixed = fixed_frequencies(model.config) or ("", limit)
    if fixed >= limit:
        return limit
    said = f"{type(model).__name__} changes the rotary positions ({kind}) of all tokens of a row when it has more than {fixed}"
    if context_length is not None and context_length > fixed:
        raise ConfigError(
            f"context_length={context_length} is too much for the built-in engine: {said}, so tokens sampled earlier had other "
            f"log-probabilities than the finished row. Set context_length to {fixed} or less."
        )
    if context_length is None:
        log_once(logging.INFO, f"The built-in engine limits the context to {fixed} tokens: {said}.")
    return fixed


def why_not_llama_family(model: Any, context_length: int) -> str | None:
    """Return the reason why ``LlamaFamily`` cannot compute ``model``, or None if it can."""
    config = model.config
    if type(model).__name__ not in _LLAMA_FAMILY or not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is not of the Llama family"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    if config.rope_parameters["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary positions are {config.rope_parameters['rope_type']}"
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = "sliding_attention" in layer_types if layer_types else window is not None
    if slides and window is not None and window < context_length:
        return f"its attention slides over {window} tokens"
    if getattr(config, "is_causal", True) is False:
        return "its tokens attend to later ones"
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"a projection is a {type(module).__name__}"
        if base_of(module) is not module and not is_bypassed(module):
            return "it carries adapters"
        if base_of(module) is not module and type(base_of(module)) is not nn.Linear:
            return f"an adapter is on a {type(base_of(module)).__name__}"
    layer = model.model.layers[0]
    if base_of(layer.self_attn.o_proj).bias is not None or base_of(layer.mlp.down_proj).bias is not None:
        return "its output projections have biases"
    return None
