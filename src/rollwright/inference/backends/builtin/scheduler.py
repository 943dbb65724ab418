"""The engine's step (schedule, run, sample, postprocess) and its scheduler: queue, admission, prompt chunks, rows and preemption.

Rows ``0 .. len(running) - 1`` decode. At most one sequence is in the middle of its prompt; it is in the row after the decoding ones.
Requests are served first come, first served; a preempted sequence returns to the head of the queue with the tokens that it has.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.adapters import Adapter
from rollwright.inference.backends.builtin.batch import Chunk, DecodeBatch, Rows, RowTable, Sequence, prefill_batch
from rollwright.inference.backends.builtin.kv_cache import KeptPrefix, PrefixCache, PrefixIndex
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.prompt_lookup import Draft, PromptLookup
from rollwright.inference.backends.builtin.sampling import StepPlan, most_likely, sample, score_prompts
from rollwright.inference.backends.builtin.verification import prompt_lookup, verification_batch
from rollwright.inference.request import ModelResponse

Finished = tuple[Sequence, ModelResponse | BaseException]
#: By row: the stop string or token that the output ends with, if any, and the error that ends it, if any.
Endings = dict[int, tuple[str | int | None, EngineError | None]]

#: Maximum number of prompt tokens scored in one pass, and maximum size of their logits in float32, which are in memory together. The
#: second is what limits models with a large vocabulary: 111 tokens with one of 150,000.
_SCORED_TOKENS, _SCORED_BYTES = 512, 64 << 20
_FEWEST_SCORED = 16  # with a vocabulary of any size, because a pass reads all weights
_HEADROOM = 64  # free columns that a sequence needs beyond its tokens if its whole length does not fit


class Stepper:
    """Runs the steps: computes prompts and next tokens of the scheduled sequences. Only one thread at a time may use it.

    Args:
        runner: the model and its cache.
        max_rows: maximum number of sequences at once.
        kept_bytes: maximum memory for the keys and values of finished sequences.
        prefill_tokens: maximum number of prompt tokens in one step.
        version: version of the weights.
        drafted_tokens: maximum number of tokens drafted by prompt lookup for each row in a step; 0 drafts none.

    Raises:
        ConfigError: drafts would change bits that the runner keeps.
    """

    def __init__(
        self, runner: ModelRunner, max_rows: int, kept_bytes: int, prefill_tokens: int, version: int, drafted_tokens: int = 0
    ) -> None:
        self._runner = runner
        self._table = RowTable(max_rows)
        self.scheduler = Scheduler(runner, self._table, kept_bytes, prefill_tokens)
        self.version = version
        self._decode: tuple[DecodeBatch, StepPlan] | None = None  # batch and plan of the previous step
        self._decode_layout = 0, 0  # changes of the table and of the cache when ``_decode`` was made
        self.lookup = prompt_lookup(runner, drafted_tokens)
        self._counts = dict.fromkeys(("steps", "prefill_tokens", "generated_tokens", "finished", "aborted"), 0)

    @property
    def has_work(self) -> bool:
        """True if a step would compute something."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.partial or (scheduler.waiting and not scheduler.holding))

    @torch.inference_mode()
    def step(self, finished: list[Finished]) -> None:
        """Compute some prompt tokens and one new token for every running sequence.

        Args:
            finished: receives the sequences that end, with their responses. If the step fails, the sequences added so far have ended
                nonetheless.
        """
        runner = self._runner
        self._counts["steps"] += 1
        prefill = self.scheduler.schedule_prefill()
        if prefill.groups:
            first = len(self.scheduler.running)
            logits: list[Tensor] = []
            for group in prefill.groups:
                batch = prefill_batch(group, group[0].sequence.row, runner.device, runner.invariant_attention)
                group_logits = runner.forward(batch, runner.cache)
                if batch.scores_all and batch.last_tokens is not None:
                    score_prompts(group, group_logits)
                    group_logits = group_logits[batch.last_tokens]
                if group[0].completes:
                    logits.append(group_logits)
                self._counts["prefill_tokens"] += sum(chunk.length for chunk in group)
            self.scheduler.prefilled(prefill)
            if prefill.followers:
                logits.append(torch.cat(logits)[[leader.row - first for _, leader in prefill.followers]])
            if logits:
                plan = self._plan(slice(first, len(self.scheduler.running)))
                self._end(self._sample(torch.cat(logits) if len(logits) > 1 else logits[0], plan)[1], finished)
        if running := self.scheduler.schedule_decode():
            if self.lookup is None:
                self._end(self._decode_step(running)[1], finished)
            else:
                self._decode_with_drafts(self.lookup, running, finished)

    def _plan(self, rows: Rows) -> StepPlan:
        return StepPlan(self._table, self.scheduler.running, rows, self._runner.vocabulary, self._runner.device)

    def _decode_step(self, running: list[Sequence]) -> tuple[np.ndarray, Endings]:
        """Compute one token for each running sequence; see ``_sample``."""
        runner = self._runner
        layout = self._table.changes, runner.cache.layouts
        if self._decode is None or self._decode_layout != layout:
            plan = self._plan(slice(0, len(running)))
            self._decode = DecodeBatch(self._table, running, runner.cache, runner.device), plan
            self._decode_layout = layout
        batch, plan = self._decode
        batch.begin_step()
        return self._sample(runner.forward(batch, runner.cache), plan)

    def _decode_with_drafts(self, lookup: PromptLookup, running: list[Sequence], finished: list[Finished]) -> None:
        """Compute one token for each running sequence, or more for those whose drafts are computed, too."""
        drafts = lookup.drafts(running, self._table, self._runner.cache.length)
        count, began = len(running), time.perf_counter()
        if any(draft.used for draft in drafts):
            endings = self._wide_step(running, drafts)
        else:
            tokens, endings = self._decode_step(running)
            for draft in drafts:
                draft.drawn = int(tokens[draft.row] == draft.tokens[0])
        lookup.learn(drafts, count, time.perf_counter() - began)
        self._end(endings, finished)

    def _wide_step(self, running: list[Sequence], drafts: list[Draft]) -> Endings:
        """Compute the newest tokens and the drafted ones together, then draw one token after the other for each row.

        A row goes on while the drawn token is the drafted one, whose keys and values are then in the cache. Those of other drafted tokens
        are overwritten by later steps.
        """
        self._decode = None
        batch = verification_batch(self._table, running, drafts, self._runner)
        logits_TV = self._runner.forward(batch, self._runner.cache)
        lengths = np.array(batch.lengths)
        starts, rows = lengths.cumsum() - lengths, self._table.numbers[: len(running)]
        by_row, endings = {draft.row: draft for draft in drafts}, Endings()
        for offset in range(batch.query_length):
            places = torch.as_tensor(starts[rows] + offset, device=logits_TV.device)
            tokens, ended = self._sample(logits_TV.index_select(0, places), self._plan(rows))
            endings |= ended
            going_on = list[int]()
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                draft = by_row.get(row)
                if draft is None:
                    continue
                if offset < max(draft.used, 1) and token == draft.tokens[offset]:
                    draft.drawn += 1
                    if offset < draft.used and row not in ended:
                        going_on.append(row)
                draft.is_cut |= row in ended
            if not going_on:
                break
            rows = np.array(going_on)
        return endings

    def release_memory(self) -> None:
        """See ``BuiltinEngine.release_memory``."""
        if running := self.scheduler.active():
            raise EngineError(f"The memory of the cache cannot be released while {len(running)} requests run: end them first.")
        self.scheduler.kept.clear()
        self._decode = None
        self._runner.cache.release()

    def _sample(self, logits: Tensor, plan: StepPlan) -> tuple[np.ndarray, Endings]:
        """Draw a token for each of the plan's rows. Returns the tokens, and how sequences end, by row."""
        tokens, logprobs = sample(logits, plan)
        for index, adjustment in plan.adjusted:
            adjustment.take(int(tokens[index]))
        if plan.steps == 0 and plan.begins:
            now = time.monotonic()
            for sequence in plan.begins:
                sequence.first_token_at = now
        self._table.append(plan.rows, tokens, logprobs, self.version)
        plan.steps += 1
        self._counts["generated_tokens"] += len(tokens)
        for index, sequence, count in plan.detailed:
            logprobs_V = (logits[index].float() / sequence.request.gconfig.effective_temperature).log_softmax(-1)
            sequence.top_logprobs.append(most_likely(logprobs_V, count))
        for index, sequence in plan.heard:
            if sequence.on_token is not None:
                version = self.version if sequence.version < 0 else sequence.version
                sequence.on_token(sequence, int(tokens[index]), float(logprobs[index]), version)

        stops, exhausted = plan.ended(tokens)
        matches: dict[int, str] = {}
        for index, watch in plan.watched:
            if (match := watch.find(int(tokens[index]), bool(plan.until_minimum[index] <= plan.steps))) is not None:
                matches[index] = match
        failed = {index: error for index, adjustment in plan.adjusted if (error := adjustment.error)}
        if stops is None and exhausted is None and not matches and not failed:
            return tokens, {}
        ends = {*matches, *failed}
        for ended in (stops, exhausted):
            if ended is not None:
                ends.update(ended.nonzero()[0].tolist())
        endings = Endings()
        for index in ends:
            match = int(tokens[index]) if stops is not None and stops[index] else matches.get(index)
            endings[int(plan.numbers[index])] = match, failed.get(index)
        return tokens, endings

    def _end(self, endings: Endings, finished: list[Finished]) -> None:
        """Remove the sequences that end."""
        responses: list[Finished] = []
        for row in sorted(endings, reverse=True):  # from the last row down: fewer rows move, and never an ending one
            sequence, (match, error) = self.scheduler.running[row], endings[row]
            self.scheduler.remove(sequence, keep=True)
            response = sequence.response("length" if match is None else "stop", match)
            responses.append((sequence, error or response))
        self._counts["finished"] += len(responses)
        finished += responses[::-1]

    # ------------------------------------------------------------------ between steps

    @torch.inference_mode()
    def abort(self, rid: str | None, run: str | None = None) -> list[Finished]:
        """Remove the sequences of one conversation, or all sequences; each gets a response with the output so far.

        Args:
            rid: the conversation. None means all.
            run: the run whose sequences are meant. None means all.
        """
        chosen = [s for s in self.scheduler.sequences() if rid in (None, s.request.rid) and run in (None, s.run)]
        for sequence in chosen:
            self.scheduler.remove(sequence)
        self._counts["aborted"] += len(chosen)
        return [(sequence, sequence.response("abort")) for sequence in chosen]

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the numbers of running and waiting requests."""
        scheduler = self.scheduler
        return {
            **self._counts,
            **({} if self.lookup is None else self.lookup.stats()),
            "running": len(scheduler.active()),
            "waiting": len(scheduler.waiting) + len(scheduler.parked),
            "version": self.version,
            "preemptions": scheduler.preemptions,
            "reused_tokens": scheduler.reused_tokens,
            "kept_bytes": scheduler.kept.bytes,
            "kept_sequences": len(scheduler.kept),
            "cache_rows": self._runner.cache.rows,
            "cache_length": self._runner.cache.length,
        }


def answer(stepper: Stepper, sequences: list[Sequence]) -> list[Finished]:
    """Run sequences together on an idle stepper, and return them with their responses in the order in which they end."""
    stepper.scheduler.waiting.extend(sequences)
    finished = list[Finished]()
    while stepper.has_work:
        stepper.step(finished)
    return finished


@dataclass
class Prefill:
    """The prefill work of one step.

    Attributes:
        groups: chunks that run together, of similar length, in row order.
        followers: pairs ``(sequence, leader)`` that have the same prompt; the sequence reuses the leader's keys, values and logits.
    """

    groups: list[list[Chunk]] = field(default_factory=list)
    followers: list[tuple[Sequence, Sequence]] = field(default_factory=list)


class Scheduler:
    """The queue and the assignment of sequences to rows.

    Args:
        runner: the model and its cache, whose rows are scheduled.
        table: per-row arrays, moved along with the rows.
        kept_bytes: maximum memory for the keys and values of finished sequences.
        prefill_tokens: maximum number of prompt tokens computed in one step.

    Attributes:
        kept: keys and values of finished sequences.
        waiting: the queue.
        running: decoding sequences, by row.
        partial: the sequence in the middle of its prompt, if any.
        holding: True while no request is admitted.
        held_runs: runs whose sequences are parked instead of computed.
        parked: sequences of held runs, in order.
        newest: adapter of requests that name none, or None for the base alone.
    """

    def __init__(self, runner: ModelRunner, table: RowTable, kept_bytes: int, prefill_tokens: int) -> None:
        self._prompts_alone = runner.prompts_alone
        self._cache = runner.cache
        self._vocabulary = runner.vocabulary
        self._table = table
        self._prefill_tokens = prefill_tokens
        self._scored_tokens = min(_SCORED_TOKENS, max(_FEWEST_SCORED, _SCORED_BYTES // (4 * runner.vocabulary)))
        self._active_prefixes = PrefixIndex()
        self.kept = PrefixCache(kept_bytes)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.partial: Sequence | None = None
        self._admitted: list[Sequence] = []  # taken from the queue in this step; after it, they decode or are partial
        self.holding = False
        self.held_runs: set[str] = set()
        self.parked: deque[Sequence] = deque()
        self.newest: Adapter | None = None
        self.preemptions = 0
        self.reused_tokens = 0

    def active(self) -> list[Sequence]:
        """Return all sequences in rows, in row order."""
        return self.running + ([self.partial] if self.partial else [])

    def sequences(self) -> list[Sequence]:
        """Return all sequences: those in rows, then those that wait."""
        return [*self.active(), *self.waiting, *self.parked]

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        (self.parked if sequence.run in self.held_runs else self.waiting).append(sequence)

    def hold_run(self, run: str) -> None:
        """Compute nothing for a run until ``release_run``. Its computed keys and values are kept if memory allows."""
        self.held_runs.add(run)
        running = [sequence for sequence in self.active() if sequence.run == run]
        for sequence in reversed(running):
            self.remove(sequence, keep=True)
        queued = [sequence for sequence in self.waiting if sequence.run == run]
        for sequence in queued:
            self.waiting.remove(sequence)
        self.parked.extend(running + queued)

    def release_run(self, run: str) -> None:
        """Continue with a run's sequences, before those that wait."""
        self.held_runs.discard(run)
        released = [sequence for sequence in self.parked if sequence.run == run]
        self.parked = deque(sequence for sequence in self.parked if sequence.run != run)
        self.waiting.extendleft(reversed(released))

    def _used(self) -> list[int]:
        """Return the number of cached tokens of each row in use."""
        return self._table.cached[: len(self.running)].tolist() + ([self.partial.cached] if self.partial else [])

    # ------------------------------------------------------------------ admission

    def schedule_prefill(self) -> Prefill:
        """Admit the requests that fit and return the prompt tokens to compute now."""
        if self.partial is None and (self.holding or not self.waiting):
            return Prefill()
        chunks: list[Chunk] = []
        followers: list[tuple[Sequence, Sequence]] = []
        budget = self._prefill_tokens
        if self.partial is not None:
            chunks.append(self._next_chunk(self.partial, budget))
            budget -= chunks[0].length
            if not chunks[0].completes:
                return Prefill([chunks])
        if self.waiting and not self.holding:  # if memory allows, lay out the cache for all that the queued sequences may need
            active = self.active()
            queued = list(self.waiting)[: self._cache.max_rows - len(active)]
            longest = max((sequence.length_limit for sequence in active + queued), default=0)
            if longest:
                self._cache.make_room(min(self._cache.max_rows, len(active) + len(self.waiting)), longest, self._used())
        leaders: dict[tuple, Sequence] = {}
        needed, used = 0, self._used()  # sequences admitted in this step have nothing in the cache yet
        while self.waiting and not self.holding and budget > 0:
            sequence = self.waiting[0]
            least = sequence.length_limit if self._cache.invariant else len(sequence.tokens) + _HEADROOM
            needed = max(needed, min(sequence.length_limit, least))
            if not self._cache.make_room(len(self.running) + len(chunks) + len(followers) + 1, needed, used):
                break
            self._admitted.append(self.waiting.popleft())
            if not sequence.is_bound:
                sequence.bind(self.newest)
            request = sequence.request
            layout = tuple(request.position_ids or ()), tuple(request.branch_ids or ())
            prompt = (sequence.adapter_key, sequence.prompt_length, tuple(sequence.tokens), *layout)
            is_plain = not request.multi_modal and sequence.next_scored is None
            if is_plain and prompt in leaders:
                followers.append((sequence, leaders[prompt]))
                continue
            chunks.append(self._next_chunk(sequence, budget))
            budget = budget - chunks[-1].length if chunks[-1].completes else 0
            if chunks[-1].completes and is_plain:
                leaders[prompt] = sequence
        return Prefill(self._place(chunks, followers), followers)

    def _next_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        """Return the tokens of a sequence to compute now.

        A new sequence starts after the longest computed prefix, which is copied once the sequence has its row.
        """
        if sequence is not self.partial:
            sequence.cached, sequence.prefix_source = 0, None
            # the last token and the token before each scored one must be computed, because their logits are needed
            limit = min(sequence.shareable_length, (sequence.next_scored or len(sequence.tokens)) - 1)
            for index in (self._active_prefixes, self.kept) if limit > 0 and not self._prompts_alone else ():
                source, length = index.find(sequence.tokens, sequence.adapter_key)
                if min(length, limit) > sequence.cached:
                    sequence.cached, sequence.prefix_source = min(length, limit), source
        end = len(sequence.tokens)
        budget = self._prefill_tokens if self._prompts_alone else budget
        budget = budget if sequence.next_scored is None else min(budget, self._scored_tokens)
        return Chunk(sequence, sequence.cached, end if sequence.request.multi_modal else min(end, sequence.cached + budget))

    def _place(self, chunks: list[Chunk], followers: list[tuple[Sequence, Sequence]]) -> list[list[Chunk]]:
        """Assign rows: first the chunks that complete, by length, then followers, then the chunk that does not complete.

        Returns:
            The chunks in row order, in groups. A chunk starts a new group if padding the group to one length would add more than half
            of its tokens. (Attention in whole blocks does not pad to a common length.)
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
                has_room = not scores or sum(lengths) <= self._scored_tokens
                if has_room and (self._cache.invariant or max(lengths) * len(lengths) <= 1.5 * sum(lengths) + 64):
                    groups[-1].append(chunk)
                    continue
            groups.append([chunk])
        return groups + ([unfinished] if unfinished else [])

    # ------------------------------------------------------------------ rows

    def prefilled(self, prefill: Prefill) -> None:
        """Move sequences with a complete prompt to the decoding rows. The keys and values of all chunks are in the cache now."""
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
                self._active_prefixes.add(sequence, sequence.tokens[:shareable], key=sequence.adapter_key)
        self._admitted.clear()

    def schedule_decode(self) -> list[Sequence]:
        """Return the sequences that get a token, after reserving a column for it in each row. Preempts the youngest if memory runs out."""
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
        """Put a sequence back at the head of the queue; its keys and values are recomputed later."""
        self.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def remove(self, sequence: Sequence, keep: bool = False) -> None:
        """Remove a sequence from the queue or from its row, if it has not ended. The last decoding row moves into the gap.

        Args:
            sequence: the sequence to remove.
            keep: keep its keys and values for later requests.
        """
        if sequence is self.partial:
            self.partial = None
            self._take_record(sequence, sequence.cached)
        elif sequence.row >= 0:
            row, last = sequence.row, len(self.running) - 1
            cached, cached_of_last = int(self._table.cached[row]), int(self._table.cached[last])
            self._take_record(sequence, cached)
            self._table.leave(row, last, sequence)
            self._active_prefixes.discard(sequence)
            is_plain = not sequence.has_own_layout and not sequence.request.multi_modal
            is_plain = is_plain and (sequence.adapter is None or sequence.adapter.is_held)
            if keep and is_plain and sequence.is_current and self.kept.capacity_bytes:
                # decoding rounds differently from a prompt's pass, and reusing a prefix must not change any later bit
                kept = sequence.prefilled if self._cache.invariant else cached
                self.kept.keep(sequence.tokens[:kept], self._cache.extract(row, kept), sequence.adapter_key)
            if row != last:
                mover = self.running[last]
                self._cache.copy(last, row, cached_of_last)
                self.running[row], mover.row = mover, row
            self.running.pop()
            if self.partial is not None:
                self._cache.copy(self.partial.row, last, self.partial.cached)
                self.partial.row = last
        else:
            for queue in (self.waiting, self.parked):
                if sequence in queue:
                    queue.remove(sequence)
        sequence.row, sequence.cached, sequence.is_current = -1, 0, True

    def _take_record(self, sequence: Sequence, cached: int) -> None:
        """Copy the record of the experts of a sequence's tokens from its row, except for tokens that have one from an earlier pass."""
        known = sum(map(len, sequence.routed))
        if (routed := self._cache.routed) is not None and cached > known:
            sequence.routed.append(routed[sequence.row, known:cached].cpu().numpy().copy())

    def remove_all(self) -> list[Sequence]:
        """Remove all sequences and return them in order. Nothing in the cache is valid afterwards."""
        sequences = list(dict.fromkeys([*self.active(), *self._admitted, *self.waiting, *self.parked]))
        for sequence in sequences:
            sequence.row = -1
        self.partial = None
        for holder in (self.running, self._admitted, self.waiting, self.parked, self._active_prefixes, self.kept, self._table):
            holder.clear()
        return sequences

    @torch.inference_mode()
    def weights_changed(self, recompute: bool) -> None:
        """Discard the prefixes computed so far, so that no later sequence reuses their keys and values.

        Args:
            recompute: return every sequence to the queue, in order, to recompute its keys and values.
        """
        if recompute:
            for sequence in reversed(self.active()):
                self.preempt(sequence)
        self.kept.clear()
        self._active_prefixes.clear()
        for sequence in self.active():
            sequence.is_current = False
