"""Check that a row's result on this machine does not depend on the rest of the batch, as ``batch_invariant`` requires.

Libraries do not guarantee this: the order of summation may depend on matrix sizes. So the engine measures it at startup, with its own
weights and threads: how many rows each matrix of a layer can be multiplied with at once, and whether whole requests then get identical
answers, with one layer and part of the vocabulary. If not, it computes one request at a time and checks again; if that fails too, it
raises. The outcome does not depend on ``max_running_requests``, so changing that setting does not change results.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin.batch import Sequence
from rollwright.inference.backends.builtin.cache import INVARIANT_ROWS, Shapes
from rollwright.inference.backends.builtin.model import LlamaFamily, Matrix, ModelRunner
from rollwright.inference.backends.builtin.step import Finished, Stepper
from rollwright.inference.request import ModelRequest, TopTokens
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

_MOST_ROWS = 256  # at once: more gain nothing, and each number of rows up to it is tried
_OPERATIONS = 5e10  # of the trial of a matrix, after which fewer rows have to do: half a second on two cores
_VOCABULARY = 1024
_PROMPTS = (3, 16, 30, 62, 100, 230, 450)  # tokens; some answers cross a block of keys
_NEW_TOKENS = 4
_BESIDE = 21  # other requests
_NO_LIMIT = 1 << 40


def invariant_runner(
    model: torch.nn.Module, limits: tuple[int, int | None, int], prefill_tokens: int, threads: int
) -> ModelRunner:
    """Build a runner whose rows are independent: in blocks of fixed shape or, if that is not enough, one at a time.

    Args:
        model: the model to run.
        limits: arguments of ``ModelRunner``: most rows, context length, bytes of the cache.
        prefill_tokens: most prompt tokens per step.
        threads: number of compute threads.

    Raises:
        EngineError: results on this machine vary even if requests are computed one at a time.
    """
    reason = why_not_in_blocks(model)
    runner = ModelRunner(model, *limits, shapes=Shapes.FREE if reason else Shapes.BLOCKS)
    known = _tried.setdefault(model, {})
    setting = threads, prefill_tokens, runner.context_length, runner.device, model.dtype
    if setting not in known:
        own_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            known[setting] = _try(runner, limits, prefill_tokens, reason)
        finally:
            torch.set_num_threads(own_threads)
    found = known[setting]
    if found.reason is None:
        if isinstance(runner.forward, LlamaFamily):
            runner.forward.most_rows.update(found.most_rows)
        return runner
    if found.differs_alone is not None:
        raise EngineError(
            f"batch_invariant (deterministic) is not possible on this machine with {threads} threads: {found.reason}. Even one "
            f"request at a time, {found.differs_alone}. Use one thread (OMP_NUM_THREADS=1), or turn it off."
        )
    logger.warning(
        "batch_invariant: requests are computed one at a time, with %d threads, as %s. Each is then answered alike whatever else is "
        "asked, and sampling is slower: leave deterministic (batch_invariant) off where that matters more.",
        threads,
        found.reason,
    )
    del runner  # and its cache
    return ModelRunner(model, *limits, shapes=Shapes.ONE_ROW)


@dataclass(frozen=True)
class _Found:
    """Result of the check for one model.

    Attributes:
        reason: why blocks of fixed shape are not enough; None if they are.
        most_rows: most rows that each matrix is multiplied with at once.
        differs_alone: what differs when requests are computed one at a time; None if nothing does or it was not tried.
    """

    reason: str | None
    most_rows: dict[str, int] = field(default_factory=dict)
    differs_alone: str | None = None


#: Results by model and setting, so that repeated engine starts check once.
_tried: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], _Found]] = weakref.WeakKeyDictionary()


def _try(runner: ModelRunner, limits: tuple[int, int | None, int], prefill_tokens: int, reason: str | None) -> _Found:
    reason = reason or cut_products(runner) or differing_request(runner, prefill_tokens)
    if reason is None:
        return _Found(None, dict(runner.forward.most_rows) if isinstance(runner.forward, LlamaFamily) else {})
    alone = ModelRunner(runner.model, *limits, shapes=Shapes.ONE_ROW)
    return _Found(reason, differs_alone=differing_request(alone, prefill_tokens))


def why_not_in_blocks(model: torch.nn.Module) -> str | None:
    """Why this model cannot be sampled in blocks of fixed shape; None if it may be possible."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        kind = str(parameter.dtype).removeprefix("torch.")
        return (
            f"{kind} on {parameter.device.type} is multiplied in an order that depends on the batch (float32 on a CPU is not)"
        )
    return None


@torch.inference_mode()
def cut_products(runner: ModelRunner) -> str | None:
    """Have each matrix multiplied with as many rows at once as give each row the bits that it has in a block by itself.

    Args:
        runner: computes in whole blocks.

    Returns:
        The matrix that gives a row other bits in any way, in words; None: there is none.
    """
    if not isinstance(runner.forward, LlamaFamily):
        return None
    most, cut = _MOST_ROWS, list[str]()
    for matrix in runner.forward.matrices():
        size = " × ".join(map(str, matrix.weight.shape))
        if not (count := _alike_up_to(matrix, most)):
            return f"{matrix.name} ({size}) gives a row other bits at another place among {INVARIANT_ROWS}"
        runner.forward.most_rows[matrix.name] = count
        if count < most:
            cut.append(f"{matrix.name} ({size}): {count}")
    if cut:
        logger.info("batch_invariant: fewer rows are computed at once, so that each keeps its bits: %s", "; ".join(cut))
    return None


def _alike_up_to(matrix: Matrix, most: int) -> int:
    """The most rows, in whole blocks, up to which every number of them gives each row the same bits; 0: one block does not."""
    block, generator = INVARIANT_ROWS, torch.Generator().manual_seed(0)
    inputs = torch.randn(most, matrix.weight.shape[1], generator=generator)
    alone = torch.cat([matrix.product(rows) for rows in inputs.split(block)])
    if not torch.equal(matrix.product(inputs[:block].flip(0)).flip(0), alone[:block]):
        return 0
    operations = 0
    for count in range(2 * block, most + 1, block):
        operations += 2 * count * matrix.weight.numel()
        if operations > _OPERATIONS or not torch.equal(matrix.product(inputs[:count]), alone[:count]):
            return count - block
    return most


@torch.inference_mode()
def differing_request(runner: ModelRunner, prefill_tokens: int) -> str | None:
    """Describe a request whose answer depends on the other requests; None if there is none.

    Each request is run alone; again in another order; with others, in parts and all together; and, if keys and values are kept,
    after a cached prefix and as a second turn.

    Args:
        runner: the runner to check.
        prefill_tokens: chunk size of prompts that are computed by themselves.
    """
    limit, drawn = runner.context_length - _NEW_TOKENS, random.Random(0)
    if isinstance(runner.forward, LlamaFamily):
        tokens: SequenceOf[int] = range(min(runner.vocabulary, _VOCABULARY))
        runner = runner.shallow(len(tokens))
    else:
        tokens = runner.forward.ordinary_tokens()
    requests = _requests([drawn.choices(tokens, k=length) for length in _PROMPTS if length <= limit])
    if not requests:
        return None  # a context of a few tokens, all in one block
    beside = _requests([drawn.choices(tokens, k=drawn.randint(1, min(60, limit))) for _ in range(_BESIDE)])
    longest = min(max(len(request.input_ids) for request in requests) + 2 * _NEW_TOKENS, runner.context_length)

    def answers(groups: list[list[ModelRequest]], rows: int = 1, budget: int = longest, keeps: bool = False) -> list[_Answer]:
        """Answers of all groups, run one group after the other."""
        apart = runner.with_cache_for(min(rows, runner.most_rows, max(map(len, groups))), longest)
        kept_bytes = _NO_LIMIT if keeps and not runner.prompts_alone else 0
        stepper = Stepper(apart, apart.cache.max_rows, kept_bytes, prefill_tokens if runner.prompts_alone else budget, 0)
        return [answer for group in groups for answer in _answers(stepper, group, longest)]

    def first_difference(found: list[_Answer], expected: list[_Answer], how: str) -> str | None:
        pairs = zip(requests, found, expected, strict=True)
        different = next((request for request, one, other in pairs if one != other), None)
        return different and f"a request with a prompt of {len(different.input_ids)} tokens gets different bits {how}"

    count, alone = len(requests), answers([[request] for request in requests])
    others = beside if runner.most_rows > 1 else beside[:3]
    mixed = [*others, *requests, *others]
    everything = sum(len(request.input_ids) for request in mixed)
    for rows, budget in ((7, 3 * INVARIANT_ROWS + 5), (_NO_LIMIT, everything)):  # prompts in parts, and all together
        among = answers([mixed], rows, budget)[len(others) : len(others) + count]
        if differs := first_difference(among, alone, f"among {len(mixed)} requests than alone"):
            return differs
    again = answers([[request] for request in reversed(requests)])[::-1]
    if differs := first_difference(again, alone, "when it is asked again, after others,"):
        return differs
    beginnings = [replace(request, input_ids=request.input_ids[: -(-len(request.input_ids) // 2)]) for request in requests]
    after = answers([beginnings, requests], _NO_LIMIT, everything, keeps=True)[count:]
    if differs := first_difference(after, alone, "after its beginning was computed"):
        return differs
    turns = [  # the next prompt contains the answer
        replace(request, input_ids=[*request.input_ids, *answer[0], tokens[-1]][: runner.context_length - _NEW_TOKENS])
        for request, answer in zip(requests, alone, strict=True)
    ]
    expected = answers([[request] for request in turns])
    found = answers([requests, [*turns, *others[:9]]], _NO_LIMIT, everything, keeps=True)[count : 2 * count]
    return first_difference(found, expected, "as a second turn than by itself")


#: Tokens, their log-probabilities, and those of the prompt.
_Answer = tuple[list[int], list[float], list[tuple[float, TopTokens]]]


def _requests(prompts: list[list[int]]) -> list[ModelRequest]:
    """A request for each prompt, cycling through the sampling modes; the fifth repeats the fourth with another seed."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"greedy": True}, {"min_p": 0.05}]
    made = list[ModelRequest]()
    for number, prompt in enumerate(prompts):
        gconfig = GenerationHyperparameters(max_new_tokens=_NEW_TOKENS, ignore_eos=True, **ways[number % len(ways)])
        prompt = made[-1].input_ids if number % 5 == 4 and number > 5 else prompt
        made.append(ModelRequest(prompt, gconfig, seed=number, prompt_logprobs_from=1 if number % 6 == 2 else None))
    return made


def _answers(stepper: Stepper, requests: list[ModelRequest], longest: int) -> list[_Answer]:
    """Answers to requests that run together; none has more than ``longest`` tokens."""
    sequences = list[Sequence]()
    for request in requests:
        tokens, gconfig = list(request.input_ids), request.gconfig
        length_limit = min(len(tokens) + gconfig.max_new_tokens, longest)
        sequences.append(Sequence(request, tokens, len(tokens), length_limit, seed=request.seed or 0))
    stepper.scheduler.waiting.extend(sequences)
    finished = list[Finished]()
    while stepper.has_work:
        stepper.step(finished)
    return [(s.tokens[s.prompt_length :], s.logprobs, s.prompt_logprobs) for s in sequences]
