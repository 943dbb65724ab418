"""Attention over a prefix tree, through transformers' attention interface.

``over_tree`` switches a model to this attention for one forward pass. All other passes and users of the model keep its own attention.
If a layer passes an attention argument that is not supported here, the tree records the refusal and the pass's result is invalid.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollwright.inference.routed_experts import Routing, current_routing, routing
from rollwright.training.prefix_tree import AttentionCall, PrefixTree


def attend(
    query_HTD: Tensor,
    key_HTD: Tensor,
    value_HTD: Tensor,
    tree: PrefixTree,
    scaling: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute the attention of every token over the tokens that it sees.

    Args:
        query_HTD: queries of the layout's tokens; ``key_HTD`` and ``value_HTD`` may have fewer heads (grouped-query attention).
        tree: the layout.
        scaling: factor of the scores.
        softcap: if set, scores are capped to ``softcap * tanh(x / softcap)``.
        sinks_H: attention sinks, each an extra term ``exp(sink)`` in the softmax normaliser. Not supported on GPUs.

    Returns:
        ``[T, H, D]``.
    """
    tree.uses += 1
    kind = query_HTD.device.type
    if torch.is_autocast_enabled(kind):
        query_HTD, key_HTD, value_HTD = (x.to(torch.get_autocast_dtype(kind)) for x in (query_HTD, key_HTD, value_HTD))
    if query_HTD.is_cuda:
        assert sinks_H is None, "attention sinks are not supported over a tree on a GPU"
        return attend_in_blocks(query_HTD, key_HTD, value_HTD, tree, scaling, softcap, compiled=True)
    query_THD, key_THD, value_THD = (x.transpose(0, 1) for x in (query_HTD, key_HTD, value_HTD))
    calls = (tree.own_calls, tree.shared_calls)
    return TreeAttention.apply(query_THD, key_THD, value_THD, *calls, scaling, softcap, sinks_H)  # type: ignore[no-any-return]


class TreeAttention(torch.autograd.Function):
    """Attention over a tree, computed as the tree's calls.

    Results of several calls for the same queries are merged by their log-normalisers. The gradient of a call needs only the
    merged result and normaliser (arXiv 2205.14135, appendix B.2), so only those are saved. A sink is merged last, as a key whose
    value is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        own_calls: list[AttentionCall],
        shared_calls: list[AttentionCall],
        scaling: float,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        T, heads, _ = query_THD.shape
        out_THD = value_THD.new_empty(T, heads, value_THD.shape[-1])
        normaliser_TH = query_THD.new_empty(T, heads, dtype=torch.promote_types(query_THD.dtype, torch.float32))
        for call in own_calls:
            results = _forward(call, query_THD, key_THD, value_THD, scaling, softcap)
            for target, result_NHQ in zip((out_THD, normaliser_TH), results, strict=True):
                _write(call, target, result_NHQ.transpose(1, 2))
        for call in shared_calls:
            results = _forward(call, query_THD, key_THD, value_THD, scaling, softcap)
            more_THD, more_TH = (result_NHQ.transpose(1, 2).flatten(0, 1) for result_NHQ in results)
            own_TH = normaliser_TH[call.queries]
            out_THD[call.queries].lerp_(more_THD, torch.sigmoid(more_TH - own_TH)[:, :, None].to(out_THD.dtype))
            torch.logaddexp(own_TH, more_TH, out=own_TH)
        if sinks_H is not None:
            sinks_H = sinks_H.to(normaliser_TH.dtype)
            out_THD.mul_(torch.sigmoid(normaliser_TH - sinks_H)[:, :, None].to(out_THD.dtype))
            normaliser_TH = torch.logaddexp(normaliser_TH, sinks_H)
        ctx.save_for_backward(query_THD, key_THD, value_THD, out_THD, normaliser_TH, sinks_H)
        ctx.calls, ctx.scaling, ctx.softcap = (own_calls, shared_calls), scaling, softcap
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_THD, key_THD, value_THD, out_THD, normaliser_TH, sinks_H = ctx.saved_tensors
        grad_query_THD = torch.empty_like(query_THD)
        own_calls, shared_calls = ctx.calls
        make = (
            torch.empty_like if all(call.is_causal for call in own_calls) else torch.zeros_like
        )  # otherwise some gradients are only added to
        grad_key_THD, grad_value_THD = make(key_THD), make(value_THD)
        for call in itertools.chain(own_calls, shared_calls):
            grads = _backward(call, grad_THD, query_THD, key_THD, value_THD, out_THD, normaliser_TH, ctx.scaling, ctx.softcap)
            query_NQHD, key_NKHD, value_NKHD = (grad.transpose(1, 2) for grad in grads)
            if call in shared_calls:
                grad_query_THD[call.queries] += query_NQHD.flatten(0, 1)
            else:
                _write(call, grad_query_THD, query_NQHD)
            for target, grad in ((grad_key_THD, key_NKHD), (grad_value_THD, value_NKHD)):
                if call.is_causal:  # over its own queries, which are keys of no other own call
                    _write(call, target, grad)
                elif isinstance(call.keys, slice):
                    target[call.keys] += grad.flatten(0, 1)
                else:
                    target.index_add_(0, call.keys.flatten(), grad.flatten(0, 1))
        grad_sinks_H = None
        if sinks_H is not None:  # dp = p (0 - grad · out), where p is the sink's share
            grad_sinks_H = -(torch.exp(sinks_H - normaliser_TH) * (grad_THD * out_THD).sum(-1)).sum(0)
        return grad_query_THD, grad_key_THD, grad_value_THD, None, None, None, None, grad_sinks_H


def _pieces(call: AttentionCall, places: Tensor | slice, *layouts: Tensor) -> list[Tensor]:
    """Select rows of ``[T, H, ...]`` tensors by a call's layout indices; returns ``[N, H, L, ...]`` each."""
    selected = (x[places] for x in layouts)
    return [(x.unflatten(0, (call.pieces, -1)) if isinstance(places, slice) else x).transpose(1, 2) for x in selected]


def _write(call: AttentionCall, target: Tensor, values_NQH: Tensor) -> None:
    """Write a call's values for its queries, ``[N, Q, H, ...]``, to the queries' rows of ``target``."""
    if isinstance(call.queries, slice):
        target[call.queries] = values_NQH.flatten(0, 1)
    elif call.padding is None:
        target[call.queries] = values_NQH
    else:
        target[call.queries[~call.padding]] = values_NQH[~call.padding]


def _operands(
    call: AttentionCall, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any] | None]:
    """Return a call's queries, keys and values with equal numbers of heads, and the other arguments for PyTorch's CPU kernel.

    The other arguments are None if the kernel cannot compute the call.
    """
    (query_NHQD,) = _pieces(call, call.queries, query_THD)
    key_NHKD, value_NHKD = _pieces(call, call.keys, key_THD, value_THD)
    if (groups := query_NHQD.shape[1] // key_NHKD.shape[1]) > 1:
        key_NHKD, value_NHKD = (x.repeat_interleave(groups, dim=1) for x in (key_NHKD, value_NHKD))
    if softcap is not None or query_NHQD.device.type != "cpu" or query_NHQD.shape[-1] != value_NHKD.shape[-1]:
        return query_NHQD, key_NHKD, value_NHKD, None
    bias = None
    if call.allowed is not None:
        bias = torch.zeros(call.allowed.shape, dtype=query_NHQD.dtype).masked_fill_(~call.allowed, -torch.inf)
    arguments = {"dropout_p": 0.0, "is_causal": call.is_causal, "attn_mask": bias, "scale": scaling}
    return query_NHQD, key_NHKD, value_NHKD, arguments


def _forward(
    call: AttentionCall, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the output ``[N, H, Q, D]`` and log-normalisers ``[N, H, Q]`` of a call."""
    query, key, value, arguments = _operands(call, query_THD, key_THD, value_THD, scaling, softcap)
    if arguments is not None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **arguments)
    products, seen = _products(call, query, key, scaling, softcap)
    products = products.masked_fill(~seen, -torch.inf)
    normaliser = products.logsumexp(-1)
    return torch.exp(products - normaliser[..., None]).to(value.dtype) @ value, normaliser


def _backward(
    call: AttentionCall,
    grad_THD: Tensor,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    out_THD: Tensor,
    normaliser_TH: Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a call's queries ``[N, H, Q, D]``, keys and values ``[N, Hk, K, D]``."""
    query, key, value, arguments = _operands(call, query_THD, key_THD, value_THD, scaling, softcap)
    grad, out, normaliser = _pieces(call, call.queries, grad_THD, out_THD, normaliser_TH)
    if call.padding is not None:  # padding contributes nothing
        normaliser = normaliser.masked_fill(call.padding[:, None], torch.inf)
    if arguments is not None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = kernel(grad, query, key, value, out, normaliser, **arguments)
    else:
        products, seen = _products(call, query, key, scaling, softcap)
        weights = torch.exp(products - normaliser[..., None]).masked_fill_(~seen, 0.0)
        towards = (grad @ value.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)) * weights * scaling
        if softcap is not None:  # d (c tanh(x / c)) / dx = 1 - tanh²
            towards *= 1 - (products / softcap).square()
        towards = towards.to(query.dtype)
        grads = towards @ key, towards.transpose(-1, -2) @ query, weights.to(grad.dtype).transpose(-1, -2) @ grad
    grad_query, grad_key, grad_value = grads
    if (groups := query_THD.shape[1] // key_THD.shape[1]) > 1:
        grad_key, grad_value = (each.unflatten(1, (-1, groups)).sum(2) for each in (grad_key, grad_value))
    return grad_query, grad_key, grad_value


def _products(call: AttentionCall, query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Compute the scaled and capped products of queries and keys in at least float32, and the mask of the allowed pairs."""
    products = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if softcap is not None:
        products = softcap * torch.tanh(products / softcap)
    seen = torch.ones(products.shape[-2:], dtype=torch.bool, device=query.device) if call.allowed is None else call.allowed
    return products, seen.tril() if call.is_causal else seen


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
    """Compute ``attend`` with FlexAttention (used on GPUs), which skips blocks in which no token sees another."""
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
    kernel: Any = _compiled(flex_attention) if compiled else flex_attention
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


@functools.cache
def _compiled(kernel: Any) -> Any:
    return torch.compile(kernel, dynamic=True)


_NAME = "prefix_tree"


def over_tree(model: Any) -> AbstractContextManager[None]:
    """Return a context in which a model's attention layers use the ``prefix_tree`` argument of the model's forward pass.

    Gradient checkpointing recomputes layers after the context has ended: see ``recomputed_alike``.
    """
    config = model.config.get_text_config()
    return _ComputedBy(config, _registered(config._attn_implementation))


def recomputed_alike(model: Any) -> Callable[[], tuple[Any, Any]]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint`` that recomputes layers with the attention of the first pass."""
    return functools.partial(
        _contexts, model.config.get_text_config()
    )  # a partial, so that a copy of the model gets its own configuration


def _contexts(config: Any) -> tuple[Any, Any]:
    again = _ComputedBy(config, config._attn_implementation)
    how = current_routing()
    return contextlib.nullcontext(), again if how is None else _RoutedAgain(again, how)


@dataclass
class _RoutedAgain(AbstractContextManager[None]):
    """Context in which layers are recomputed with the recorded experts of the first pass. Reentrant."""

    computed: _ComputedBy
    how: Routing
    opened: list[contextlib.ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        stack.enter_context(self.computed)
        stack.enter_context(routing(self.how))
        self.opened.append(stack)

    def __exit__(self, *_error: Any) -> None:
        self.opened.pop().close()


@dataclass
class _ComputedBy(AbstractContextManager[None]):
    """Context in which layers use the attention implementation of a given name. Reentrant."""

    config: Any
    name: str
    before: list[str] = field(default_factory=list)

    def __enter__(self) -> None:
        self.before.append(self.config._attn_implementation_internal)
        self.config._attn_implementation_internal = self.name  # the property's setter would also change the vision tower

    def __exit__(self, *_error: Any) -> None:
        self.config._attn_implementation_internal = self.before.pop()


@functools.cache
def _registered(own: str) -> str:
    """Register the attention over trees that replaces the attention ``own``, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = own if own.startswith(_NAME) else f"{_NAME}|{own}"
    if name != own:
        AttentionInterface.register(name, _attention(own))
        if own in (masks := AttentionMaskInterface()):
            AttentionMaskInterface.register(name, masks[own])
    return name


@functools.cache
def leave_uncompiled() -> None:
    """Exclude attention over a tree from ``torch.compile``, which would recompile it for each batch because its calls differ."""
    global attend
    attend = cast(Any, torch.compiler.disable(attend))


#: Arguments of attention functions that do not affect the result, or that affect it only without a tree.
_WITHOUT_EFFECT = {
    "position_ids",
    "position_embeddings",
    "hidden_states",
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "layer_idx",
}


def _attention(own: str) -> Callable[..., tuple[Tensor, Any]]:
    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        prefix_tree: PrefixTree | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Any]:
        if prefix_tree is None:
            return _own_attention(module, own)(module, query, key, value, attention_mask, *args, **arguments)
        scaling, softcap, sinks_H = (arguments.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
        prefix_tree.refusal = prefix_tree.refusal or _not_understood(args, arguments, prefix_tree, sinks_H)
        if prefix_tree.refusal:
            sinks_H = None
        scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
        out_THD = attend(query.squeeze(0), key.squeeze(0), value.squeeze(0), prefix_tree, scaling, softcap, sinks_H)
        return out_THD[None], None

    return forward


def _own_attention(module: nn.Module, own: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return the layer's original attention: transformers' function of that name, or the eager one in the layer's module."""
    for layer in type(module).__mro__:
        names = getattr(inspect.unwrap(layer.__dict__.get("forward", object)), "__globals__", {})
        if "ALL_ATTENTION_FUNCTIONS" in names:
            return names["ALL_ATTENTION_FUNCTIONS"].get_interface(own, names.get("eager_attention_forward"))
    from transformers import AttentionInterface

    return AttentionInterface()[own]


def _not_understood(args: tuple[Any, ...], arguments: dict[str, Any], tree: PrefixTree, sinks_H: Tensor | None) -> str | None:
    """Return why a layer's attention cannot be computed over the tree, or None if it can."""
    if sinks_H is not None and tree.input_ids.is_cuda:
        return "its attention has sinks (s_aux), which are not supported over a tree on a GPU"
    if args:
        return f"its attention takes {len(args)} positional arguments"
    arguments = dict(arguments)
    if arguments.pop("is_causal", None) is False:
        return "its attention is not causal"
    window = arguments.pop("sliding_window", None)
    if window is not None and window < tree.longest:
        return f"its attention slides over {window} tokens, and rows have {tree.longest}"
    has_effect = (
        name
        for name, value in arguments.items()
        if name not in _WITHOUT_EFFECT
        and not name.startswith("output_")
        and not (value is None or (isinstance(value, (bool, int, float)) and not value))
    )
    name = next(has_effect, None)
    return None if name is None else f"its attention takes {name}, which attention over a tree does not support"


def why_not(model: Any, longest: int) -> str | None:
    """Return why rows cannot share prefixes according to the model's configuration, or None if nothing in it forbids sharing.

    Args:
        model: a Hugging Face model.
        longest: tokens of the longest row.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface"
    if getattr(model, "_is_stateful", False):
        return f"{name} has a recurrent state"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if others := kinds - _KINDS.keys():
        return f"{name} has layers of {', '.join(sorted(others))}"
    for kind in kinds if getattr(config, "layer_types", None) else _KINDS:
        size = getattr(config, _KINDS[kind], None) if _KINDS[kind] else None
        if size is not None and size < longest:
            return f"{name} attends to {_KINDS[kind]}={size} tokens, and rows have {longest}"
    return None


#: Layer types whose attention is fully causal, at least up to some length -> the setting that holds this length.
_KINDS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
