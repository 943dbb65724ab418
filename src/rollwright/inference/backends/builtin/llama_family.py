"""The decoder forward of the Llama family, over packed tokens and the slot cache.

Llama, Mistral, Qwen2 and Qwen3 are one architecture with switches: RMSNorm before attention and MLP, rotary positions,
grouped-query attention, SwiGLU; Qwen2 adds biases to query, key and value, Qwen3 a norm on each query and key head.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` queries of a row, ``K`` cache columns, ``H`` heads, ``D`` head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollwright.inference.backends.builtin.forward_batch import ForwardBatch
from rollwright.inference.backends.builtin.fused_weights import fuse_rows
from rollwright.inference.backends.builtin.kv_cache import KVCache, LayerShape
from rollwright.inference.backends.builtin.sequence import Sequence

_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def why_not_llama_family(model: Any, context_length: int) -> str | None:
    """The reason why this forward cannot compute ``model``; None where it can."""
    config = model.config
    if type(model).__name__ not in _CLASSES or not type(model).__module__.startswith("transformers."):
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
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"a projection is a {type(module).__name__}"
        if not isinstance(module, nn.Linear) and type(module).__module__.startswith("peft."):
            return "it carries adapters"
    layer = model.model.layers[0]
    if layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None:
        return "its output projections have biases"
    return None


class _Layer:
    """One decoder layer's tensors: views of, or the storage under, the Hugging Face parameters."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv_weight = fuse_rows([p.weight for p in projections])
        self.qkv_bias = None if attention.q_proj.bias is None else fuse_rows([p.bias for p in projections])
        self.gate_up_weight = fuse_rows([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.output_weight = attention.o_proj.weight
        self.down_weight = mlp.down_proj.weight
        self.input_norm = module.input_layernorm.weight
        self.mlp_norm = module.post_attention_layernorm.weight


class LlamaFamily:
    """Forward of a Llama, Mistral, Qwen2 or Qwen3 model that shares its weights.

    Args:
        model: the Hugging Face model; its query, key, value, gate and up parameters become views of fused tensors.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._has_head_norm = hasattr(model.model.layers[0].self_attn, "q_norm")
        self._rope_table: tuple[Tensor, Tensor] | None = None
        self.layer_shapes = [LayerShape(self._kv_heads, self._head_size, self._head_size)] * config.num_hidden_layers
        self.share_weights()

    def share_weights(self) -> None:
        """Fuse the parameters, or fuse them again where something (``model.to``, a load) put new storage under them."""
        model = self._model
        self._layers = [_Layer(module) for module in model.model.layers]
        self._embedding = model.model.embed_tokens.weight
        self._final_norm = model.model.norm.weight
        self._head = model.lm_head.weight
        self._head_bias = model.lm_head.bias
        if self._has_head_norm:
            attention = [module.self_attn for module in model.model.layers]
            fused = fuse_rows([norm.weight for a in attention for norm in (a.q_norm, a.k_norm)])
            self._head_norms = fused.view(len(attention), 2, self._head_size)
            kinds = [0] * self._heads + [1] * self._kv_heads
            self._norm_of_head = torch.tensor(kinds, device=fused.device)

    def multi_modal_position_delta(self, sequence: Sequence) -> int:
        """0: the family reads text only, and the engine refuses other inputs."""
        return 0

    def _rope(self, positions_T: Tensor, up_to: int) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, ``[T, 1, D]`` each: ``rotate_half(x) * sin = swap_halves(x) * signed_sin``."""
        if self._rope_table is None or len(self._rope_table[0]) < up_to:
            length = max(1024, 1 << (up_to - 1).bit_length())
            positions = torch.arange(length, device=positions_T.device)[None]
            cos, sin = self._model.model.rotary_emb(self._embedding[:1], positions)
            sin = sin[0].clone()
            sin[:, : self._head_size // 2].neg_()
            self._rope_table = cos[0].contiguous(), sin
        cos, sin = self._rope_table
        return cos.index_select(0, positions_T)[:, None], sin.index_select(0, positions_T)[:, None]

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits ``[n, vocabulary]`` of each row's last token; the keys and values of all tokens go into the cache."""
        H, G, D, eps = self._heads, self._kv_heads, self._head_size, self._eps
        cos, sin = self._rope(batch.positions, batch.position_limit)
        head_norms = self._head_norms.index_select(1, self._norm_of_head) if self._has_head_norm else None
        attend = _DecodeAttention(batch, H // G) if batch.decoding else _PrefillAttention(batch, H // G)
        places = cache.places(batch.rows, batch.columns, G)

        x = F.embedding(batch.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (x.shape[1],), layer.input_norm, eps)
            qkv = F.linear(normed, layer.qkv_weight, layer.qkv_bias).view(-1, H + 2 * G, D)
            qk, values = qkv[:, : H + G], qkv[:, H + G :]
            if head_norms is not None:
                qk = F.rms_norm(qk, (D,), None, eps).mul_(head_norms[index])
            qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
            keys = qk[:, H:]
            cache.flat_keys[index].index_copy_(0, places, keys.reshape(-1, D))
            cache.flat_values[index].index_copy_(0, places, values.reshape(-1, D))
            attended = attend(qk[:, :H], keys, values, cache.keys[index], cache.values[index])
            x.addmm_(attended, layer.output_weight.t())
            normed = F.rms_norm(x, (x.shape[1],), layer.mlp_norm, eps)
            gate, up = F.linear(normed, layer.gate_up_weight).chunk(2, -1)
            x.addmm_(F.silu(gate).mul_(up), layer.down_weight.t())
        if not batch.decoding:
            x = x.index_select(0, batch.last_tokens)
        return F.linear(F.rms_norm(x, (x.shape[1],), self._final_norm, eps), self._head, self._head_bias)


class _DecodeAttention:
    """One query a row against the cache: two batched products, which beat the fused kernel on CPU at one query."""

    def __init__(self, batch: ForwardBatch, group: int) -> None:
        self._batch = batch
        self._group = group
        self._bias: Tensor | None = None

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        batch, group = self._batch, self._group
        n, kv_heads, D = batch.row_count, cached_keys.shape[1], q.shape[-1]
        q = (q * D**-0.5).view(n * kv_heads, group, D)  # a copy in any case: q is a slice
        k = cached_keys[:n].flatten(0, 1)[:, : batch.kv_length]
        v = cached_values[:n].flatten(0, 1)[:, : batch.kv_length]
        scores = torch.bmm(q, k.transpose(1, 2))
        if batch.visible is not None:
            if self._bias is None:
                bias = torch.zeros(batch.visible.shape, dtype=q.dtype, device=q.device)
                self._bias = bias.masked_fill_(~batch.visible, float("-inf"))
            scores.view(n, kv_heads * group, -1).add_(self._bias)  # broadcast over heads; baddbmm would need it spread out
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights, v).view(n, -1)


class _PrefillAttention:
    """Many queries a row: causal over the queries themselves where rows begin at 0, else over the rows' cache."""

    def __init__(self, batch: ForwardBatch, group: int) -> None:
        self._batch = batch
        self._grouped = group > 1

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        batch = self._batch
        if batch.visible is None:
            k, v = batch.pad(keys).transpose(1, 2), batch.pad(values).transpose(1, 2)
            mask = None
        else:
            rows = slice(batch.first_row, batch.first_row + batch.row_count)
            k, v = cached_keys[rows, :, : batch.kv_length], cached_values[rows, :, : batch.kv_length]
            mask = batch.visible[:, None]
        attended = F.scaled_dot_product_attention(
            batch.pad(q).transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self._grouped
        )
        return batch.unpad(attended.transpose(1, 2)).flatten(1)
