"""One step of the engine: schedule, run, sample, postprocess; once for new prompts, once for all that decode."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rollwright.inference.backends.builtin.batch import RowTable, decode_batch, prefill_batch
from rollwright.inference.backends.builtin.cache import PrefixCache
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.sampler import sample
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
        self.scheduler = Scheduler(runner.cache, self._table, PrefixCache(kept_bytes), prefill_tokens, runner.vocabulary)
        self.version = version
        self._counts = dict.fromkeys(("steps", "prefill_tokens", "generated_tokens", "finished", "aborted"), 0)

    @property
    def has_work(self) -> bool:
        """True where a step would compute something."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.partial or (scheduler.waiting and not scheduler.holding))

    @torch.inference_mode()
    def step(self, finished: list[Finished]) -> None:
        """Compute some prompt tokens and one new token for every running sequence.

        Args:
            finished: sequences are added to it as they end, with their responses; where the step fails, those in it have
                ended all the same.
        """
        self._counts["steps"] += 1
        prefill = self.scheduler.schedule_prefill()
        if prefill.groups:
            first = len(self.scheduler.running)
            logits = self._run_prefill(prefill, first)
            if logits is not None:
                self._sample(logits, first)
                self._postprocess(first, finished)
        if running := self.scheduler.schedule_decode():
            logits = self._runner.run(decode_batch(self._table, running, self._runner.device))
            self._table.rows["cached"][: len(running)] += 1
            self._table.rows["position"][: len(running)] += 1
            self._sample(logits, 0)
            self._postprocess(0, finished)

    def _run_prefill(self, prefill: Prefill, first: int) -> Tensor | None:
        """Logits of the sequences whose prompts are complete now, in rows from ``first`` on; None where none is."""
        logits: list[Tensor] = []
        for group in prefill.groups:
            group_logits = self._runner.run(prefill_batch(group, group[0].sequence.row, self._runner.device))
            if group[0].completes:
                logits.append(group_logits)
            self._counts["prefill_tokens"] += sum(chunk.length for chunk in group)
        self.scheduler.prefilled(prefill)
        if prefill.followers:
            logits.append(torch.cat(logits)[[leader.row - first for _, leader in prefill.followers]])
        return torch.cat(logits) if logits else None

    def _sample(self, logits: Tensor, first: int) -> None:
        """Draw a token for each running sequence from row ``first`` on."""
        table, running = self._table, self.scheduler.running
        last = len(running)
        rows = table.rows[first:last]
        history = {}
        if rows["frequency_penalty"].any():
            for row, sequence in enumerate(running[first:], first):
                output = sequence.tokens[sequence.prompt_length :] + table.unflushed(row)["token"].tolist()
                if output:
                    history[row] = torch.tensor(output)
        is_first = rows["generated"] == 0
        tokens, logprobs = sample(logits, table, first, last, history)
        if is_first.any():
            now = time.monotonic()
            for index in is_first.nonzero()[0].tolist():
                running[first + index].first_token_at = now
        table.append(first, last, tokens, logprobs, self.version)
        for index in rows["has_listener"].nonzero()[0].tolist():
            sequence = running[first + index]
            if sequence.on_token is not None:
                sequence.on_token(sequence, int(tokens[index]), float(logprobs[index]), self.version)
        self._counts["generated_tokens"] += last - first

    def _postprocess(self, first: int, finished: list[Finished]) -> None:
        """Take out the sequences from row ``first`` on that end with their newest token."""
        running, rows = self.scheduler.running, self._table.rows[first : len(self.scheduler.running)]
        may_stop = rows["generated"] >= rows["min_new_tokens"]
        stops = (self._table.stop_ids[first : len(running)] == rows["last_token"][:, None]).any(axis=1) & may_stop
        matches: dict[int, str] = {}
        for index in rows["has_stop_strings"].nonzero()[0].tolist():
            watch = running[first + index].stop_strings
            if watch and (match := watch.find(int(rows["last_token"][index]), bool(may_stop[index]))) is not None:
                matches[index] = match
        ends = stops | (rows["generated"] >= rows["max_new_tokens"])
        ends[list(matches)] = True
        if not ends.any():
            return
        leaving = []
        for index in ends.nonzero()[0].tolist():
            match = int(rows["last_token"][index]) if stops[index] else matches.get(index)
            leaving.append((running[first + index], "length" if match is None else "stop", match))
        responses: list[Finished] = []
        for sequence, reason, match in reversed(leaving):  # from the last row down: fewer rows are moved
            self.scheduler.remove(sequence, keep=True)
            responses.append((sequence, sequence.response(reason, match)))
        self._counts["finished"] += len(responses)
        finished += responses[::-1]

    # ------------------------------------------------------------------ between steps

    @torch.inference_mode()
    def abort(self, rid: str | None) -> list[Finished]:
        """Take out the sequences of one conversation, or all; each gets a response with what it has."""
        scheduler = self.scheduler
        chosen = [s for s in [*scheduler.active(), *scheduler.waiting] if rid is None or s.request.rid == rid]
        for sequence in chosen:
            scheduler.remove(sequence)
        self._counts["aborted"] += len(chosen)
        return [(sequence, sequence.response("abort")) for sequence in chosen]

    @torch.inference_mode()
    def publish(self, version: int, recompute: bool) -> None:
        """The weights are ``version`` now.

        Args:
            recompute: running sequences compute their keys and values again, under the new weights.
        """
        self._runner.forward.share_weights()
        self.scheduler.weights_changed(recompute)
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
            "kept_bytes": scheduler.kept.bytes,
            "kept_sequences": len(scheduler.kept),
            "cache_rows": self._runner.cache.rows,
            "cache_length": self._runner.cache.length,
        }
