"""Batch invariance: a request gets the same bits whether it runs alone or among others (``batch_invariant``).

``InvariantPrefill`` computes prompts in shapes of whole blocks, as decoding does. In float32 on CPU a query's bits then depend neither on
what is computed beside it, nor on how its prompt is cut into chunks, nor on the number of masked columns after it.

Libraries do not guarantee this, because the order of summation may depend on matrix sizes. So the engine runs a check at startup, with
its own weights and threads. It finds out how many rows each matrix of a layer can be multiplied with at once, and how many queries the
keys and values, whether masked columns change a sum, and whether whole requests then get identical answers with one layer and part of the
vocabulary. If something differs with several threads, the engine checks whether it can use one. If that differs, too, it computes one
request at a time and repeats the check; if that fails, it raises an error. The outcome does not depend on ``max_running_requests``,
so changing that setting does not change results.

Axes: ``T`` packed tokens, ``n`` rows, ``Q`` queries of a row, ``K`` cache columns, ``H`` heads, ``G`` key-value heads, ``D`` head size.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.attention_masks import sees
from rollwright.inference.backends.builtin.batch import Chunk, ForwardBatch, Sequence
from rollwright.inference.backends.builtin.kv_cache import INVARIANT_ROWS, KEY_BLOCK, Shapes, in_blocks
from rollwright.inference.backends.builtin.low_rank import LowRank
from rollwright.inference.backends.builtin.model import SUMMED, LlamaFamily, Matrix, ModelRunner, weighted_sum
from rollwright.inference.backends.builtin.scheduler import Stepper, answer
from rollwright.inference.compute_threads import compute_threads
from rollwright.inference.model_facts import ordinary_tokens
from rollwright.inference.request import ModelRequest, TopTokens
from rollwright.tracking.logging import getLogger

logger = getLogger(__name__)

_MOST_ROWS = 256  # multiplied at once: more rows gain nothing, and every number of blocks up to this is tried
_OPERATIONS = 5e10  # limit for the check of a matrix, about half a second on two cores; rows not checked by then are not used
_VOCABULARY = 1024
_PROMPTS = (3, 16, 30, 62, 100, 230, 450)  # lengths in tokens; some answers cross the border between blocks of keys
_NEW_TOKENS = 4
_BESIDE = 21  # other requests in the batch
_NO_LIMIT = 1 << 40
_QUERIES_AT_ONCE = 256  # limited because the scores of these queries for all columns are in memory together

#: Name of the products of queries and keys, and of weights and values, in messages and limits.
ATTENTION = "attention to a prompt"


def invariant_runner(
    model: torch.nn.Module,
    limits: tuple[int, int | None, int],
    prefill_tokens: int,
    threads: int,
    records_experts: bool = False,
) -> tuple[ModelRunner, int]:
    """Build a runner that computes rows independently: in blocks of fixed shape or, if that is not enough, one row at a time.

    Blocks on one thread come before single rows on several: with 16 requests they were seven times as fast.

    Args:
        model: the model to run.
        limits: arguments ``max_rows``, ``context_length`` and ``cache_bytes`` of ``ModelRunner``.
        prefill_tokens: maximum number of prompt tokens per step.
        threads: number of compute threads.
        records_experts: argument of ``ModelRunner``.

    Returns:
        The runner, and the number of threads to use: ``threads``, or 1 if blocks are enough only then.

    Raises:
        EngineError: results on this machine vary even if requests are computed one at a time.
    """
    reason, parameter = None, next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        kind = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}"
        reason = f"{kind} is multiplied in an order that depends on the batch (float32 on a CPU is not)"
    for count in () if reason else dict.fromkeys((threads, 1)):
        runner = ModelRunner(model, *limits, Shapes.BLOCKS, InvariantPrefill, records_experts)
        found = _known(runner, prefill_tokens, count)
        if found.reason is None:
            if isinstance(runner.forward, LlamaFamily):
                _limit(runner, found.most_rows)
            runner.forward.stacks.limit = _AdapterLimits(count)
            if reason is not None:
                logger.warning("batch_invariant: this engine computes with one thread, as with %d threads %s.", threads, reason)
            return runner, count
        reason = reason or found.reason
        del runner  # and its cache
    runner = ModelRunner(model, *limits, shapes=Shapes.ONE_ROW, records_experts=records_experts)
    if (differs := _known(runner, prefill_tokens, threads).reason) is not None:
        raise EngineError(
            f"batch_invariant (deterministic) is not possible on this machine with {threads} threads: {reason}. Even one "
            f"request at a time, {differs}. Use one thread (OMP_NUM_THREADS=1), or turn it off."
        )
    logger.warning(
        "batch_invariant: requests are computed one at a time, with %d threads, as %s. Each is then answered alike whatever else is "
        "asked, and sampling is slower: leave deterministic (batch_invariant) off where that matters more.",
        threads,
        reason,
    )
    return runner, threads


@dataclass(frozen=True)
class _CheckResult:
    """Result of the check of a runner.

    Attributes:
        reason: what differs, or None if nothing does.
        most_rows: maximum number of rows that each matrix is multiplied with at once, and of those of ``ATTENTION``.
    """

    reason: str | None
    most_rows: dict[str, int] = field(default_factory=dict)


#: Results by model and setting, so that only the first engine with a setting runs the check.
_results: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], _CheckResult]] = weakref.WeakKeyDictionary()


def _known(runner: ModelRunner, prefill_tokens: int, threads: int) -> _CheckResult:
    """Return the result of the check with this number of threads."""
    model, known = runner.model, _results.setdefault(runner.model, {})
    setting = runner.cache.shapes, threads, prefill_tokens, runner.context_length, runner.device, model.dtype
    if setting not in known:
        with compute_threads(threads):
            known[setting] = _check(runner, prefill_tokens)
    return known[setting]


def _check(runner: ModelRunner, prefill_tokens: int) -> _CheckResult:
    most_rows, reason = dict[str, int](), None
    if runner.cache.invariant and isinstance(runner.forward, LlamaFamily):
        most_rows, reason = alike_rows(runner.forward)
        reason = reason or differing_sum(runner.forward)
        if reason is None:
            _limit(runner, most_rows)
    return _CheckResult(reason or differing_request(runner, prefill_tokens), most_rows)


def _limit(runner: ModelRunner, most_rows: dict[str, int]) -> None:
    """Compute at most this many rows at once."""
    assert isinstance(runner.forward, LlamaFamily)
    runner.forward.most_rows.update({name: most for name, most in most_rows.items() if name != ATTENTION})
    runner.invariant_attention = functools.partial(InvariantPrefill, most_rows=most_rows[ATTENTION])


@torch.inference_mode()
def alike_rows(forward: LlamaFamily) -> tuple[dict[str, int], str | None]:
    """Find out with how many rows at once each matrix gives a row the same bits as in a single block.

    Returns:
        The numbers by name, at most 256 each, and a description of a product for which no number helps, or None.
    """
    most_rows, cut = dict[str, int](), list[str]()
    for name, size, count in _counts(forward):
        if not count:
            return most_rows, f"{name} ({size}) gives a row other bits at another place among {INVARIANT_ROWS}"
        most_rows[name] = count
        if count < _MOST_ROWS:
            cut.append(f"{name} ({size}): {count}")
    if cut:
        logger.info("batch_invariant: fewer rows are computed at once, so that each keeps its bits: %s", "; ".join(cut))
    return most_rows, None


def _counts(forward: LlamaFamily) -> Iterator[tuple[str, str, int]]:
    """Yield the name of each product, the size of what rows are multiplied with, and the result of ``_alike_up_to``."""
    for matrix in forward.matrices():
        yield matrix.name, " × ".join(map(str, matrix.weight.shape)), _alike_up_to(matrix.product, *matrix.weight.shape)
    size, generator = forward.layer_shapes[0].key_size, torch.Generator().manual_seed(1)
    cached = torch.randn(2, SUMMED, size, generator=generator)
    counts = list[int]()
    for length in range(KEY_BLOCK, SUMMED + 1, KEY_BLOCK):
        part = cached[:, :length]
        for factor in (part.transpose(1, 2), part):
            counts.append(_alike_up_to(functools.partial(_batched, factor), factor.shape[2], factor.shape[1]))
    yield ATTENTION, f"{KEY_BLOCK} to {SUMMED} keys of {size}", min(counts)


def _batched(factor: Tensor, rows: Tensor) -> Tensor:
    """Multiply rows with each of two matrices, as attention does, and return both products side by side."""
    return torch.cat(list(torch.bmm(rows.expand(2, -1, -1), factor)), 1)


def _alike_up_to(product: Callable[[Tensor], Tensor], outputs: int, inputs: int) -> int:
    """Return the largest number of rows at which each row gets the same bits as in a single block, or 0 if a single block fails."""
    block, generator = INVARIANT_ROWS, torch.Generator().manual_seed(0)
    rows = torch.randn(_MOST_ROWS, inputs, generator=generator)
    alone = torch.cat([product(part) for part in rows.split(block)])
    if not torch.equal(product(rows[:block].flip(0)).flip(0), alone[:block]):
        return 0
    operations = 0
    for count in range(2 * block, _MOST_ROWS + 1, block):
        operations += 2 * count * outputs * inputs
        if operations > _OPERATIONS or not torch.equal(product(rows[:count]), alone[:count]):
            return count - block
    return _MOST_ROWS


@torch.inference_mode()
def differing_sum(forward: LlamaFamily) -> str | None:
    """Describe a sum over the columns of the cache whose bits depend on the number of masked columns after it, or return None."""
    size, generator = forward.layer_shapes[0].value_size, torch.Generator().manual_seed(2)
    for queries in (forward.queries_of_key, INVARIANT_ROWS):  # of a token that is decoded, and of a prompt
        weights = torch.rand(2, queries, SUMMED, generator=generator)
        values = torch.randn(2, SUMMED, size, generator=generator)
        for seen in range(KEY_BLOCK, SUMMED, KEY_BLOCK):
            masked = weights.index_fill(2, torch.arange(seen, SUMMED), 0.0)
            expected = torch.bmm(masked[:, :, :seen], values[:, :seen])
            for length in range(seen + KEY_BLOCK, SUMMED + 1, KEY_BLOCK):
                if not torch.equal(torch.bmm(masked[:, :, :length], values[:, :length]), expected):
                    return f"{queries} queries get other bits from {seen} keys of {size} if {length - seen} masked ones follow"
    return None


class _AdapterLimits:
    """Limits how the matrices of an adapter are multiplied, as ``alike_rows`` does for those of the model.

    An ``A`` has few outputs, so several threads may divide its rows among themselves and round them differently. It then gets one thread.

    Args:
        threads: number of compute threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: dict[tuple[int, ...], tuple[int, int | None]] = {}

    @torch.inference_mode()
    def __call__(self, product: LowRank) -> None:
        """Set the number of rows and of threads of a product.

        Raises:
            WeightUpdateError: a row gets other bits at another place among 16, even with one thread.
        """
        matrices = [Matrix("A", product.a), *(Matrix("B", part.b_t.t(), is_added=True) for part in product.parts)]
        shape = tuple(size for matrix in matrices for size in matrix.weight.shape)
        if shape not in self._known:
            for threads in dict.fromkeys((self._threads, 1)):
                with compute_threads(threads):
                    most = min(_alike_up_to(matrix.product, *matrix.weight.shape) for matrix in matrices)
                if most:
                    break
            self._known[shape] = most, None if threads == self._threads else threads
        product.most, product.threads = self._known[shape]
        if not product.most:
            raise WeightUpdateError(
                f"batch_invariant (deterministic): matrices of the adapter's sizes {shape} give a row other bits beside other rows on "
                "this machine. Choose another rank (actor.lora.rank), or turn deterministic off."
            )


@torch.inference_mode()
def differing_request(runner: ModelRunner, prefill_tokens: int) -> str | None:
    """Describe a request whose answer depends on the other requests, or return None if there is none.

    Each request is run alone, in another order, and among others, with prompts in parts and all together. Each request is also run after
    its own prefix, and as a second turn; if the runner reuses keys and values, they then come from the cache.

    Args:
        runner: the runner to check.
        prefill_tokens: chunk size for prompts if each is computed by itself.
    """
    limit, drawn = runner.context_length - _NEW_TOKENS, random.Random(0)
    if isinstance(runner.forward, LlamaFamily):
        tokens: SequenceOf[int] = range(min(runner.vocabulary, _VOCABULARY))
        runner = runner.shallow(len(tokens))
    else:
        tokens = ordinary_tokens(runner.model.config)
    requests = _requests([drawn.choices(tokens, k=length) for length in _PROMPTS if length <= limit])
    if not requests:
        return None  # a context of a few tokens, all in one block
    beside = _requests([drawn.choices(tokens, k=drawn.randint(1, min(60, limit))) for _ in range(_BESIDE)])
    longest = min(max(len(request.input_ids) for request in requests) + 2 * _NEW_TOKENS, runner.context_length)

    def answers(groups: list[list[ModelRequest]], rows: int = 1, budget: int = longest, keeps: bool = False) -> list[_Answer]:
        """Run one group after the other and return the answers of all."""
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


#: Output tokens, their log-probabilities, and the scores of the prompt tokens.
_Answer = tuple[list[int], list[float], list[tuple[float, TopTokens]]]


def _requests(prompts: list[list[int]]) -> list[ModelRequest]:
    """Return a request per prompt, cycling through the sampling modes. Some requests repeat the previous prompt with another seed."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"greedy": True}, {"min_p": 0.05}]
    made = list[ModelRequest]()
    for number, prompt in enumerate(prompts):
        gconfig = GenerationHyperparameters(max_new_tokens=_NEW_TOKENS, ignore_eos=True, **ways[number % len(ways)])
        prompt = made[-1].input_ids if number % 5 == 4 and number > 5 else prompt
        made.append(ModelRequest(prompt, gconfig, seed=number, prompt_logprobs_from=1 if number % 6 == 2 else None))
    return made


def _answers(stepper: Stepper, requests: list[ModelRequest], longest: int) -> list[_Answer]:
    """Run requests together and return their answers; each sequence has at most ``longest`` tokens."""
    sequences = list[Sequence]()
    for request in requests:
        tokens, gconfig = list(request.input_ids), request.gconfig
        length_limit = min(len(tokens) + gconfig.max_new_tokens, longest)
        sequences.append(Sequence(request, tokens, len(tokens), length_limit, seed=request.seed or 0))
    answer(stepper, sequences)
    return [(s.tokens[s.prompt_length :], s.logprobs, s.prompt_logprobs) for s in sequences]


@dataclass
class _Queries:
    """Queries ``begin .. end - 1`` of a prompt, starting at the packed token ``first``."""

    chunk: Chunk
    row: int
    first: int
    begin: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def shape(self) -> tuple[int, int]:
        """Number of computed queries and columns."""
        return in_blocks(self.count, INVARIANT_ROWS), in_blocks(self.end, KEY_BLOCK)


@dataclass
class _Block:
    """Queries of one prompt, or of several prompts in neighbouring rows, that are computed together.

    Attributes:
        rows: rows of the cache.
        tokens: range of the packed tokens.
        places: ``[tokens]``, indices of these tokens among the ``n * Q`` padded queries, or None if there is no padding.
        hidden: ``[n, 1, Q, 1, K]``, the columns that a query must not see.
    """

    rows: slice
    tokens: slice
    places: Tensor | None
    hidden: Tensor


class InvariantPrefill:
    """Causal attention of the prompts in a batch, computed in whole blocks of queries and columns.

    Args:
        batch: a batch of prompts.
        chunks: the prompts' tokens, in row order.
        most_rows: maximum number of rows (queries × heads of a key) that keys and values are multiplied with at once, as whole blocks.
    """

    def __init__(self, batch: ForwardBatch, chunks: list[Chunk], most_rows: int = _MOST_ROWS) -> None:
        self._device, self._most_rows = batch.columns.device, most_rows
        self._padded_count = len(batch.padded_tokens)
        parts: list[list[_Queries]] = []
        first = 0
        for row, chunk in enumerate(chunks, batch.first_row):
            for begin in range(chunk.start, chunk.end, _QUERIES_AT_ONCE):
                part = _Queries(chunk, row, first + begin - chunk.start, begin, min(begin + _QUERIES_AT_ONCE, chunk.end))
                before = parts[-1] if parts else []
                is_next = bool(before) and before[-1].row + 1 == row and before[0].shape == part.shape
                if is_next and (len(before) + 1) * part.shape[0] <= _QUERIES_AT_ONCE:
                    before.append(part)
                else:
                    parts.append([part])
            first += chunk.length
        self._blocks = [self._block(together) for together in parts]

    def _block(self, parts: list[_Queries]) -> _Block:
        (queries, length), device = parts[0].shape, self._device
        columns, hidden, places = torch.arange(length, device=device), [], []
        for number, part in enumerate(parts):
            own = columns > torch.arange(part.begin, part.begin + queries, device=device)[:, None]
            if part.chunk.sequence.request.branch_ids is not None:
                branches = torch.as_tensor(part.chunk.sequence.branch_ids()[: part.end], device=device)
                own[: part.count, : part.end] |= ~sees(branches[part.begin :], branches)
            hidden.append(own)
            places.append(torch.arange(part.count, device=device) + number * queries)
        tokens = slice(parts[0].first, parts[-1].first + parts[-1].count)
        is_full = all(part.count == queries for part in parts)
        rows = slice(parts[0].row, parts[-1].row + 1)
        return _Block(rows, tokens, None if is_full else torch.cat(places), torch.stack(hidden)[:, None, :, None])

    def __call__(self, q: Tensor, cached_keys: Tensor, cached_values: Tensor) -> Tensor:
        """Attend from the queries ``[T, H, D]``; returns ``[T, H * D]``, with zeros for padding.

        Args:
            q: queries, followed by padding.
            cached_keys, cached_values: keys and values of all rows, ``[rows, G, length, D]``, including those of this batch.
        """
        H, D, G = q.shape[1], q.shape[2], cached_keys.shape[1]
        attended = q.new_zeros(self._padded_count, H * D)
        q = q * D**-0.5  # scaled here, because the library scales before or after summing, depending on the size
        for block in self._blocks:
            n, _, Q, _, K = block.hidden.shape
            part = q[block.tokens]
            if block.places is not None:
                part = q.new_zeros(n * Q, H, D).index_copy_(0, block.places, part)
            keys, values = (c[block.rows, :, :K].flatten(0, 1) for c in (cached_keys, cached_values))
            part = part.view(n, Q, G, -1, D).transpose(1, 2).reshape(n * G, -1, D)
            scores = self._by_rows(torch.bmm, part, keys.transpose(1, 2))
            scores.view(n, G, Q, -1, K).masked_fill_(block.hidden, float("-inf"))
            read = self._by_rows(weighted_sum, scores.softmax(-1), values)
            read = read.view(n, G, Q, -1, D).transpose(1, 2).reshape(n * Q, -1)
            attended[block.tokens] = read if block.places is None else read[block.places]
        return attended

    def _by_rows(self, product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, factor: Tensor) -> Tensor:
        """Compute ``product(rows, factor)`` of ``rows [n * G, r, inputs]``, at most ``most_rows`` of the ``r`` at a time."""
        if rows.shape[1] <= self._most_rows:
            return product(rows, factor)
        return torch.cat([product(part, factor) for part in rows.split(self._most_rows, 1)], 1)
