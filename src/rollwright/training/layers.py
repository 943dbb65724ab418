"""Layers computed in fewer passes over memory: the output layer with its softmax, RMSNorm and rotary positions.

``output_logprobs`` maps hidden states to log-probabilities of given tokens without ever holding all logits in float32. It computes
``logits_chunk_mib`` of logits at a time. If the logits are few, they are kept for the backward pass; otherwise they are recomputed there.
The softmax works on a few rows at a time, which fit into the processor's cache.

``use_fast_layers`` replaces layers of a Hugging Face model that trains in float32 on a CPU if the replacement computes the same result."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Number of logits that are kept for the backward pass instead of being recomputed (64 MiB of float32).
_KEPT_LOGITS = 1 << 24

#: Number of logits that softmax processes at a time on a CPU (1 MiB of float32, half of a core's second-level cache).
_CACHED_LOGITS = 1 << 18

#: Number of logits in a chunk (32 MiB of float32); a chunk has at least 1024 tokens.
_CHUNK_LOGITS = 1 << 23


def output_logprobs(
    head: nn.Module,
    hidden_TH: Tensor,
    labels_T: Tensor,
    temperature_T: Tensor,
    *,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
    chunk_bytes: int = 256 << 20,
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of labels under an output layer, and entropies.

    Args:
        head: module that maps hidden states to logits and has a ``weight [V, H]``.
        hidden_TH: hidden states of the tokens that predict the labels.
        labels_T: token ids.
        temperature_T: divisor of the logits.
        with_entropy: compute entropies; otherwise they are 0.
        entropy_gradient: let gradients flow through the entropies.
        chunk_bytes: size in bytes of the float32 logits that are held at a time.

    Returns:
        ``logprobs_T`` and ``entropy_T``, in nats.
    """
    tokens, vocabulary = int(hidden_TH.shape[0]), int(head.weight.shape[0])  # type: ignore[arg-type]
    keep_logits = not torch.is_grad_enabled() or tokens * vocabulary <= _KEPT_LOGITS
    chunk_tokens = max(1, chunk_bytes // (4 * vocabulary))
    if type(head) is nn.Linear and head.bias is None and not torch.is_autocast_enabled(hidden_TH.device.type):
        size = min(chunk_tokens, max(1024, _CHUNK_LOGITS // vocabulary))
        keep_logits = keep_logits and torch.is_grad_enabled()
        entropy = (with_entropy, entropy_gradient)
        return _LinearLogprobs.apply(hidden_TH, head.weight, labels_T, temperature_T, *entropy, size, keep_logits)  # type: ignore[no-any-return]

    def score(hidden: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return selected_logprobs(
            head(hidden), labels, temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
        )

    chunks = zip(*(each.split(chunk_tokens) for each in (hidden_TH, labels_T, temperature_T)), strict=True)
    pieces = [score(*chunk) if keep_logits else checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


def candidate_logprobs(
    logits_of: Callable[[Tensor], Tensor], inputs_TH: Tensor, candidates_TK: Tensor, temperature_T: Tensor, chunk_tokens: int
) -> Tensor:
    """Compute the log-probabilities of several candidates for each token.

    Args:
        logits_of: maps a chunk of inputs to logits ``[C, V]``.
        inputs_TH: hidden states, or logits, of the tokens that predict the candidates.
        candidates_TK: token ids.
        temperature_T: divisor of the logits.
        chunk_tokens: number of tokens whose logits are held at a time; the backward pass computes them again.

    Returns:
        ``[T, K]``, in nats.
    """

    def score(inputs: Tensor, candidates: Tensor, temperature: Tensor) -> Tensor:
        logits = logits_of(inputs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
        return logits.gather(-1, candidates) - logits.logsumexp(-1, keepdim=True)

    chunks = zip(*(each.split(chunk_tokens) for each in (inputs_TH, candidates_TK, temperature_T)), strict=True)
    return torch.cat([checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks])


def selected_logprobs(
    logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor, *, with_entropy: bool = False, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of one label for each row of logits, and the entropy of each row's distribution.

    Args:
        logits_TV: unscaled logits, of any float type; the softmax is computed in float32 at least.
        labels_T: token ids.
        temperature_T: divisor of the logits.
        with_entropy: compute the entropy; otherwise it is 0.
        entropy_gradient: let gradients flow through the entropy, which costs two more passes over the logits.

    Returns:
        ``logprobs_T`` and ``entropy_T``, in nats.
    """
    return _SelectedLogprobs.apply(logits_TV, labels_T, temperature_T, with_entropy, entropy_gradient)  # type: ignore[no-any-return]


class _SelectedLogprobs(torch.autograd.Function):
    """``log softmax(logits / temperature)[label]`` and the entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor, with_entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_T, normaliser_T, entropy_T = _softmax(logits_TV, labels_T, temperature_T, with_entropy)
        ctx.save_for_backward(logits_TV, labels_T, temperature_T, normaliser_T, entropy_T)
        ctx.set_materialize_grads(False)
        if not (with_entropy and entropy_gradient):
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_TV, labels_T, temperature_T, normaliser_T, entropy_T = ctx.saved_tensors
        grad_TV = logits_TV.to(normaliser_T.dtype, copy=True)
        _logits_to_gradient(grad_TV, labels_T, temperature_T, normaliser_T, entropy_T, grad_logprobs_T, grad_entropy_T)
        return grad_TV.to(logits_TV.dtype), None, None, None, None


class _LinearLogprobs(torch.autograd.Function):
    """``_SelectedLogprobs`` of a linear output layer without bias, in chunks: the gradient of all logits is never held at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        temperature_T: Tensor,
        with_entropy: bool,
        entropy_gradient: bool,
        chunk_tokens: int,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        saved_logits, results = [], []
        for place in range(0, max(1, len(hidden_TH)), chunk_tokens):
            part = slice(place, place + chunk_tokens)
            logits_CV = hidden_TH[part] @ weight_VH.t()
            results.append(_softmax(logits_CV, labels_T[part], temperature_T[part], with_entropy))
            saved_logits += [logits_CV] * keep_logits
        logprobs_T, normaliser_T, entropy_T = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, temperature_T, normaliser_T, entropy_T, *saved_logits)
        ctx.set_materialize_grads(False)
        if not (with_entropy and entropy_gradient):
            ctx.mark_non_differentiable(entropy_T)
        ctx.chunk_tokens = chunk_tokens
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_TH, weight_VH, labels_T, temperature_T, normaliser_T, entropy_T, *saved_logits = ctx.saved_tensors
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for number, place in enumerate(range(0, len(hidden_TH), ctx.chunk_tokens)):
            part = slice(place, place + ctx.chunk_tokens)
            hidden, labels, temperature, normaliser, entropy = (
                each[part] for each in (hidden_TH, labels_T, temperature_T, normaliser_T, entropy_T)
            )
            grad_logprobs, grad_entropy = (None if grad is None else grad[part] for grad in (grad_logprobs_T, grad_entropy_T))
            # The kept logits are changed in place; autograd reports an error if a second backward pass needs them.
            grad_CV = saved_logits[number] if saved_logits else hidden @ weight_VH.t()
            wide_CV = grad_CV.to(normaliser.dtype)
            _logits_to_gradient(wide_CV, labels, temperature, normaliser, entropy, grad_logprobs, grad_entropy)
            grad_CV = wide_CV.to(hidden.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_CV.t(), hidden)
        return grad_hidden_TH, grad_weight_VH, None, None, None, None, None, None


def _cached_parts(logits_TV: Tensor) -> Iterator[slice]:
    """Divide rows of logits into parts that fit into the processor's cache; on a GPU, all rows are one part."""
    tokens, vocabulary = logits_TV.shape
    size = max(1, tokens if logits_TV.is_cuda else _CACHED_LOGITS // vocabulary)
    return (slice(place, place + size) for place in range(0, max(1, tokens), size))


def _softmax(logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of labels, log-normalisers and entropies (0 without ``with_entropy``), ``[T]`` in at least float32."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    is_scaled = logits_TV.is_cuda or bool((temperature_T != 1).any())
    found = []
    for part in _cached_parts(logits_TV):
        logits = logits_TV[part].to(wide)
        if is_scaled:
            logits = logits / temperature_T[part, None]
        largest = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - largest)
        total = weights.sum(-1)
        normaliser = largest[:, 0] + total.log()
        logprobs = logits.gather(-1, labels_T[part, None])[:, 0] - normaliser
        entropy = normaliser - weights.mul_(logits).sum(-1) / total if with_entropy else torch.zeros_like(normaliser)
        found.append((logprobs, normaliser, entropy))
    logprobs_T, normaliser_T, entropy_T = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logprobs_T, normaliser_T, entropy_T


def _logits_to_gradient(
    logits_TV: Tensor,
    labels_T: Tensor,
    temperature_T: Tensor,
    normaliser_T: Tensor,
    entropy_T: Tensor,
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> None:
    """Overwrite logits with their gradient."""
    if grad_logprobs_T is None:
        grad_logprobs_T = torch.zeros_like(normaliser_T)
    is_scaled = logits_TV.is_cuda or bool((temperature_T != 1).any())
    for part in _cached_parts(logits_TV):
        grad, temperature, towards = logits_TV[part], temperature_T[part, None], grad_logprobs_T[part, None]
        if is_scaled:
            grad /= temperature
        grad -= normaliser_T[part, None]
        # d logp / d z = onehot - p;  d H / d z = -p (log p + H)
        if grad_entropy_T is None:
            grad.exp_().mul_(-towards)
        else:
            probabilities = grad.exp()
            grad.add_(entropy_T[part, None]).mul_(grad_entropy_T[part, None]).add_(towards).mul_(probabilities).neg_()
        grad.scatter_add_(1, labels_T[part, None], towards)
        if is_scaled:
            grad /= temperature


@torch.no_grad()
def use_fast_layers(model: nn.Module) -> int:
    """Replace a model's RMSNorm layers and its attention's rotary positions in place, if the replacement computes the same result.

    Architectures use one name for different computations (some add one to a norm's weight), so each layer is first tried on a probe.

    Returns:
        Number of replaced layers.
    """
    changed = 0
    for module in model.modules():
        if "forward" in vars(module):  # the instance's forward is already replaced
            continue
        forward = types.MethodType(_norm_forward, module) if _is_norm(module) else _with_fast_rotation(module)
        if forward is not None:
            module.forward = forward  # type: ignore[method-assign]
            changed += 1
    return changed


def _is_norm(module: Any) -> bool:
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or weight is None or weight.dim() != 1:
        return False
    probe = torch.linspace(-2.0, 3.0, 3 * weight.shape[0], dtype=weight.dtype).view(3, -1)
    tried = torch.linspace(0.5, 1.5, weight.shape[0], dtype=weight.dtype)  # the layer's own weight may not be allocated yet
    return _is_same(
        lambda: (torch.func.functional_call(module, {"weight": tried}, (probe,)),),
        lambda: (_RMSNorm.apply(probe, tried, epsilon),),  # type: ignore[arg-type, return-value]
    )


def _is_same(theirs: Callable[[], tuple[Tensor, ...]], ours: Callable[[], tuple[Tensor, ...]]) -> bool:
    """Return True if a layer's own computation accepts the probe and returns the same values as ours."""
    try:
        expected = theirs()
    except (RuntimeError, TypeError, ValueError, IndexError):  # same class name, but another signature
        return False
    return all(torch.allclose(mine, other, rtol=1e-5, atol=1e-6) for mine, other in zip(ours(), expected, strict=True))


class _RMSNorm(torch.autograd.Function):
    """``w · x / sqrt(mean(x²) + eps)`` over the last axis (arXiv 1910.07467, eq. 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        # With n = x · scale: dw = Σ g n;  dx = scale · (g w - n · mean(g w n))
        normalised = x * scale
        product = grad * normalised
        grad_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        pull = (product @ weight[:, None]).div_(-x.shape[-1])
        grad_x = (grad * weight).addcmul_(normalised, pull).mul_(scale)
        return grad_x, grad_weight, None


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[return-value]


class _Rotation(torch.autograd.Function):
    """Rotary positions (arXiv 2104.09864, eq. 34): each pair ``(x_i, x_{i + D/2})`` is rotated by its angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None  # type: ignore[return-value]


def _rotate(
    theirs: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    if cos.shape[-1] != q.shape[-1]:  # partial rotary: only a part of each head is rotated
        return theirs(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)  # type: ignore[return-value]


_ROTATE = "apply_rotary_pos_emb"


def _with_fast_rotation(module: nn.Module) -> Callable[..., Any] | None:
    """Return an attention layer's forward pass with the fast ``apply_rotary_pos_emb``.

    Returns None if the layer does not use that function, or if the function computes something else.
    """
    forward = type(module).forward
    theirs = getattr(forward, "__globals__", {}).get(_ROTATE)
    if theirs is None or _ROTATE not in forward.__code__.co_names or forward.__closure__:
        return None
    if [*inspect.signature(theirs).parameters] != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return None
    ours = functools.partial(_rotate, theirs)
    x, angle = torch.linspace(-1.0, 1.0, 24).view(1, 2, 3, 4), torch.linspace(0.0, 3.0, 6).view(1, 3, 2)
    cos, sin = (torch.cat((each, each), -1) for each in (angle.cos(), angle.sin()))
    if not _is_same(lambda: theirs(x, -x, cos, sin), lambda: ours(x, -x, cos, sin)):
        return None
    names = {**forward.__globals__, _ROTATE: ours}
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(copy, module)
