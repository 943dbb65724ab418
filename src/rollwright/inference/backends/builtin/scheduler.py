"""Who runs: admission of waiting sequences, chunks of prompts to prefill, rows, and preemption when the cache is full.

Rows ``0 .. len(running) - 1`` decode. At most one sequence is in the middle of its prompt, in the row after them. First
come, first served; a preempted sequence goes back to the head of the queue with the tokens it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollwright.inference.backends.builtin.kv_cache import KVCache
from rollwright.inference.backends.builtin.prefix_cache import KeptPrefix, PrefixCache, PrefixIndex
from rollwright.inference.backends.builtin.row_table import RowTable
from rollwright.inference.backends.builtin.sequence import Sequence

_HEADROOM = 64  # columns beyond its tokens that a sequence must find free when not all it may need fits


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
class Prefill:
    """What to prefill in one step.

    Attributes:
        groups: chunks that run together, of similar length, in row order.
        followers: ``(sequence, leader)`` with the same prompt: the follower takes the leader's keys, values and logits.
    """

    groups: list[list[Chunk]] = field(default_factory=list)
    followers: list[tuple[Sequence, Sequence]] = field(default_factory=list)


class Scheduler:
    """Queue and rows.

    Args:
        cache: the slots.
        table: per-row arrays, moved along with the rows.
        kept: keys and values of finished sequences.
        prefill_tokens: most prompt tokens computed in one step.
    """

    def __init__(self, cache: KVCache, table: RowTable, kept: PrefixCache, prefill_tokens: int, vocabulary: int) -> None:
        self._cache = cache
        self._table = table
        self._kept = kept
        self._prefill_tokens = prefill_tokens
        self._vocabulary = vocabulary
        self._active_prefixes = PrefixIndex()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.partial: Sequence | None = None
        self._admitted: list[Sequence] = []  # taken from the queue in this step, not in a row yet
        self.holding = False  # True: nothing new is admitted
        self.preemptions = 0
        self.reused_tokens = 0

    def active(self) -> list[Sequence]:
        """All sequences that occupy rows, in row order."""
        return self.running + ([self.partial] if self.partial else [])

    def _used(self) -> list[int]:
        used = self._table.cached[: len(self.running)].tolist()
        return used + ([self.partial.cached] if self.partial else [])

    # ------------------------------------------------------------------ admission

    def schedule_prefill(self) -> Prefill:
        """Admit what fits and say which prompt tokens to compute now."""
        prefill, budget = Prefill(), self._prefill_tokens
        chunks: list[Chunk] = []
        if self.partial is not None:
            chunk = self._chunk(self.partial, budget)
            budget -= chunk.length
            chunks.append(chunk)
            if not chunk.completes:
                prefill.groups = [chunks]
                return prefill
        if self.waiting and not self.holding:
            self._reserve_for_all()
        leaders: dict[tuple, Sequence] = {}
        while self.waiting and not self.holding and budget > 0:
            sequence = self.waiting[0]
            key = self._prompt_key(sequence)
            leader = leaders.get(key) if key else None
            row = len(self.running) + len(chunks) + len(prefill.followers)
            if not self._admit(sequence, row):
                break
            self.waiting.popleft()
            self._admitted.append(sequence)
            if leader is not None:
                prefill.followers.append((sequence, leader))
                continue
            self._reuse_prefix(sequence)
            chunk = self._chunk(sequence, budget)
            budget -= chunk.length
            chunks.append(chunk)
            if chunk.completes and key:
                leaders[key] = sequence
        self._place(chunks, prefill)
        return prefill

    def _reserve_for_all(self) -> None:
        """Lay the cache out for all that waiting sequences may need, where the memory allows it."""
        active = self.active()
        free = self._cache.max_rows - len(active)
        longest = max((s.length_limit for s in [*active, *list(self.waiting)[:free]]), default=0)
        if longest:
            self._cache.make_room(min(self._cache.max_rows, len(active) + len(self.waiting)), longest, self._used())

    def _admit(self, sequence: Sequence, row: int) -> bool:
        """Make room for a sequence in ``row``; sequences admitted in this step hold nothing in the cache yet."""
        lengths = [min(s.length_limit, len(s.tokens) + _HEADROOM) for s in (*self._admitted, sequence)]
        return self._cache.make_room(row + 1, max(lengths), self._used())

    @staticmethod
    def _prompt_key(sequence: Sequence) -> tuple | None:
        request = sequence.request
        if request.multi_modal:
            return None
        layout = tuple(request.position_ids or ()), tuple(request.branch_ids or ())
        return sequence.prompt_length, tuple(sequence.tokens), *layout

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Note where a prefix of the sequence was computed before; it is copied once the sequence has its row."""
        sequence.cached, sequence.prefix_source = 0, None
        limit = min(sequence.shareable_length, len(sequence.tokens) - 1)  # the last token must be computed: it gives logits
        if limit <= 0:
            return
        for index in (self._active_prefixes, self._kept):
            source, length = index.find(sequence.tokens)
            if min(length, limit) > sequence.cached:
                sequence.cached, sequence.prefix_source = min(length, limit), source

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        end = len(sequence.tokens)
        if not sequence.request.multi_modal:
            end = min(end, sequence.cached + budget)
        return Chunk(sequence, sequence.cached, end)

    def _place(self, chunks: list[Chunk], prefill: Prefill) -> None:
        """Give rows: completing chunks by length, then followers, then the chunk that does not complete."""
        if not chunks:
            return
        old_partial, self.partial = self.partial, None
        unfinished = [c for c in chunks if not c.completes]
        first = [c for c in chunks if c.sequence is old_partial and c.completes]
        others = sorted((c for c in chunks if c.completes and c.sequence is not old_partial), key=lambda c: c.length)
        row = len(self.running)
        for chunk in first + others:
            chunk.sequence.row = row
            row += 1
        for sequence, _ in prefill.followers:
            sequence.row = row
            row += 1
        for chunk in unfinished:
            chunk.sequence.row = row
            self.partial = chunk.sequence
            if chunk.sequence in self._admitted:
                self._admitted.remove(chunk.sequence)
        for chunk in others + unfinished:
            self._copy_prefix(chunk.sequence)
        prefill.groups = [*self._grouped(first + others), *([unfinished] if unfinished else [])]

    def _copy_prefix(self, sequence: Sequence) -> None:
        source, sequence.prefix_source = sequence.prefix_source, None
        if source is None:
            return
        self.reused_tokens += sequence.cached
        if isinstance(source, Sequence):
            self._cache.copy(source.row, sequence.row, sequence.cached)
        elif isinstance(source, KeptPrefix):
            self._cache.insert(sequence.row, source.tensors, sequence.cached)

    @staticmethod
    def _grouped(chunks: list[Chunk]) -> list[list[Chunk]]:
        """Cut row-ordered chunks where padding them to one length would waste more than half."""
        groups: list[list[Chunk]] = []
        for chunk in chunks:
            if groups and not chunk.sequence.request.multi_modal and not groups[-1][0].sequence.request.multi_modal:
                lengths = [c.length for c in groups[-1]] + [chunk.length]
                if max(lengths) * len(lengths) <= 1.5 * sum(lengths) + 64:
                    groups[-1].append(chunk)
                    continue
            groups.append([chunk])
        return groups

    # ------------------------------------------------------------------ rows

    def prefilled(self, chunks: list[Chunk]) -> None:
        """The chunks' keys and values are in the cache; those that are complete begin to decode."""
        for chunk in chunks:
            chunk.sequence.cached = chunk.end
            if chunk.completes:
                self._begin(chunk.sequence)

    def follow(self, sequence: Sequence, leader: Sequence) -> None:
        """Give a follower its leader's keys and values; it begins to decode."""
        self._cache.copy(leader.row, sequence.row, len(sequence.tokens))
        self.reused_tokens += len(sequence.tokens)
        sequence.cached = len(sequence.tokens)
        self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        assert sequence.row == len(self.running)
        self.running.append(sequence)
        if sequence in self._admitted:
            self._admitted.remove(sequence)
        self._table.enter(sequence.row, sequence, self._vocabulary)
        if shareable := sequence.shareable_length:
            self._active_prefixes.add(sequence, sequence.tokens[:shareable])

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """Take a decoding sequence out of its row; the last row fills the hole.

        Args:
            keep: its keys and values are kept for a later request.
        """
        row, last = sequence.row, len(self.running) - 1
        self._table.flush(row, sequence)
        self._active_prefixes.discard(sequence)
        cached = int(self._table.cached[row])
        plain = not sequence.has_own_layout and not sequence.request.multi_modal
        if keep and plain and sequence.is_current and self._kept.capacity_bytes:
            self._kept.keep(sequence.tokens[:cached], self._cache.extract(row, cached))
        if row != last:
            mover = self.running[last]
            self._cache.copy(last, row, int(self._table.cached[last]))
            self._table.move(last, row)
            self.running[row], mover.row = mover, row
        self.running.pop()
        sequence.row, sequence.cached, sequence.is_current = -1, 0, True
        if self.partial is not None:
            self._cache.copy(self.partial.row, last, self.partial.cached)
            self.partial.row = last

    def room_for_decode(self) -> None:
        """See that every running row has a column for its next token, preempting the youngest where memory ends."""
        while self.running:
            needed = int(self._table.cached[: len(self.running)].max()) + 1
            rows, used = len(self.running) + (self.partial is not None), self._used()
            grown = max(needed, min(needed + needed // 4, max(s.length_limit for s in self.running)))
            if (
                self._cache.make_room(rows, needed, used)
                if needed <= self._cache.length
                else (self._cache.make_room(rows, grown, used) or self._cache.make_room(rows, needed, used))
            ):
                return
            self.preempt(self.active()[-1])

    def preempt(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue; its keys and values are computed anew later."""
        if sequence is self.partial:
            self.partial = None
            sequence.row, sequence.cached, sequence.is_current = -1, 0, True
        else:
            self.leave(sequence, keep=False)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def preempt_all(self) -> None:
        """Every sequence goes back to the queue, in order: the weights changed."""
        for sequence in reversed(self.active()):
            self.preempt(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it is; one that has ended is nowhere."""
        if sequence is self.partial:
            self.partial = None
        elif sequence.row >= 0:
            self.leave(sequence, keep=False)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def remove_all(self) -> list[Sequence]:
        """Take out everything, in order; the cache holds nothing of worth afterwards."""
        sequences = [*self.active(), *self._admitted, *self.waiting]
        self.running.clear()
        self._admitted.clear()
        self.waiting.clear()
        self.partial = None
        self._active_prefixes = PrefixIndex()
        self._kept.clear()
        return sequences

    def forget_kept(self) -> None:
        """Give up the keys and values of finished sequences."""
        self._kept.clear()

    def forget_prefixes(self) -> None:
        """No later sequence may use keys and values computed so far: the weights changed."""
        self._kept.clear()
        self._active_prefixes = PrefixIndex()
        for sequence in self.active():
            sequence.is_current = False
