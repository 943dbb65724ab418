"""One step of the engine: schedule, run, sample, postprocess; once for new prompts, once for all that decode.

Tokens are drawn with temperature, top-k, top-p, min-p, bias and penalties; log-probabilities are those before all but the
temperature. Each token takes one uniform number, a function of (request seed, index of the token) alone: what a request
draws depends on its own distribution, never on which requests share the batch.

Axes: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.inference.backends.builtin.batch import Chunk, Sequence, prefill_batch
from rollwright.inference.backends.builtin.cache import PrefixCache
from rollwright.inference.backends.builtin.model import ModelRunner
from rollwright.inference.backends.builtin.rows import DecodeBatch, RowTable, StepPlan
from rollwright.inference.backends.builtin.scheduler import Scheduler
from rollwright.inference.request import ModelRequest, ModelResponse, TopTokens
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

Finished = tuple[Sequence, ModelResponse | BaseException]

_MEASURED_ROWS, _MEASURED_TOKENS, _MEASURED_SECONDS = 32, 64, 0.1  # of decoding with each number of threads
_AS_FAST = 1.1  # fewer threads are used where they take at most so many times as long: others need processors, too
_fastest_threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by model
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
        self.scheduler = Scheduler(
            runner.cache, self._table, PrefixCache(kept_bytes), prefill_tokens, runner.vocabulary, runner.prompts_alone
        )
        self.version = version
        self._decode: tuple[DecodeBatch, StepPlan] | None = None  # of the step before
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
                batch = prefill_batch(group, group[0].sequence.row, self._runner.device, self._runner.prefill_block)
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
                self._sample(torch.cat(logits) if len(logits) > 1 else logits[0], self._plan(first), finished)
        if running := self.scheduler.schedule_decode():
            if self._decode is None or not self._decode[0].is_current:
                self._decode = DecodeBatch(self._table, running, self._runner.cache, self._runner.device), self._plan(0)
            batch, plan = self._decode
            batch.begin_step()
            next_logits = self._runner.forward(batch, self._runner.cache)
            batch.advance()
            self._sample(next_logits, plan, finished)

    def _plan(self, first: int) -> StepPlan:
        return StepPlan(self._table, self.scheduler.running, first, self._runner.vocabulary, self._runner.device)

    def _sample(self, logits: Tensor, plan: StepPlan, finished: list[Finished]) -> None:
        """Draw a token for each of the plan's rows, and take out the sequences that end with it."""
        running, first = self.scheduler.running, plan.first
        tokens, logprobs = sample(logits, plan)
        for index, adjustment in plan.adjusted:
            adjustment.take(int(tokens[index]))
        if plan.steps == 0 and plan.begins:
            now = time.monotonic()
            for sequence in plan.begins:
                sequence.first_token_at = now
        self._table.append(first, plan.last, tokens, logprobs, self.version)
        plan.steps += 1
        self._counts["generated_tokens"] += len(tokens)
        for index, sequence, count in plan.detailed:
            logprobs_V = (logits[index].float() / sequence.request.gconfig.effective_temperature).log_softmax(-1)
            sequence.top_logprobs.append(most_likely(logprobs_V, count))
        for index, sequence in plan.heard:
            if sequence.on_token is not None:
                sequence.on_token(sequence, int(tokens[index]), float(logprobs[index]), self.version)

        stops, exhausted = plan.stopped(tokens), plan.exhausted()
        may_stop = plan.may_stop() if plan.watched else None
        matches: dict[int, str] = {}
        for index, watch in plan.watched:
            if (match := watch.find(int(tokens[index]), bool(may_stop[index]))) is not None:  # type: ignore[index]
                matches[index] = match
        failed = {index: error for index, adjustment in plan.adjusted if (error := adjustment.error)}
        if stops is None and exhausted is None and not matches and not failed:
            return
        ends = {*matches, *failed}
        for ended in (stops, exhausted):
            if ended is not None:
                ends.update(ended.nonzero()[0].tolist())
        responses: list[Finished] = []
        for index in sorted(ends, reverse=True):  # from the last row down: fewer rows are moved, and none that ends
            sequence = running[first + index]
            match = int(tokens[index]) if stops is not None and stops[index] else matches.get(index)
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


def answer_apart(runner: ModelRunner, sequence: Sequence, version: int) -> ModelResponse:
    """What the model answers, with a cache of its own, apart from what runs."""
    stepper, finished = (
        Stepper(runner.with_cache_for(1, sequence.length_limit), 1, 0, len(sequence.tokens), version),
        list[Finished](),
    )
    stepper.scheduler.waiting.append(sequence)
    while stepper.has_work:
        stepper.step(finished)
    response = finished[0][1]
    assert isinstance(response, ModelResponse)
    return response


@torch.inference_mode()
def fastest_threads(runner: ModelRunner, rows: int) -> int:
    """The fewest threads of those that compute a decode step about as fast as any number, measured on CPU.

    A model that cannot be measured (memory runs out, its forward fails) gets torch's number; its first request tells why.

    Args:
        runner: of the model.
        rows: most sequences at once.
    """
    most = torch.get_num_threads()
    if most == 1 or runner.device.type != "cpu":
        return most
    if (known := _fastest_threads.get(runner.model)) is not None and known <= most:
        return known
    rows = min(rows, _MEASURED_ROWS)
    runner, table = runner.with_cache_for(rows, _MEASURED_TOKENS), RowTable(rows)
    runner.cache.make_room(rows, _MEASURED_TOKENS, [])
    ids = [0] * (_MEASURED_TOKENS // 2)
    sequences = [Sequence(ModelRequest(ids), tokens=ids, prompt_length=len(ids), length_limit=len(ids)) for _ in range(rows)]
    for row, sequence in enumerate(sequences):
        table.enter(row, sequence, runner.vocabulary)
    batch = DecodeBatch(table, sequences, runner.cache, runner.device)
    seconds = dict[int, float]()
    try:
        for count in sorted({1, *(1 << power for power in range(1, most.bit_length())), most}):
            torch.set_num_threads(count)
            runner.forward(batch, runner.cache)
            began, taken = time.perf_counter(), list[float]()
            while len(taken) < 8 and (not taken or time.perf_counter() - began < _MEASURED_SECONDS):
                start = time.perf_counter()
                runner.forward(batch, runner.cache)
                taken.append(time.perf_counter() - start)
            seconds[count] = min(taken)
    except Exception as error:
        logger.warning("the fastest number of threads could not be measured (%s); %d compute", error, most)
        return most
    finally:
        torch.set_num_threads(most)
    fastest = min(seconds.values())
    return _fastest_threads.setdefault(runner.model, next(n for n, value in seconds.items() if value <= _AS_FAST * fastest))


def sample(logits_BV: Tensor, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token for each row of the plan.

    Args:
        logits_BV: of these rows.
        plan: how each row is sampled.

    Returns:
        Tokens ``[B]`` int64, and their log-probabilities ``[B]`` float32 under the temperature-scaled softmax.
    """
    scores_BV = logits_BV.float()
    if plan.temperature_B1 is not None:
        scores_BV = scores_BV / plan.temperature_B1
    uniforms_B, forbidden, is_plain_B = plan.uniforms(), plan.forbidden(), plan.is_plain_B
    if is_plain_B is not None and not is_plain_B.any():
        return _sample_any(scores_BV, uniforms_B, forbidden, plan)
    tokens_B, logprobs_B = _sample_plain(scores_BV, uniforms_B, forbidden)
    if forbidden is not None:  # what is allowed may be too unlikely for float32
        is_finite_B = np.isfinite(logprobs_B)
        is_plain_B = is_finite_B if is_plain_B is None else is_plain_B & is_finite_B
    if is_plain_B is None or is_plain_B.all():
        return tokens_B, logprobs_B
    others = _sample_any(scores_BV, uniforms_B, forbidden, plan)  # a row is drawn in one way, whatever the others ask for
    return np.where(is_plain_B, tokens_B, others[0]), np.where(is_plain_B, logprobs_B, others[1])


def _sample_plain(scores_BV: Tensor, uniforms_B: Tensor, forbidden: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Any token may come, except those at ``forbidden``, places in the flat ``[B * V]``."""
    probs_BV = scores_BV.softmax(-1)
    if forbidden is not None:
        probs_BV.view(-1).index_fill_(0, forbidden, 0.0)
    tokens_B = inverse_cdf(probs_BV, uniforms_B)
    # In float64: a vectorised logarithm may round the last rows otherwise than the others.
    logprobs_B = probs_BV.gather(1, tokens_B[:, None]).squeeze(1).double().log_()
    return tokens_B.cpu().numpy(), logprobs_B.float().cpu().numpy()


def _sample_any(
    scores_BV: Tensor, uniforms_B: Tensor, forbidden: Tensor | None, plan: StepPlan
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of every kind, with their adjustments."""
    logprobs_BV = scores_BV.log_softmax(-1)
    if plan.adjusted or forbidden is not None:
        scores_BV = scores_BV.clone()
        for index, adjustment in plan.adjusted:
            adjustment.apply(scores_BV[index])
        if forbidden is not None:
            scores_BV.view(-1).index_fill_(0, forbidden, float("-inf"))
    tokens_B = torch.empty(len(scores_BV), dtype=torch.int64, device=scores_BV.device)
    for kind, index in plan.kinds.items():
        scores, uniforms = (scores_BV, uniforms_B) if index is None else (scores_BV[index], uniforms_B[index])
        if kind == "whole":
            drawn = inverse_cdf(scores.softmax(-1), uniforms)
        elif kind == "greedy":
            drawn = scores.argmax(-1)
        else:
            drawn = truncated_inverse_cdf(scores, uniforms, *plan.limits)
        if index is None:
            tokens_B = drawn
        else:
            tokens_B[index] = drawn
    logprobs_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B.cpu().numpy(), logprobs_B.cpu().numpy()


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


@functools.cache
def _block_size(vocabulary: int) -> int | None:
    """A divisor of the vocabulary near its square root; None where there is none in a useful range, or one sum is as fast."""
    if vocabulary <= 1024:
        return None
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
    before = torch.nn.functional.pad(running, (1, 0)).gather(1, block)
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
