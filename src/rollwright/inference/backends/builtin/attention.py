"""Attention of the Llama family over the cache: one query a row while decoding, many queries a row in a prompt.

``decode_attention`` and ``InvariantPrefill`` compute each query in shapes of whole blocks, as two batched products with a softmax
between them. In float32 on CPU a query's bits are then the same whatever is computed beside it, however its prompt is cut into
chunks, and however many columns are masked behind it. The fused kernel (``prefill_attention``) is faster for long prompts, and
rounds by how its threads divide the queries.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` queries of a row, ``K`` cache columns, ``H`` heads, ``G`` key-value heads, ``R`` heads
of a key-value head, ``D`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.experience.branches import sees
from rollwright.inference.backends.builtin.batch import Chunk, ForwardBatch, to_tensor
from rollwright.inference.backends.builtin.cache import INVARIANT_ROWS, KEY_BLOCK, in_blocks

SUMMED = 384  # most columns of a product that sums over them: MKL cuts longer ones in parts of a size that goes by their number
QUERIES = 256  # most queries that are computed together: their scores are in memory for all columns


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """One query a row against the cache: two batched products, which beat the fused kernel on CPU at one query.

    Args:
        q: ``[n, H, D]``.
        keys, values: of the rows' key-value heads, ``[n * G, D, K]`` and ``[n * G, K, D]``.
        bias: ``[n * G, 1, K]``.
    """
    rows, D = len(q), q.shape[-1]
    scores = torch.baddbmm(bias, q.reshape(len(keys), -1, D), keys, alpha=D**-0.5)
    weights = scores.softmax(-1, dtype=torch.float32)
    if weights.dtype != values.dtype:
        weights = weights.to(values.dtype)
    return _weighted(weights, values).view(rows, -1)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """The sum of values by weights, in the order of the columns, ``SUMMED`` at a time: columns of weight 0 behind add nothing."""
    if weights.shape[2] <= SUMMED:
        return torch.bmm(weights, values)
    total = torch.bmm(weights[:, :, :SUMMED], values[:, :SUMMED])
    for begin in range(SUMMED, weights.shape[2], SUMMED):
        total.baddbmm_(weights[:, :, begin : begin + SUMMED], values[:, begin : begin + SUMMED])
    return total


def prefill_attention(batch: ForwardBatch, q: Tensor, new: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
    """Many queries a row: causal over the queries themselves where rows begin at 0, else over the rows' cache.

    Args:
        q: ``[T, H, D]``.
        new: ``[T, 2 * G, D]``: the tokens' keys and values.
        cached_keys, cached_values: of all rows, ``[rows, G, length, D]``.
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


@dataclass
class _Part:
    """Queries ``begin .. end - 1`` of a prompt, the first of which is the packed token ``first``."""

    chunk: Chunk
    row: int
    first: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and columns that are computed."""
        return in_blocks(self.count, INVARIANT_ROWS), in_blocks(self.end, KEY_BLOCK)


@dataclass
class _Block:
    """Queries of one prompt, or of several prompts in neighbouring rows, that are computed together.

    Attributes:
        rows: of the cache.
        tokens: which of the packed tokens.
        places: ``[tokens]``: their places among the ``n * Q`` padded queries; None: there is no padding.
        hidden: ``[n, 1, Q, 1, K]``: what a query must not see.
    """

    rows: slice
    tokens: slice
    places: Tensor | None
    hidden: Tensor


class InvariantPrefill:
    """Causal attention of the prompts in a batch, each query in whole blocks of queries and columns.

    Args:
        batch: with its ``chunks``.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        assert batch.chunks is not None
        self._device = batch.columns.device
        self._padded_count = len(batch.padded_tokens)
        parts: list[list[_Part]] = []
        first = 0
        for row, chunk in enumerate(batch.chunks, batch.first_row):
            for begin in range(chunk.start, chunk.end, QUERIES):
                part = _Part(chunk, row, first + begin - chunk.start, begin, min(begin + QUERIES, chunk.end))
                before = parts[-1] if parts else []
                is_next = bool(before) and before[-1].row + 1 == row and before[0].shape == part.shape
                if is_next and (len(before) + 1) * part.shape[0] <= QUERIES:
                    before.append(part)
                else:
                    parts.append([part])
            first += chunk.length
        self._blocks = [self._block(together) for together in parts]

    def _block(self, parts: list[_Part]) -> _Block:
        (queries, length), device = parts[0].shape, self._device
        columns, hidden, places = torch.arange(length, device=device), [], []
        for number, part in enumerate(parts):
            own = columns > torch.arange(part.begin, part.begin + queries, device=device)[:, None]
            if part.chunk.sequence.request.branch_ids is not None:
                branches = to_tensor(part.chunk.sequence.branch_ids()[: part.end], device)
                own[: part.count, : part.end] |= ~sees(branches[part.begin :], branches)
            hidden.append(own)
            places.append(torch.arange(part.count, device=device) + number * queries)
        tokens = slice(parts[0].first, parts[-1].first + parts[-1].count)
        is_full = all(part.count == queries for part in parts)
        rows = slice(parts[0].row, parts[-1].row + 1)
        return _Block(rows, tokens, None if is_full else torch.cat(places), torch.stack(hidden)[:, None, :, None])

    def __call__(self, q: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """What the queries ``[T, H, D]`` read, ``[T, H * D]``; 0 for padding.

        Args:
            q: with those of padding.
            cached_keys, cached_values: of all rows, ``[rows, G, length, D]``; those of the batch are among them.
        """
        H, D, G = q.shape[1], q.shape[2], cached_keys.shape[1]
        attended = q.new_zeros(self._padded_count, H * D)
        q = q * D**-0.5  # here, as the library applies a factor of its own before or after it sums, by the size
        for block in self._blocks:
            n, _, Q, _, K = block.hidden.shape
            part = q[block.tokens]
            if block.places is not None:
                part = q.new_zeros(n * Q, H, D).index_copy_(0, block.places, part)
            keys, values = (c[block.rows, :, :K].flatten(0, 1) for c in (cached_keys, cached_values))
            part = part.view(n, Q, G, -1, D).transpose(1, 2).reshape(n * G, -1, D)
            scores = torch.bmm(part, keys.transpose(1, 2))
            scores.view(n, G, Q, -1, K).masked_fill_(block.hidden, float("-inf"))
            read = _weighted(scores.softmax(-1), values).view(n, G, Q, -1, D).transpose(1, 2).reshape(n * Q, -1)
            attended[block.tokens] = read if block.places is None else read[block.places]
        return attended
