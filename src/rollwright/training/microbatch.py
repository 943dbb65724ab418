"""Cutting a batch so that it fits in memory, with little padding.

Rows are sorted by length, so that rows of a micro-batch are about as long as each other, and columns to the right of a
micro-batch's longest row are cut off. The loss's weights are fixed before (``aggregation_weights``), so that none of
this changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollwright.config.sections import MicroBatchSpec
from rollwright.errors import TrainingError
from rollwright.experience.trajectory import Trajectory, row_lengths, select_rows


def split_rows(lengths: Sequence[int], spec: MicroBatchSpec, *, at_least: int = 1) -> list[list[int]]:
    """Divide rows into micro-batches by a budget of padded tokens.

    Args:
        lengths: tokens of each row.
        spec: the budget, and the smallest number of micro-batches.
        at_least: a further smallest number (that of the rank with the most); where there are not enough rows, empty
            micro-batches fill up.

    Returns:
        Lists of row indices, longest rows first; every row is in exactly one. A row above the budget is alone in its own.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= spec.max_tokens_per_mb:
            parts[-1].append(row)
        else:
            parts.append([row])
    while len(parts) < min(max(spec.n_mbs, at_least), len(order)):
        widest = max(range(len(parts)), key=lambda index: (len(parts[index]) > 1, len(parts[index]) * lengths[parts[index][0]]))
        half = (len(parts[widest]) + 1) // 2
        parts[widest : widest + 1] = [parts[widest][:half], parts[widest][half:]]
    parts += [[] for _ in range(at_least - len(parts))]
    return parts


def micro_batches(batch: Trajectory, spec: MicroBatchSpec, *, at_least: int = 1) -> list[tuple[torch.Tensor, Trajectory]]:
    """The micro-batches of a batch, each with the indices of its rows.

    An empty micro-batch (see ``split_rows``) is row 0 over one column: it is computed, because every rank must take part
    in a sharded forward pass, and its indices are empty so that nothing of it counts.
    """
    lengths = row_lengths(batch).clamp(min=1).tolist()
    parts = []
    for rows in split_rows(lengths, spec, at_least=at_least):
        index = torch.tensor(rows, dtype=torch.long, device=batch["input_ids"].device)
        parts.append((index, select_rows(batch, rows or [0], width=lengths[rows[0]] if rows else 1)))
    return parts


def split_minibatches(batch: Trajectory, count: int) -> list[torch.Tensor]:
    """Divide a batch into parts for one optimizer step each, by whole groups (rows, where there are no ``group_ids``).

    Returns:
        ``count`` tensors of row indices. Groups stay in their order; their numbers differ by one at most.

    Raises:
        TrainingError: there are fewer groups than parts.
    """
    rows = int(batch["input_ids"].shape[0])
    device = batch["input_ids"].device
    if count == 1:
        return [torch.arange(rows, device=device)]
    groups = batch.get("group_ids")
    unit_of_row = torch.arange(rows) if groups is None else _in_order_of_appearance(groups.cpu())
    units = int(unit_of_row.max()) + 1 if rows else 0
    if units < count:
        what = "rows" if groups is None else "groups"
        raise TrainingError(
            f"A batch of {units} {what} cannot be divided into actor.ppo_n_minibatches={count} optimizer steps; lower "
            "ppo_n_minibatches or raise train_dataset.batch_size."
        )
    part_of_unit = torch.arange(units) * count // units
    part_of_row = part_of_unit[unit_of_row]
    return [torch.nonzero(part_of_row == part).flatten().to(device) for part in range(count)]


def _in_order_of_appearance(ids: torch.Tensor) -> torch.Tensor:
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in ids.tolist()], dtype=torch.long)
