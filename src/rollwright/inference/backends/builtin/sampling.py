"""Samples the tokens of a step (temperature, top-k, top-p, min-p) and finds the rows whose output ends.

Log-probabilities are those of the temperature-scaled softmax, before top-k, top-p, min-p, bias and penalties (``adjustments``). Each token
takes one uniform number, which depends only on the request's seed and the token's index. A request's tokens therefore depend on its own
distributions and never on the other requests of the batch.

Axes: ``B`` sampled rows, ``V`` vocabulary.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from rollwright.inference.backends.builtin.batch import Chunk, Rows, RowTable, Sequence
from rollwright.inference.request import TopTokens

_BELOW_ONE = 1.0 - 2.0**-23  # keeps a target below the total despite rounding
_UNIFORMS = 16  # random numbers computed at once for each row, from a plan's second step on


def sample(logits_BV: Tensor, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token for each row of the plan.

    Args:
        logits_BV: logits of these rows.
        plan: settings of the rows.

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
    if forbidden is not None:  # the probabilities of the allowed tokens may underflow in float32
        is_finite_B = np.isfinite(logprobs_B)
        is_plain_B = is_finite_B if is_plain_B is None else is_plain_B & is_finite_B
    if is_plain_B is None or is_plain_B.all():
        return tokens_B, logprobs_B
    others = _sample_any(scores_BV, uniforms_B, forbidden, plan)  # how a row is drawn never depends on the other rows
    return np.where(is_plain_B, tokens_B, others[0]), np.where(is_plain_B, logprobs_B, others[1])


def _sample_plain(scores_BV: Tensor, uniforms_B: Tensor, forbidden: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Draw from the whole distribution except the tokens at ``forbidden``, which are indices into the flat ``[B * V]``."""
    probs_BV = scores_BV.softmax(-1)
    if forbidden is not None:
        probs_BV.view(-1).index_fill_(0, forbidden, 0.0)
    tokens_B = inverse_cdf(probs_BV, uniforms_B)
    # In float64, because a vectorised logarithm may round the last rows differently.
    logprobs_B = probs_BV.gather(1, tokens_B[:, None]).squeeze(1).double().log_()
    return tokens_B.cpu().numpy(), logprobs_B.float().cpu().numpy()


def _sample_any(
    scores_BV: Tensor, uniforms_B: Tensor, forbidden: Tensor | None, plan: StepPlan
) -> tuple[np.ndarray, np.ndarray]:
    """Draw for rows of all kinds, with adjustments."""
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


@functools.cache
def _block_size(vocabulary: int) -> int | None:
    """Return a divisor of the vocabulary near its square root, or None if no divisor is useful or a single sum is as fast."""
    if vocabulary <= 1024:
        return None
    candidates = [size for size in range(16, 1025) if vocabulary % size == 0]
    return min(candidates, key=lambda size: abs(size - vocabulary**0.5), default=None)


def inverse_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the token at which the cumulative sum of the weights passes ``uniform * total``, ``[B]``.

    If the vocabulary divides into blocks, the sum has two levels, because block sums are vectorised, while a cumulative sum over the
    whole vocabulary is slower and less exact.
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
    """Draw a token for each row, ``[B]``, from a truncated distribution.

    The ``top_k`` most likely tokens (0 means all) are restricted to the smallest set that has the mass ``top_p``, and then to tokens at
    least ``min_p`` times as likely as the most likely token.
    """
    ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
    running = ordered.softmax(-1).cumsum(-1)
    vocabulary = running.shape[1]
    last = torch.where(top_k_B > 0, top_k_B, vocabulary).clamp(max=vocabulary)[:, None] - 1
    mass = running.gather(1, last)
    # the set ends at the first token where the mass reaches top_p
    nucleus = torch.searchsorted(running, mass * top_p_B[:, None])
    last = torch.minimum(last, torch.where(top_p_B[:, None] < 1, nucleus, vocabulary - 1))
    likely = (ordered >= ordered[:, :1] + min_p_B[:, None].log()).sum(-1, keepdim=True) - 1
    last = torch.minimum(last, likely)
    target = running.gather(1, last) * uniforms_B[:, None].clamp(max=_BELOW_ONE)
    index = torch.minimum(torch.searchsorted(running, target, right=True), last)
    return order.gather(1, index).squeeze(1)


def counter_uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return one float32 number in [0, 1), with 24 random bits, for each (seed, counter).

    Args:
        seeds: ``[B]`` uint64.
        counters: ``[..., B]`` int64, the index of the token within its request.
    """
    state = _mix(seeds * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D))
    state = _mix(state + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class StepPlan:
    """Sampling settings of the rows from ``first`` on. A plan is reused as long as the same sequences are in these rows.

    Args:
        table: settings of the rows.
        running: the sequences by row.
        rows: rows of the plan.
        vocabulary: number of tokens.
        device: device of the logits.

    Attributes:
        numbers: ``[B]``, the numbers of the rows.
        steps: number of tokens sampled by this plan for each row.
        temperature_B1: temperatures, or None if all are 1.
        kinds: indices of the rows by kind of sampling: ``whole`` (any token), ``greedy`` or ``truncated``. None means all rows.
        is_plain_B: True for rows that may return any token and have no adjustment. None means all rows.
        limits: ``top_k``, ``top_p`` and ``min_p`` of the truncated rows.
        begins: sequences whose first token is sampled in the plan's first step.
        adjusted, watched, heard, detailed: rows that have an adjustment, stop strings, an ``on_token`` callback, or ``top_logprobs``.
        until_minimum: ``[B]``, number of the plan's steps after which a row has its ``min_new_tokens`` and may stop.
    """

    def __init__(self, table: RowTable, running: list[Sequence], rows: Rows, vocabulary: int, device: torch.device) -> None:
        self.rows, self.numbers, self.steps = rows, table.numbers[rows], 0
        self._device, self._vocabulary = device, vocabulary
        settings, self._generated = table.settings[rows], table.generated[rows].copy()
        self._seeds = settings["seed"].copy()
        self.temperature_B1: Tensor | None = None
        self.kinds: dict[str, Tensor | None] = {"whole": None}
        self.limits: list[Tensor] = []
        self.is_plain_B: np.ndarray | None = None
        if not settings["is_plain"].all():
            self._read_kinds(settings)
        self.begins = [running[row] for row in self.numbers[self._generated == 0]]
        sequences = [(index, running[self.numbers[index]]) for index in settings["has_extras"].nonzero()[0].tolist()]
        self.adjusted = [(index, s.adjustment) for index, s in sequences if s.adjustment is not None]
        self.watched = [(index, s.stop_strings) for index, s in sequences if s.stop_strings is not None]
        self.heard = [(index, s) for index, s in sequences if s.on_token is not None]
        self.detailed = [(i, s, min(count, vocabulary)) for i, s in sequences if (count := s.request.top_logprobs)]
        if self.adjusted:
            self.is_plain_B = np.ones(len(settings), dtype=bool) if self.is_plain_B is None else self.is_plain_B
            self.is_plain_B[[index for index, _ in self.adjusted]] = False
        self._stop_ids = table.stop_ids[rows].copy()
        self.until_minimum = settings["min_new_tokens"] - self._generated
        self._until_limit = settings["max_new_tokens"] - self._generated
        self._first_minimum, self._last_minimum = int(self.until_minimum.min()), int(self.until_minimum.max())
        self._first_limit = int(self._until_limit.min())
        self._forbidden: Tensor | None = None
        self._forbidden_until = 0
        self._uniforms: list[Tensor] = []
        self._uniforms_end = 0  # the first step that has no number yet

    def _read_kinds(self, settings: np.ndarray) -> None:
        temperatures, is_greedy = settings["temperature"], settings["greedy"]
        if not (temperatures == 1.0).all():
            self.temperature_B1 = torch.as_tensor(temperatures.copy(), device=self._device)[:, None]
        is_truncated = ((settings["top_k"] > 0) | (settings["top_p"] < 1.0) | (settings["min_p"] > 0)) & ~is_greedy
        is_whole = ~(is_greedy | is_truncated)
        self.is_plain_B = None if is_whole.all() else is_whole
        kinds = {"whole": is_whole, "greedy": is_greedy, "truncated": is_truncated}
        self.kinds = {
            kind: None if chosen.all() else torch.as_tensor(chosen.nonzero()[0], device=self._device)
            for kind, chosen in kinds.items()
            if chosen.any()
        }
        limits = (settings[name][is_truncated] for name in ("top_k", "top_p", "min_p"))
        self.limits = [torch.as_tensor(limit, device=self._device) for limit in limits]

    def uniforms(self) -> Tensor:
        """Return the random numbers of this step, ``[B]``; see ``counter_uniforms``."""
        if self.steps >= self._uniforms_end:
            count = _UNIFORMS if self.steps else 1  # many plans last one step
            counters = self._generated + (self.steps + np.arange(count))[:, None]
            self._uniforms = list(torch.as_tensor(counter_uniforms(self._seeds, counters), device=self._device))
            self._uniforms_end = self.steps + count
        return self._uniforms[self.steps - self._uniforms_end]

    def forbidden(self) -> Tensor | None:
        """Return the stop ids of rows below ``min_new_tokens``, as indices into the flat ``[B * V]``, or None if there are none."""
        if self.steps >= self._last_minimum:
            return None
        if self.steps >= self._forbidden_until:
            is_below = self.until_minimum > self.steps
            self._forbidden_until = int(self.until_minimum[is_below].min())
            is_token = (self._stop_ids >= 0) & (self._stop_ids < self._vocabulary) & is_below[:, None]
            places = self._stop_ids + np.arange(len(self.numbers))[:, None] * self._vocabulary
            self._forbidden = torch.as_tensor(places[is_token], device=self._device) if is_token.any() else None
        return self._forbidden

    def ended(self, tokens: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Find the rows that end with their newest token.

        Args:
            tokens: the newest token of each row, ``[B]``, already counted in ``steps``.

        Returns:
            Masks ``[B]`` of the rows that sampled one of their stop ids, and of the rows that reached their limit; None means no row.
        """
        stopped = None
        if self.steps >= self._first_minimum:
            hits = self._stop_ids == tokens[:, None]
            stopped = hits.any(axis=1) & (self.until_minimum <= self.steps) if hits.any() else None
        return stopped, self._until_limit <= self.steps if self.steps >= self._first_limit else None


#: Rows of a prompt's logits that are normalised at a time; the copies of more would take as much memory as the logits again.
_SCORED_ROWS = 16


def score_prompts(group: list[Chunk], logits_TV: Tensor) -> None:
    """Add the log-probabilities of prompt tokens to the sequences of ``group``.

    As for sampled tokens, these come from the temperature-scaled softmax.

    Args:
        group: chunks of the prompts to score.
        logits_TV: logits of the chunks' tokens.
    """
    for chunk, logits in zip(group, logits_TV.split([chunk.length for chunk in group]), strict=True):
        sequence, request = chunk.sequence, chunk.sequence.request
        begin, end = sequence.next_scored or 0, min(chunk.end + 1, sequence.prompt_length)
        scored, targets = logits[begin - 1 - chunk.start : end - 1 - chunk.start], sequence.tokens[begin:end]
        for first in range(0, len(targets), _SCORED_ROWS):
            scores = scored[first : first + _SCORED_ROWS].float() / request.gconfig.effective_temperature
            logprobs_TV = scores.log_softmax(-1)
            ids_T = torch.tensor(targets[first : first + _SCORED_ROWS], dtype=torch.int64, device=logits.device)
            values = logprobs_TV.gather(1, ids_T[:, None]).squeeze(1).tolist()
            count = min(request.top_logprobs or 0, logits.shape[1])
            sequence.prompt_logprobs += [
                (value, most_likely(row, count)) for value, row in zip(values, logprobs_TV, strict=True)
            ]


def most_likely(logprobs_V: Tensor, count: int) -> TopTokens:
    """Return the ``count`` most likely tokens and their log-probabilities."""
    values, tokens = logprobs_V.topk(count)
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
