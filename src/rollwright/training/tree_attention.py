"""Attention over a prefix tree: each token over what it sees, through transformers' attention interface.

``use_tree_attention`` registers it under the name of the model's own attention with ``prefix_tree|`` before it; a forward pass without
a tree computes what it computed before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.training.prefix_tree import PrefixTree


def attend(
    query_HTD: Tensor, key_HTD: Tensor, value_HTD: Tensor, tree: PrefixTree, scaling: float, softcap: float | None = None
) -> Tensor:
    """Attention of every token over what it sees.

    Args:
        query_HTD: of the layout's tokens; ``key_HTD`` and ``value_HTD`` may have fewer heads, each for a group of query heads.
        tree: the layout.
        scaling: of the products.
        softcap: products are capped to ``softcap * tanh(x / softcap)``.

    Returns:
        ``[T, H, D]``.
    """
    if query_HTD.is_cuda:
        return attend_in_blocks(query_HTD, key_HTD, value_HTD, tree, scaling, softcap, compiled=True)
    heads, groups = query_HTD.shape[0], query_HTD.shape[0] // key_HTD.shape[0]
    query_THD, key_THD, value_THD = (x.transpose(0, 1) for x in (query_HTD, key_HTD, value_HTD))
    pieces = []
    for call in tree.calls:
        q, k, v = (
            x[index].transpose(1, 2) for x, index in ((query_THD, call.queries), (key_THD, call.keys), (value_THD, call.keys))
        )
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        mask = None if call.allowed is None else call.allowed[:, None]
        if softcap is None:
            out_NHQD = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        else:
            out_NHQD = _capped(q, k, v, mask, scaling, softcap)
        out = out_NHQD.transpose(1, 2).reshape(-1, heads, v.shape[-1])
        pieces.append(out if len(call.outputs) == len(out) else out[call.outputs])
    return torch.cat(pieces)[tree.back]


def attend_in_blocks(
    query_HTD: Tensor,
    key_HTD: Tensor,
    value_HTD: Tensor,
    tree: PrefixTree,
    scaling: float,
    softcap: float | None = None,
    *,
    compiled: bool,
) -> Tensor:
    """The same as ``attend`` by FlexAttention, which leaves out blocks of which no token sees another: for GPUs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ends_T, branches_T = tree.ends, tree.branches

    def sees(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        below = (key <= query) & (query < ends_T[key])
        if branches_T is None:
            return below
        own, other = branches_T[query], branches_T[key]
        return below & ((other == 0) | (own == 0) | (own == other))

    def cap(score: Tensor, *_place: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    if tree.block_mask is None:
        tree.block_mask = create_block_mask(sees, None, None, tree.tokens, tree.tokens, device=query_HTD.device)
    global _compiled_flex_attention
    if compiled and _compiled_flex_attention is None:
        _compiled_flex_attention = torch.compile(flex_attention, dynamic=True)
    kernel: Any = _compiled_flex_attention if compiled else flex_attention
    out_1HTD = kernel(
        query_HTD[None],
        key_HTD[None],
        value_HTD[None],
        score_mod=None if softcap is None else cap,
        block_mask=tree.block_mask,
        scale=scaling,
        enable_gqa=key_HTD.shape[0] != query_HTD.shape[0],
    )
    return out_1HTD[0].transpose(0, 1)


_compiled_flex_attention: Any = None


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """Attention whose products are capped; ``mask`` is bool, or added, or None for causal attention."""
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype) @ v


def use_tree_attention(model: nn.Module) -> None:
    """Let a model's attention layers take a ``prefix_tree``; without one they compute what they computed before."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    before = config._attn_implementation
    if before.startswith(_NAME):
        return
    name = f"{_NAME}|{before}"
    masks = AttentionMaskInterface()
    AttentionInterface.register(name, _attention(AttentionInterface()["sdpa" if before == "eager" else before]))
    AttentionMaskInterface.register(name, masks["sdpa" if before == "eager" else before])
    config._attn_implementation = name


_NAME = "prefix_tree"


def _attention(otherwise: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        prefix_tree: PrefixTree | None = None,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
        if prefix_tree is not None:
            prefix_tree.uses += 1
            return attend(query[0], key[0], value[0], prefix_tree, scaling, softcap)[None], None
        if softcap is not None:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            return _capped(query, key, value, attention_mask, scaling, softcap).transpose(1, 2).contiguous(), None
        return otherwise(module, query, key, value, attention_mask, scaling=scaling, **others)

    return forward


def why_not(model: nn.Module, longest: int) -> str | None:
    """Why rows of a model cannot share prefixes; None: they can.

    Args:
        model: a Hugging Face model.
        longest: tokens of the longest row.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not use transformers' attention interface"
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has a recurrent state"
    if not getattr(config, "is_causal", True):
        return f"{type(model).__name__} is not causal"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        return f"{type(model).__name__} has layers of {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    slides = "sliding_attention" in kinds or (getattr(config, "layer_types", None) is None and window)
    if slides and window is not None and window < longest:
        return f"{type(model).__name__} attends to the last {window} tokens, and rows have {longest}"
    return None
