"""One step of the engine: schedule, run, postprocess."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rollwright.inference.backends.builtin.forward_batch import decode_batch, prefill_batch
from rollwright.inference.backends.builtin.model_runner import ModelRunner
from rollwright.inference.backends.builtin.prefix_cache import PrefixCache
from rollwright.inference.backends.builtin.row_table import RowTable
from rollwright.inference.backends.builtin.sampler import Sampler
from rollwright.inference.backends.builtin.scheduler import Prefill, Scheduler
from rollwright.inference.backends.builtin.sequence import Sequence
from rollwright.inference.request import ModelResponse

Finished = tuple[Sequence, ModelResponse | BaseException]


class Stepper:
    """Everything that a step reads and writes; used by one thread at a time.

    Args:
        runner: the model and its cache.
        max_rows: most sequences at once.
        kept_bytes: most memory for finished sequences' keys and values.
        prefill_tokens: most prompt tokens in one step.
        version: of the weights at the start.
    """

    def __init__(self, runner: ModelRunner, max_rows: int, kept_bytes: int, prefill_tokens: int, version: int) -> None:
        self._runner = runner
        self._table = RowTable(max_rows)
        self._kept = PrefixCache(kept_bytes)
        self._sampler = Sampler(runner.device)
        self.scheduler = Scheduler(runner.cache, self._table, self._kept, prefill_tokens, runner.vocabulary)
        self.version = version
        self._counts = dict.fromkeys(("steps", "prefill_tokens", "generated_tokens", "finished", "aborted"), 0)

    @property
    def has_work(self) -> bool:
        """True where a step would compute something."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.partial or (scheduler.waiting and not scheduler.holding))

    @torch.inference_mode()
    def step(self, finished: list[Finished] | None = None) -> list[Finished]:
        """Compute some prompt tokens and one new token for every running sequence.

        Args:
            finished: sequences are added to it as they end; where the step fails, those in it have ended all the same.

        Returns:
            The sequences that ended, with their responses.
        """
        self._counts["steps"] += 1
        finished = [] if finished is None else finished
        prefill = self.scheduler.schedule_prefill()
        if prefill.groups:
            finished += self._prefill(prefill)
        self.scheduler.room_for_decode()
        if self.scheduler.running:
            finished += self._decode()
        return finished

    def _prefill(self, prefill: Prefill) -> list[Finished]:
        scheduler, first = self.scheduler, len(self.scheduler.running)
        logits: list[Tensor] = []
        for group in prefill.groups:
            chunks = [(chunk.sequence, chunk.start, chunk.end) for chunk in group]
            group_logits = self._runner.run(prefill_batch(chunks, group[0].sequence.row, self._runner.device))
            if group[0].completes:
                logits.append(group_logits)
                scheduler.prefilled(group)
            self._counts["prefill_tokens"] += sum(chunk.length for chunk in group)
        for sequence, leader in prefill.followers:
            scheduler.follow(sequence, leader)
        for group in prefill.groups:
            if not group[0].completes:
                scheduler.prefilled(group)
        if not logits:
            return []
        if prefill.followers:
            logits.append(torch.cat(logits)[[leader.row - first for _, leader in prefill.followers]])
        return self._sample(torch.cat(logits), first, len(scheduler.running))

    def _decode(self) -> list[Finished]:
        running = self.scheduler.running
        branched = self._table.has_hidden[: len(running)].nonzero()[0].tolist()
        hidden = {row: running[row].hidden for row in branched}
        logits = self._runner.run(decode_batch(self._table, len(running), hidden, self._runner.device))
        self._table.advance(len(running))
        return self._sample(logits, 0, len(running))

    def _sample(self, logits: Tensor, first: int, last: int) -> list[Finished]:
        """Draw a token for each of rows ``first .. last-1`` and take out the sequences that end with it."""
        table, running = self._table, self.scheduler.running
        history = {}
        if table.frequency_penalty[first:last].any():
            history = {row: torch.tensor(self._output(running[row])) for row in range(first, last) if table.generated[row]}
        is_first = table.generated[first:last] == 0
        tokens, logprobs = self._sampler.sample(logits, table, first, last, history)
        if is_first.any():
            now = time.monotonic()
            for index in is_first.nonzero()[0].tolist():
                running[first + index].first_token_at = now
        for index in (table.version[first:last] != self.version).nonzero()[0].tolist():
            running[first + index].mark_version(int(table.generated[first + index]), self.version)
        table.version[first:last] = self.version
        table.append(first, last, tokens, logprobs)
        for index in table.has_listener[first:last].nonzero()[0].tolist():
            if (listener := running[first + index].on_token) is not None:
                listener(int(tokens[index]), float(logprobs[index]), self.version)
        self._counts["generated_tokens"] += last - first
        return self._take_finished(first, last)

    def _output(self, sequence: Sequence) -> list[int]:
        count = int(self._table.generated[sequence.row] - self._table.flushed[sequence.row])
        return sequence.tokens[sequence.prompt_length :] + self._table.tokens[sequence.row, :count].tolist()

    def _take_finished(self, first: int, last: int) -> list[Finished]:
        table, running = self._table, self.scheduler.running
        stopped, exhausted = table.stopped(first, last), table.exhausted(first, last)
        matches: dict[int, str] = {}
        for index in table.has_stop_strings[first:last].nonzero()[0].tolist():
            watch, row = running[first + index].stop_strings, first + index
            may_stop = bool(table.generated[row] >= table.min_new_tokens[row])
            if watch is not None and (match := watch.find(int(table.last_token[row]), may_stop)) is not None:
                matches[index] = match
        ended = stopped | exhausted
        ended[list(matches)] = True
        if not ended.any():
            return []
        leaving = []
        for index in ended.nonzero()[0].tolist():
            token = int(table.last_token[first + index])
            reason = "stop" if stopped[index] or index in matches else "length"
            leaving.append((running[first + index], reason, token if stopped[index] else matches.get(index)))
        finished: list[Finished] = []
        for sequence, reason, match in reversed(leaving):  # from the last row down: fewer rows are moved
            self.scheduler.leave(sequence, keep=True)
            finished.append((sequence, sequence.response(reason, match)))
        self._counts["finished"] += len(finished)
        return finished[::-1]

    # ------------------------------------------------------------------ between steps

    @torch.inference_mode()
    def abort(self, rid: str | None) -> list[Finished]:
        """Take out the sequences of one conversation, or all; each gets a response with what it has."""
        scheduler = self.scheduler
        chosen = [s for s in [*scheduler.active(), *scheduler.waiting] if rid is None or s.request.rid == rid]
        finished: list[Finished] = []
        for sequence in chosen:
            scheduler.remove(sequence)
            finished.append((sequence, sequence.response("abort")))
        self._counts["aborted"] += len(finished)
        return finished

    @torch.inference_mode()
    def publish(self, version: int, recompute: bool) -> None:
        """The weights are ``version`` now.

        Args:
            recompute: running sequences compute their keys and values anew, under the new weights.
        """
        self._runner.share_weights()
        if recompute:
            self.scheduler.preempt_all()
        self.scheduler.forget_prefixes()
        self.version = version

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what runs and waits now."""
        scheduler = self.scheduler
        return {
            **self._counts,
            "running": len(scheduler.active()),
            "waiting": len(scheduler.waiting),
            "version": self.version,
            "preemptions": scheduler.preemptions,
            "reused_tokens": scheduler.reused_tokens,
            "kept_bytes": self._kept.bytes,
            "kept_sequences": len(self._kept),
            "cache_rows": self._runner.cache.rows,
            "cache_length": self._runner.cache.length,
        }


def sample_alone(runner: ModelRunner, sequence: Sequence, version: int) -> ModelResponse:
    """One sequence from its prompt to its end, over a cache of its own; no step of anybody else runs meanwhile.

    Args:
        runner: its model computes.
        sequence: in no queue.
        version: of the weights.
    """
    own = runner.for_one_sequence(len(sequence.tokens) + sequence.max_new_tokens)
    stepper = Stepper(own, 1, 0, len(sequence.tokens), version)
    stepper.scheduler.waiting.append(sequence)
    finished: list[Finished] = []
    while stepper.has_work:
        stepper.step(finished)
    ((_, response),) = finished
    assert isinstance(response, ModelResponse)
    return response
