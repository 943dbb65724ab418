"""Data of an engine step: sequences, the table of decoding rows, and the tokens of one forward pass.

Tokens are packed along one axis, and each token has a cache row and column. With a small model a step takes well under a millisecond, so
anything that changes only when a sequence enters or leaves a row is computed then (``RowTable``, ``DecodeBatch``), not in each step. Rows
are computed in blocks of ``KVCache.row_block`` and keys in blocks of ``KEY_BLOCK``: with few distinct shapes, a row's result depends
little, or not at all, on its neighbours.

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

from rollwright.inference.attention_masks import sees
from rollwright.inference.backends.builtin.adapters import Adapter
from rollwright.inference.backends.builtin.adjustments import Adjustment
from rollwright.inference.backends.builtin.kv_cache import INVARIANT_ROWS, KEY_BLOCK, KVCache, in_blocks
from rollwright.inference.backends.builtin.low_rank import Term
from rollwright.inference.backends.builtin.stop_strings import StopStrings
from rollwright.inference.backends.builtin.token_matches import TokenMatches
from rollwright.inference.request import ModelRequest, ModelResponse, TopTokens

_NO_TOKEN = -1

Rows = slice | np.ndarray  # of the table: rows next to each other, or their numbers

#: Settings of a row's sequence; they do not change while the sequence is in the row.
_SETTINGS = np.dtype(
    [
        ("max_new_tokens", np.int64),
        ("min_new_tokens", np.int64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("greedy", np.bool_),
        ("is_plain", np.bool_),  # any token can be sampled, at temperature 1
        ("has_extras", np.bool_),  # an adjustment, stop strings, a listener or alternatives
    ],
    align=True,
)


#: An output's sampled tokens: ``(tokens, log-probabilities, versions)``.
Sampled = tuple[list[int], list[float], list[int]]


@dataclass(eq=False)
class Sequence:
    """A request from submission to response.

    Attributes:
        tokens: prompt and generated tokens. While the sequence is in a row, its newest tokens are in the row table; they are added
            here when the sequence leaves the row. The same holds for ``logprobs`` and ``versions``, which have one entry for each
            generated token.
        top_logprobs: the most likely alternatives to each generated token, if requested.
        prompt_logprobs: log-probability and most likely alternatives of each prompt token scored so far.
        length_limit: maximum number of tokens, including the prompt.
        has_own_layout: True if positions or attention differ from those of a plain causal sequence.
        position_delta: position minus index of the tokens after a multi-modal prompt.
        hidden: ``[prompt]`` bool, the columns that new tokens must not see, or None if they see all columns.
        adjustment: changes the logits before a token is drawn, if requested.
        on_token: called in the engine's thread with the sequence, each sampled token, its log-probability and its version.
        cached: number of leading tokens whose keys and values are in the cache row.
        row: cache row of the sequence, or -1 while the sequence waits.
        prefix_source: running or kept sequence whose computed prefix will be copied to this sequence's row.
        prefilled: number of leading tokens that were computed as a prompt; the others were decoded one by one.
        is_current: False if older weights computed some of the keys and values.
        adapter: adapter that computes the sequence, or None for the base alone.
        is_bound: True once ``adapter`` is settled: from the beginning if the request names one, else when the sequence first gets a row.
        version: version of the sequence's tokens if it is that of its adapter, or -1 for the engine's weights at each token.
        run: name of the run that the request belongs to; empty if the engine serves one run.
        routed: the record of the experts of the leading tokens, in parts, if the engine keeps one (``inference/routed_experts.py``). A
            token that is computed again keeps its first record, which its answer was sampled with.
        matches: repeated text of the sequence, once it was looked up.
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
    adapter: Adapter | None = None
    is_bound: bool = False
    version: int = -1
    run: str = ""
    routed: list[np.ndarray] = field(default_factory=list)
    matches: TokenMatches | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    def bind(self, adapter: Adapter | None) -> None:
        """Settle the adapter, for good: all tokens of the sequence are computed with it and carry its version."""
        self.adapter, self.is_bound = adapter, True
        self.version = -1 if adapter is None else adapter.version

    @property
    def adapter_key(self) -> int:
        """Key of the adapter, which the keys and values of the sequence belong to; 0 for the base alone."""
        return 0 if self.adapter is None else self.adapter.key

    @property
    def next_scored(self) -> int | None:
        """Index of the next prompt token that still has to be scored, or None if all are scored."""
        if self.request.prompt_logprobs_from is None:
            return None
        index = max(1, self.request.prompt_logprobs_from) + len(self.prompt_logprobs)
        return index if index < self.prompt_length else None

    @property
    def shareable_length(self) -> int:
        """Number of leading tokens whose keys and values equal those of a plain causal text sequence.

        A trunk token (branch 0) sees all tokens before it, so leading trunk tokens at positions 0, 1, 2, ... qualify. For
        multi-modal prompts the number is 0, because equal ids may stand for different images.
        """
        if self.request.multi_modal:
            return 0
        if not self.has_own_layout:
            return len(self.tokens)
        branches, positions = self.branch_ids(), self.position_ids()
        differs = (branches != 0) | (positions != np.arange(len(positions)))
        return int(differs.argmax()) if differs.any() else len(positions)

    def position_ids(self) -> np.ndarray:
        """Return the rotary position of every token, ``[len(tokens)]``; new tokens continue from the last prompt token's position."""
        length = len(self.tokens)
        if self.request.position_ids is None:
            return np.arange(length) + self.position_delta
        positions = np.asarray(self.request.position_ids, dtype=np.int64)
        return np.concatenate([positions, positions[-1] + 1 + np.arange(length - len(positions))])

    def branch_ids(self) -> np.ndarray:
        """Return the branch of every token, ``[len(tokens)]``. 0 is the trunk; new tokens belong to the last prompt token's branch."""
        length = len(self.tokens)
        if self.request.branch_ids is None:
            return np.zeros(length, dtype=np.int64)
        branches = np.asarray(self.request.branch_ids, dtype=np.int64)
        return np.concatenate([branches, np.full(length - len(branches), branches[-1])])

    def response(
        self, stop_reason: str = "stop", stop_match: str | int | None = None, sampled: Sampled | None = None
    ) -> ModelResponse:
        """Build the response from everything generated so far, or from the tokens passed to ``on_token`` so far (``sampled``)."""
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
            routed_experts=self._record_of(self.prompt_length + len(tokens) - 1) if sampled is None and self.routed else None,
            **scores,
        )

    def _record_of(self, length: int) -> np.ndarray:
        """Return the record of the first ``length`` tokens; those that were not computed have none."""
        record = np.concatenate(self.routed)[:length]
        return np.pad(record, ((0, length - len(record)), (0, 0)))


@dataclass
class Chunk:
    """Tokens ``start .. end-1`` of a sequence, computed in one pass.

    Attributes:
        length: number of tokens.
        completes: True if the sequence can be sampled afterwards.
    """

    sequence: Sequence
    start: int
    end: int

    def __post_init__(self) -> None:
        self.length = self.end - self.start
        self.completes = self.end == len(self.sequence.tokens)


class RowTable:
    """State of the decoding rows in arrays, so that a step's bookkeeping is a few numpy calls for any batch size.

    Attributes:
        settings: ``[rows]`` with the fields of ``_SETTINGS``.
        last_token: ``[rows]``, the newest token, whose keys and values are computed in the next step.
        cached: ``[rows]``, number of tokens before the newest one.
        position: ``[rows]``, rotary position of the newest token.
        generated: ``[rows]``, number of output tokens.
        flushed: ``[rows]``, number of output tokens that the sequence object already has.
        bound_version: ``[rows]``, version of the row's tokens, or -1 for that of the engine's weights at each token.
        stop_ids: ``[rows, maximum number of stop ids]``, padded with -1.
        tokens, logprobs, versions: ``[rows, capacity]``, the output after the ``flushed`` tokens.
        changes: number of times that a sequence entered or left a row.
        numbers: ``[rows]``, the numbers of the rows.
    """

    def __init__(self, rows: int) -> None:
        rows = in_blocks(rows, INVARIANT_ROWS)
        self.settings = np.zeros(rows, dtype=_SETTINGS)
        self._counts = np.zeros((6, rows), dtype=np.int64)
        self.last_token, self.cached, self.position, self.generated, self.flushed, self.bound_version = self._counts
        self.stop_ids = np.full((rows, 2), _NO_TOKEN, dtype=np.int64)
        self.tokens = np.zeros((rows, 64), dtype=np.int64)
        self.logprobs = np.zeros((rows, 64), dtype=np.float32)
        self.versions = np.zeros((rows, 64), dtype=np.int32)
        self.changes = 0
        self.numbers = np.arange(rows)

    def enter(self, row: int, sequence: Sequence, vocabulary: int) -> None:
        """Put ``sequence``, whose keys and values are all in the cache, in ``row``, ready for ``append``."""
        gconfig, stop_ids, length = sequence.request.gconfig, sequence.stop_ids, len(sequence.tokens)
        max_new_tokens, generated = sequence.length_limit - sequence.prompt_length, len(sequence.logprobs)
        top_k = gconfig.top_k if 0 < gconfig.top_k < vocabulary else 0
        extras = sequence.adjustment, sequence.stop_strings, sequence.on_token, sequence.request.top_logprobs
        self.settings[row] = (
            max_new_tokens,
            min(gconfig.min_new_tokens, max_new_tokens),
            sequence.seed & 0xFFFFFFFFFFFFFFFF,
            top_k,
            gconfig.effective_temperature,
            gconfig.top_p,
            gconfig.min_p,
            gconfig.is_greedy,
            not gconfig.is_greedy and gconfig.temperature == 1.0 and not top_k and gconfig.top_p >= 1.0 and not gconfig.min_p,
            extras != (None, None, None, None),
        )
        position = sequence.position_ids()[-1] if sequence.has_own_layout else length - 1
        self._counts[:, row] = (sequence.tokens[-1], length - 1, position, generated, generated, sequence.version)
        if (missing := len(stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.changes += 1

    def append(self, rows: Rows, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one sampled token to each of these rows. ``version`` is that of the engine's weights."""
        columns = self.generated[rows] - self.flushed[rows]
        if int(columns.max()) >= self.tokens.shape[1]:  # double the width; the contents of the new half are overwritten
            self.tokens, self.logprobs, self.versions = (np.tile(a, 2) for a in (self.tokens, self.logprobs, self.versions))
        places = self.numbers[rows] * self.tokens.shape[1] + columns
        self.tokens.reshape(-1)[places] = tokens
        self.logprobs.reshape(-1)[places] = logprobs
        bound = self.bound_version[rows]
        self.versions.reshape(-1)[places] = np.where(bound < 0, version, bound)
        self.last_token[rows] = tokens
        self._counts[1:4, rows] += 1  # cached, position, generated

    def tokens_from(self, row: int, sequence: Sequence, start: int) -> list[int]:
        """Return the tokens of the sequence in ``row``, those of its prompt included, from index ``start`` on."""
        count, begin = int(self.generated[row] - self.flushed[row]), max(0, start - len(sequence.tokens))
        return sequence.tokens[start:] + self.tokens[row, begin:count].tolist()

    def leave(self, row: int, last: int, sequence: Sequence) -> None:
        """Move the output of ``row`` to ``sequence``, free the row, and fill the gap with the sequence in row ``last``."""
        count = int(self.generated[row] - self.flushed[row])
        sequence.tokens += self.tokens[row, :count].tolist()
        sequence.logprobs += self.logprobs[row, :count].tolist()
        sequence.versions += self.versions[row, :count].tolist()
        self.changes += 1
        if row != last:
            self._counts[:, row] = self._counts[:, last]
            for array in (self.settings, self.stop_ids, self.tokens, self.logprobs, self.versions):
                array[row] = array[last]
        self._counts[:, last] = 0  # padding rows are computed with token 0 at position 0

    def clear(self) -> None:
        """Empty all rows."""
        self.changes += 1
        self._counts[:] = 0


#: Attends from queries ``[T, H, D]`` over a layer's cached keys and values ``[rows, G, length, D]``; returns ``[T, H * D]``.
PromptAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class ForwardBatch:
    """Input of one forward pass.

    Attributes:
        token_ids, positions, rows, columns: ``[T]``, token, rotary position, cache row and cache column.
        padded_tokens, padded_positions: ``token_ids`` and ``positions`` followed by padding, which is also computed.
        position_limit: one more than the largest position.
        first_row, row_count: the contiguous rows ``first_row .. first_row + row_count - 1``, in packed order.
        query_length: maximum number of tokens of a row (``Q``).
        kv_length: number of columns that attention reads (``K``).
        visible: ``[n, Q, K]`` bool, with queries padded on the left. It is None if plain causal attention over the queries alone
            gives the same result, that is, if every row begins at column 0 and all have the same length.
        is_query: ``[n, Q]`` bool, False for padding, which is on the left so that last tokens are in the last column. It is None
            if all rows have the same length.
        last_tokens: ``[n]``, index in ``T`` of each row's last token. It is None while decoding, when each row has one token.
        scores_all: return the logits of all tokens, ``[T, vocabulary]``, instead of only those of each row's last token.
        multi_modal: processor outputs of the sequence if the pass is a multi-modal prompt.
        branched: positions of a branched sequence's first tokens, by row (counted from ``first_row``); later tokens continue from
            the last of these positions.
        attention: replaces the usual attention of prompts, which uses ``visible``.
        adapters: adapter of each row, or empty if none has one.
        lengths: number of tokens of each row.
        terms: what the adapters add, once the forward has looked it up.
    """

    token_ids: Tensor
    positions: Tensor
    padded_tokens: Tensor
    padded_positions: Tensor
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
    attention: PromptAttention | None = None
    adapters: list[Adapter | None] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    terms: tuple[Term, ...] | None = None

    @property
    def computed_rows(self) -> int:
        """Number of rows passed to a model's own forward."""
        return self.row_count

    @property
    def read_length(self) -> int:
        """Number of columns of each row passed to a model's own forward."""
        return self.kv_length

    def pad(self, packed: Tensor) -> Tensor:
        """Pad ``[T, ...]`` to ``[n, Q, ...]``."""
        if self.is_query is None:
            return packed.view(self.row_count, self.query_length, *packed.shape[1:])
        padded = packed.new_zeros(self.row_count, self.query_length, *packed.shape[1:])
        padded[self.is_query] = packed
        return padded

    def rows_apart(self) -> Iterator[ForwardBatch]:
        """Split into batches of one row each, which have no padding and read only the row's own columns."""
        counts = [self.query_length] * self.row_count if self.is_query is None else self.is_query.sum(1).tolist()
        for row, end in enumerate(itertools.accumulate(counts)):
            tokens = slice(end - counts[row], end)
            length = int(self.columns[end - 1]) + 1
            yield ForwardBatch(
                token_ids=self.token_ids[tokens],
                positions=self.positions[tokens],
                padded_tokens=self.token_ids[tokens],
                padded_positions=self.positions[tokens],
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
                adapters=self.adapters[row : row + 1],
                lengths=[counts[row]],
            )

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the coordinates of queries, ``[n, Q]``, and of columns, ``[n or 1, K]``, in which windows and chunks are measured.

        A coordinate is the column or, in a branched sequence, the position, as if a branch and what it sees were a separate row.
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
        """Pack ``[n, Q, ...]`` to ``[T, ...]``, the inverse of ``pad``."""
        return padded.flatten(0, 1) if self.is_query is None else padded[self.is_query]


def adapters_of(sequences: list[Sequence]) -> list[Adapter | None]:
    """Return the adapter of each sequence, or an empty list if none has one."""
    adapters = [sequence.adapter for sequence in sequences]
    return adapters if any(adapters) else []


def prefill_batch(
    chunks: list[Chunk],
    first_row: int,
    device: torch.device,
    invariant_attention: Callable[[ForwardBatch, list[Chunk]], PromptAttention] | None = None,
) -> ForwardBatch:
    """Lay out the prompt tokens of several sequences, which are in consecutive rows starting at ``first_row``.

    Args:
        chunks: the prompt tokens, in row order.
        first_row: row of the first chunk.
        device: device of the tensors.
        invariant_attention: builds the batch's attention if a token's result must not depend on the other tokens; the batch is
            then padded to whole blocks.
    """
    lengths = np.array([chunk.length for chunk in chunks])
    query_length, kv_length = int(lengths.max()), max(chunk.end for chunk in chunks)
    columns = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    positions = columns
    if any(chunk.sequence.has_own_layout for chunk in chunks):
        positions = np.concatenate([chunk.sequence.position_ids()[chunk.start : chunk.end] for chunk in chunks])
    is_ragged = int(lengths.min()) != query_length
    is_query = np.arange(query_length) >= (query_length - lengths)[:, None]
    token_ids = torch.tensor([token for c in chunks for token in c.sequence.tokens[c.start : c.end]], device=device)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=(position_ids := torch.as_tensor(positions, device=device)),
        padded_tokens=token_ids,
        padded_positions=position_ids,
        rows=torch.as_tensor(np.repeat(np.arange(first_row, first_row + len(chunks)), lengths), device=device),
        columns=torch.as_tensor(columns, device=device),
        position_limit=int(positions.max()) + 1,
        first_row=first_row,
        row_count=len(chunks),
        query_length=query_length,
        kv_length=kv_length,
        is_query=torch.as_tensor(is_query, device=device) if is_ragged else None,
        last_tokens=torch.as_tensor(lengths.cumsum() - 1, device=device),
        scores_all=chunks[0].sequence.next_scored is not None,
        multi_modal=chunks[0].sequence.request.multi_modal,
        adapters=adapters_of([chunk.sequence for chunk in chunks]),
        lengths=lengths.tolist(),
    )
    if invariant_attention is not None:
        padding = (0, -len(columns) % INVARIANT_ROWS)
        batch.padded_tokens, batch.padded_positions = F.pad(token_ids, padding), F.pad(position_ids, padding)
        batch.attention = invariant_attention(batch, chunks)
        return batch
    branched = [(index, c) for index, c in enumerate(chunks) if c.sequence.request.branch_ids is not None]
    if branched or is_ragged or any(chunk.start for chunk in chunks):
        batch.visible = torch.arange(kv_length, device=device) <= batch.pad(batch.columns)[:, :, None]
        for index, chunk in branched:
            branches = torch.as_tensor(chunk.sequence.branch_ids()[: chunk.end], device=device)
            batch.visible[index, -chunk.length :, : chunk.end] &= sees(branches[chunk.start :], branches)
            batch.branched[index] = torch.as_tensor(chunk.sequence.position_ids()[: chunk.end], device=device)
    return batch


class DecodeBatch(ForwardBatch):
    """One new token for each running sequence. The batch is reused as long as the same sequences are in the same rows.

    Padding rows follow the running ones; they are computed, but neither cached nor sampled. Call ``begin_step`` before each forward
    pass.

    Args:
        table: state of the rows after the previous step.
        running: sequences by row.
        cache: the KV cache that holds the rows.
        device: device of the model.

    Attributes:
        padded_count: number of computed rows: ``row_count`` rounded up to a multiple of the cache's ``row_block`` if the cache has
            that many rows.
    """

    def __init__(self, table: RowTable, running: list[Sequence], cache: KVCache, device: torch.device) -> None:
        count = len(running)
        padded = in_blocks(count, cache.row_block)
        self.padded_count = padded if padded <= cache.rows else count
        self.row_count = count
        self._table, self._cache, self._device = table, cache, device
        self._hidden = [(row, s.hidden) for row, s in enumerate(running) if s.hidden is not None]
        self._bias: Tensor | None = None
        super().__init__(
            **self._read_table(),
            rows=torch.arange(count, device=device),
            position_limit=int(table.position[:count].max()),
            first_row=0,
            row_count=count,
            query_length=1,
            kv_length=int(table.cached[:count].max()),
            branched={
                row: torch.tensor(s.request.position_ids, device=device)
                for row, s in enumerate(running)
                if s.request.branch_ids is not None and s.request.position_ids is not None
            },
            adapters=adapters_of(running),
            lengths=[1] * count,
        )

    def _read_table(self) -> dict[str, Any]:
        """Return the next tokens as tensors of the table's arrays; on CPU the tensors share the arrays' memory and follow its changes."""
        table, count, padded = self._table, self.row_count, self.padded_count
        arrays = table.last_token[:padded], table.position[:padded], table.cached[:count]
        tokens, positions, columns = (torch.as_tensor(array, device=self._device) for array in arrays)
        return {
            "token_ids": tokens[:count],
            "positions": positions[:count],
            "padded_tokens": tokens,
            "padded_positions": positions,
            "columns": columns,
        }

    def begin_step(self) -> None:
        """Advance to the tokens that the previous step left in the table."""
        self.position_limit += 1
        self.kv_length += 1
        if self._device.type != "cpu":
            vars(self).update(self._read_table())
        if self._hidden:  # otherwise plain causal attention gives the same result
            columns = torch.arange(self.kv_length, device=self._device)
            self.visible = (columns <= self.columns[:, None])[:, None]
            for row, hidden in self._hidden:
                self.visible[row, 0, : len(hidden)] &= ~hidden

    @property
    def computed_rows(self) -> int:
        return self.padded_count if self._cache.invariant else self.row_count

    @property
    def read_length(self) -> int:
        return in_blocks(self.kv_length, KEY_BLOCK) if self._cache.invariant else self.kv_length

    def bias(self, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the attention bias ``[padded_count * heads, 1, K]``: 0 if a row sees a column, else -inf.

        ``K`` is ``kv_length`` rounded up to whole blocks, at most the length of the cache.
        """
        length, count = min(in_blocks(self.kv_length, KEY_BLOCK), self._cache.length), self.row_count
        if self._bias is not None and self._bias.shape[2] == length:
            self._bias.view(-1).index_fill_(0, (self._bias_starts + self.columns[:, None]).view(-1), 0.0)
            return self._bias
        is_seen = torch.arange(length, device=self._device) <= self.columns[:, None]
        for row, hidden in self._hidden:
            is_seen[row, : len(hidden)] &= ~hidden
        bias = torch.zeros(self.padded_count, heads, length, dtype=dtype, device=self._device)
        bias[:count].masked_fill_(~is_seen[:, None], float("-inf"))
        self._bias_starts = torch.arange(count * heads, device=self._device).view(count, heads) * length
        self._bias = bias.view(-1, 1, length)
        return self._bias
