"""What a step works on: sequences, and the tokens of one forward pass.

Tokens are packed along one axis, every row's queries at its next columns.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` padded queries of a row, ``K`` cache columns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.experience.branches import sees
from rollwright.inference.backends.builtin.adjustment import Adjustment
from rollwright.inference.backends.builtin.stop_strings import StopStrings
from rollwright.inference.request import ModelRequest, ModelResponse, TopTokens

#: A sampled token, its log-probability and its version: ``(tokens, log-probabilities, versions)`` of an output.
Sampled = tuple[list[int], list[float], list[int]]


@dataclass(eq=False)
class Sequence:
    """A request from submission to response.

    Attributes:
        tokens: prompt and generated tokens. While the sequence is in a row, its newest tokens are in the row table and are
            added here when it leaves the row; so are ``logprobs`` and ``versions``, one for each generated token.
        top_logprobs: the most likely tokens beside each generated one, where the request asks for them.
        prompt_logprobs: of the prompt's tokens that were scored so far, with the most likely ones.
        length_limit: most tokens, the prompt included.
        has_own_layout: positions or attention differ from a plain causal sequence.
        position_delta: position minus index of the tokens after a multi-modal prompt.
        hidden: ``[prompt]`` bool, the columns that new tokens must not see; None where they see all.
        adjustment: what changes its scores before a token is drawn; None where nothing does.
        on_token: called in the engine's thread with the sequence, each sampled token, its log-probability and version.
        cached: leading tokens whose keys and values are in its row.
        row: its row in the cache, -1 while it waits.
        prefix_source: where a computed prefix is to be copied from.
        prefilled: leading tokens whose keys and values were computed as a prompt's are; the others were decoded one by one.
        is_current: False where some keys and values were computed by older weights.
    """

    request: ModelRequest
    tokens: list[int]
    prompt_length: int
    length_limit: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    has_own_layout: bool = False
    position_delta: int = 0
    hidden: Tensor | None = None
    stop_strings: StopStrings | None = None
    adjustment: Adjustment | None = None
    on_token: Callable[[Sequence, int, float, int], None] | None = None
    future: Future[ModelResponse] | asyncio.Future[ModelResponse] = None  # type: ignore[assignment]  # set when it is queued
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TopTokens]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int = 0
    row: int = -1
    prefix_source: object = None
    prefilled: int = 0
    is_current: bool = True
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    @property
    def next_scored(self) -> int | None:
        """Index of the first token of the prompt that waits for its log-probability; None: none does."""
        if self.request.prompt_logprobs_from is None:
            return None
        index = max(1, self.request.prompt_logprobs_from) + len(self.prompt_logprobs)
        return index if index < self.prompt_length else None

    @property
    def shareable_length(self) -> int:
        """Leading tokens whose keys and values equal those of a plain causal text sequence.

        A trunk token sees all tokens before it, so leading trunk tokens at positions 0, 1, 2, ... are plain. Multi-modal
        prompts share nothing: equal ids may stand for different images.
        """
        if self.request.multi_modal:
            return 0
        if not self.has_own_layout:
            return len(self.tokens)
        branches, positions = self.branch_ids(), self.position_ids()
        differs = (branches != 0) | (positions != np.arange(len(positions)))
        return int(differs.argmax()) if differs.any() else len(positions)

    def position_ids(self) -> np.ndarray:
        """Rotary position of every token, ``[len(tokens)]``; new tokens continue after the last prompt token's."""
        length = len(self.tokens)
        if self.request.position_ids is None:
            return np.arange(length) + self.position_delta
        positions = np.asarray(self.request.position_ids, dtype=np.int64)
        return np.concatenate([positions, positions[-1] + 1 + np.arange(length - len(positions))])

    def branch_ids(self) -> np.ndarray:
        """Branch of every token, ``[len(tokens)]``; new tokens belong to the last prompt token's branch; 0 is the trunk."""
        length = len(self.tokens)
        if self.request.branch_ids is None:
            return np.zeros(length, dtype=np.int64)
        branches = np.asarray(self.request.branch_ids, dtype=np.int64)
        return np.concatenate([branches, np.full(length - len(branches), branches[-1])])

    def response(
        self, stop_reason: str = "stop", stop_match: str | int | None = None, sampled: Sampled | None = None
    ) -> ModelResponse:
        """The response with all that was generated so far, or with what a listener has kept of it (``sampled``)."""
        tokens, logprobs, versions = sampled or (self.tokens[self.prompt_length :], self.logprobs, self.versions)
        now, request = time.monotonic(), self.request
        scores: dict[str, Any] = {}
        if request.top_logprobs:
            scores["output_top_logprobs"] = self.top_logprobs[: len(tokens)]
        if request.prompt_logprobs_from is not None:
            none = [None] if request.prompt_logprobs_from == 0 else []
            scores["input_logprobs"] = [*none, *(logprob for logprob, _ in self.prompt_logprobs)]
            if request.top_logprobs:
                scores["input_top_logprobs"] = [*none, *(top for _, top in self.prompt_logprobs)]
        return ModelResponse(
            input_tokens=self.tokens[: self.prompt_length],
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason=stop_reason,
            stop_match=stop_match,
            latency=now - self.submitted_at,
            ttft=(self.first_token_at or now) - self.submitted_at,
            temperature=request.gconfig.effective_temperature,
            rid=request.rid,
            seed=self.seed,
            **scores,
        )


@dataclass
class Chunk:
    """Tokens ``start .. end-1`` of a sequence, to be computed now."""

    sequence: Sequence
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start

    @property
    def completes(self) -> bool:
        """True where the sequence can be sampled afterwards."""
        return self.end == len(self.sequence.tokens)


@dataclass
class ForwardBatch:
    """What a model needs to know of one pass.

    Attributes:
        token_ids, positions, rows, columns: ``[T]``: the token, its rotary position, its cache row and column.
        position_limit: one more than the largest position.
        first_row, row_count: the contiguous rows ``first_row .. first_row + row_count - 1``, in packed order.
        query_length: most tokens of a row (``Q``).
        kv_length: columns that attention reads (``K``).
        visible: ``[n, Q, K]`` bool, queries padded on the left; None where plain causal attention over the queries alone
            gives the same (every row begins at column 0 and all have one length).
        is_query: ``[n, Q]`` bool, false on padding, which is on the left so that last tokens are in the last column; None
            where all rows have one length.
        last_tokens: ``[n]``: index in ``T`` of each row's last token; None while decoding, where a row has one token.
        scores_all: return the logits of all tokens, ``[T, vocabulary]``, not only those of each row's last token.
        padded_tokens, padded_positions: ``token_ids`` and ``positions`` followed by the padding, which is computed too.
        chunks: set if queries are computed in whole blocks, in place of ``visible``.
        multi_modal: processor outputs of the sequence if the pass is a multi-modal prompt.
        branched: row (counted from ``first_row``) -> positions of a branched sequence's first tokens; later tokens continue from the last.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    columns: Tensor
    position_limit: int
    first_row: int
    row_count: int
    query_length: int
    kv_length: int
    visible: Tensor | None = None
    is_query: Tensor | None = None
    last_tokens: Tensor | None = None
    scores_all: bool = False
    multi_modal: dict[str, Any] | None = None
    branched: dict[int, Tensor] = field(default_factory=dict)
    padded_tokens: Tensor = field(init=False)
    padded_positions: Tensor = field(init=False)
    chunks: list[Chunk] | None = None

    def __post_init__(self) -> None:
        self.padded_tokens, self.padded_positions = self.token_ids, self.positions

    @property
    def computed_rows(self) -> int:
        """Rows that a model's own forward is given."""
        return self.row_count

    @property
    def read_length(self) -> int:
        """Columns that it is given of each row."""
        return self.kv_length

    def pad(self, packed: Tensor) -> Tensor:
        """``[T, ...]`` to ``[n, Q, ...]``."""
        if self.is_query is None:
            return packed.view(self.row_count, self.query_length, *packed.shape[1:])
        padded = packed.new_zeros(self.row_count, self.query_length, *packed.shape[1:])
        padded[self.is_query] = packed
        return padded

    def rows_apart(self) -> Iterator[ForwardBatch]:
        """Split into batches of one row each, without padding and reading only that row's columns."""
        counts = [self.query_length] * self.row_count if self.is_query is None else self.is_query.sum(1).tolist()
        for row, end in enumerate(itertools.accumulate(counts)):
            tokens = slice(end - counts[row], end)
            length = int(self.columns[end - 1]) + 1
            yield ForwardBatch(
                token_ids=self.token_ids[tokens],
                positions=self.positions[tokens],
                rows=self.rows[tokens],
                columns=self.columns[tokens],
                position_limit=self.position_limit,
                first_row=self.first_row + row,
                row_count=1,
                query_length=counts[row],
                kv_length=length,
                visible=None if self.visible is None else self.visible[row : row + 1, -counts[row] :, :length],
                scores_all=self.scores_all,
                multi_modal=self.multi_modal,
                branched={0: self.branched[row]} if row in self.branched else {},
            )

    def places(self) -> tuple[Tensor, Tensor]:
        """Coordinates in which windows and chunks are measured: of queries ``[n, Q]`` and of columns ``[n or 1, K]``.

        These are the columns; in branched sequences the positions, as if a branch and what it sees were a separate row.
        """
        queries = self.pad(self.columns)
        keys = torch.arange(self.read_length, device=queries.device)[None]
        if not self.branched:
            return queries, keys
        keys = keys.repeat(self.row_count, 1)
        for row, positions in self.branched.items():
            known = positions[: self.read_length]
            keys[row, : len(known)] = known
            keys[row, len(known) :] += positions[-1] + 1 - len(positions)
        return keys.gather(1, queries), keys

    def unpad(self, padded: Tensor) -> Tensor:
        """``[n, Q, ...]`` to ``[T, ...]``."""
        return padded.flatten(0, 1) if self.is_query is None else padded[self.is_query]


def prefill_batch(chunks: list[Chunk], first_row: int, device: torch.device, block: int = 1) -> ForwardBatch:
    """Prompt tokens of several sequences, which are in the rows from ``first_row`` on in this order.

    Args:
        block: of tokens and queries, where those beside one must not change its bits; 1: they may.
    """
    lengths = np.array([chunk.length for chunk in chunks])
    query_length, kv_length = int(lengths.max()), max(chunk.end for chunk in chunks)
    columns = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    positions = columns
    if any(chunk.sequence.has_own_layout for chunk in chunks):
        positions = np.concatenate([chunk.sequence.position_ids()[chunk.start : chunk.end] for chunk in chunks])
    is_ragged = int(lengths.min()) != query_length
    is_query = np.arange(query_length) >= (query_length - lengths)[:, None]
    batch = ForwardBatch(
        token_ids=torch.tensor([token for c in chunks for token in c.sequence.tokens[c.start : c.end]], device=device),
        positions=to_tensor(positions, device),
        rows=to_tensor(np.repeat(np.arange(first_row, first_row + len(chunks)), lengths), device),
        columns=to_tensor(columns, device),
        position_limit=int(positions.max()) + 1,
        first_row=first_row,
        row_count=len(chunks),
        query_length=query_length,
        kv_length=kv_length,
        is_query=to_tensor(is_query, device) if is_ragged else None,
        last_tokens=to_tensor(lengths.cumsum() - 1, device),
        scores_all=chunks[0].sequence.next_scored is not None,
        multi_modal=chunks[0].sequence.request.multi_modal,
    )
    if block > 1:
        padding = (0, -len(columns) % block)
        batch.chunks = chunks
        batch.padded_tokens, batch.padded_positions = (F.pad(t, padding) for t in (batch.token_ids, batch.positions))
        return batch
    branched = [(index, c) for index, c in enumerate(chunks) if c.sequence.request.branch_ids is not None]
    if branched or is_ragged or any(chunk.start for chunk in chunks):
        batch.visible = torch.arange(kv_length, device=device) <= batch.pad(batch.columns)[:, :, None]
        for index, chunk in branched:
            branches = to_tensor(chunk.sequence.branch_ids()[: chunk.end], device)
            batch.visible[index, -chunk.length :, : chunk.end] &= sees(branches[chunk.start :], branches)
            batch.branched[index] = to_tensor(chunk.sequence.position_ids()[: chunk.end], device)
    return batch


def to_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
