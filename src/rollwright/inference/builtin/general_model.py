"""Any other Hugging Face causal model, by its own forward over the slot cache.

The model sees padded queries (on the left), an explicit mask ``[n, 1, Q, K]`` and explicit positions, and a
``transformers`` cache whose layers write to and read from our slots. A model that does not honour these (a state-space
model, attention biases of its own) is found out by a probe when the engine starts, not by wrong samples.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from rollwright.errors import EngineError
from rollwright.inference.builtin.forward_batch import ForwardBatch
from rollwright.inference.builtin.kv_cache import KVCache, LayerShape


class _SlotLayer(CacheLayerMixin):
    """One layer of the slot cache as ``transformers`` sees it during one forward pass."""

    is_sliding = False

    def __init__(self, index: int, batch: ForwardBatch, cache: KVCache) -> None:
        super().__init__()
        self._index, self._batch, self._cache = index, batch, cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[n, heads, Q, size]`` into the slots; return all columns that attention reads, ``[n, heads, K, size]``."""
        batch, keys, values = self._batch, self._cache.keys[self._index], self._cache.values[self._index]
        keys[batch.rows, :, batch.columns] = batch.unpad(key_states.transpose(1, 2))
        values[batch.rows, :, batch.columns] = batch.unpad(value_states.transpose(1, 2))
        rows = slice(batch.first_row, batch.first_row + batch.row_count)
        return keys[rows, :, : batch.kv_length], values[rows, :, : batch.kv_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._batch.kv_length, 0

    def get_seq_length(self) -> int:
        return self._batch.kv_length - self._batch.padded_queries

    def get_max_length(self) -> int:
        return -1


class GeneralModel:
    """Forward of any Hugging Face causal language model with per-token keys and values.

    Args:
        model: the model; its own forward is called.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._keeps_last_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self.layer_shapes = self._probe_layer_shapes()

    def share_weights(self) -> None:
        """Nothing to do: the model's own parameters are read."""

    def weights_are_shared(self) -> bool:
        """True: the model's own parameters are read."""
        return True

    def _probe_layer_shapes(self) -> list[LayerShape]:
        probe = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        with torch.inference_mode():
            output = self._model(probe, past_key_values=DynamicCache(), use_cache=True)
        layers = getattr(output.past_key_values, "layers", None)
        if not layers or any(getattr(layer, "keys", None) is None or layer.keys.dim() != 4 for layer in layers):
            raise EngineError(
                f"The built-in engine cannot serve {type(self._model).__name__}: it does not keep keys and values for each "
                "token (a recurrent or hybrid model). Use an SGLang or vLLM server for it."
            )
        return [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits ``[n, vocabulary]`` of each row's last token; the keys and values of all tokens go into the cache."""
        visible = batch.visible
        if visible is None:
            columns = batch.pad(batch.columns)
            visible = torch.arange(batch.kv_length, device=columns.device) <= columns[:, :, None]
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        layers = [_SlotLayer(index, batch, cache) for index in range(len(self.layer_shapes))]
        arguments: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_last_logits else {}
        if self._takes_positions:
            arguments["position_ids"] = batch.pad(batch.positions)
        output = self._model(
            input_ids=batch.pad(batch.token_ids),
            attention_mask=mask,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **arguments,
        )
        return output.logits[:, -1]
