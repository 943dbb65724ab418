"""Who runs: the queue, admission, chunks of prompts to compute, rows, and preemption when the cache is full.

Rows ``0 .. len(running) - 1`` decode. At most one sequence is in the middle of its prompt, in the row after them. First
come, first served; a preempted sequence goes back to the head of the queue with the tokens it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollwright.inference.backends.builtin.batch import Chunk, Sequence
from rollwright.inference.backends.builtin.cache import KeptPrefix, KVCache, PrefixCache, PrefixIndex
from rollwright.inference.backends.builtin.rows import RowTable

#: Most prompt tokens that are scored in one pass: their logits are in memory together.
_SCORED_TOKENS = 512
_HEADROOM = 64  # columns beyond its tokens that a sequence must find free when not all it may need fits


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
        vocabulary: of the model.
        prompts_alone: each prompt is computed by itself, from its beginning, and cut in one way.

    Attributes:
        holding: True: nothing new is admitted.
    """

    def __init__(
        self,
        cache: KVCache,
        table: RowTable,
        kept: PrefixCache,
        prefill_tokens: int,
        vocabulary: int,
        prompts_alone: bool = False,
    ) -> None:
        self._prompts_alone = prompts_alone
        self.kept = kept
        self._cache = cache
        self._table = table
        self._prefill_tokens = prefill_tokens
        self._vocabulary = vocabulary
        self._active_prefixes = PrefixIndex()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.partial: Sequence | None = None
        self._admitted: list[Sequence] = []  # taken from the queue in this step; they decode, or are partial, after it
        self.holding = False
        self.preemptions = 0
        self.reused_tokens = 0

    def active(self) -> list[Sequence]:
        """All sequences that are in rows, in row order."""
        return self.running + ([self.partial] if self.partial else [])

    @property
    def unfinished(self) -> int:
        """How many sequences run or wait."""
        return len(self.waiting) + len(self.running) + (self.partial is not None)

    def _used(self) -> list[int]:
        """Tokens in the cache of each row in use."""
        return self._table.cached[: len(self.running)].tolist() + ([self.partial.cached] if self.partial else [])

    # ------------------------------------------------------------------ admission

    def schedule_prefill(self) -> Prefill:
        """Admit what fits and return which prompt tokens to compute now."""
        if self.partial is None and (self.holding or not self.waiting):
            return Prefill()
        chunks: list[Chunk] = []
        followers: list[tuple[Sequence, Sequence]] = []
        budget = self._prefill_tokens
        if self.partial is not None:
            chunks.append(self._chunk(self.partial, budget))
            budget -= chunks[0].length
            if not chunks[0].completes:
                return Prefill([chunks])
        if self.waiting and not self.holding:  # lay the cache out for all that these may need, where the memory allows it
            active = self.active()
            queued = list(self.waiting)[: self._cache.max_rows - len(active)]
            longest = max((sequence.length_limit for sequence in active + queued), default=0)
            if longest:
                self._cache.make_room(min(self._cache.max_rows, len(active) + len(self.waiting)), longest, self._used())
        leaders: dict[tuple, Sequence] = {}
        needed, used = 0, self._used()  # sequences admitted in this step hold nothing in the cache yet
        while self.waiting and not self.holding and budget > 0:
            sequence = self.waiting[0]
            least = sequence.length_limit if self._cache.invariant else len(sequence.tokens) + _HEADROOM
            needed = max(needed, min(sequence.length_limit, least))
            if not self._cache.make_room(len(self.running) + len(chunks) + len(followers) + 1, needed, used):
                break
            self._admitted.append(self.waiting.popleft())
            request = sequence.request
            layout = tuple(request.position_ids or ()), tuple(request.branch_ids or ())
            prompt = (sequence.prompt_length, tuple(sequence.tokens), *layout)
            is_plain = not request.multi_modal and sequence.next_scored is None
            if is_plain and prompt in leaders:
                followers.append((sequence, leaders[prompt]))
                continue
            self._find_prefix(sequence)
            chunks.append(self._chunk(sequence, budget))
            budget = budget - chunks[-1].length if chunks[-1].completes else 0
            if chunks[-1].completes and is_plain:
                leaders[prompt] = sequence
        return Prefill(self._place(chunks, followers), followers)

    def _find_prefix(self, sequence: Sequence) -> None:
        """Note where a prefix of the sequence was computed before; it is copied once the sequence has its row."""
        sequence.cached, sequence.prefix_source = 0, None
        # the last token must be computed, and the one before each that is scored: they give logits
        limit = min(sequence.shareable_length, (sequence.next_scored or len(sequence.tokens)) - 1)
        if limit <= 0 or self._prompts_alone:
            return
        for index in (self._active_prefixes, self.kept):
            source, length = index.find(sequence.tokens)
            if min(length, limit) > sequence.cached:
                sequence.cached, sequence.prefix_source = min(length, limit), source

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        end = len(sequence.tokens)
        budget = self._prefill_tokens if self._prompts_alone else budget
        budget = budget if sequence.next_scored is None else min(budget, _SCORED_TOKENS)
        return Chunk(sequence, sequence.cached, end if sequence.request.multi_modal else min(end, sequence.cached + budget))

    def _place(self, chunks: list[Chunk], followers: list[tuple[Sequence, Sequence]]) -> list[list[Chunk]]:
        """Assign rows: completing chunks by length, then followers, then the chunk that does not complete.

        Returns:
            The chunks in row order, in groups: they are cut where padding to one length would waste more than half. (Attention in
            whole blocks pads to no common length.)
        """
        resumed = [chunk for chunk in chunks if chunk.completes and chunk.sequence is self.partial]
        begun = sorted((c for c in chunks if c.completes and c.sequence is not self.partial), key=lambda c: c.length)
        unfinished = [chunk for chunk in chunks if not chunk.completes]
        in_order = [c.sequence for c in resumed + begun] + [s for s, _ in followers] + [c.sequence for c in unfinished]
        for row, sequence in enumerate(in_order, len(self.running)):
            sequence.row = row
        self._admitted += [chunk.sequence for chunk in resumed]
        self.partial = unfinished[0].sequence if unfinished else None
        for chunk in begun + unfinished:
            sequence, source = chunk.sequence, chunk.sequence.prefix_source
            sequence.prefix_source = None
            if isinstance(source, Sequence):
                self._cache.copy(source.row, sequence.row, sequence.cached)
            elif isinstance(source, KeptPrefix):
                self._cache.insert(sequence.row, source.tensors, sequence.cached)
            self.reused_tokens += sequence.cached
        groups: list[list[Chunk]] = []
        for chunk in resumed + begun:
            before = groups[-1][0].sequence if groups else chunk.sequence
            scores = chunk.sequence.next_scored is not None
            are_alike = scores == (before.next_scored is not None)
            if (
                groups
                and are_alike
                and not self._prompts_alone
                and not chunk.sequence.request.multi_modal
                and not before.request.multi_modal
            ):
                lengths = [c.length for c in groups[-1]] + [chunk.length]
                has_room = not scores or sum(lengths) <= _SCORED_TOKENS
                if has_room and (self._cache.invariant or max(lengths) * len(lengths) <= 1.5 * sum(lengths) + 64):
                    groups[-1].append(chunk)
                    continue
            groups.append([chunk])
        return groups + ([unfinished] if unfinished else [])

    # ------------------------------------------------------------------ rows

    def prefilled(self, prefill: Prefill) -> None:
        """The keys and values of all chunks are in the cache; sequences whose prompt is complete begin to decode."""
        chunks = [chunk for group in prefill.groups for chunk in group]
        for chunk in chunks:
            chunk.sequence.cached = chunk.end
        for sequence, leader in prefill.followers:
            self._cache.copy(leader.row, sequence.row, len(sequence.tokens))
            sequence.cached = len(sequence.tokens)
            self.reused_tokens += sequence.cached
        for sequence in [chunk.sequence for chunk in chunks if chunk.completes] + [s for s, _ in prefill.followers]:
            assert sequence.row == len(self.running)
            sequence.prefilled = len(sequence.tokens)
            self.running.append(sequence)
            self._table.enter(sequence.row, sequence, self._vocabulary)
            if shareable := sequence.shareable_length:
                self._active_prefixes.add(sequence, sequence.tokens[:shareable])
        self._admitted.clear()

    def schedule_decode(self) -> list[Sequence]:
        """The sequences that get a token, each with a free column for it; the youngest are preempted where memory ends."""
        while self.running:
            grown = needed = int(self._table.cached[: len(self.running)].max()) + 1
            if needed > self._cache.length:
                grown = max(needed, min(needed + needed // 4, max(s.length_limit for s in self.running)))
            rows = len(self.running) + (self.partial is not None)
            if rows <= self._cache.rows and needed <= self._cache.length:
                break
            used = self._used()
            if self._cache.make_room(rows, grown, used) or self._cache.make_room(rows, needed, used):
                break
            self.preempt(self.active()[-1])
        return self.running

    def preempt(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue; its keys and values are computed again later."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Take a sequence out wherever it is; one that has ended is nowhere. The last row fills the hole of a row that decodes.

        Args:
            keep: its keys and values are kept for a later request.
        """
        if sequence is self.partial:
            self.partial = None
        elif sequence.row >= 0:
            row, last = sequence.row, len(self.running) - 1
            cached = int(self._table.cached[row])
            self._table.flush(row, sequence)
            self._active_prefixes.discard(sequence)
            is_plain = not sequence.has_own_layout and not sequence.request.multi_modal
            if keep and is_plain and sequence.is_current and self.kept.capacity_bytes:
                # decoding rounds otherwise than the pass of a prompt: whether a prefix is found must not be seen in what follows
                kept = sequence.prefilled if self._cache.invariant else cached
                self.kept.keep(sequence.tokens[:kept], self._cache.extract(row, kept))
            if row != last:
                mover = self.running[last]
                self._cache.copy(last, row, int(self._table.cached[last]))
                self.running[row], mover.row = mover, row
            self._table.leave(row, last)
            self.running.pop()
            if self.partial is not None:
                self._cache.copy(self.partial.row, last, self.partial.cached)
                self.partial.row = last
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.row, sequence.cached, sequence.is_current = -1, 0, True

    def remove_all(self) -> list[Sequence]:
        """Take out everything, in order; nothing in the cache is valid afterwards."""
        sequences = list(dict.fromkeys([*self.active(), *self._admitted, *self.waiting]))
        for sequence in sequences:
            sequence.row = -1
        self.partial = None
        for holder in (self.running, self._admitted, self.waiting, self._active_prefixes, self.kept, self._table):
            holder.clear()
        return sequences

    def weights_changed(self, recompute: bool) -> None:
        """No later sequence may use keys and values computed so far.

        Args:
            recompute: every sequence goes back to the queue, in order, to compute its own again.
        """
        if recompute:
            for sequence in reversed(self.active()):
                self.preempt(sequence)
        self.kept.clear()
        self._active_prefixes.clear()
        for sequence in self.active():
            sequence.is_current = False
