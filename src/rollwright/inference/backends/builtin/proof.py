"""Checks that a Hugging Face model computes the same log-probabilities over our cache, masks and positions as in a plain forward.

The engine runs this check when it starts. It uses a few tokens for every model and, for each window, chunk and other length in the model's
configuration (``inference/model_facts.py``) that is below the engine's context length, a row that exceeds this length.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollwright.inference.backends.builtin.batch import Chunk, ForwardBatch, Sequence, prefill_batch
from rollwright.inference.backends.builtin.kv_cache import KVCache, LayerShape
from rollwright.inference.model_facts import attention_of, regime_lengths
from rollwright.inference.request import ModelRequest

_SHORT = (11, 5)  # lengths of the rows in the short check
_BEYOND = 64  # tokens by which a row exceeds a length; at most the length itself
_ONE_BY_ONE = 2  # in the pass that ends this many tokens before the end, rows are computed one by one
_PIECE = 1024  # maximum number of tokens per pass, because the additive mask is materialised
#: Maximum number of operations of a check: about two minutes on two cores, less on a GPU. Rows that would take more are an error.
_OPERATIONS, _GPU_OPERATIONS = 1e14, 1e16
_LIKELY = 64  # tokens compared in half precision; the log-probabilities of unlikely tokens are mostly rounding error
#: Tolerances: in float32 at every position; in half precision the mean over likely tokens and the median over positions.
_NATS, _HALF_NATS = 1e-3, 0.1

Forward = Callable[[ForwardBatch, KVCache], Tensor]
#: Checks that each model has passed: mode of computation, attention implementation, longest row.
_proved: weakref.WeakKeyDictionary[Any, set[tuple[str, str, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Difference:
    """A difference and advice about it. ``reason`` continues a message that begins with the model's name."""

    reason: str
    advice: str = ""


def prove(
    forward: Forward, model: Any, layers: list[LayerShape], tokens: list[int], context_length: int, mode: str
) -> Difference | None:
    """Compare ragged passes over a cache with plain forwards.

    Args:
        forward: forward of ``model`` over the cache.
        model: the model to check.
        layers: shapes of the cache's layers.
        tokens: ordinary tokens to build rows from.
        context_length: longest row to check.
        mode: how ``forward`` computes; passed checks are remembered by model and mode.

    Returns:
        The first difference, or None if the results agree.
    """
    if reason := _differs(forward, model, layers, tokens, [min(n, context_length) for n in _SHORT], 0):
        said = f"with an explicit mask and cache it computes other log-probabilities than in a plain forward ({reason}; it may have "
        return Difference(f"{said}position biases or its own state)")
    by_length: dict[int, list[str]] = {}
    for name, length in regime_lengths(model.config).items():
        if length < context_length:
            by_length.setdefault(length, []).append(f"{name}={length}")
    most = _OPERATIONS if model.device.type == "cpu" else _GPU_OPERATIONS
    attention = attention_of(model.config)
    for length, names in sorted(by_length.items()):
        longest = min(length + min(length, _BEYOND), context_length)
        if (known := (mode, attention, longest)) in _proved.get(model, ()):
            continue
        try:
            is_short = (operations := _operations(model, longest)) <= most
            reason = _differs(forward, model, layers, tokens, [longest, min(_SHORT)], length) if is_short else ""
        except torch.OutOfMemoryError:
            is_short, reason = False, ""
        beyond, advice = " and ".join(names), f" With a context_length of {length} or less there are no such rows."
        if not is_short:
            said = f"rows of more than {length} tokens, beyond {beyond}, cannot be compared with its plain forward here: that takes "
            return Difference(f"{said}{operations:.0e} operations, or more memory than there is", advice)
        if reason:
            said = f"in a row of {longest} tokens, beyond {beyond}, it computes other log-probabilities than in a plain forward"
            return Difference(f"{said} ({reason})", advice)
        _proved.setdefault(model, set()).add(known)
    return None


def _operations(model: Any, length: int) -> float:
    """Estimate the number of operations of both forwards of a row."""
    text = model.config.get_text_config()
    attention = 4 * length**2 * (getattr(text, "hidden_size", None) or 1024) * (getattr(text, "num_hidden_layers", None) or 1)
    return 2.0 * (2 * sum(p.numel() for p in model.parameters()) * length + attention)


def _differs(
    forward: Forward, model: Any, layers: list[LayerShape], tokens: list[int], lengths: list[int], border: int
) -> str | None:
    """Compare rows computed in parts, some ending before and some after ``border`` tokens, and describe a difference, if any.

    Later parts are ragged, because all rows end in the same pass. The last parts have one token, as in decoding.
    """
    generator, device = torch.Generator().manual_seed(0), model.device
    rows = [[tokens[i] for i in torch.randint(len(tokens), (n,), generator=generator).tolist()] for n in lengths]
    bytes_per_token = sum(shape.heads * (shape.key_size + shape.value_size) for shape in layers) * model.dtype.itemsize
    cache = KVCache(layers, len(rows) * max(lengths) * bytes_per_token, len(rows), model.dtype, device)
    cache.make_room(len(rows), max(lengths), [])
    sequences = [Sequence(ModelRequest(row), tokens=row, prompt_length=len(row), length_limit=len(row) + 1) for row in rows]
    before = max(lengths) - (border - min(8, border // 2)) if border else 0
    ends = sorted({before, 6, 3, 2, 1, 0, *range(before, max(lengths), _PIECE)} - {max(lengths)}, reverse=True)
    done, computed = [0] * len(rows), list[tuple[int, int, Tensor]]()  # (row, tokens so far, logits)
    for left in ends:
        chunks = [Chunk(s, done[i], len(s.tokens) - left) for i, s in enumerate(sequences) if len(s.tokens) - left > done[i]]
        # Rows are computed one by one once: if they always ended together, positions counted for the whole batch would go unnoticed.
        for group in [[chunk] for chunk in chunks] if left == _ONE_BY_ONE else [chunks] if chunks else []:
            first = sequences.index(group[0].sequence)
            logits = forward(prefill_batch(group, first, device), cache)
            for number, chunk in enumerate(group, first):
                done[number] = chunk.end
                if left <= max(before, 6):  # the logits of every piece of a long row would take too much memory
                    computed.append((number, chunk.end, logits[number - first]))
    for number, row in enumerate(rows):
        ids = torch.tensor([row], device=device)
        ends_of_row = [(end, logits) for index, end, logits in computed if index == number]
        plain = _plain(model, ids, len(row) + 1 - min(end for end, _ in ends_of_row))
        distances = [(_distance(logits, plain[end - len(row) - 1], model.dtype), end) for end, logits in ends_of_row]
        # In half precision a single position may be far off, because rounding can route to another expert.
        distance, end = max(distances) if model.dtype == torch.float32 else sorted(distances)[(len(distances) - 1) // 2]
        if not distance <= (_NATS if model.dtype == torch.float32 else _HALF_NATS):
            return f"by {distance:.2g} nats after {end} tokens of {len(row)}"
    return None


def _plain(model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the logits ``[count, V]`` of a row's last tokens from the model's own forward without a cache."""
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": count} if count < ids.shape[1] and can_keep else {}
    return model(input_ids=ids, use_cache=False, **keep).logits[0, -count:]


def _distance(logits_V: Tensor, plain_V: Tensor, dtype: torch.dtype) -> float:
    """Return the distance of two distributions in nats, which is infinite if either has NaNs."""
    logprobs_V, plain_V = logits_V.float().log_softmax(-1), plain_V.float().log_softmax(-1)
    distance_V = (logprobs_V - plain_V).abs()
    if dtype == torch.float32:
        distance = distance_V[plain_V > -20].max().item()
    else:
        distance = distance_V[plain_V.topk(min(_LIKELY, len(plain_V))).indices].mean().item()
    return distance if distance == distance else float("inf")
