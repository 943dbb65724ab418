"""Runs Hugging Face causal models outside the Llama family with their own forward over the KV cache.

The model gets left-padded queries, an explicit mask ``[n, 1, Q, K]`` for each kind of layer, explicit positions, and a
``transformers`` cache whose layers read and write our slots. A check at startup rejects a model that ignores any of these (a
state-space model, custom attention biases), because it would produce wrong samples.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from rollwright.errors import EngineError, RollwrightError, WeightUpdateError
from rollwright.inference.attention_masks import VisibleTokens, only_visible
from rollwright.inference.backends.builtin.adapters import Adapter, linear_paths, linear_shape
from rollwright.inference.backends.builtin.batch import ForwardBatch
from rollwright.inference.backends.builtin.kv_cache import KVCache, LayerShape
from rollwright.inference.backends.builtin.low_rank import AdapterStacks, Site, Term, add_terms_in, engine_pass
from rollwright.inference.backends.builtin.proof import Difference, prove
from rollwright.inference.model_facts import ordinary_tokens
from rollwright.inference.request import ModelRequest
from rollwright.inference.routed_experts import Recording, Routers, routing
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)


class _SlotLayer(CacheLayerMixin):
    """One layer of the KV cache as a ``transformers`` cache layer, for one forward pass."""

    is_sliding = False

    def __init__(self, index: int, batch: ForwardBatch, cache: KVCache) -> None:
        super().__init__()
        self._index, self._batch, self._cache = index, batch, cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the slots already exist."""

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


def attends_both_ways(model: Any) -> bool:
    """Return whether tokens of an image attend in both directions, that is, whether the model adds blocks to its causal masks."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    sources = (inspect.getsource(module) for module in modules if module.__name__.startswith("transformers.models."))
    return any("block_sequence_ids" in source or "or_mask_function=" in source for source in sources)


class _RowCounts(Term):
    """A term that adds nothing, and notes how many rows each layer gets."""

    def __init__(self) -> None:
        super().__init__({}, None)
        self.by_site: dict[Hashable, int] = {}

    def add(self, site: Hashable, x: Tensor, y: Tensor) -> None:
        """See ``Term.add``."""
        self.by_site[site] = len(x)


class GeneralModel:
    """Forward of any Hugging Face causal language model that has keys and values for each token.

    Args:
        model: the model; its own forward is called.
        records_experts: write the experts that each token is sent to into the cache.

    Attributes:
        routers: the routers whose choice is recorded, or None.
        stacks: matrices of the adapters that are computed.
    """

    stacks: AdapterStacks

    def __init__(self, model: Any, *, records_experts: bool = False) -> None:
        self._model = model
        self.routers = Routers.of(model) if records_experts else None
        parameters = inspect.signature(model.forward).parameters
        self._keeps_last_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._makes_masks, self._rows_apart = True, False
        self.layer_shapes = self._probe_layer_shapes()
        if self.routers is not None:  # only on the first call: checks the routers
            with engine_pass(), torch.inference_mode(), routing(Recording(self.routers)):
                model(torch.arange(4, device=model.device)[None])

    def share_weights(self) -> None:
        """Do nothing: the forward reads the model's own parameters."""

    def sites(self) -> dict[Hashable, Site]:
        """Return the linear layers that adapters can be added to; each is a site of its own."""
        outputs = {path: linear_shape(self._model.get_submodule(path))[0] for path in linear_paths(self._model)}
        return {path: [(path, slice(0, count))] for path, count in outputs.items()}

    @torch.inference_mode()
    def check_adapter(self, adapter: Adapter) -> None:
        """Check that the adapted layers compute each token by itself, so that tokens of several adapters can be computed together.

        Raises:
            WeightUpdateError: a layer does not.
        """
        add_terms_in(self._model)
        tokens, counts = ordinary_tokens(self._model.config), _RowCounts()
        rows = torch.tensor([tokens[index * len(tokens) // 15] for index in range(15)], device=self._model.device).view(3, 5)
        with engine_pass([counts]):
            self._model(rows)
        unseen = (
            rows.numel() if "image_token_id" in self._model.config.to_dict() else 0
        )  # layers of images, which are computed alone
        for path in adapter.factors:
            if (count := counts.by_site.get(path, unseen)) not in (len(rows), rows.numel()):
                raise WeightUpdateError(
                    f"The adapter {adapter.name} adapts {path}, which gets {count} rows for {rows.numel()} tokens: the built-in engine "
                    f"adds adapters to layers of {type(self._model).__name__} that compute each token by itself. Leave this layer out "
                    "of the adapter's targets, or use an SGLang or vLLM server."
                )

    def _refusal(self, reason: str, advice: str = "") -> EngineError:
        name = type(self._model).__name__
        return EngineError(f"The built-in engine cannot serve {name}: {reason}.{advice} Use an SGLang or vLLM server for it.")

    def _probe_layer_shapes(self) -> list[LayerShape]:
        probe = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        try:
            with engine_pass(), torch.inference_mode(), only_visible(VisibleTokens(probe[None] == 0, probe, probe)) as choice:
                output = self._model(probe, past_key_values=DynamicCache(), use_cache=True)
        except RollwrightError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:  # a foreign forward may raise anything
            raise self._refusal(f"its forward takes no key-value cache ({type(error).__name__}: {error})") from error
        layers = getattr(getattr(output, "past_key_values", None), "layers", None)
        if not layers or any(getattr(layer, "keys", None) is None or layer.keys.dim() != 4 for layer in layers):
            raise self._refusal("it does not keep keys and values for each token (a recurrent or hybrid model)")
        self._makes_masks = choice.masks > 0
        return [LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers]

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return logits of each row's last token, ``[n, vocabulary]``, or of all, ``[T, vocabulary]``; keys and values are cached."""
        if self._rows_apart and (batch.row_count > 1 or batch.read_length > batch.kv_length):
            return torch.cat([self(row, cache) for row in batch.rows_apart()])
        tokens, positions = batch.pad(batch.token_ids), batch.pad(batch.positions)
        if batch.computed_rows > batch.row_count:
            tokens, positions = (batch_padded[:, None] for batch_padded in (batch.padded_tokens, batch.padded_positions))
        layers: list[Any] = [_SlotLayer(index, batch, cache) for index in range(len(self.layer_shapes))]
        arguments: dict[str, Any] = {"logits_to_keep": 0 if batch.scores_all else 1} if self._keeps_last_logits else {}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if batch.multi_modal is not None:
            arguments |= self._model_inputs(batch.multi_modal, batch.token_ids[None])
            if (positions := self._rope_index(arguments)) is not None:
                arguments["position_ids"] = positions
        arguments["input_ids"] = tokens
        choice = self._visible_tokens(batch)
        if not self._makes_masks:  # with transformers' functions: give it an additive mask [n, 1, Q, K]
            mask = torch.zeros(choice.visible.shape, dtype=self._model.dtype, device=tokens.device)
            arguments["attention_mask"] = mask.masked_fill_(~choice.visible, torch.finfo(mask.dtype).min)[:, None]
        recording = None if self.routers is None or cache.routed is None else Recording(self.routers)
        with engine_pass(self._terms(batch, tokens)), only_visible(choice), routing(recording):
            output = self._model(past_key_values=Cache(layers=layers), use_cache=True, **arguments)
        if recording is not None and cache.routed is not None:
            count, shape = batch.row_count, tokens.shape
            cache.routed[batch.rows, batch.columns] = recording.record(lambda all: batch.unpad(all.unflatten(0, shape)[:count]))
        return batch.unpad(output.logits) if batch.scores_all else output.logits[: batch.row_count, -1]

    def _terms(self, batch: ForwardBatch, tokens: Tensor) -> tuple[Term, ...]:
        """Return what adapters add to the rows of the padded ``tokens``, ``[n, Q]``."""
        if batch.terms is None:
            batch.terms = self.stacks.terms(batch.adapters, tokens.shape[1], tokens.numel())
        return batch.terms

    def _visible_tokens(self, batch: ForwardBatch) -> VisibleTokens:
        """Return the columns that each query may see, for all computed rows, before the layers apply their windows."""
        visible, (queries, keys) = batch.visible, batch.places()
        if visible is None:
            visible = torch.arange(batch.read_length, device=keys.device) <= batch.pad(batch.columns)[:, :, None]
        elif visible.shape[2] < batch.read_length:
            visible = F.pad(visible, (0, batch.read_length - visible.shape[2]))
        keys = keys.expand(batch.row_count, -1)
        if padding := batch.computed_rows - batch.row_count:
            visible, queries, keys = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)) for x in (visible, queries, keys))
            visible[batch.row_count :, :, 0] = True  # softmax of a fully masked row is NaN
        return VisibleTokens(visible, queries, keys)

    # ------------------------------------------------------------------ images and video

    def multi_modal_position_delta(self, request: ModelRequest) -> int:
        """Return the position of the token after a multi-modal prompt minus the prompt's length.

        With three-axis rotary positions (M-RoPE) an image takes fewer positions than it has tokens. Other models return 0.
        """
        inputs = self._model_inputs(request.multi_modal or {}, torch.tensor([request.input_ids]))
        return 0 if (positions := self._rope_index(inputs)) is None else int(positions.max()) + 1 - len(request.input_ids)

    def _model_inputs(self, multi_modal: dict[str, Any], input_ids: Tensor) -> dict[str, Any]:
        """Return the processor outputs that the model takes, on its device and in its dtype."""
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
        """Return the ``[3, 1, L]`` positions of a model with M-RoPE, or None for other models."""
        if "mm_token_type_ids" not in inputs or not hasattr(self._model.model, "get_rope_index"):
            return None
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        return self._model.model.get_rope_index(**{name: inputs[name] for name in names if name in inputs})[0]

    # ------------------------------------------------------------------ check against the model's plain forward

    @torch.inference_mode()
    def verify(self, context_length: int) -> None:
        """Compare chunked, ragged passes over a cache with plain forwards of the model; see ``proof``.

        If the results differ only when rows are batched, as with a model that counts positions for the whole batch, the model is
        computed row by row from then on.

        Raises:
            EngineError: the results differ even row by row: the model ignores the mask, the positions or the cache.
        """
        if (difference := self._difference(context_length)) is None:
            return
        self._rows_apart = True
        if (apart := self._difference(context_length)) is not None:
            raise self._refusal(apart.reason, apart.advice)
        said = "%s is computed one row at a time, which is slower: in a batch with rows of other lengths, %s."
        logger.warning(said, type(self._model).__name__, difference.reason)

    def _difference(self, context_length: int) -> Difference | None:
        mode = "one row at a time" if self._rows_apart else "rows together"
        try:
            with engine_pass():
                return prove(self, self._model, self.layer_shapes, ordinary_tokens(self._model.config), context_length, mode)
        except Exception as error:  # a foreign forward may raise anything
            return Difference(f"it does not accept an explicit mask and cache ({type(error).__name__}: {error})")
