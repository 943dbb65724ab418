"""Any other Hugging Face causal model, by its own forward over the slot cache.

The model sees padded queries (on the left), an explicit mask ``[n, 1, Q, K]`` and explicit positions, and a
``transformers`` cache whose layers write to and read from our slots. A model that does not honour these (a state-space
model, attention biases of its own) is found out by a probe when the engine starts, not by wrong samples.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.batch import Chunk, ForwardBatch, Sequence, prefill_batch
from rollwright.inference.backends.builtin.cache import KVCache, LayerShape
from rollwright.inference.request import ModelRequest


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
        count, rows = batch.row_count, slice(batch.first_row, batch.first_row + batch.computed_rows)
        keys[batch.rows, :, batch.columns] = batch.unpad(key_states[:count].transpose(1, 2))
        values[batch.rows, :, batch.columns] = batch.unpad(value_states[:count].transpose(1, 2))
        return keys[rows, :, : batch.read_length], values[rows, :, : batch.read_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._batch.read_length, 0

    def get_seq_length(self) -> int:
        return self._batch.kv_length - self._batch.query_length

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

    def _refusal(self, reason: str) -> EngineError:
        return EngineError(
            f"The built-in engine cannot serve {type(self._model).__name__}: {reason}. Use an SGLang or vLLM server for it."
        )

    def _probe_layer_shapes(self) -> list[LayerShape]:
        probe = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        try:
            with torch.inference_mode():
                output = self._model(probe, past_key_values=DynamicCache(), use_cache=True)
        except Exception as error:  # a foreign forward may raise anything
            raise self._refusal(f"its forward takes no key-value cache ({type(error).__name__}: {error})") from error
        layers = getattr(getattr(output, "past_key_values", None), "layers", None)
        if not layers or any(getattr(layer, "keys", None) is None or layer.keys.dim() != 4 for layer in layers):
            raise self._refusal("it does not keep keys and values for each token (a recurrent or hybrid model)")
        return [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits ``[n, vocabulary]`` of each row's last token, or ``[T, vocabulary]`` of all; keys and values go into the cache."""
        visible, tokens, positions = batch.visible, batch.pad(batch.token_ids), batch.pad(batch.positions)
        if visible is None:
            columns = batch.pad(batch.columns)
            visible = torch.arange(batch.read_length, device=columns.device) <= columns[:, :, None]
        if (padding := batch.computed_rows - batch.row_count) or visible.shape[2] < batch.read_length:
            visible = F.pad(visible, (0, batch.read_length - visible.shape[2], 0, 0, 0, padding))
            visible[batch.row_count :, :, 0] = True  # a row that sees nothing is not a number
            tokens, positions = (batch_padded[:, None] for batch_padded in (batch.padded_tokens, batch.padded_positions))
        dtype = self._model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
        layers: list[Any] = [_SlotLayer(index, batch, cache) for index in range(len(self.layer_shapes))]
        arguments: dict[str, Any] = {"logits_to_keep": 0 if batch.scores_all else 1} if self._keeps_last_logits else {}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if batch.multi_modal is not None:
            arguments |= self._model_inputs(batch.multi_modal, batch.token_ids[None])
            if (positions := self._rope_index(arguments)) is not None:
                arguments["position_ids"] = positions
        arguments["input_ids"] = tokens
        output = self._model(
            attention_mask=mask,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            **arguments,
        )
        return batch.unpad(output.logits) if batch.scores_all else output.logits[: batch.row_count, -1]

    # ------------------------------------------------------------------ images and video

    def multi_modal_position_delta(self, request: ModelRequest) -> int:
        """Position of the token after a multi-modal prompt, less the prompt's length: an image takes fewer positions than
        it has tokens where rotary positions have three axes (M-RoPE); 0 in other models."""
        inputs = self._model_inputs(request.multi_modal or {}, torch.tensor([request.input_ids]))
        return 0 if (positions := self._rope_index(inputs)) is None else int(positions.max()) + 1 - len(request.input_ids)

    def _model_inputs(self, multi_modal: dict[str, Any], input_ids: Tensor) -> dict[str, Any]:
        """What the model takes of the processor's outputs, on its device and in its dtype."""
        device, dtype = self._model.device, self._model.dtype
        inputs = {
            k: v.to(device, dtype if v.is_floating_point() else None) if isinstance(v, Tensor) else v
            for k, v in multi_modal.items()
            if k not in ("input_ids", "attention_mask", "position_ids")
        }
        if {"image_grid_thw", "video_grid_thw"} & inputs.keys():
            config = self._model.config
            kinds = (input_ids == config.image_token_id) + 2 * (input_ids == config.video_token_id)
            inputs["mm_token_type_ids"] = kinds.int().to(device)
        else:
            inputs.pop("mm_token_type_ids", None)
        return {**inputs, "input_ids": input_ids.to(device)}

    def _rope_index(self, inputs: dict[str, Any]) -> Tensor | None:
        """``[3, 1, L]`` positions of a model with M-RoPE; None for other models."""
        if "mm_token_type_ids" not in inputs or not hasattr(self._model.model, "get_rope_index"):
            return None
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        return self._model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})[0]

    # ------------------------------------------------------------------ does it compute what the model computes?

    def ordinary_tokens(self) -> list[int]:
        """Some tokens that are no special ones, such as that of an image."""
        config = self._model.config
        named = [v for c in (config, config.get_text_config()) for k, v in vars(c).items() if k.endswith("_token_id")]
        special = {i for v in named for i in (v if isinstance(v, list) else [v])}
        return [i for i in range(min(64, config.get_text_config().vocab_size)) if i not in special]

    @torch.inference_mode()
    def verify(self, cache: KVCache) -> None:
        """Compare chunked, ragged passes over the cache with plain forwards of the model.

        Raises:
            EngineError: they differ: the model does not honour the mask, the positions or the cache that it is given.
        """
        ordinary = self.ordinary_tokens()
        prompts = [[ordinary[(7 * i + length) % len(ordinary)] for i in range(length)] for length in (11, 5)]
        sequences = [Sequence(ModelRequest(p), tokens=p, prompt_length=len(p), length_limit=len(p) + 1) for p in prompts]
        device = self._model.device
        if not cache.make_room(len(prompts), max(map(len, prompts)), []):
            return  # too small for more than one sequence: nothing is ever ragged
        begin = [Chunk(s, 0, s.prompt_length - 3) for s in sequences]
        end = [Chunk(s, s.prompt_length - 3, s.prompt_length) for s in sequences]
        try:
            self(prefill_batch(begin, 0, device), cache)
            logits = self(prefill_batch(end, 0, device), cache)
        except Exception as error:  # a foreign forward may raise anything
            raise self._refusal(f"it takes no explicit mask and cache ({type(error).__name__}: {error})") from error
        plain = torch.stack([self._model(torch.tensor([tokens], device=device)).logits[0, -1] for tokens in prompts])
        scale = (plain - plain.mean(-1, keepdim=True)).abs().max().item()
        tolerance = scale * (1e-3 if self._model.dtype == torch.float32 else 0.1)
        if not (logits - plain).abs().max().item() <= tolerance:
            raise self._refusal(
                "with an explicit mask and cache it computes other logits than in a plain forward (it may have position biases "
                "or a state of its own)"
            )
