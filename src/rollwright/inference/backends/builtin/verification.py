"""Whether a runner can compute wide steps, and the forward pass of one: the newest token of every row, and after it the tokens that were drafted for some rows.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` padded queries of a row, ``K`` cache columns, ``H`` heads, ``G`` key-value heads, ``D`` head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.errors import ConfigError
from rollwright.inference.backends.builtin.batch import ForwardBatch, RowTable, Sequence, adapters_of
from rollwright.inference.backends.builtin.kv_cache import KEY_BLOCK, KVCache, in_blocks
from rollwright.inference.backends.builtin.model import ModelRunner, decode_attention, weighted_sum
from rollwright.inference.backends.builtin.prompt_lookup import Draft, PromptLookup

#: Maximum size of the logits of a wide step in float32, unless plain steps have more.
_LOGIT_BYTES = 64 << 20


def prompt_lookup(runner: ModelRunner, most: int) -> PromptLookup | None:
    """Return what drafts at most ``most`` tokens for each row of a runner, or None for 0.

    Raises:
        ConfigError: the number is negative, or wide steps would change bits that the runner keeps.
    """
    if most < 0:
        raise ConfigError(f"prompt_lookup_tokens is {most}; set it to 0 or more.")
    if most and runner.prompts_alone:
        raise ConfigError(
            f"prompt_lookup_tokens={most} is not possible with batch_invariant (deterministic) here: the engine computes "
            f"{type(runner.model).__name__} in passes whose bits depend on the number of tokens of a request. Set prompt_lookup_tokens "
            "to 0, or turn batch_invariant (deterministic) off."
        )
    return PromptLookup(most, _LOGIT_BYTES // (4 * runner.vocabulary), not runner.packs_tokens) if most else None


def verification_batch(table: RowTable, running: list[Sequence], drafts: list[Draft], runner: ModelRunner) -> ForwardBatch:
    """Lay out the tokens of a wide step, row by row.

    Args:
        table: state of the rows after the previous step.
        running: sequences by row.
        drafts: drafts of some rows; the first ``used`` tokens of each are computed.
        runner: the model and its cache, which has columns for all these tokens.
    """
    count, cache, device = len(running), runner.cache, runner.device
    lengths = np.ones(count, dtype=np.int64)
    for draft in drafts:
        lengths[draft.row] += draft.used
    starts, rows = lengths.cumsum() - lengths, np.arange(count).repeat(lengths)
    offsets = np.arange(len(rows)) - starts[rows]
    tokens = table.last_token[rows]
    for draft in drafts:
        begin = starts[draft.row] + 1
        tokens[begin : begin + draft.used] = draft.tokens[: draft.used]
    columns, positions = table.cached[rows] + offsets, table.position[rows] + offsets
    padding = (0, -len(tokens) % cache.row_block)
    token_ids, position_ids = (torch.as_tensor(array, device=device) for array in (tokens, positions))
    query_length = int(lengths.max())
    is_query = np.arange(query_length) >= (query_length - lengths)[:, None]
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=position_ids,
        padded_tokens=F.pad(token_ids, padding),
        padded_positions=F.pad(position_ids, padding),
        rows=torch.as_tensor(rows, device=device),
        columns=torch.as_tensor(columns, device=device),
        position_limit=int(positions.max()) + 1,
        first_row=0,
        row_count=count,
        query_length=query_length,
        kv_length=int(columns.max()) + 1,
        is_query=None if is_query.all() else torch.as_tensor(is_query, device=device),
        scores_all=True,
        branched={
            row: torch.tensor(s.request.position_ids, device=device)
            for row, s in enumerate(running)
            if s.request.branch_ids is not None and s.request.position_ids is not None
        },
        adapters=adapters_of(running),
        lengths=lengths.tolist(),
    )
    hidden = {row: s.hidden for row, s in enumerate(running) if s.hidden is not None}
    if not runner.packs_tokens or not cache.invariant:
        length = min(in_blocks(batch.kv_length, KEY_BLOCK), cache.length) if runner.packs_tokens else batch.kv_length
        batch.visible = torch.arange(length, device=device) <= batch.pad(batch.columns)[:, :, None]
        for row, columns_hidden in hidden.items():
            batch.visible[row, :, : len(columns_hidden)] &= ~columns_hidden
    if runner.packs_tokens:
        batch.attention = DecodedOneByOne(batch, hidden, cache) if cache.invariant else DecodedTogether(batch)
    return batch


class DecodedTogether:
    """Attention of all queries of a row at once, by two batched products.

    Args:
        batch: a wide step, with ``visible``.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        assert batch.visible is not None
        self._hidden = ~batch.visible[:, None, :, None]

    def __call__(self, q: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """See ``PromptAttention``; ``q`` is padded, and so is the result."""
        batch, (H, D), G = self._batch, q.shape[1:], cached_keys.shape[1]
        n, Q, K = batch.row_count, batch.query_length, self._hidden.shape[-1]
        keys, values = (cached[:n, :, :K].flatten(0, 1) for cached in (cached_keys, cached_values))
        queries = batch.pad(q[: len(batch.token_ids)]).view(n, Q, G, H // G, D).transpose(1, 2).reshape(n * G, -1, D)
        scores = torch.bmm(queries * D**-0.5, keys.transpose(1, 2))
        scores.view(n, G, Q, H // G, K).masked_fill_(self._hidden, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        read = torch.bmm(weights, values).view(n, G, Q, H // G, D).transpose(1, 2).reshape(n, Q, H * D)
        return F.pad(batch.unpad(read), (0, 0, 0, len(q) - len(batch.token_ids)))


@dataclass
class _Level:
    """The queries at one offset from the rows' newest tokens.

    Attributes:
        rows: whole blocks of rows that contain those with a query at this offset.
        tokens: ``[rows]``, the packed token of each row; any token for rows without one.
        places: ``[queries]``, the rows with a query, counted from the first of ``rows``.
        written: ``[queries]``, the packed tokens of these rows.
        bias: ``[rows * G, 1, K]``, 0 for visible columns, else -inf.
    """

    rows: slice
    tokens: Tensor
    places: Tensor
    written: Tensor
    bias: Tensor


class DecodedOneByOne:
    """Attention in the shapes of plain decode steps, one query per row after the other, so that each query gets the same bits.

    Args:
        batch: a wide step.
        hidden: columns that new tokens of a row must not see, by row.
        cache: the cache.
    """

    def __init__(self, batch: ForwardBatch, hidden: dict[int, Tensor], cache: KVCache) -> None:
        lengths, device = np.array(batch.lengths), batch.columns.device
        starts = lengths.cumsum() - lengths
        length, heads, dtype = (
            min(in_blocks(batch.kv_length, KEY_BLOCK), cache.length),
            cache.keys[0].shape[1],
            cache.keys[0].dtype,
        )
        self._levels = list[_Level]()
        for offset in range(batch.query_length):
            having = (lengths > offset).nonzero()[0]
            first = int(having[0]) // cache.row_block * cache.row_block
            end = in_blocks(int(having[-1]) + 1, cache.row_block)
            tokens = np.zeros(end - first, dtype=np.int64)
            tokens[having - first] = starts[having] + offset
            places = torch.as_tensor(having - first, device=device)
            written = torch.as_tensor(starts[having] + offset, device=device)
            is_seen = torch.zeros(end - first, length, dtype=torch.bool, device=device)
            is_seen[:, 0] = True  # softmax of a fully masked row is NaN
            is_seen[places] = torch.arange(length, device=device) <= batch.columns[written][:, None]
            for row, columns in hidden.items():
                if first <= row < end and lengths[row] > offset:
                    is_seen[row - first, : len(columns)] &= ~columns
            bias = torch.zeros(end - first, heads, length, dtype=dtype, device=device)
            bias.masked_fill_(~is_seen[:, None], float("-inf"))
            level = _Level(slice(first, end), torch.as_tensor(tokens, device=device), places, written, bias.view(-1, 1, length))
            self._levels.append(level)

    def __call__(self, q: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """See ``PromptAttention``; ``q`` is padded, and so is the result."""
        attended = q.new_zeros(len(q), q.shape[1] * q.shape[2])
        for level in self._levels:
            length = level.bias.shape[2]
            keys, values = (cached[level.rows].flatten(0, 1)[:, :length] for cached in (cached_keys, cached_values))
            read = decode_attention(q.index_select(0, level.tokens), keys.transpose(1, 2), values, level.bias, weighted_sum)
            attended.index_copy_(0, level.written, read.index_select(0, level.places))
        return attended
