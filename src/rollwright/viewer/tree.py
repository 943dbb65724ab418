"""The prefix tree of a group, which holds shared tokens once and shows where the rows diverge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rollwright.viewer.reading import RowTokens

_SHOWN = 80  # characters of a node's text

#: A row of the tree: the key of its sample, its number in it, and its tokens.
TreeRow = tuple[str, int, RowTokens]


def prefix_tree(rows: Sequence[TreeRow], text: Callable[[list[int]], str]) -> dict[str, Any]:
    """Build the tree of a group's rows as plain values.

    A node is a stretch of tokens with the same rows, the same mask and the same isolated branch. A branch, and the trunk after it, are
    children of the trunk before it.

    Args:
        rows: the group's rows.
        text: decodes tokens.

    Returns:
        ``{"nodes": [...], "width": tokens of the longest row}``; a node has ``id``, ``parent`` (None for a root), ``start`` (column of
        its first token), ``tokens``, ``text``, ``samples``, ``rows``, ``branch``, ``trained``, and the means of its rows'
        ``advantage`` and ``reward``.
    """
    nodes: list[dict[str, Any]] = []
    edges = [_edges(tokens) for _, _, tokens in rows]

    def grow(members: list[int], start: int, parent: int | None, trunk: int | None) -> None:
        """Add the nodes of rows that share their first ``start`` tokens; ``trunk`` is the last node of the trunk."""
        while members:
            first = rows[members[0]][2]
            stop = min(int(edges[row][start]) if start < len(edges[row]) else start for row in members)
            for row in members[1:]:
                other, span = rows[row][2].ids[start:stop], first.ids[start:stop]
                differs = np.flatnonzero(other != span)
                stop = start + int(differs[0]) if len(differs) else stop
            if stop == start:
                break
            branch = 0 if first.branches is None else int(first.branches[start])
            leaves_branch = parent is not None and nodes[parent]["branch"] not in (0, branch)
            above = trunk if leaves_branch else parent
            parent = _add(nodes, [rows[row] for row in members], start, stop, above, branch, text)
            trunk = trunk if branch else parent
            start = stop
        part(members, start, parent, trunk)

    def part(members: Iterable[int], start: int, parent: int | None, trunk: int | None) -> None:
        """Grow a subtree for each next token of the rows."""
        parts: dict[tuple[int, bool], list[int]] = {}
        for row in members:
            tokens = rows[row][2]
            if start < len(tokens.ids):
                parts.setdefault((int(tokens.ids[start]), bool(tokens.mask[start])), []).append(row)
        for some in parts.values():
            grow(some, start, parent, trunk)

    part(range(len(rows)), 0, None, None)
    return {"nodes": nodes, "width": max((len(tokens.ids) for _, _, tokens in rows), default=0)}


def _edges(tokens: RowTokens) -> np.ndarray:
    """Return, for each token, the end of its stretch of equal mask and branch."""
    length = len(tokens.ids)
    changes = np.zeros(length, dtype=bool)
    changes[1:] = tokens.mask[1:] != tokens.mask[:-1]
    if tokens.branches is not None:
        changes[1:] |= tokens.branches[1:] != tokens.branches[:-1]
    ends = np.append(np.flatnonzero(changes), length)
    return ends[np.searchsorted(ends, np.arange(length), side="right")]


def parting(row: RowTokens, others: Mapping[str, RowTokens]) -> tuple[int, str] | None:
    """Find the first token of ``row`` that differs from all other rows.

    Args:
        row: a sample's row.
        others: rows of samples of the same task, by name.

    Returns:
        Its position, and the name of a row that shares all tokens before it; None if another row begins with all of ``row``.
    """
    furthest, name = -1, ""
    for each, other in others.items():
        count = min(len(row.ids), len(other.ids))
        differs = np.flatnonzero(row.ids[:count] != other.ids[:count])
        shared = int(differs[0]) if len(differs) else count
        if shared > furthest:
            furthest, name = shared, each
    return (furthest, name) if 0 <= furthest < len(row.ids) else None


def _add(
    nodes: list[dict[str, Any]],
    rows: list[TreeRow],
    start: int,
    stop: int,
    parent: int | None,
    branch: int,
    text: Callable[[list[int]], str],
) -> int:
    tokens = rows[0][2]
    advantages = [float(row.advantages[start]) for _, _, row in rows if row.advantages is not None and row.mask[start]]
    rewards = [row.reward for _, _, row in rows if row.reward == row.reward]
    shown = text(tokens.ids[start : min(stop, start + _SHOWN)].tolist())
    nodes.append(
        {
            "id": len(nodes),
            "parent": parent,
            "start": start,
            "tokens": stop - start,
            "text": shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…",
            "samples": list(dict.fromkeys(key for key, _, _ in rows)),
            "rows": [[key, number] for key, number, _ in rows],
            "branch": branch,
            "trained": bool(tokens.mask[start]),
            "advantage": sum(advantages) / len(advantages) if advantages else None,
            "reward": sum(rewards) / len(rewards) if rewards else None,
        }
    )
    return len(nodes) - 1
