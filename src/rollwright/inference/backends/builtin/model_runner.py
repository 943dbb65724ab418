"""Runs a model over batches of packed tokens: picks the forward that computes it, and holds the cache."""

from __future__ import annotations

import copy
import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.forward_batch import ForwardBatch
from rollwright.inference.backends.builtin.general_model import GeneralModel
from rollwright.inference.backends.builtin.kv_cache import KVCache, LayerShape
from rollwright.inference.backends.builtin.llama_family import LlamaFamily, why_not_llama_family
from rollwright.inference.backends.builtin.sequence import Sequence
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)


@functools.cache
def _tell_once(message: str) -> None:
    """Log what is the same for every engine over a model; sequence processing starts one for each call."""
    logger.info(message)


class CachedForward(Protocol):
    """A model's forward over the slot cache."""

    layer_shapes: list[LayerShape]

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor: ...

    def share_weights(self) -> None: ...

    def multi_modal_position_delta(self, sequence: Sequence) -> int: ...


class ModelRunner:
    """A model, its forward and its cache.

    Args:
        model: a Hugging Face causal language model; its weights are shared, not copied.
        max_rows: most sequences at once.
        context_length: most tokens of a sequence; None: the model's own limit, or what the cache holds if that is less.
        cache_bytes: limit of the cache's memory.

    Raises:
        ConfigError: the cache cannot hold one sequence of ``context_length``.
    """

    def __init__(self, model: Any, max_rows: int, context_length: int | None, cache_bytes: int) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or 1 << 20
        if context_length is not None and context_length > limit:
            raise ConfigError(f"context_length={context_length} is more than the model's {limit} positions; lower it.")
        self.vocabulary: int = config.vocab_size
        name, reason = type(model).__name__, why_not_llama_family(model, context_length or limit)
        self._forward: CachedForward
        if reason is None:
            self._forward = LlamaFamily(model)
            _tell_once(f"{name} is computed by the built-in Llama-family forward, on its own weights.")
        else:
            self._forward = GeneralModel(model)
            _tell_once(f"{name} is computed by its own Hugging Face forward over the built-in cache: {reason}.")
        self.takes_multi_modal = reason is not None and "image_token_id" in model.config.to_dict()
        self.cache = KVCache(self._forward.layer_shapes, cache_bytes, max_rows, model.dtype, self.device)
        self.context_length: int = min(context_length or limit, self.cache.capacity_tokens)
        if self.cache.capacity_tokens < (context_length or 2):
            needed = self.cache.bytes_per_token * (context_length or 2)
            raise ConfigError(
                f"kv_cache_bytes={cache_bytes} holds {self.cache.capacity_tokens} tokens, and one sequence of "
                f"context_length={context_length} needs {needed} bytes; raise the one or lower the other."
            )
        if isinstance(self._forward, GeneralModel):
            self._forward.verify(self.cache)
        if self.context_length < limit and context_length is None:
            logger.info("context_length is %d: what kv_cache_bytes holds (the model has %d).", self.context_length, limit)

    def for_one_sequence(self, tokens: int) -> ModelRunner:
        """The same model and forward over a small cache of its own, for a sequence of at most ``tokens`` tokens."""
        runner = copy.copy(self)
        runner.cache = KVCache(
            self._forward.layer_shapes, tokens * self.cache.bytes_per_token, 1, self.model.dtype, self.device
        )
        return runner

    def run(self, batch: ForwardBatch) -> Tensor:
        """Logits ``[n, vocabulary]`` of each row's last token."""
        return self._forward.forward(batch, self.cache)

    def multi_modal_position_delta(self, sequence: Sequence) -> int:
        """By how much positions after a multi-modal prompt differ from the number of tokens before them."""
        return self._forward.multi_modal_position_delta(sequence)

    def share_weights(self) -> None:
        """See that the forward reads the model's present parameters, whatever was put in their place."""
        self._forward.share_weights()
