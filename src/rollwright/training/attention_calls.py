"""The attention of a prefix tree as a few calls of an ordinary kernel: which queries attend to which keys together.

A *run* is a stretch of the layout in which each token sees those before it, and some tokens before the stretch, its ancestors. Ancestors
that many runs have in common are attended to by all of their queries in one *shared* call, which needs no mask and no copies. What is
left of each run is its *own* call. A query that is in several calls gets the merged result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: What a call costs before it computes anything, forward and backward, in products of a query and a key. Measured by
#: ``benchmarks/shared_prefixes.py --costs`` on two cores of a Xeon under load, for 4 to 16 heads of 16 to 128: 1,700 to 10,600, median 5,500.
_CALL_COST = 5_000

#: What it costs to copy a token into a call and its gradient back, in the same unit. Measured in the same runs: 24 to 145, median 60.
_COPY_COST = 60


@dataclass
class Run:
    """Tokens ``start`` to ``end`` of the layout, and the places of the tokens before them that they see."""

    start: int
    end: int
    ancestors: np.ndarray

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.start


@dataclass(eq=False)
class AttentionCall:
    """``N`` pieces of ``Q`` queries over ``K`` keys each.

    Attributes:
        pieces: ``N``.
        queries: their places in the layout, ``[N, Q]``, or a slice of ``N * Q`` places.
        keys: the same, ``[N, K]``.
        is_causal: query ``i`` sees the keys up to ``i``; else all that ``allowed`` leaves.
        allowed: ``[N or 1, 1, Q, K]`` bool.
        padding: ``[N, Q]`` bool, the queries that are no tokens; None: all are.
    """

    pieces: int
    queries: Tensor | slice
    keys: Tensor | slice
    is_causal: bool = False
    allowed: Tensor | None = None
    padding: Tensor | None = None


def attention_calls(
    runs: Sequence[Run], ends_T: np.ndarray, branches_T: np.ndarray | None, device: torch.device
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """The calls of a layout.

    Args:
        runs: in the order of the layout, which they cover.
        ends_T: the place after the last token below each token.
        branches_T: of each token; None: there are none.
        device: where the places go.

    Returns:
        Own calls, which together have each token as a query once, and shared ones.
    """
    shared, is_shared_T = [], np.zeros(len(ends_T), dtype=bool)
    for first, last, start, end in _common_ancestors(runs, ends_T, branches_T):
        is_shared_T[first:last] = True
        shared.append(AttentionCall(1, slice(start, end), slice(first, last)))
    rest = [Run(run.start, run.end, run.ancestors[~is_shared_T[run.ancestors]]) for run in runs]
    stretches, short = _stretches([run for run in rest if not len(run.ancestors)])
    own = [AttentionCall(len(part), *[slice(part[0].start, part[-1].end)] * 2, is_causal=True) for part in stretches]
    own += [_joined(part, device) for part in _together(short)]
    own += [_joined(part, device) for part in _together([run for run in rest if len(run.ancestors)])]
    return own, shared


def _common_ancestors(
    runs: Sequence[Run], ends_T: np.ndarray, branches_T: np.ndarray | None
) -> list[tuple[int, int, int, int]]:
    """Tokens ``first`` to ``last`` that all tokens from ``start`` to ``end`` see, where one call for them saves more than it costs."""
    starts = np.array([run.start for run in runs])
    found = []
    for number, run in enumerate(runs):
        if branches_T is not None and branches_T[run.start]:
            continue  # not all that comes below a branch sees it
        ends = ends_T[run.start : run.end]
        edges = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(ends)]
        for first, last in itertools.pairwise(edges):
            end = int(ends[first])
            below = int(np.searchsorted(starts, end)) - number - 1
            merged = _COPY_COST * (end - run.end)  # merging two results of a query costs about what a copy does
            if _COPY_COST * (last - first) * below > merged + _CALL_COST:
                found.append((run.start + first, run.start + last, run.end, end))
    return found


def _stretches(runs: Sequence[Run]) -> tuple[list[list[Run]], list[Run]]:
    """Neighbours of one length, whose call needs no copies; and what is too short for a call of its own."""
    stretches: list[list[Run]] = []
    for run in runs:
        if stretches and stretches[-1][-1].end == run.start and stretches[-1][-1].tokens == run.tokens:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    long = [part for part in stretches if _COPY_COST * len(part) * part[0].tokens > _CALL_COST]
    kept = {run.start for part in long for run in part}
    return long, [run for run in runs if run.start not in kept]


def _together(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of about one size share a call: padding and copies cost less than another call."""
    parts: list[list[Run]] = []
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


def _joined(runs: Sequence[Run], device: torch.device) -> AttentionCall:
    """One call of several runs, padded to the longest. Padding stands for place 0 and sees what the last query of its run sees."""
    q_N1 = np.array([[run.tokens] for run in runs])
    k_N1 = np.array([[run.tokens + len(run.ancestors)] for run in runs])
    Q, K = int(q_N1.max()), int(k_N1.max())
    queries_NQ, keys_NK = np.zeros((len(runs), Q), dtype=np.int64), np.zeros((len(runs), K), dtype=np.int64)
    for n, run in enumerate(runs):
        queries_NQ[n, : run.tokens] = np.arange(run.start, run.end)
        keys_NK[n, : k_N1[n, 0]] = np.concatenate([run.ancestors, np.arange(run.start, run.end)])
    is_causal = bool((q_N1 == k_N1).all())  # which does not reach the padding to the right
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


def _put(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
