"""Drawing tokens: temperature, top-k, top-p, frequency penalty, and log-probabilities before all but the temperature.

Each token takes one uniform number, a function of (request seed, index of the token) alone: what a request draws depends
on its own distribution, never on which requests share the batch.

Axes: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from rollwright.inference.backends.builtin.row_table import RowTable

_BELOW_ONE = 1.0 - 2.0**-23  # keeps a target below the total, whatever the rounding


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


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


def truncated_inverse_cdf(scores_BV: Tensor, uniforms_B: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Draw from the ``top_k`` most likely tokens (0: all), then from the smallest set of these with mass ``top_p``, ``[B]``."""
    ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
    running = ordered.softmax(-1).cumsum(-1)
    vocabulary = running.shape[1]
    last = torch.where(top_k_B > 0, top_k_B, vocabulary).clamp(max=vocabulary)[:, None] - 1
    mass = running.gather(1, last)
    # the set ends with the first token at which the mass reaches top_p
    nucleus = torch.searchsorted(running, mass * top_p_B[:, None])
    last = torch.minimum(last, torch.where(top_p_B[:, None] < 1, nucleus, vocabulary - 1))
    target = running.gather(1, last) * uniforms_B[:, None].clamp(max=_BELOW_ONE)
    index = torch.minimum(torch.searchsorted(running, target, right=True), last)
    return order.gather(1, index).squeeze(1)


class Sampler:
    """Samples rows of the row table.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def sample(
        self, logits_BV: Tensor, table: RowTable, first: int, last: int, history: dict[int, Tensor]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw one token for each of rows ``first .. last-1``.

        Args:
            logits_BV: of these rows; may be overwritten.
            history: output tokens so far of the rows that have a frequency penalty, by row.

        Returns:
            Tokens ``[B]`` int64, and their log-probabilities ``[B]`` float32 under the temperature-scaled softmax.
        """
        scores_BV = logits_BV.float()
        temperature = table.temperature[first:last]
        if (temperature != 1.0).any():
            scores_BV = scores_BV / self._tensor(temperature)[:, None]
        greedy = table.greedy[first:last]
        generated = table.generated[first:last]
        adjusted = (table.frequency_penalty[first:last] != 0) | (generated < table.min_new_tokens[first:last])
        whole = (table.top_k[first:last] == 0) & (table.top_p[first:last] >= 1.0)
        uniforms_B = counter_uniforms(table.seed[first:last], generated)

        if whole.all() and not greedy.any():
            probs_BV = scores_BV.softmax(-1)
            weights_BV = probs_BV
            if adjusted.any():
                weights_BV = self._adjusted(scores_BV, table, first, adjusted, history).softmax(-1)
            tokens = inverse_cdf(weights_BV, self._tensor(uniforms_B))
            logprobs = probs_BV.gather(1, tokens[:, None]).squeeze(1).log_()
            return tokens.cpu().numpy(), logprobs.cpu().numpy()

        logprobs_BV = scores_BV.log_softmax(-1)
        if adjusted.any():
            scores_BV = self._adjusted(scores_BV, table, first, adjusted, history)
        tokens = torch.empty(len(greedy), dtype=torch.int64, device=self._device)
        drawn = whole & ~greedy
        if drawn.any():
            index = self._tensor(drawn.nonzero()[0])
            tokens[index] = inverse_cdf(scores_BV[index].softmax(-1), self._tensor(uniforms_B[drawn]))
        if greedy.any():
            index = self._tensor(greedy.nonzero()[0])
            tokens[index] = scores_BV[index].argmax(-1)
        truncated = ~whole & ~greedy
        if truncated.any():
            index = self._tensor(truncated.nonzero()[0])
            tokens[index] = truncated_inverse_cdf(
                scores_BV[index],
                self._tensor(uniforms_B[truncated]),
                self._tensor(table.top_k[first:last][truncated]),
                self._tensor(table.top_p[first:last][truncated]),
            )
        logprobs = logprobs_BV.gather(1, tokens[:, None]).squeeze(1)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _adjusted(
        self, scores_BV: Tensor, table: RowTable, first: int, adjusted: np.ndarray, history: dict[int, Tensor]
    ) -> Tensor:
        """A copy of the scores, the frequency penalty taken off and, below ``min_new_tokens``, without stop ids."""
        scores_BV, vocabulary = scores_BV.clone(), scores_BV.shape[1]
        rows = first + adjusted.nonzero()[0]
        for row in rows[table.frequency_penalty[rows] != 0].tolist():
            if row in history:
                counts = torch.bincount(history[row].to(self._device), minlength=vocabulary)
                scores_BV[row - first] -= counts * float(table.frequency_penalty[row] / table.temperature[row])
        short = rows[table.generated[rows] < table.min_new_tokens[rows]]
        stop_ids = table.stop_ids[short]
        place, column = ((stop_ids >= 0) & (stop_ids < vocabulary)).nonzero()
        scores_BV[self._tensor(short[place] - first), self._tensor(stop_ids[place, column])] = float("-inf")
        return scores_BV
