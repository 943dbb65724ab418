"""Shared prefixes are computed once: the rows of a micro-batch as a tree, one ``[1, T]`` row of distinct tokens.

The samples of a group share their prompt, the rows of a conversation share its history. Rows are sorted, so that each row shares
its longest prefix with the row before it; only the rest of it, its *run*, is new. The layout is the runs one after another:

    row 0   p p p p a a a      run of 7 tokens, sees itself
    row 1   p p p p b b        run of 2 tokens, sees the four p and itself
    row 2   p p p p b c        run of 1 token, sees the four p, the first b and itself

Invariants:

* two tokens are one only where everything that they can see is equal: ids, positions, branches and pictures up to them;
* a token sees the tokens of its own row, by the rule of ``experience.branches`` where the row has branches, and nothing else.

Everything but attention works on tokens, so a Hugging Face model computes the layout as it is; ``tree_attention`` is the rest. Autograd
sums the gradients of a shared token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright.config.sections import MicroBatchSpec
from rollwright.experience.trajectory import MULTI_MODAL, Trajectory, row_lengths
from rollwright.training.attention_calls import AttentionCall, Run, attention_calls


@dataclass
class PrefixTree:
    """The layout of a micro-batch: see the module's docstring.

    Attributes:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]``.
        place: ``[B, L]``, index in the layout of each row's token; 0 at padding.
        predictor: ``[B, L]``, index in the layout of the token that predicts it; 0 in the first column and at padding.
        sources: ``[T]``, index into the rows' ``B * L`` tokens.
        repeated: ``[B, L]`` bool, the tokens that the row shares with the row before it.
        own_calls: attention calls; each token is a query of exactly one.
        shared_calls: further keys for many queries; their results are merged with those of ``own_calls``.
        ends: ``[T]``, index after a token's last descendant: the tokens from its own index up to there see it.
        branches: ``[T]``, branch of each token, 0 on the trunk; None if no row has branches.
        longest: tokens of the longest row.
        uses: attention layers that used the tree; 0 after a forward pass means that the model does not pass it on.
        refusal: why a layer's attention cannot be computed over the tree, set in a forward pass; its result is then invalid.
        is_tried: True during the check, which looks for a refusal; otherwise a refusal is an error.
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
    longest: int
    uses: int = 0
    refusal: str | None = None
    is_tried: bool = False
    block_mask: Any = None

    @property
    def tokens(self) -> int:
        """``T``, the distinct tokens."""
        return int(self.input_ids.shape[1])

    def inputs(self) -> dict[str, Any]:
        """Arguments of a Hugging Face model, see ``tree_attention.over_tree``.

        Models pass a 4-D mask on unchanged, which avoids building a ``[T, T]`` one. A layer that uses it instead of the tree
        computes NaN.
        """
        mask = torch.full((1, 1, 1, 1), torch.nan, device=self.input_ids.device)
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "attention_mask": mask, "prefix_tree": self}


class SortedRows:
    """The rows of a batch, group by group, sorted so that each shares its longest prefix with the row before it.

    Args:
        batch: ``input_ids [B, L]`` and, where there are, ``attention_mask``, ``position_ids``, ``branch_ids``, ``group_ids``, pictures.
        picture_ids: tokens that stand for pictures. A row shares those of all its pictures or of none.

    Attributes:
        order: row numbers.
        lengths: tokens of each row, in that order.
        shared: tokens that each has in common with the row before it, in that order; 0 for the first.
    """

    def __init__(self, batch: Trajectory, picture_ids: Sequence[int] = ()) -> None:
        ids_BL = batch["input_ids"].cpu().numpy()
        rows, columns_L = range(len(ids_BL)), np.arange(ids_BL.shape[1])
        lengths_B = row_lengths(batch).clamp(min=1).cpu().numpy()
        seen = [ids_BL, *(batch[name].cpu().numpy() for name in ("position_ids", "branch_ids") if batch.get(name) is not None)]
        keys_BLK = np.stack(seen, axis=-1).astype(">u4")  # big-endian, so that bytes sort as numbers
        pictures_B = _picture_numbers(batch.get(MULTI_MODAL), len(ids_BL))
        texts = [(pictures_B[row], keys_BLK[row, : lengths_B[row]].tobytes()) for row in rows]
        groups = batch["group_ids"].tolist() if batch.get("group_ids") is not None else [0] * len(ids_BL)
        first: dict[int, tuple[int, bytes]] = {}
        for row in rows:
            first[groups[row]] = min(first.get(groups[row], texts[row]), texts[row])
        self.order = np.array(sorted(rows, key=lambda row: (first[groups[row]], groups[row], texts[row], row)), dtype=np.int64)
        self.lengths = lengths_B[self.order]
        self._group = np.array(groups)[self.order]
        here_BLK, pictures_B = keys_BLK[self.order], pictures_B[self.order]
        equal_BL = (here_BLK[1:] == here_BLK[:-1]).all(-1) & (pictures_B[1:] == pictures_B[:-1])[:, None]
        equal_BL &= columns_L < np.minimum(self.lengths[1:], self.lengths[:-1])[:, None]
        self.shared = np.concatenate([[0], np.logical_and.accumulate(equal_BL, axis=1).sum(1)]).astype(np.int64)
        for row in np.flatnonzero(pictures_B):
            places = np.flatnonzero(np.isin(ids_BL[self.order[row]], picture_ids))
            if len(places) and places[0] < self.shared[row] <= places[-1]:
                self.shared[row] = places[0]

    @property
    def distinct(self) -> int:
        """Distinct tokens of all rows together."""
        return int((self.lengths - self.shared).sum())

    def tokens_of_groups(self) -> dict[int, int]:
        """Distinct tokens of each group by its id, counted alone."""
        tokens: dict[int, int] = {}
        for group, length, shared in zip(self._group.tolist(), self.lengths.tolist(), self.shared.tolist(), strict=True):
            tokens[group] = tokens[group] + length - shared if group in tokens else length
        return tokens

    def parts(self, spec: MicroBatchSpec, *, at_least: int = 1) -> list[list[int]]:
        """Divide the rows into micro-batches by a budget of distinct tokens, by whole groups where they fit.

        A group that does not fit is cut between rows, and the path above the cut is computed in both parts.

        Args:
            spec: the budget, and the smallest number of micro-batches.
            at_least: a further smallest number; where there are not enough rows, empty micro-batches fill up.

        Returns:
            Places in ``order`` of each part's rows; every row is in exactly one. A row above the budget is alone in its own.
        """
        budget, fresh = spec.max_tokens_per_mb, (self.lengths - self.shared).tolist()
        edges = [0, *(np.flatnonzero(np.diff(self._group)) + 1).tolist(), len(self.order)]
        starts, used = [0], 0
        for begin, end in itertools.pairwise(edges):
            alone = int(self.lengths[begin]) + sum(fresh[begin + 1 : end])
            if begin and alone <= budget < used + sum(fresh[begin:end]):  # the whole group goes into a part of its own
                starts.append(begin)
                used = int(self.lengths[begin]) - fresh[begin]
            for index in range(begin, end):
                if index > starts[-1] and used + fresh[index] > budget:
                    starts.append(index)
                    used = int(self.lengths[index])
                else:
                    used += fresh[index]
        parts = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(self.order)], strict=True)]
        while len(parts) < min(max(spec.n_mbs, at_least), len(self.order)):
            widest = max(range(len(parts)), key=lambda index: len(parts[index]))
            half = (len(parts[widest]) + 1) // 2
            parts[widest : widest + 1] = [parts[widest][:half], parts[widest][half:]]
        return parts + [[] for _ in range(at_least - len(parts))]


def _picture_numbers(entries: Sequence[Any] | None, rows: int) -> np.ndarray:
    """A number for each row that is equal where the pictures are: 0 where there are none."""
    numbers = np.zeros(rows, dtype=np.int64)
    seen: list[Any] = []
    for row, entry in enumerate(entries or []):
        if not entry:
            continue
        equal = [number for number, other in enumerate(seen) if _same_pictures(other, entry)]
        if not equal:
            seen.append(entry)
        numbers[row] = equal[0] + 1 if equal else len(seen)
    return numbers


def _same_pictures(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one is other or (one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one))


def build(batch: Trajectory, shared: Sequence[int] | None = None) -> PrefixTree:
    """The tree of a micro-batch, on the device of ``input_ids``.

    Args:
        batch: its rows.
        shared: tokens that each row has in common with the row before it; None: found out, in the order that shares most.
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
    runs: list[Run] = []
    sources: list[tuple[int, int, int]] = []
    before, tokens = -1, 0
    for row, common in zip(order, shared_B, strict=True):
        length = lengths[row]
        place_BL[row, :common] = place_BL[before, :common]
        place_BL[row, common:length] = np.arange(tokens, tokens + length - common)
        predictor_BL[row, 1:length] = place_BL[row, : length - 1]
        repeated_BL[row, :common] = True
        for start, visible in [(0, np.arange(length))] if branches is None else _segments(branches[row, :length]):
            if start:  # the first token of a branch is predicted by the last that it sees
                earlier = visible[visible < start]
                predictor_BL[row, start] = place_BL[row, earlier[-1]] if len(earlier) else 0
            fresh = visible[visible >= max(start, common)]
            if not len(fresh):
                continue
            places = place_BL[row, visible]
            start, end = int(places[-len(fresh)]), int(places[-1]) + 1
            if branches is None and common and place_BL[row, common - 1] == tokens - 1:  # it goes on where the last run ends
                runs[-1].end = end
            else:
                runs.append(Run(start, end, places[: -len(fresh)]))
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
        longest=max(lengths),
    )


def _ends(sources: list[tuple[int, int, int]], tokens: int) -> np.ndarray:
    """The place after the last token below each token, from (row, columns shared with the row before, columns)."""
    ends_T = np.empty(tokens, dtype=np.int64)
    below_L = np.full(max(length for *_, length in sources), tokens)  # of the tokens of the rows that come later
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
    """Runs of one branch in a row: where each starts, and the columns that its last token sees (see ``experience.branches``)."""
    length = len(branches_L)
    starts = [0, *(np.flatnonzero(np.diff(branches_L)) + 1).tolist()]
    result = []
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        branch, columns = branches_L[start], np.arange(end)
        seen = columns if branch == 0 else columns[(branches_L[:end] == 0) | (branches_L[:end] == branch)]
        result.append((start, seen))
    return result
