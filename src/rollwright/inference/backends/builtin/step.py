"""One step of the engine: schedule, run, sample, postprocess; once for new prompts, once for all that decode.

Tokens are drawn with temperature, top-k, top-p, min-p, bias and penalties; log-probabilities are those before all but the
temperature. Each token takes one uniform number, a function of (request seed, index of the token) alone: what a request
draws depends on its own distribution, never on which requests share the batch.

Axes: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import time

import numpy as np
import torch
from torch import Tensor

from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.adjustment import Adjustment
from rollwright.inference.backends.builtin.batch import Chunk, RowTable, Sequence, decode_batch, prefill_batch, to_tensor
from rollwright.inference.backends.builtin.cache import PrefixCache
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.scheduler import Scheduler
from rollwright.inference.request import ModelResponse, TopTokens

Finished = tuple[Sequence, ModelResponse | BaseException]

_BELOW_ONE = 1.0 - 2.0**-23  # keeps a target below the total, whatever the rounding


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
            logits: list[Tensor] = []
            for group in prefill.groups:
                batch = prefill_batch(group, group[0].sequence.row, self._runner.device)
                group_logits = self._runner.forward(batch, self._runner.cache)
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
                self._sample(torch.cat(logits), first)
                self._postprocess(first, finished)
        if running := self.scheduler.schedule_decode():
            batch = decode_batch(self._table, running, self._runner.device)
            next_logits = self._runner.forward(batch, self._runner.cache)
            self._table.rows["cached"][: len(running)] += 1
            self._table.rows["position"][: len(running)] += 1
            self._sample(next_logits, 0)
            self._postprocess(0, finished)

    def _sample(self, logits: Tensor, first: int) -> None:
        """Draw a token for each running sequence from row ``first`` on."""
        table, running = self._table, self.scheduler.running
        last = len(running)
        rows = table.rows[first:last]
        adjusted = ((index, running[first + index].adjustment) for index in rows["is_adjusted"].nonzero()[0].tolist())
        adjustments = [(index, adjustment) for index, adjustment in adjusted if adjustment is not None]
        begins = (rows["generated"] == 0).nonzero()[0].tolist()
        tokens, logprobs = sample(logits, table, first, last, adjustments)
        for index, adjustment in adjustments:
            adjustment.take(int(tokens[index]))
        for index in begins:
            running[first + index].first_token_at = time.monotonic()
        table.append(first, last, tokens, logprobs, self.version)
        for index in rows["top_logprobs"].nonzero()[0].tolist():
            logprobs_V = (logits[index].float() / float(rows["temperature"][index])).log_softmax(-1)
            running[first + index].top_logprobs.append(most_likely(logprobs_V, int(rows["top_logprobs"][index])))
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
        failed: dict[int, EngineError] = {
            index: error
            for index in rows["is_adjusted"].nonzero()[0].tolist()
            if (adjustment := running[first + index].adjustment) and (error := adjustment.error)
        }
        ends[list(failed)] = True
        responses: list[Finished] = []
        for index in reversed(ends.nonzero()[0].tolist()):  # from the last row down: fewer rows are moved, and none that ends
            sequence = running[first + index]
            match = int(rows["last_token"][index]) if stops[index] else matches.get(index)
            self.scheduler.remove(sequence, keep=True)
            response = sequence.response("length" if match is None else "stop", match)
            responses.append((sequence, failed.get(index) or response))
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


def sample(
    logits_BV: Tensor, table: RowTable, first: int, last: int, adjustments: list[tuple[int, Adjustment]]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token for each of rows ``first .. last-1``.

    Args:
        logits_BV: of these rows.
        table: how each row is sampled.
        adjustments: of the rows that have one, by their index in ``logits_BV``.

    Returns:
        Tokens ``[B]`` int64, and their log-probabilities ``[B]`` float32 under the temperature-scaled softmax.
    """
    rows, device = table.rows[first:last], logits_BV.device
    scores_BV = logits_BV.float()
    if (rows["temperature"] != 1.0).any():
        scores_BV = scores_BV / to_tensor(rows["temperature"], device)[:, None]
    greedy = rows["greedy"]
    below_minimum = (rows["generated"] < rows["min_new_tokens"]).nonzero()[0].tolist()
    whole = (rows["top_k"] == 0) & (rows["top_p"] >= 1.0) & (rows["min_p"] == 0)
    uniforms_B = to_tensor(counter_uniforms(rows["seed"], rows["generated"]), device)

    if whole.all() and not greedy.any():
        probs_BV = scores_BV.softmax(-1)
        weights_BV = probs_BV
        if adjustments or below_minimum:
            weights_BV = _adjusted(scores_BV, table, first, adjustments, below_minimum).softmax(-1)
        tokens = inverse_cdf(weights_BV, uniforms_B)
        logprobs = probs_BV.gather(1, tokens[:, None]).squeeze(1).log_()
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    logprobs_BV = scores_BV.log_softmax(-1)
    if adjustments or below_minimum:
        scores_BV = _adjusted(scores_BV, table, first, adjustments, below_minimum)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    for kind, chosen in (("whole", whole & ~greedy), ("greedy", greedy), ("truncated", ~whole & ~greedy)):
        if not chosen.any():
            continue
        index = to_tensor(chosen.nonzero()[0], device)
        if kind == "whole":
            tokens[index] = inverse_cdf(scores_BV[index].softmax(-1), uniforms_B[index])
        elif kind == "greedy":
            tokens[index] = scores_BV[index].argmax(-1)
        else:
            limits = [to_tensor(rows[name][chosen], device) for name in ("top_k", "top_p", "min_p")]
            tokens[index] = truncated_inverse_cdf(scores_BV[index], uniforms_B[index], *limits)
    logprobs = logprobs_BV.gather(1, tokens[:, None]).squeeze(1)
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _adjusted(
    scores_BV: Tensor, table: RowTable, first: int, adjustments: list[tuple[int, Adjustment]], below_minimum: list[int]
) -> Tensor:
    """A copy of the scores, adjusted and, for the rows below ``min_new_tokens``, without stop ids."""
    scores_BV, vocabulary, device = scores_BV.clone(), scores_BV.shape[1], scores_BV.device
    for index, adjustment in adjustments:
        adjustment.apply(scores_BV[index])
    for index in below_minimum:
        stop_ids = table.stop_ids[first + index]
        scores_BV[index, to_tensor(stop_ids[(stop_ids >= 0) & (stop_ids < vocabulary)], device)] = float("-inf")
    return scores_BV


def score_prompts(group: list[Chunk], logits_TV: Tensor) -> None:
    """Add the log-probabilities of prompt tokens to the sequences of ``group``, whose tokens ``logits_TV`` belong to.

    They are those of the temperature-scaled softmax, as if the tokens had been sampled.
    """
    for chunk, logits in zip(group, logits_TV.split([chunk.length for chunk in group]), strict=True):
        sequence, request = chunk.sequence, chunk.sequence.request
        begin, end = sequence.next_scored or 0, min(chunk.end + 1, sequence.prompt_length)
        scores = logits[begin - 1 - chunk.start : end - 1 - chunk.start].float() / request.gconfig.effective_temperature
        logprobs_TV, targets = scores.log_softmax(-1), torch.tensor(sequence.tokens[begin:end], dtype=torch.int64)
        values = logprobs_TV.gather(1, targets.to(logits.device)[:, None]).squeeze(1).tolist()
        count = min(request.top_logprobs or 0, logits.shape[1])
        sequence.prompt_logprobs += [(value, most_likely(row, count)) for value, row in zip(values, logprobs_TV, strict=True)]


def most_likely(logprobs_V: Tensor, count: int) -> TopTokens:
    """The ``count`` most likely tokens and their log-probabilities."""
    values, tokens = logprobs_V.topk(count)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))


def counter_uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, counter), float32, of 24 bits.

    Args:
        seeds: ``[B]`` uint64.
        counters: ``[B]`` int64, the index of the token within its request.
    """
    state = _mix(seeds * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D))
    state = _mix(state + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@functools.cache
def _block_size(vocabulary: int) -> int | None:
    """A divisor of the vocabulary near its square root, or None where there is none in a useful range."""
    candidates = [size for size in range(16, 1025) if vocabulary % size == 0]
    return min(candidates, key=lambda size: abs(size - vocabulary**0.5), default=None)


def inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The token at which the running sum of the weights passes ``uniform * total``, ``[B]``.

    The sum is taken in two levels where the vocabulary divides into blocks: summing blocks is vectorised, a running sum
    over the whole vocabulary is not, and it is the less exact one.
    """
    size = _block_size(weights_BV.shape[1])
    if size is None:
        running = weights_BV.cumsum(-1)
        target = running[:, -1:] * uniforms_B[:, None].clamp(max=_BELOW_ONE)
        return torch.searchsorted(running, target, right=True).clamp_(max=weights_BV.shape[1] - 1).squeeze(1)
    blocks = weights_BV.view(weights_BV.shape[0], -1, size)
    running = blocks.sum(-1).cumsum(-1)
    target = running[:, -1:] * uniforms_B[:, None].clamp(max=_BELOW_ONE)
    block = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[1] - 1)
    before = running.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, size)).squeeze(1).cumsum(-1)
    target = torch.minimum(target - before, inner[:, -1:] * _BELOW_ONE)
    return (block * size + torch.searchsorted(inner, target, right=True).clamp_(max=size - 1)).squeeze(1)


def truncated_inverse_cdf(scores_BV: Tensor, uniforms_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Draw a token, ``[B]``, from the ``top_k`` most likely ones (0: all), of these from the smallest set with mass ``top_p``, and
    of these from those at least ``min_p`` times as likely as the most likely one."""
    ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
    running = ordered.softmax(-1).cumsum(-1)
    vocabulary = running.shape[1]
    last = torch.where(top_k_B > 0, top_k_B, vocabulary).clamp(max=vocabulary)[:, None] - 1
    mass = running.gather(1, last)
    # the set ends with the first token at which the mass reaches top_p
    nucleus = torch.searchsorted(running, mass * top_p_B[:, None])
    last = torch.minimum(last, torch.where(top_p_B[:, None] < 1, nucleus, vocabulary - 1))
    likely = (ordered >= ordered[:, :1] + min_p_B[:, None].log()).sum(-1, keepdim=True) - 1
    last = torch.minimum(last, likely)
    target = running.gather(1, last) * uniforms_B[:, None].clamp(max=_BELOW_ONE)
    index = torch.minimum(torch.searchsorted(running, target, right=True), last)
    return order.gather(1, index).squeeze(1)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
