"""The tokens of one forward pass and where each belongs: packed along one axis, every row's queries at its next columns.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` padded queries of a row, ``K`` cache columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.inference.backends.builtin.row_table import RowTable
from rollwright.inference.backends.builtin.sequence import Sequence


@dataclass
class ForwardBatch:
    """What a model needs to know of one pass.

    Attributes:
        token_ids, positions, rows, columns: ``[T]``: the token, its rotary position, its cache row and column.
        position_limit: one more than the largest position.
        first_row, row_count: the contiguous rows ``first_row .. first_row + row_count - 1``, in packed order.
        query_lengths: tokens of each row.
        kv_length: columns that attention reads (``K``).
        visible: ``[n, Q, K]`` bool, queries padded on the left; None where plain causal attention over the queries alone
            says the same (every row begins at column 0 and all have one length).
        decoding: one token a row.
        multi_modal: processor outputs of the sequence, where the pass is a multi-modal prompt.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    columns: Tensor
    position_limit: int
    first_row: int
    row_count: int
    query_lengths: list[int]
    kv_length: int
    visible: Tensor | None
    decoding: bool
    multi_modal: dict[str, Any] | None = None

    @cached_property
    def padded_queries(self) -> int:
        """``Q``."""
        return max(self.query_lengths)

    @cached_property
    def is_ragged(self) -> bool:
        """True where rows have different numbers of queries."""
        return min(self.query_lengths) != self.padded_queries

    @cached_property
    def is_query(self) -> Tensor:
        """``[n, Q]`` bool: false on padding, which is on the left so that last tokens stand in the last column."""
        lengths = torch.tensor(self.query_lengths)
        real = torch.arange(self.padded_queries) >= (self.padded_queries - lengths)[:, None]
        return real.to(self.token_ids.device)

    @cached_property
    def last_tokens(self) -> Tensor:
        """``[n]``: index in ``T`` of each row's last token."""
        return torch.tensor(np.cumsum(self.query_lengths) - 1, device=self.token_ids.device)

    def pad(self, packed: Tensor) -> Tensor:
        """``[T, ...]`` to ``[n, Q, ...]``."""
        if not self.is_ragged:
            return packed.view(self.row_count, self.padded_queries, *packed.shape[1:])
        padded = packed.new_zeros(self.row_count, self.padded_queries, *packed.shape[1:])
        padded[self.is_query] = packed
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """``[n, Q, ...]`` to ``[T, ...]``."""
        return padded[self.is_query] if self.is_ragged else padded.flatten(0, 1)


def decode_batch(table: RowTable, count: int, hidden: dict[int, Tensor], device: torch.device) -> ForwardBatch:
    """One new token for each of the first ``count`` rows.

    Args:
        hidden: for rows with branches, the columns ``[K']`` that their new tokens must not see.
    """
    cached = table.cached[:count]
    kv_length = int(cached.max()) + 1
    columns = torch.from_numpy(cached).to(device)
    visible = None
    if hidden or int(cached.min()) + 1 != kv_length:
        visible = (torch.arange(kv_length, device=device) <= columns[:, None])[:, None]
        for row, columns_hidden in hidden.items():
            visible[row, 0, : len(columns_hidden)] &= ~columns_hidden
    return ForwardBatch(
        token_ids=torch.from_numpy(table.last_token[:count]).to(device),
        positions=torch.from_numpy(table.position[:count]).to(device),
        rows=torch.arange(count, device=device),
        columns=columns,
        position_limit=int(table.position[:count].max()) + 1,
        first_row=0,
        row_count=count,
        query_lengths=[1] * count,
        kv_length=kv_length,
        visible=visible,
        decoding=True,
    )


def prefill_batch(chunks: list[tuple[Sequence, int, int]], first_row: int, device: torch.device) -> ForwardBatch:
    """Prompt tokens ``start .. end-1`` of several sequences, which occupy the rows from ``first_row`` on in this order."""
    lengths = [end - start for _, start, end in chunks]
    kv_length = max(end for _, _, end in chunks)
    columns = np.concatenate([np.arange(start, end) for _, start, end in chunks])
    positions = np.concatenate(
        [
            sequence.position_ids()[start:end] if sequence.has_own_layout else np.arange(start, end)
            for sequence, start, end in chunks
        ]
    )
    tokens = [token for sequence, start, end in chunks for token in sequence.tokens[start:end]]
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.from_numpy(positions).to(device),
        rows=torch.from_numpy(np.repeat(np.arange(first_row, first_row + len(chunks)), lengths)).to(device),
        columns=torch.from_numpy(columns).to(device),
        position_limit=int(positions.max()) + 1,
        first_row=first_row,
        row_count=len(chunks),
        query_lengths=lengths,
        kv_length=kv_length,
        visible=None,
        decoding=False,
        multi_modal=chunks[0][0].request.multi_modal,
    )
    branched = any(sequence.request.branch_ids is not None for sequence, _, _ in chunks)
    if branched or batch.is_ragged or any(start for _, start, _ in chunks):
        batch.visible = torch.arange(kv_length, device=device) <= batch.pad(batch.columns)[:, :, None]
    if branched and batch.visible is not None:
        for index, (sequence, start, end) in enumerate(chunks):
            if sequence.request.branch_ids is not None:
                branches = torch.from_numpy(sequence.branch_ids()[:end]).to(device)
                batch.visible[index, -(end - start) :, :end] &= branch_visibility(branches[start:], branches)
    return batch


def branch_visibility(query_branches: Tensor, key_branches: Tensor) -> Tensor:
    """``[Q, K]`` bool: the trunk (0) is seen by all and sees all; a branch sees the trunk and itself. Causality is apart."""
    query, key = query_branches[:, None], key_branches[None, :]
    return (key == 0) | (key == query) | (query == 0)


def hidden_columns(sequence: Sequence, device: torch.device) -> Tensor | None:
    """``[prompt]`` bool: the columns that the sequence's new tokens must not see; None where they see all."""
    if sequence.request.branch_ids is None:
        return None
    branches = torch.from_numpy(sequence.branch_ids()[: sequence.prompt_length])
    hidden = ~branch_visibility(branches[-1:], branches)[0]
    return hidden.to(device) if bool(hidden.any()) else None
