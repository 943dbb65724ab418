"""Whether this machine computes a row alike whatever is computed beside it: what ``batch_invariant`` relies on.

Nothing promises it: a library may multiply matrices of other sizes in another order. So an engine looks when it starts, with its own
weights, threads and limits, at one layer and a part of the vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import torch
import torch.nn.functional as F
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.batch import Sequence
from rollwright.inference.backends.builtin.cache import INVARIANT_ROWS, in_blocks
from rollwright.inference.backends.builtin.model import LlamaFamily, ModelRunner
from rollwright.inference.backends.builtin.step import Finished, Stepper
from rollwright.inference.request import ModelRequest
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

_OPERATIONS = 2e10  # most multiplications that the check of each matrix takes: half a second on two cores
_VOCABULARY = 1024
_PROMPTS = (3, 16, 41, 100, 230, 450)  # tokens
_NEW_TOKENS = 4
_BESIDE = 21  # other requests


def invariant_runner(
    model: torch.nn.Module, limits: tuple[int, int | None, int], prefill_tokens: int, threads: int
) -> ModelRunner:
    """A runner whose rows do not depend on each other: in blocks of fixed shape, or, where that is not enough, for one row.

    Args:
        model: to be computed.
        limits: of ``ModelRunner``: most rows, context length, bytes of the cache.
        prefill_tokens: most in one step.
        threads: that will compute.
    """
    most_rows, context_length, cache_bytes = limits
    runner, own_threads = ModelRunner(model, *limits, invariant=True), torch.get_num_threads()
    reason = runner.why_not_invariant
    if reason is None:
        torch.set_num_threads(threads)
        try:
            reason = first_difference(runner, most_rows, prefill_tokens)
        finally:
            torch.set_num_threads(own_threads)
    if reason is None:
        return runner
    logger.warning(
        "batch_invariant: requests are computed one at a time, with %d threads, as %s. Each is then answered alike whatever else is "
        "asked, and sampling is slower: leave deterministic (batch_invariant) off where that matters more.",
        threads,
        reason,
    )
    return ModelRunner(model, 1, context_length, cache_bytes)


@torch.inference_mode()
def first_difference(runner: ModelRunner, most_rows: int, most_tokens: int) -> str | None:
    """What depends on what is computed beside it, in words; None: nothing was found.

    Args:
        runner: computes in whole blocks.
        most_rows, most_tokens: of a decode step, and of prompts in one step.
    """
    for name, weight, bias in runner.forward.matrices() if isinstance(runner.forward, LlamaFamily) else []:
        most = most_rows if name == "the head" else max(most_rows, most_tokens)
        if (count := _differing_rows(weight, bias, in_blocks(most, INVARIANT_ROWS))) is not None:
            size = " × ".join(map(str, weight.shape))
            return f"{name} ({size}) gives a row other bits among {count} rows than among {INVARIANT_ROWS}"
    return _differing_request(runner, most_rows)


def _differing_rows(weight: Tensor, bias: Tensor | None, most: int) -> int | None:
    """A number of rows, up to ``most``, among which some row is other than in a block by itself."""
    block, generator = INVARIANT_ROWS, torch.Generator().manual_seed(0)
    counts = [2 * block, most, 3 * block, 5 * block, 7 * block, 4 * block, *(block * n for n in (9, 13, 16, 17, 33, 64, 128))]
    counts = [count for count in dict.fromkeys(counts) if block < count <= most]
    inputs = torch.randn(max(counts, default=0), weight.shape[1], generator=generator)
    operations = 0
    for count in counts:
        operations += 2 * count * weight.numel()
        if operations > _OPERATIONS and count != counts[0]:
            continue
        rows = F.linear(inputs[:count], weight, bias)
        for first in {0, count // block // 2 * block, count - block}:
            alone = F.linear(inputs[first : first + block].clone(), weight, bias)
            if not torch.equal(rows[first : first + block], alone):
                return count
    return None


def _differing_request(runner: ModelRunner, most_rows: int) -> str | None:
    """The request that is answered otherwise among others than alone."""
    limit, drawn = runner.context_length - _NEW_TOKENS, random.Random(0)
    if isinstance(runner.forward, LlamaFamily):
        tokens: SequenceOf[int] = range(min(runner.vocabulary, _VOCABULARY))
        runner = runner.shallow(len(tokens))
    else:
        tokens = runner.forward.ordinary_tokens()
    prompts = [drawn.choices(tokens, k=length) for length in _PROMPTS if length <= limit]
    longest = max(map(len, prompts), default=0) + _NEW_TOKENS + 40

    def answers(prompts: list[list[int]], rows: int, budget: int, kept_bytes: int = 0) -> list[tuple[list[int], list[float]]]:
        stepper = Stepper(runner.with_cache_for(rows, min(longest, runner.context_length)), rows, kept_bytes, budget, 0)
        return [_answers(stepper, [prompt])[0] for prompt in prompts] if rows == 1 else _answers(stepper, prompts)

    alone = answers(prompts, 1, longest)
    others = [drawn.choices(tokens, k=drawn.randint(1, min(60, limit))) for _ in range(_BESIDE)]
    mixed = [*others, *prompts, *others]
    everything = sum(map(len, mixed))
    for rows, budget in ((7, 3 * INVARIANT_ROWS + 5), (len(mixed), everything)):  # prompts in parts, and all together
        rows = min(most_rows, rows)
        among = answers(mixed, rows, longest if runner.prompts_alone else budget)[len(others) : len(others) + len(prompts)]
        for prompt, answer, expected in zip(prompts, among, alone, strict=True):
            if answer != expected:
                return (
                    f"a request with a prompt of {len(prompt)} tokens is answered with other bits among {rows} rows than alone"
                )
    return None


def _answers(stepper: Stepper, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of a completion of each."""
    gconfig = GenerationHyperparameters(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    sequences = [Sequence(ModelRequest(p, gconfig), list(p), len(p), len(p) + _NEW_TOKENS, seed=sum(p)) for p in prompts]
    stepper.scheduler.waiting.extend(sequences)
    finished = list[Finished]()
    while stepper.has_work:
        stepper.step(finished)
    return [(sequence.tokens[sequence.prompt_length :], sequence.logprobs) for sequence in sequences]
