"""The inner loop of BM25 search, compiled. It holds no GIL, so that searches run beside an event loop."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def top_rows(
    weights: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    term_ids: np.ndarray,
    topk: int,
    scores: np.ndarray,
    touched: np.ndarray,
    best_rows: np.ndarray,
    best_scores: np.ndarray,
) -> int:
    """Add up the posting lists of a query's terms and keep the best rows; ties go to the lower row.

    Only rows that hold a term are looked at, and only they are reset, so a query costs its posting lists and not the corpus.

    Args:
        weights, rows, starts: the index: BM25 weight and row of each posting, and where each term's postings start.
        term_ids: the query's terms, ``[Q]``.
        topk: rows to keep.
        scores: scratch, ``[N]`` float32, all zero before and after.
        touched: scratch, ``[N]`` int32.
        best_rows, best_scores: results, ``[topk]``.

    Returns:
        How many of the results are filled.
    """
    count = 0
    for term in term_ids:
        for posting in range(starts[term], starts[term + 1]):
            row = rows[posting]
            if scores[row] == 0.0:
                touched[count] = row
                count += 1
            scores[row] += weights[posting]

    kept = 0
    for position in range(count):
        row = touched[position]
        score = scores[row]
        scores[row] = 0.0
        if kept == topk:
            worst = best_scores[topk - 1]
            if score < worst or (score == worst and row > best_rows[topk - 1]):
                continue
            place = topk - 1
        else:
            place = kept
            kept += 1
        while place > 0 and (
            score > best_scores[place - 1] or (score == best_scores[place - 1] and row < best_rows[place - 1])
        ):
            best_scores[place] = best_scores[place - 1]
            best_rows[place] = best_rows[place - 1]
            place -= 1
        best_scores[place] = score
        best_rows[place] = row
    return kept
