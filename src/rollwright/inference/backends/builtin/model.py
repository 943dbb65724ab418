"""Runs a model over batches of packed tokens: the runner with its KV cache, the Llama family's forward, and its attention.

Llama, Mistral, Qwen2 and Qwen3 are one architecture with switches: RMSNorm before attention and MLP, rotary positions,
grouped-query attention, SwiGLU; Qwen2 adds biases to query, key and value, Qwen3 a norm on each query and key head. Query,
key and value weights are fused into one tensor, gate and up into another. The fused tensors own the storage, and the Hugging Face
model's parameters become views of them: nothing is stored twice, an in-place optimizer step takes effect at once, and the model
saves and loads as before because each parameter is contiguous and overlaps no other. ``general_model`` runs all other models.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` queries of a row, ``K`` cache columns, ``H`` heads, ``G`` key-value heads, ``D`` head size.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.adapters import Adapter, base_of
from rollwright.inference.backends.builtin.batch import Chunk, DecodeBatch, ForwardBatch, PromptAttention
from rollwright.inference.backends.builtin.general_model import GeneralModel, attends_both_ways
from rollwright.inference.backends.builtin.kv_cache import INVARIANT_ROWS, LENGTH_STEP, KVCache, LayerShape, Shapes, in_blocks
from rollwright.inference.backends.builtin.loading import (
    has_bfloat16_instructions,
    log_once,
    position_limit,
    why_not_llama_family,
)
from rollwright.inference.backends.builtin.low_rank import AdapterStacks, Site, Term
from rollwright.inference.backends.builtin.packed_weights import FASTEST_ROWS, PackedWeights, packed_if_faster, packed_linear
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

#: Maximum number of columns that one product sums over, because MKL splits longer sums into parts whose size depends on the length: sums
#: of more than 192 columns on an AMD processor with AVX-512, of more than 256 on an Intel one with AVX2, and of more than 384 with AVX-512.
SUMMED = 192

#: Names of the weight matrices, as used in messages.
QKV, OUTPUT, GATE_UP, DOWN, HEAD = "query, key and value", "the output of attention", "gate and up", "down", "the head"


class ModelRunner:
    """A model, its forward and its cache.

    Args:
        model: a Hugging Face causal language model; its weights are shared, not copied.
        max_rows: maximum number of sequences at once.
        context_length: maximum number of tokens of a sequence. None uses the smaller of the model's limit and the cache's capacity.
        cache_bytes: limit of the cache's memory.
        shapes: shapes of the computation. With ``BLOCKS`` and ``ONE_ROW`` a row's result does not depend on other rows if the
            processor and its libraries comply, which ``batch_invariance`` checks.
        invariant_attention: attention of prompts with ``BLOCKS``; see ``prefill_batch``.
        records_experts: keep the experts of each token beside its keys and values.

    Attributes:
        packs_tokens: True if tokens are computed without padding, so that each row may have its own number of them.
        prompts_alone: True if each prompt is computed by itself, from its beginning, in shapes that depend only on the prompt.
        most_rows: maximum number of sequences that can be computed at once, regardless of ``max_rows``.

    Raises:
        ConfigError: the cache cannot hold one sequence of ``context_length``, or the experts of this model cannot be recorded.
    """

    def __init__(
        self,
        model: Any,
        max_rows: int,
        context_length: int | None,
        cache_bytes: int,
        shapes: Shapes = Shapes.FREE,
        invariant_attention: Callable[[ForwardBatch, list[Chunk]], PromptAttention] | None = None,
        records_experts: bool = False,
    ) -> None:
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or 1 << 20
        if context_length is not None and context_length > limit:
            raise ConfigError(f"context_length={context_length} is more than the model's {limit} positions; lower it.")
        limit = position_limit(model, limit, context_length)
        self.vocabulary: int = config.vocab_size
        name, reason = type(model).__name__, why_not_llama_family(model, context_length or limit)
        if records_experts:
            reason = reason or "its experts are recorded"  # refused by ``GeneralModel``, because the Llama family has none
        self.forward = LlamaFamily(model) if reason is None else GeneralModel(model, records_experts=records_experts)
        routers = self.forward.routers if isinstance(self.forward, GeneralModel) else None
        self._record = None if routers is None else (routers.width, routers.dtype)
        if isinstance(self.forward, LlamaFamily) and shapes is Shapes.FREE:
            self.forward.pack_if_faster()
        self.forward.stacks = AdapterStacks(self.forward.sites(), together=shapes is Shapes.FREE)
        computed_by = (
            "the built-in Llama-family forward, on its own weights"
            if reason is None
            else (f"its own Hugging Face forward over the built-in cache: {reason}")
        )
        log_once(logging.DEBUG if reason is None else logging.INFO, f"{name} is computed by {computed_by}.")
        if self.device.type == "cpu" and model.dtype == torch.bfloat16 and not has_bfloat16_instructions():
            slow = "This processor has no instructions for bfloat16: prompts take about five times as long as in float32"
            log_once(logging.WARNING, f"{slow}. Set rollout.dtype: float32.")
        self.takes_multi_modal = reason is not None and "image_token_id" in model.config.to_dict()
        self.sees_pictures_causally = not (self.takes_multi_modal and attends_both_ways(model))
        is_general, in_whole_blocks = isinstance(self.forward, GeneralModel), shapes is Shapes.BLOCKS
        self.packs_tokens = not is_general
        self.prompts_alone = shapes is Shapes.ONE_ROW or (in_whole_blocks and is_general)
        self.invariant_attention = None if is_general else invariant_attention
        # a forward pass that cannot be split is always given the same number of rows
        self.most_rows = int(shapes) if self.prompts_alone else 1 << 62
        max_rows = min(max_rows, self.most_rows)
        self.cache = KVCache(self.forward.layer_shapes, cache_bytes, max_rows, model.dtype, self.device, shapes, self._record)
        longest = self.cache.longest_row
        self.context_length: int = min(context_length or limit, longest)
        if longest < (context_length or 2):
            rows = f"a block of {INVARIANT_ROWS} sequences" if in_whole_blocks else "one sequence"
            needed = self.cache.bytes_for(context_length or 2)
            raise ConfigError(
                f"kv_cache_bytes={cache_bytes} holds {self.cache.capacity_tokens} tokens, and {rows} of "
                f"context_length={context_length} needs {needed} bytes; raise the one or lower the other."
            )
        if isinstance(self.forward, GeneralModel):
            self.forward.verify(self.context_length)
        if shapes is Shapes.ONE_ROW:  # all later requests use this layout
            self.cache.make_room(1, self.context_length, [])
        if self.context_length < limit and context_length is None:
            logger.info("context_length is %d: what kv_cache_bytes holds (the model has %d).", self.context_length, limit)

    @property
    def records_experts(self) -> bool:
        """True if the cache keeps the experts of each token."""
        return self._record is not None

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Stack an adapter's matrices and check that the model can be computed with it.

        Raises:
            WeightUpdateError: it cannot.
        """
        self.forward.check_adapter(adapter)
        self.forward.stacks.products([adapter])

    def with_cache_for(self, rows: int, tokens: int) -> ModelRunner:
        """Return a runner of the same model with a separate small cache for ``rows`` sequences of at most ``tokens`` tokens."""
        runner, cache = copy.copy(self), self.cache
        size = in_blocks(rows, cache.row_block) * in_blocks(tokens, LENGTH_STEP) * cache.bytes_per_token
        shapes = self.forward.layer_shapes
        runner.cache = KVCache(shapes, size, rows, self.model.dtype, self.device, cache.shapes, self._record)
        return runner

    def shallow(self, vocabulary: int) -> ModelRunner:
        """Return a runner with only the first layer and the first ``vocabulary`` tokens, enough to check how rows are computed."""
        assert isinstance(self.forward, LlamaFamily)
        runner = copy.copy(self)
        runner.forward, runner.vocabulary = self.forward.shallow(vocabulary), vocabulary
        return runner


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of the model.

    Attributes:
        name: name of the matrix in messages.
        weight: ``[outputs, inputs]``.
        bias: ``[outputs]``, if any.
        is_added: True if the product is added to a tensor in place.
    """

    name: str
    weight: Tensor
    bias: Tensor | None = None
    is_added: bool = False

    def product(self, rows: Tensor) -> Tensor:
        """Compute the product as a layer does, with all rows at once."""
        if not self.is_added:
            return F.linear(rows, self.weight, self.bias)
        present = rows[:, :1].repeat(1, len(self.weight))  # adding to 0 could hide a different order of summation
        return present.addmm_(rows, self.weight.t())


class LlamaFamily:
    """Forward of a Llama, Mistral, Qwen2 or Qwen3 model that shares its weights.

    Args:
        model: the Hugging Face model; its query, key, value, gate and up parameters become views of fused tensors.

    Attributes:
        queries_of_key: number of query heads that share a key-value head.
        most_rows: maximum number of rows that each matrix is multiplied with at once, by its name; larger batches are split.
        stacks: matrices of the adapters that are computed.
    """

    stacks: AdapterStacks
    _packed: PackedWeights | None = None

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self.queries_of_key = self._heads // self._kv_heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._epsilon = torch.full((), self._eps, device=model.device)
        self._has_head_norm = hasattr(model.model.layers[0].self_attn, "q_norm")
        self._rope_table: Tensor | None = None
        self.most_rows: dict[str, int] = dict.fromkeys((QKV, OUTPUT, GATE_UP, DOWN, HEAD), 1 << 62)
        self.layer_shapes = [LayerShape(self._kv_heads, self._head_size, self._head_size)] * config.num_hidden_layers
        self.share_weights()

    def share_weights(self) -> None:
        """Fuse the parameters. Call it again if something, such as ``model.to`` or a load, may have replaced their storage."""
        model = self._model
        self._layers: list[SimpleNamespace] = []  # each layer's tensors: the parameters, or the storage under them
        for module in model.model.layers:
            attention, mlp = module.self_attn, module.mlp
            projections = [base_of(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            self._layers.append(
                SimpleNamespace(
                    qkv_weight=fuse_rows([p.weight for p in projections]),
                    qkv_bias=None if projections[0].bias is None else fuse_rows([p.bias for p in projections]),
                    gate_up_weight=fuse_rows([base_of(mlp.gate_proj).weight, base_of(mlp.up_proj).weight]),
                    output_weight_t=base_of(attention.o_proj).weight.detach().t(),
                    down_weight_t=base_of(mlp.down_proj).weight.detach().t(),
                    input_norm=module.input_layernorm.weight,
                    mlp_norm=module.post_attention_layernorm.weight,
                )
            )
        self._embedding = model.model.embed_tokens.weight
        self._residual_dtype = residual_dtype(self._embedding)
        self._final_norm = model.model.norm.weight
        self._head = base_of(model.lm_head).weight
        self._head_bias = base_of(model.lm_head).bias
        if self._has_head_norm:
            attention = [module.self_attn for module in model.model.layers]
            fused = fuse_rows([norm.weight for a in attention for norm in (a.q_norm, a.k_norm)])
            self._head_norms = fused.view(len(attention), 2, self._head_size)
            kinds = [0] * self._heads + [1] * self._kv_heads
            self._norm_of_head = torch.tensor(kinds, device=fused.device)

    def pack_if_faster(self) -> None:
        """Compute with copies of the weights in another order, if they are faster here."""
        if self._embedding.device.type == "cpu":
            self._packed = packed_if_faster(self._model, [layer.gate_up_weight for layer in self._layers])
        if self._packed is not None:
            self.most_rows = dict.fromkeys(self.most_rows, FASTEST_ROWS)

    def sites(self) -> dict[Hashable, Site]:
        """Return the linear layers that adapters can be added to, by layer and matrix."""
        queries, keys = self._heads * self._head_size, self._kv_heads * self._head_size
        sizes = {
            QKV: {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
            OUTPUT: {"self_attn.o_proj": self._model.config.hidden_size},
            GATE_UP: {
                "mlp.gate_proj": self._model.config.intermediate_size,
                "mlp.up_proj": self._model.config.intermediate_size,
            },
            DOWN: {"mlp.down_proj": self._model.config.hidden_size},
        }
        sites: dict[Hashable, Site] = {(HEAD,): [("lm_head", slice(0, len(self._head)))]}
        for index in range(len(self._layers)):
            for matrix, outputs in sizes.items():
                ends = list(itertools.accumulate(outputs.values()))
                slices = [slice(end - size, end) for end, size in zip(ends, outputs.values(), strict=True)]
                paths = (f"model.layers.{index}.{name}" for name in outputs)
                sites[index, matrix] = list(zip(paths, slices, strict=True))
        return sites

    def check_adapter(self, adapter: Adapter) -> None:
        """Do nothing: every linear layer computes each token by itself."""

    def _terms(self, batch: ForwardBatch) -> tuple[Term, ...]:
        """Return what adapters add to the rows of a batch."""
        if batch.terms is None:
            batch.terms = self.stacks.terms(batch.adapters, batch.lengths, len(batch.padded_tokens))
        return batch.terms

    def shallow(self, vocabulary: int) -> LlamaFamily:
        """Return a copy with one layer and the first ``vocabulary`` tokens."""
        forward = copy.copy(self)
        forward._packed = None
        forward._layers, forward.layer_shapes = self._layers[:1], self.layer_shapes[:1]
        forward._head, forward.most_rows = self._head[:vocabulary], self.most_rows | {HEAD: INVARIANT_ROWS}
        forward._head_bias = None if self._head_bias is None else self._head_bias[:vocabulary]
        return forward

    def matrices(self) -> list[Matrix]:
        """Return the matrices of the first layer, and the head."""
        layer = self._layers[0]
        return [
            Matrix(QKV, layer.qkv_weight, layer.qkv_bias),
            Matrix(OUTPUT, layer.output_weight_t.t(), is_added=True),
            Matrix(GATE_UP, layer.gate_up_weight),
            Matrix(DOWN, layer.down_weight_t.t(), is_added=True),
            Matrix(HEAD, self._head, self._head_bias),
        ]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm over the last axis; ``weight`` is broadcast over the axes before it, and the result has its type.

        ``torch.rms_norm`` runs one kernel on a GPU, but seven operators on CPU. The four used here take half the time in a short step.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return torch.rms_norm(x, x.shape[-1:], None, self._eps).mul_(weight)
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        normed = (x * torch.addcmul(self._epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)
        return normed.to(weight.dtype)

    def _rope(self, positions_T: Tensor, up_to: int) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine, ``[T, 1, D]`` each, where ``rotate_half(x) * sin = swap_halves(x) * signed_sin``."""
        if self._rope_table is None or len(self._rope_table) < up_to:
            length = max(1024, 1 << (up_to - 1).bit_length())
            positions = torch.arange(length, device=positions_T.device)[None]
            cos, sin = self._model.model.rotary_emb(self._embedding[:1].to(self._residual_dtype), positions)
            self._rope_table = torch.stack((cos[0], sin[0]), 1)
            self._rope_table[:, 1, : self._head_size // 2].neg_()
        cos, sin = self._rope_table.index_select(0, positions_T).split(1, 1)
        return cos, sin

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Return logits of each row's last token, ``[n, vocabulary]``, or of all, ``[T, vocabulary]``; keys and values are cached."""
        H, G, D, norm, most = self._heads, self._kv_heads, self._head_size, self._norm, self.most_rows
        count, tokens, positions = len(batch.columns), batch.padded_tokens, batch.padded_positions
        layers, head = self._layers, self._head
        if self._packed is not None:
            layers, head = self._packed.of(layers, head)
        if isinstance(batch, DecodeBatch):
            bias = batch.bias(G, self._embedding.dtype)
            read = cache.read(batch.padded_count, bias.shape[2])
            sum_values = torch.bmm if cache.shapes is Shapes.FREE else weighted_sum
        cos, sin = self._rope(positions, batch.position_limit)
        head_norms = self._head_norms.index_select(1, self._norm_of_head) if self._has_head_norm else None
        places = cache.places(batch.rows, batch.columns)

        terms = self._terms(batch)
        x = torch.embedding(self._embedding, tokens).to(self._residual_dtype)
        for index, layer in enumerate(layers):
            read_by_qkv = norm(x, layer.input_norm)
            qkv = linear(read_by_qkv, layer.qkv_weight, layer.qkv_bias, most[QKV])
            for term in terms:
                term.add((index, QKV), read_by_qkv, qkv)
            qkv = qkv.view(-1, H + 2 * G, D)
            qk = qkv[:, : H + G].to(x.dtype)
            if head_norms is not None:
                qk = norm(qk, head_norms[index])
            qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin).to(qkv.dtype)
            new = torch.cat((qk[:count, H:], qkv[:count, H + G :]), 1)  # without padding rows
            cache.flat.index_copy_(0, places[index], new.view(-1, D))
            if isinstance(batch, DecodeBatch):
                keys, values = read[index]
                attended = decode_attention(qk[:, :H], keys, values, bias, sum_values)
            elif batch.attention is not None:
                attended = batch.attention(qk[:, :H], cache.keys[index], cache.values[index])
            else:
                attended = prefill_attention(batch, qk[:, :H], new, cache.keys[index], cache.values[index])
            add_product(x, attended, layer.output_weight_t, most[OUTPUT])
            for term in terms:
                term.add((index, OUTPUT), attended, x)
            for part in (x,) if terms else x.split(most[GATE_UP]):  # whose activations fit into the processor's cache
                self._add_mlp(part, index, layer, terms)
        if batch.last_tokens is not None and not batch.scores_all:
            last, count = batch.last_tokens, len(batch.last_tokens)
            last = last if batch.attention is None else F.pad(last, (0, -count % INVARIANT_ROWS))
            x, terms = x.index_select(0, last), tuple(term.selected(last) for term in terms)
        x = norm(x, self._final_norm)
        logits = linear(x, head, self._head_bias, most[HEAD])
        for term in terms:
            term.add((HEAD,), x, logits)
        return logits[:count]

    def _add_mlp(self, x: Tensor, index: int, layer: SimpleNamespace, terms: tuple[Term, ...]) -> None:
        """Add a layer's MLP to ``x`` in place."""
        normed = self._norm(x, layer.mlp_norm)
        gate_up = linear(normed, layer.gate_up_weight, None, self.most_rows[GATE_UP])
        for term in terms:
            term.add((index, GATE_UP), normed, gate_up)
        gate, up = gate_up.chunk(2, -1)
        hidden = F.silu(gate).mul_(up)
        add_product(x, hidden, layer.down_weight_t, self.most_rows[DOWN])
        for term in terms:
            term.add((index, DOWN), hidden, x)


def residual_dtype(weight: Tensor) -> torch.dtype:
    """Return the type of the sums between layers and of what is computed per element, for weights of one type.

    On a CPU, matrix products and attention are faster in bfloat16. The rest is not, and rounds less in float32.
    """
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> Tensor:
    """Compute ``x @ weight.T + bias``, at most ``most`` rows at a time."""
    product = packed_linear if weight.is_mkldnn else F.linear
    if len(x) <= most:
        return product(x, weight, bias)
    return torch.cat([product(rows, weight, bias) for rows in x.split(most)])


def add_product(x: Tensor, rows: Tensor, weight_t: Tensor, most: int) -> None:
    """Add ``rows @ weight_t`` to ``x``, at most ``most`` rows at a time."""
    if len(x) > most:
        for part, factor in zip(x.split(most), rows.split(most), strict=True):
            add_product(part, factor, weight_t, most)
    elif weight_t.is_mkldnn:
        x.add_(packed_linear(rows, weight_t, None))
    elif x.dtype != rows.dtype:
        x.add_(rows @ weight_t)
    else:
        x.addmm_(rows, weight_t)


def fuse_rows(parameters: list[nn.Parameter]) -> Tensor:
    """Return one tensor ``[sum of first axes, ...]`` that owns the parameters' storage; the parameters become views of it.

    Parameters that are already fused in this order are left as they are.
    """
    first, sizes = parameters[0].data, [p.shape[0] for p in parameters]
    ends = itertools.accumulate((p.numel() * p.element_size() for p in parameters), initial=first.data_ptr())
    storage = first.untyped_storage().data_ptr()
    if all(
        p.is_contiguous() and p.data_ptr() == begin and p.untyped_storage().data_ptr() == storage
        for p, begin in zip(parameters, ends, strict=False)
    ):
        return torch.as_strided(first, (sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    with torch.inference_mode(False), torch.no_grad():
        fused = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, fused.split(sizes), strict=True):
            parameter.data = part
    return fused


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, sum_values: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Attend from one query per row over the cache, by two batched products, which are faster than the fused kernel on CPU.

    The shapes are whole blocks, so in float32 on CPU and with ``weighted_sum`` a query's bits do not depend on the other rows or on
    masked columns. The fused kernel (``prefill_attention``) is faster for long prompts, but its rounding depends on how its threads
    divide the queries.

    Args:
        q: ``[n, H, D]``.
        keys, values: keys ``[n * G, D, K]`` and values ``[n * G, K, D]`` of the rows' key-value heads.
        bias: ``[n * G, 1, K]``.
        sum_values: multiplies the weights and the values: ``weighted_sum``, or ``torch.bmm``, which is faster with many columns.
    """
    rows, D = len(q), q.shape[-1]
    scores = torch.baddbmm(bias, q.reshape(len(keys), -1, D), keys, alpha=D**-0.5)
    weights = scores.softmax(-1, dtype=torch.float32)
    if weights.dtype != values.dtype:
        weights = weights.to(values.dtype)
    return sum_values(weights, values).view(rows, -1)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Compute ``weights @ values``, ``SUMMED`` columns at a time in order, so that trailing columns of weight 0 change no bit."""
    if weights.shape[2] <= SUMMED:
        return torch.bmm(weights, values)
    total = torch.bmm(weights[:, :, :SUMMED], values[:, :SUMMED])
    for begin in range(SUMMED, weights.shape[2], SUMMED):
        total.baddbmm_(weights[:, :, begin : begin + SUMMED], values[:, begin : begin + SUMMED])
    return total


def prefill_attention(batch: ForwardBatch, q: Tensor, new: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
    """Attend from many queries per row: causally over the queries themselves if ``batch.visible`` is None, else over the rows' cache.

    Args:
        q: ``[T, H, D]``.
        new: ``[T, 2 * G, D]``: the tokens' keys and values.
        cached_keys, cached_values: keys and values of all rows, ``[rows, G, length, D]``.
    """
    visible, heads = batch.visible, cached_keys.shape[1]
    if visible is None:
        k, v = batch.pad(new).transpose(1, 2).split(heads, 1)
    else:
        rows = slice(batch.first_row, batch.first_row + batch.row_count)
        k, v = cached_keys[rows, :, : batch.kv_length], cached_values[rows, :, : batch.kv_length]
        visible = visible[:, None]
    attended = F.scaled_dot_product_attention(
        batch.pad(q).transpose(1, 2), k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=q.shape[1] > heads
    )
    return batch.unpad(attended.transpose(1, 2)).flatten(1)
