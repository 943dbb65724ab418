"""What each running row needs at every step, in arrays: the step's bookkeeping is a few numpy calls, whatever the batch."""

from __future__ import annotations

import numpy as np

from rollwright.inference.backends.builtin.sequence import Sequence

_NO_TOKEN = -1


class RowTable:
    """Arrays over rows; rows ``0 .. n-1`` run.

    ``last_token`` is the newest token, whose keys and values are not in the cache yet; ``cached`` counts those before it.
    """

    def __init__(self, rows: int) -> None:
        self.last_token = np.zeros(rows, dtype=np.int64)
        self.cached = np.zeros(rows, dtype=np.int64)
        self.position = np.zeros(rows, dtype=np.int64)
        self.generated = np.zeros(rows, dtype=np.int64)
        self.flushed = np.zeros(rows, dtype=np.int64)  # output tokens that the sequence object holds already
        self.max_new_tokens = np.zeros(rows, dtype=np.int64)
        self.min_new_tokens = np.zeros(rows, dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.temperature = np.ones(rows, dtype=np.float32)
        self.greedy = np.zeros(rows, dtype=bool)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int64)
        self.frequency_penalty = np.zeros(rows, dtype=np.float32)
        self.has_stop_strings = np.zeros(rows, dtype=bool)
        self.has_hidden = np.zeros(rows, dtype=bool)
        self.version = np.full(rows, -1, dtype=np.int64)  # that sampled the newest token
        self.has_listener = np.zeros(rows, dtype=bool)
        self.stop_ids = np.full((rows, 2), _NO_TOKEN, dtype=np.int64)
        self.tokens = np.zeros((rows, 64), dtype=np.int64)
        self.logprobs = np.zeros((rows, 64), dtype=np.float32)

    def _arrays(self) -> list[np.ndarray]:
        return list(self.__dict__.values())

    def _widen(self, name: str, columns: int, fill: int = 0) -> None:
        old = getattr(self, name)
        if columns > old.shape[1]:
            new = np.full((old.shape[0], max(columns, 2 * old.shape[1])), fill, dtype=old.dtype)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def enter(self, row: int, sequence: Sequence, vocabulary: int) -> None:
        """Put ``sequence`` in ``row``: its keys and values are about to be computed up to its last token."""
        gconfig, stop_ids = sequence.gconfig, sequence.stop_ids
        self._widen("stop_ids", len(stop_ids), _NO_TOKEN)
        self.generated[row] = self.flushed[row] = sequence.generated
        self.cached[row] = len(sequence.tokens)
        self.position[row] = sequence.position_ids()[-1] + 1 if sequence.has_own_layout else len(sequence.tokens)
        self.max_new_tokens[row] = sequence.max_new_tokens
        self.min_new_tokens[row] = min(gconfig.min_new_tokens, sequence.max_new_tokens)
        self.seed[row] = sequence.seed & 0xFFFFFFFFFFFFFFFF
        self.temperature[row] = gconfig.effective_temperature
        self.greedy[row] = gconfig.is_greedy
        self.top_p[row] = gconfig.top_p
        self.top_k[row] = gconfig.top_k if 0 < gconfig.top_k < vocabulary else 0
        self.frequency_penalty[row] = gconfig.frequency_penalty
        self.has_stop_strings[row] = sequence.stop_strings is not None
        self.has_hidden[row] = sequence.hidden is not None
        self.version[row] = -1
        self.has_listener[row] = sequence.on_token is not None
        self.stop_ids[row] = _NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids

    def append(self, first: int, last: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add one sampled token to each of rows ``first .. last-1``."""
        columns = self.generated[first:last] - self.flushed[first:last]
        widest = int(columns.max()) + 1
        self._widen("tokens", widest)
        self._widen("logprobs", widest)
        rows = np.arange(first, last)
        self.tokens[rows, columns] = tokens
        self.logprobs[rows, columns] = logprobs
        self.last_token[first:last] = tokens
        self.generated[first:last] += 1

    def advance(self, rows: int) -> None:
        """The newest tokens of the first ``rows`` rows are now in the cache."""
        self.cached[:rows] += 1
        self.position[:rows] += 1

    def stopped(self, first: int, last: int) -> np.ndarray:
        """True for rows whose newest token is one of their stop ids."""
        hits = (self.stop_ids[first:last] == self.last_token[first:last, None]).any(axis=1)
        return hits & (self.generated[first:last] >= self.min_new_tokens[first:last])

    def exhausted(self, first: int, last: int) -> np.ndarray:
        """True for rows that have all the tokens they may have."""
        return self.generated[first:last] >= self.max_new_tokens[first:last]

    def flush(self, row: int, sequence: Sequence) -> None:
        """Move the row's new tokens and log-probabilities into ``sequence``."""
        count = int(self.generated[row] - self.flushed[row])
        sequence.tokens += self.tokens[row, :count].tolist()
        sequence.logprobs += self.logprobs[row, :count].tolist()
        self.flushed[row] = self.generated[row]

    def move(self, source: int, destination: int) -> None:
        """Copy everything of row ``source`` to row ``destination``."""
        for array in self._arrays():
            array[destination] = array[source]
