"""The rows that decode: what each of them needs, in arrays, and what a step needs of all of them.

A step takes well under a millisecond with a small model, so what only changes when a sequence enters or leaves a row is made
then (``StepPlan``, ``DecodeBatch``) and not at every step. Rows are computed in blocks of ``KVCache.row_block`` and keys in
blocks of ``KEY_BLOCK``, so that there are few shapes: what a row computes depends less, or not at all, on what runs beside it.

Axes: ``B`` rows that are sampled, ``V`` vocabulary, ``K`` cache columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollwright.inference.backends.builtin.batch import ForwardBatch, Sequence, to_tensor
from rollwright.inference.backends.builtin.cache import INVARIANT_ROWS, KEY_BLOCK, KVCache, in_blocks

_NO_TOKEN = -1
_UNIFORMS = 16  # random numbers of a row that are made at once, where a plan lasts

#: What a row's sequence asks for; it does not change while the sequence is in the row.
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
        ("is_plain", np.bool_),  # any token may come, at temperature 1
        ("has_extras", np.bool_),  # an adjustment, stop strings, a listener or alternatives
    ],
    align=True,
)


class RowTable:
    """What each running row needs, in arrays: a step's bookkeeping is a few numpy calls, whatever the batch.

    Attributes:
        settings: ``[rows]`` of the fields above.
        last_token: ``[rows]``: the newest token, whose keys and values are not in the cache yet.
        cached: ``[rows]``: tokens before it.
        position: ``[rows]``: its rotary position.
        generated: ``[rows]``: output tokens; ``flushed``: those of them that the sequence object holds already.
        stop_ids: ``[rows, most stop ids]``, padded with -1.
        tokens, logprobs, versions: ``[rows, most tokens]``: what a row generated since ``flushed``.
        changes: grows whenever a sequence enters or leaves a row.
    """

    def __init__(self, rows: int) -> None:
        rows = in_blocks(rows, INVARIANT_ROWS)
        self.settings = np.zeros(rows, dtype=_SETTINGS)
        self._counts = np.zeros((5, rows), dtype=np.int64)
        self.last_token, self.cached, self.position, self.generated, self.flushed = self._counts
        self.stop_ids = np.full((rows, 2), _NO_TOKEN, dtype=np.int64)
        self.tokens = np.zeros((rows, 64), dtype=np.int64)
        self.logprobs = np.zeros((rows, 64), dtype=np.float32)
        self.versions = np.zeros((rows, 64), dtype=np.int32)
        self.changes = 0

    def enter(self, row: int, sequence: Sequence, vocabulary: int) -> None:
        """Put ``sequence`` in ``row``: its keys and values are in the cache up to its last token."""
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
        position = sequence.position_ids()[-1] + 1 if sequence.has_own_layout else length
        self._counts[:, row] = (sequence.tokens[-1], length, position, generated, generated)
        if (missing := len(stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
        self.changes += 1

    def append(self, first: int, last: int, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Add one sampled token to each of rows ``first .. last-1``."""
        columns = self.generated[first:last] - self.flushed[first:last]
        if int(columns.max()) >= self.tokens.shape[1]:  # as wide again; what the new half holds is overwritten
            self.tokens, self.logprobs, self.versions = (np.tile(a, 2) for a in (self.tokens, self.logprobs, self.versions))
        places = np.arange(first, last) * self.tokens.shape[1] + columns
        self.tokens.reshape(-1)[places] = tokens
        self.logprobs.reshape(-1)[places] = logprobs
        self.versions.reshape(-1)[places] = version
        self.last_token[first:last] = tokens
        self.generated[first:last] += 1

    def flush(self, row: int, sequence: Sequence) -> None:
        """Hand the row's new tokens, log-probabilities and versions to its sequence."""
        count = int(self.generated[row] - self.flushed[row])
        sequence.tokens += self.tokens[row, :count].tolist()
        sequence.logprobs += self.logprobs[row, :count].tolist()
        sequence.versions += self.versions[row, :count].tolist()
        self.flushed[row] = self.generated[row]

    def leave(self, row: int, last: int) -> None:
        """The sequence in ``row`` leaves, and that of row ``last`` fills the hole."""
        self.changes += 1
        if row != last:
            self._counts[:, row] = self._counts[:, last]
            for array in (self.settings, self.stop_ids, self.tokens, self.logprobs, self.versions):
                array[row] = array[last]
        self._counts[:, last] = 0  # padding rows are computed: at token 0, position 0

    def clear(self) -> None:
        """All sequences leave."""
        self.changes += 1
        self._counts[:] = 0


class StepPlan:
    """How rows ``first .. last-1`` are sampled, for as long as the same sequences are in them.

    Args:
        table: their settings.
        running: the sequences by row.
        first: the first row; the last is that of the last sequence.
        vocabulary: of the model.
        device: of the logits.

    Attributes:
        steps: tokens that each row was given by this plan.
        temperature_B1: None where all are 1.
        kinds: ``whole`` (all tokens may come), ``greedy`` or ``truncated``, each with the rows that are sampled so; None: all.
        is_plain_B: rows from which any token may come, and that have no adjustment; None: all.
        limits: ``top_k``, ``top_p`` and ``min_p`` of the truncated rows.
        begins: sequences whose first token is the plan's first.
        adjusted, watched, heard, detailed: rows with an adjustment, with stop strings, with a listener, and with alternatives.
    """

    def __init__(self, table: RowTable, running: list[Sequence], first: int, vocabulary: int, device: torch.device) -> None:
        last = len(running)
        self.first, self.last, self.changes, self.steps = first, last, table.changes, 0
        self._device, self._vocabulary = device, vocabulary
        settings, self._generated = table.settings[first:last], table.generated[first:last].copy()
        self._seeds = settings["seed"].copy()
        self.temperature_B1: Tensor | None = None
        self.kinds: dict[str, Tensor | None] = {"whole": None}
        self.limits: list[Tensor] = []
        self.is_plain_B: np.ndarray | None = None
        if not settings["is_plain"].all():
            self._read_kinds(settings)
        self.begins = [running[first + index] for index in (self._generated == 0).nonzero()[0].tolist()]
        sequences = [(index, running[first + index]) for index in settings["has_extras"].nonzero()[0].tolist()]
        self.adjusted = [(index, s.adjustment) for index, s in sequences if s.adjustment is not None]
        self.watched = [(index, s.stop_strings) for index, s in sequences if s.stop_strings is not None]
        self.heard = [(index, s) for index, s in sequences if s.on_token is not None]
        self.detailed = [(i, s, min(count, vocabulary)) for i, s in sequences if (count := s.request.top_logprobs)]
        if self.adjusted:
            self.is_plain_B = np.ones(last - first, dtype=bool) if self.is_plain_B is None else self.is_plain_B
            self.is_plain_B[[index for index, _ in self.adjusted]] = False
        self._stop_ids = table.stop_ids[first:last].copy()
        self._until_minimum = settings["min_new_tokens"] - self._generated
        self._until_limit = settings["max_new_tokens"] - self._generated
        self._first_minimum, self._last_minimum = int(self._until_minimum.min()), int(self._until_minimum.max())
        self._first_limit = int(self._until_limit.min())
        self._forbidden: Tensor | None = None
        self._forbidden_until = 0
        self._uniforms: list[Tensor] = []
        self._uniforms_end = 0  # the step that they do not reach

    def _read_kinds(self, settings: np.ndarray) -> None:
        temperatures, is_greedy = settings["temperature"], settings["greedy"]
        if not (temperatures == 1.0).all():
            self.temperature_B1 = to_tensor(temperatures, self._device)[:, None]
        is_truncated = ((settings["top_k"] > 0) | (settings["top_p"] < 1.0) | (settings["min_p"] > 0)) & ~is_greedy
        is_whole = ~(is_greedy | is_truncated)
        self.is_plain_B = None if is_whole.all() else is_whole
        kinds = {"whole": is_whole, "greedy": is_greedy, "truncated": is_truncated}
        self.kinds = {
            kind: None if chosen.all() else to_tensor(chosen.nonzero()[0], self._device)
            for kind, chosen in kinds.items()
            if chosen.any()
        }
        self.limits = [to_tensor(settings[name][is_truncated], self._device) for name in ("top_k", "top_p", "min_p")]

    def uniforms(self) -> Tensor:
        """The random numbers of this step, ``[B]``; see ``counter_uniforms``."""
        if self.steps >= self._uniforms_end:
            count = _UNIFORMS if self.steps else 1  # a plan often ends with its first step
            counters = self._generated + (self.steps + np.arange(count))[:, None]
            self._uniforms = list(to_tensor(counter_uniforms(self._seeds, counters), self._device))
            self._uniforms_end = self.steps + count
        return self._uniforms[self.steps - self._uniforms_end]

    def forbidden(self) -> Tensor | None:
        """Places in the flat ``[B * V]`` of the stop ids of rows below ``min_new_tokens``; None where there are none."""
        if self.steps >= self._last_minimum:
            return None
        if self.steps >= self._forbidden_until:
            is_below = self._until_minimum > self.steps
            self._forbidden_until = int(self._until_minimum[is_below].min())
            is_token = (self._stop_ids >= 0) & (self._stop_ids < self._vocabulary) & is_below[:, None]
            places = self._stop_ids + np.arange(self.last - self.first)[:, None] * self._vocabulary
            self._forbidden = to_tensor(places[is_token], self._device) if is_token.any() else None
        return self._forbidden

    def stopped(self, tokens: np.ndarray) -> np.ndarray | None:
        """Rows whose newest token (of ``steps``, with it) is one of their stop ids and may be, ``[B]`` bool; None: no row."""
        if self.steps < self._first_minimum:
            return None
        hits = self._stop_ids == tokens[:, None]
        return hits.any(axis=1) & self.may_stop() if hits.any() else None

    def may_stop(self) -> np.ndarray:
        """Rows that have their ``min_new_tokens``, ``[B]`` bool."""
        return self._until_minimum <= self.steps

    def exhausted(self) -> np.ndarray | None:
        """Rows that have all the tokens they may have, ``[B]`` bool; None: no row."""
        return self._until_limit <= self.steps if self.steps >= self._first_limit else None


class DecodeBatch(ForwardBatch):
    """One new token for each running sequence, for as long as the same sequences are in the same slots.

    Padding rows follow the running ones: they are computed, and neither kept nor sampled.

    Args:
        table: their tokens, which it advances.
        running: the sequences by row.
        cache: their slots.
        device: of the model.

    Attributes:
        padded_count: rows that are computed; a multiple of the cache's ``row_block`` where it has as many.
        padded_tokens, padded_positions: ``[padded_count]``.
    """

    def __init__(self, table: RowTable, running: list[Sequence], cache: KVCache, device: torch.device) -> None:
        count = len(running)
        padded = in_blocks(count, cache.row_block)
        self.padded_count = padded if padded <= cache.rows else count
        self._table, self._cache, self._device = table, cache, device
        self._changes, self._layouts = table.changes, cache.layouts
        self._hidden = [(row, s.hidden) for row, s in enumerate(running) if s.hidden is not None]
        self._bias: Tensor | None = None
        tokens, positions = self._read_table()
        super().__init__(
            token_ids=tokens[:count],
            positions=positions[:count],
            rows=torch.arange(count, device=device),
            columns=self._columns[:count],
            position_limit=int(table.position[:count].max()) + 1,
            first_row=0,
            row_count=count,
            query_length=1,
            kv_length=int(table.cached[:count].max()) + 1,
            branched={
                row: torch.tensor(s.request.position_ids, device=device)
                for row, s in enumerate(running)
                if s.request.branch_ids is not None and s.request.position_ids is not None
            },
        )
        self.padded_tokens, self.padded_positions = tokens, positions
        self._show_hidden()

    @property
    def is_current(self) -> bool:
        """True while the same sequences are in the same slots."""
        return self._changes == self._table.changes and self._layouts == self._cache.layouts

    def _read_table(self) -> tuple[Tensor, Tensor]:
        """Padded tokens and positions, as tensors of the table's arrays: on CPU they share its memory, and see every step."""
        table, count = self._table, self.padded_count
        arrays = table.last_token[:count], table.position[:count], table.cached[:count]
        tokens, positions, self._columns = (to_tensor(array, self._device) for array in arrays)
        return tokens, positions

    def _show_hidden(self) -> None:
        """The mask of rows with columns that new tokens must not see; without such rows plain causal attention is the same."""
        if self._hidden:
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

    def advance(self) -> None:
        """The newest tokens are in the cache, and the next ones follow."""
        count = self.row_count
        self._table.cached[:count] += 1
        self._table.position[:count] += 1
        self.position_limit += 1
        self.kv_length += 1

    def begin_step(self) -> None:
        """Read what the step before this one left in the table."""
        if self._device.type != "cpu":
            self.padded_tokens, self.padded_positions = self._read_table()
            count = self.row_count
            self.token_ids, self.positions = self.padded_tokens[:count], self.padded_positions[:count]
            self.columns = self._columns[:count]
        self._show_hidden()

    def bias(self, heads: int, dtype: torch.dtype) -> Tensor:
        """What attention adds to its scores, ``[padded_count * heads, 1, K]``: 0 where a row sees a column, else -inf.

        ``K`` is ``kv_length`` in whole blocks, where the cache is as long.
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


def counter_uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, counter), float32, of 24 bits.

    Args:
        seeds: ``[B]`` uint64.
        counters: ``[..., B]`` int64, the index of the token within its request.
    """
    state = _mix(seeds * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D))
    state = _mix(state + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
