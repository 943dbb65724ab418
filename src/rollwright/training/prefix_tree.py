"""Prefix tree of a micro-batch: each shared prefix is computed once, in one ``[1, T]`` row of distinct tokens.

The samples of a group share their prompt, and the rows of a conversation share its history. Rows are sorted so that each row shares its
longest prefix with the row before it; only the rest of the row, its *run*, is new. The *layout* is the concatenation of all runs:

    row 0   p p p p a a a      run of 7 tokens, sees itself
    row 1   p p p p b b        run of 2 tokens, sees the four p and itself
    row 2   p p p p b c        run of 1 token, sees the four p, the first b and itself

Invariants:

* two tokens are merged only if everything they can see is equal: ids, positions, branches, recorded experts and images up to them;
* a token sees only tokens of its own row; in rows with branches, ``inference.attention_masks`` defines which of these tokens it sees.

Everything except attention works on each token separately, so an unmodified Hugging Face model can compute the layout. Attention over the
layout becomes a few calls of an ordinary kernel (``attention_calls``), which ``tree_attention`` makes. Autograd sums the gradients of a
shared token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.config.sections import MicroBatchSpec
from rollwright.experience.contract import ROUTED_EXPERTS
from rollwright.experience.trajectory import MULTI_MODAL, Trajectory, row_lengths


@dataclass
class PrefixTree:
    """The layout of a micro-batch: see the module's docstring.

    Attributes:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``.
        place: ``[B, L]``, layout index of each token; 0 at padding.
        predictor: ``[B, L]``, layout index of the token that predicts each token; 0 in the first column and at padding.
        sources: ``[T]``, index of each layout token among the ``B * L`` tokens of the rows.
        repeated: ``[B, L]`` bool, the tokens that the row shares with the row before it.
        own_calls: attention calls; each token is a query of exactly one of them.
        shared_calls: attention calls for keys that many queries share; their results are merged with those of ``own_calls``.
        ends: ``[T]``, index after each token's last descendant. The tokens from the token's own index up to this index see it.
        branches: ``[T]``, branch of each token, 0 on the trunk. None if no row has branches.
        tokens: ``T``, the number of distinct tokens.
        longest: tokens of the longest row.
        uses: number of attention layers that used the tree. 0 after a forward pass means that the model does not pass the tree to layers.
        refusal: why a layer's attention cannot be computed over the tree. It is set in a forward pass, whose result is then invalid.
        is_tried: True during a check, in which a refusal is allowed. At any other time, a refusal is an error.
    """

    input_ids: Tensor
    position_ids: Tensor
    place: Tensor
    predictor: Tensor
    sources: Tensor
    repeated: Tensor
    own_calls: list[AttentionCall]
    shared_calls: list[AttentionCall]
    ends: Tensor
    branches: Tensor | None
    tokens: int
    longest: int
    uses: int = 0
    refusal: str | None = None
    is_tried: bool = False
    block_mask: Any = None


class SortedRows:
    """The rows of a batch, group by group, sorted so that each shares its longest prefix with the row before it.

    Args:
        batch: ``input_ids [B, L]`` and, if present, ``attention_mask``, ``position_ids``, ``branch_ids``, ``routed_experts``,
            ``group_ids`` and images.
        picture_ids: placeholder tokens of images. A row shares either the tokens of all its images or those of none.

    Attributes:
        order: row numbers in sorted order.
        lengths: number of tokens of each row, in sorted order.
        shared: number of tokens that each row shares with the row before it, in sorted order; 0 for the first.
        distinct: number of distinct tokens of all rows.
    """

    def __init__(self, batch: Trajectory, picture_ids: Sequence[int] = ()) -> None:
        ids_BL = batch["input_ids"].cpu().numpy()
        rows, columns_L = range(len(ids_BL)), np.arange(ids_BL.shape[1])
        lengths_B = row_lengths(batch).clamp(min=1).cpu().numpy()
        seen = [ids_BL, *(batch[name].cpu().numpy() for name in ("position_ids", "branch_ids") if batch.get(name) is not None)]
        if batch.get(ROUTED_EXPERTS) is not None:
            seen.append(_numbers_of_experts(batch[ROUTED_EXPERTS].cpu().numpy()))
        keys_BLK = np.stack(seen, axis=-1).astype(">u4")  # big-endian, so that bytes sort as numbers
        pictures_B = np.zeros(len(ids_BL), dtype=np.int64)
        if any(entries := batch.get(MULTI_MODAL) or []):
            pictures_B = _picture_numbers(entries)
        texts = [(pictures_B[row], keys_BLK[row, : lengths_B[row]].tobytes()) for row in rows]
        groups = batch["group_ids"].tolist() if batch.get("group_ids") is not None else [0] * len(ids_BL)
        first: dict[int, tuple[int, bytes]] = {}
        for row in rows:
            first[groups[row]] = min(first.get(groups[row], texts[row]), texts[row])
        self.order = np.array(sorted(rows, key=lambda row: (first[groups[row]], groups[row], texts[row], row)), dtype=np.int64)
        self.lengths = lengths_B[self.order]
        self._group = np.array(groups)[self.order]
        sorted_BLK, pictures_B = keys_BLK[self.order], pictures_B[self.order]
        equal_BL = (sorted_BLK[1:] == sorted_BLK[:-1]).all(-1) & (pictures_B[1:] == pictures_B[:-1])[:, None]
        equal_BL &= columns_L < np.minimum(self.lengths[1:], self.lengths[:-1])[:, None]
        self.shared = np.concatenate([[0], np.logical_and.accumulate(equal_BL, axis=1).sum(1)]).astype(np.int64)
        for row in np.flatnonzero(pictures_B):
            places = np.flatnonzero(np.isin(ids_BL[self.order[row]], picture_ids))
            if len(places) and places[0] < self.shared[row] <= places[-1]:
                self.shared[row] = places[0]
        self.distinct = int((self.lengths - self.shared).sum())

    def tokens_of_groups(self) -> dict[int, int]:
        """Count the distinct tokens of each group, by id. Tokens that several groups share count in each of them."""
        tokens: dict[int, int] = {}
        for group, length, shared in zip(self._group.tolist(), self.lengths.tolist(), self.shared.tolist(), strict=True):
            tokens[group] = tokens[group] + length - shared if group in tokens else length
        return tokens

    def parts(self, spec: MicroBatchSpec, *, at_least: int = 1) -> list[list[int]]:
        """Divide the rows into micro-batches by a budget of distinct tokens, by whole groups if they fit.

        A group that does not fit is split between rows, and the path above the split is computed in both parts.

        Args:
            spec: the budget and the minimum number of micro-batches.
            at_least: a second minimum. If there are not enough rows, empty micro-batches are added.

        Returns:
            For each part, the indices into ``order`` of its rows. Every row is in exactly one part; a row that exceeds the budget is alone.
        """
        budget, fresh = spec.max_tokens_per_mb, (self.lengths - self.shared).tolist()
        edges = [0, *(np.flatnonzero(np.diff(self._group)) + 1).tolist(), len(self.order)]
        starts, used = [0], 0
        for begin, end in itertools.pairwise(edges):
            alone = int(self.lengths[begin]) + sum(fresh[begin + 1 : end])
            if begin and alone <= budget < used + sum(fresh[begin:end]):  # start a part for the whole group
                starts.append(begin)
                used = int(self.lengths[begin]) - fresh[begin]
            for index in range(begin, end):
                if index > starts[-1] and used + fresh[index] > budget:
                    starts.append(index)
                    used = int(self.lengths[index])
                else:
                    used += fresh[index]
        parts = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(self.order)], strict=True)]
        return enough_parts(parts, spec, at_least, len)


def enough_parts(
    parts: list[list[int]], spec: MicroBatchSpec, at_least: int, size: Callable[[list[int]], Any]
) -> list[list[int]]:
    """Halve the largest micro-batches until there are enough of them; without enough rows, add empty ones.

    Args:
        parts: row indices of each micro-batch.
        spec: section that has the minimum number of micro-batches.
        at_least: a second minimum, which holds even if there are fewer rows.
        size: size of a micro-batch.
    """
    while len(parts) < min(max(spec.n_mbs, at_least), sum(map(len, parts))):
        largest = max(range(len(parts)), key=lambda index: size(parts[index]))
        half = (len(parts[largest]) + 1) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts + [[] for _ in range(at_least - len(parts))]


def _picture_numbers(entries: Sequence[Any]) -> np.ndarray:
    """Number the rows by their images: rows with equal images get equal numbers, and rows without images get 0."""
    numbers = np.zeros(len(entries), dtype=np.int64)
    seen: list[Any] = []
    for row, entry in enumerate(entries):
        if not entry:
            continue
        for number, other in enumerate(seen, 1):
            if entry is other or (entry.keys() == other.keys() and all(torch.equal(entry[key], other[key]) for key in entry)):
                numbers[row] = number
                break
        else:
            seen.append(entry)
            numbers[row] = len(seen)
    return numbers


def _numbers_of_experts(routed_BLW: np.ndarray) -> np.ndarray:
    """Number the tokens by their recorded experts, ``[B, L]``: tokens with equal experts get equal numbers."""
    rows_TW = np.ascontiguousarray(routed_BLW.reshape(-1, routed_BLW.shape[2]))
    whole_T = rows_TW.view(np.dtype((np.void, rows_TW.itemsize * rows_TW.shape[1]))).ravel()
    return np.unique(whole_T, return_inverse=True)[1].reshape(routed_BLW.shape[:2])


def build(batch: Trajectory, shared: Sequence[int] | None = None) -> PrefixTree:
    """Build the tree of a micro-batch, on the device of ``input_ids``.

    Args:
        batch: rows of the micro-batch.
        shared: number of tokens that each row shares with the row before it. If None, the rows are sorted and it is computed.
    """
    if shared is None:
        rows = SortedRows(batch)
        order, shared_B = rows.order.tolist(), rows.shared.tolist()
    else:
        order, shared_B = list(range(len(shared))), list(shared)
    lengths = row_lengths(batch).clamp(min=1).tolist()
    device = batch["input_ids"].device
    ids_BL = batch["input_ids"].cpu().numpy()
    positions = batch.get("position_ids")
    positions_BL = np.broadcast_to(np.arange(ids_BL.shape[1]), ids_BL.shape) if positions is None else positions.cpu().numpy()
    branches = None if batch.get("branch_ids") is None else batch["branch_ids"].cpu().numpy()

    place_BL = np.zeros(ids_BL.shape, dtype=np.int64)
    predictor_BL = np.zeros(ids_BL.shape, dtype=np.int64)
    repeated_BL = np.zeros(ids_BL.shape, dtype=bool)
    runs: list[TokenRun] = []
    sources: list[tuple[int, int, int]] = []
    before, tokens = -1, 0
    for row, common in zip(order, shared_B, strict=True):
        length = lengths[row]
        place_BL[row, :common] = place_BL[before, :common]
        place_BL[row, common:length] = np.arange(tokens, tokens + length - common)
        predictor_BL[row, 1:length] = place_BL[row, : length - 1]
        repeated_BL[row, :common] = True
        for start, visible in [(0, np.arange(length))] if branches is None else _segments(branches[row, :length]):
            if start:  # the first token of a branch is predicted by the last token it sees
                earlier = visible[visible < start]
                predictor_BL[row, start] = place_BL[row, earlier[-1]] if len(earlier) else 0
            fresh = visible[visible >= max(start, common)]
            if not len(fresh):
                continue
            places = place_BL[row, visible]
            start, end = int(places[-len(fresh)]), int(places[-1]) + 1
            if branches is None and common and place_BL[row, common - 1] == tokens - 1:  # continues the last run
                runs[-1].end = end
            else:
                runs.append(TokenRun(start, end, places[: -len(fresh)]))
        sources.append((row, common, length))
        tokens += length - common
        before = row
    sources_T = np.concatenate([row * ids_BL.shape[1] + np.arange(common, length) for row, common, length in sources])
    ends_T = _ends(sources, tokens)
    branches_T = None if branches is None else branches.ravel()[sources_T]
    own_calls, shared_calls = attention_calls(runs, ends_T, branches_T, device)
    return PrefixTree(
        input_ids=_put(ids_BL.ravel()[sources_T][None], device),
        position_ids=_put(positions_BL.ravel()[sources_T][None], device),
        place=_put(place_BL, device),
        predictor=_put(predictor_BL, device),
        sources=_put(sources_T, device),
        repeated=_put(repeated_BL, device),
        own_calls=own_calls,
        shared_calls=shared_calls,
        ends=_put(ends_T, device),
        branches=None if branches_T is None else _put(branches_T, device),
        tokens=tokens,
        longest=max(lengths),
    )


def _ends(sources: list[tuple[int, int, int]], tokens: int) -> np.ndarray:
    """Compute the index after each token's last descendant. A source is (row, columns shared with the row before, columns)."""
    ends_T = np.empty(tokens, dtype=np.int64)
    below_L = np.full(max(length for *_, length in sources), tokens)  # for each column, given the rows that come later
    last = tokens
    for _, common, length in reversed(sources):
        first = last - (length - common)
        ends_T[first:last] = below_L[common:length]
        below_L[common:] = first
        last = first
    return ends_T


def _put(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _segments(branches_L: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Split a row into runs of one branch each. Returns each run's start and the columns that its last token sees.

    ``inference.attention_masks`` defines which columns a token sees.
    """
    length = len(branches_L)
    starts = [0, *(np.flatnonzero(np.diff(branches_L)) + 1).tolist()]
    result = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        branch, columns = branches_L[start], np.arange(end)
        seen = columns if branch == 0 else columns[(branches_L[:end] == 0) | (branches_L[:end] == branch)]
        result.append((start, seen))
    return result


#: Fixed cost of a call, forward and backward, in query-key products. Measured by
#: ``benchmarks/shared_prefixes.py --costs`` on two cores of a Xeon under load, for 4 to 16 heads of 16 to 128: 1,700 to 10,600, median 5,500.
_CALL_COST = 5_000

#: Cost of copying a token into a call and its gradient back, in the same unit. Measured in the same runs: 24 to 145, median 60.
_COPY_COST = 60


@dataclass
class TokenRun:
    """A run: tokens ``start`` to ``end`` of the layout, and the layout indices of the earlier tokens that they see."""

    start: int
    end: int
    ancestors: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(eq=False)
class AttentionCall:
    """``N`` pieces of ``Q`` queries over ``K`` keys each.

    Attributes:
        pieces: ``N``.
        queries: layout indices of the queries, ``[N, Q]``, or a slice of ``N * Q`` indices.
        keys: layout indices of the keys, ``[N, K]``, or a slice of ``N * K`` indices.
        is_causal: query ``i`` sees the keys up to ``i``. If False, it sees the keys that ``allowed`` permits.
        allowed: ``[N or 1, 1, Q, K]`` bool. If None, all keys are allowed.
        padding: ``[N, Q]`` bool, True for padding queries. None if there is no padding.
    """

    pieces: int
    queries: Tensor | slice
    keys: Tensor | slice
    is_causal: bool = False
    allowed: Tensor | None = None
    padding: Tensor | None = None


def attention_calls(
    runs: Sequence[TokenRun], ends_T: np.ndarray, branches_T: np.ndarray | None, device: torch.device
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """Divide the attention of a layout into calls, each of some queries over some keys.

    Earlier tokens that many runs see are the keys of one *shared* call for all queries of these runs, which needs no mask and no copies.
    The rest of each run is its *own* call. If a query is in several calls, their results are merged.

    Args:
        runs: all runs, in the order of the layout.
        ends_T: index after the last descendant of each token.
        branches_T: branch of each token. None if there are no branches.
        device: device of the index tensors.

    Returns:
        Own calls, in which each token is a query exactly once, and shared calls.
    """
    shared, is_shared_T = [], np.zeros(len(ends_T), dtype=bool)
    for first, last, start, end in _common_ancestors(runs, ends_T, branches_T):
        is_shared_T[first:last] = True
        shared.append(AttentionCall(1, slice(start, end), slice(first, last)))
    rest = [TokenRun(run.start, run.end, run.ancestors[~is_shared_T[run.ancestors]]) for run in runs]
    stretches, short = _stretches([run for run in rest if not len(run.ancestors)])
    own = [AttentionCall(len(part), *[slice(part[0].start, part[-1].end)] * 2, is_causal=True) for part in stretches]
    own += [_joined(part, device) for part in _together(short)]
    own += [_joined(part, device) for part in _together([run for run in rest if len(run.ancestors)])]
    return own, shared


def _common_ancestors(
    runs: Sequence[TokenRun], ends_T: np.ndarray, branches_T: np.ndarray | None
) -> list[tuple[int, int, int, int]]:
    """Find tokens ``first`` to ``last`` that all tokens from ``start`` to ``end`` see, if one call for them saves more than it costs."""
    starts = np.array([run.start for run in runs])
    found = []
    for number, run in enumerate(runs):
        if branches_T is not None and branches_T[run.start]:
            continue  # not every token after a branch sees it
        ends = ends_T[run.start : run.end]
        edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
        for first, last in itertools.pairwise(edges):
            end = int(ends[first])
            below = int(np.searchsorted(starts, end)) - number - 1
            merged = _COPY_COST * (end - run.end)  # merging two results of a query costs about as much as a copy
            if _COPY_COST * (last - first) * below > merged + _CALL_COST:
                found.append((run.start + first, run.start + last, run.end, end))
    return found


def _stretches(runs: Sequence[TokenRun]) -> tuple[list[list[TokenRun]], list[TokenRun]]:
    """Group neighbouring runs of equal length, whose call needs no copies; also return the runs that are too short for their own call."""
    stretches: list[list[TokenRun]] = []
    for run in runs:
        if stretches and stretches[-1][-1].end == run.start and stretches[-1][-1].tokens == run.tokens:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    long = [part for part in stretches if _COPY_COST * len(part) * part[0].tokens > _CALL_COST]
    own_starts = {run.start for part in long for run in part}
    return long, [run for run in runs if run.start not in own_starts]


def _together(runs: Sequence[TokenRun]) -> list[list[TokenRun]]:
    """Group runs of similar size into one call each, if padding and copies cost less than another call."""
    parts: list[list[TokenRun]] = []
    widest = most = work = 0
    for run in sorted(runs, key=lambda run: (-run.tokens, -len(run.ancestors))):
        keys = run.tokens + len(run.ancestors)
        if parts:
            exact = work + run.tokens * keys
            padding = widest * max(most, keys) * (len(parts[-1]) + 1) - exact
            if padding + _COPY_COST * run.tokens <= max(_CALL_COST, exact // 8):
                parts[-1].append(run)
                most, work = max(most, keys), exact
                continue
        parts.append([run])
        widest, most, work = run.tokens, keys, run.tokens * keys
    return parts


def _joined(runs: Sequence[TokenRun], device: torch.device) -> AttentionCall:
    """Make one call of several runs, padded to the longest. Padding queries use token 0 and see what the last query of their run sees."""
    q_N1 = np.array([[run.tokens] for run in runs])
    k_N1 = np.array([[run.tokens + len(run.ancestors)] for run in runs])
    Q, K = int(q_N1.max()), int(k_N1.max())
    queries_NQ, keys_NK = np.zeros((len(runs), Q), dtype=np.int64), np.zeros((len(runs), K), dtype=np.int64)
    for n, run in enumerate(runs):
        queries_NQ[n, : run.tokens] = np.arange(run.start, run.end)
        keys_NK[n, : k_N1[n, 0]] = np.concatenate([run.ancestors, np.arange(run.start, run.end)])
    is_causal = bool((q_N1 == k_N1).all())  # causal queries do not reach the padding to their right
    allowed = None
    if not is_causal:
        last_NQ = np.minimum(k_N1 - q_N1 + np.arange(Q), k_N1 - 1)
        last_NQ = last_NQ[:1] if len({(run.tokens, len(run.ancestors)) for run in runs}) == 1 else last_NQ
        allowed = _put(np.arange(K) <= last_NQ[:, None, :, None], device)
    padding_NQ = np.arange(Q) >= q_N1
    return AttentionCall(
        len(runs),
        slice(runs[0].start, runs[0].end) if len(runs) == 1 else _put(queries_NQ, device),
        _put(keys_NK, device),
        is_causal,
        allowed,
        _put(padding_NQ, device) if padding_NQ.any() else None,
    )
