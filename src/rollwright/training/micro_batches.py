"""Divide a batch over ranks, into minibatches (one for each optimizer step), and those into micro-batches that fit into memory.

Rows whose rotary frequencies differ (``model_facts.frequency_groups``) never share a micro-batch. The loss weights are computed before
(``aggregation_weights``), so micro-batches do not change the gradient. If rows share prefixes, a micro-batch gets its ``prefix_tree``;
otherwise rows are sorted by length, so that a micro-batch has rows of similar length, and columns beyond the longest are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollwright.config.sections import MicroBatchSpec
from rollwright.errors import TrainingError
from rollwright.experience.contract import KEPT
from rollwright.experience.trajectory import Trajectory, row_lengths, select_rows
from rollwright.training.prefix_tree import SortedRows
from rollwright.training.prefix_tree import build as build_tree

#: Column that says to which minibatch a row belongs, where the batch is a part of one that was divided.
MINIBATCH_IDS = "minibatch_ids"

#: Distinct tokens over padded ones from which on the padded path is as fast.
_WORTH_SHARING = 0.9


def attended_tokens(batch: Trajectory) -> Tensor:
    """Every token that has a log-probability: all but padding and each row's first. ``[B, L]`` bool."""
    mask = batch.get("attention_mask")
    wanted_BL = torch.ones_like(batch["input_ids"], dtype=torch.bool) if mask is None else mask.bool().clone()
    wanted_BL[:, 0] = False
    return wanted_BL


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


def micro_batches(
    batch: Trajectory,
    spec: MicroBatchSpec,
    *,
    at_least: int = 1,
    share_prefixes: bool = False,
    picture_ids: Sequence[int] = (),
    groups: Sequence[int] | None = None,
) -> list[tuple[torch.Tensor, Trajectory]]:
    """Split a batch into micro-batches, each with the indices of its rows.

    Args:
        batch: the rows to split.
        spec: the budget, in padded tokens, or in distinct ones if prefixes are shared.
        at_least: minimum number of micro-batches (that of the rank with the most).
        share_prefixes: give each micro-batch its ``prefix_tree`` if that saves at least a tenth of the padded tokens.
        picture_ids: image placeholder tokens.
        groups: group of each row; rows of different groups are in different micro-batches. None puts all rows into one group.

    An empty micro-batch (see ``split_rows``) is row 0 over one column. It is computed because every rank must take part
    in a sharded forward pass; its indices are empty, so it does not contribute. The same holds for a batch without rows.
    """
    group_of_row = [0] * batch["input_ids"].shape[0] if groups is None else list(groups)
    result: list[tuple[torch.Tensor, Trajectory]] = []
    kinds = sorted(set(group_of_row)) or [0]
    for kind in kinds:
        rows = [row for row, group in enumerate(group_of_row) if group == kind]
        part = batch if len(kinds) == 1 else select_rows(batch, rows)
        index_B = torch.tensor(rows, dtype=torch.long, device=batch["input_ids"].device)
        missing = at_least - len(result) if kind == kinds[-1] else 1
        found = _micro_batches_of_group(part, spec, at_least=missing, share_prefixes=share_prefixes, picture_ids=picture_ids)
        result += [(index_B[index], selected) for index, selected in found]
    return result


def _micro_batches_of_group(
    batch: Trajectory, spec: MicroBatchSpec, *, at_least: int, share_prefixes: bool, picture_ids: Sequence[int]
) -> list[tuple[torch.Tensor, Trajectory]]:
    lengths = row_lengths(batch).clamp(min=1).tolist()
    device = batch["input_ids"].device
    parts = split_rows(lengths, spec, at_least=at_least)
    rows = SortedRows(batch, picture_ids) if share_prefixes and len(lengths) > 1 else None
    if rows is not None and rows.distinct <= _WORTH_SHARING * sum(len(part) * lengths[part[0]] for part in parts if part):
        parts = rows.parts(spec, at_least=at_least)
    else:
        rows = None
    result = []
    for part in parts:
        chosen = part if rows is None else rows.order[part].tolist()
        selected = select_rows(
            batch if lengths else _one_row(batch), chosen or [0], width=max(lengths[row] for row in chosen) if chosen else 1
        )
        if rows is not None and chosen:
            selected["prefix_tree"] = build_tree(selected, [0, *rows.shared[part[1:]].tolist()])
        result.append((torch.tensor(chosen, dtype=torch.long, device=device), selected))
    return result


def _one_row(batch: Trajectory) -> Trajectory:
    """A token in the place of a batch without rows; nothing of it is wanted."""
    return {
        key: value.new_full((1, *value.shape[1:]), key in ("attention_mask", "temperature"))
        if isinstance(value, Tensor)
        else [None]
        for key, value in batch.items()
    }


def split_minibatches(batch: Trajectory, count: int) -> list[torch.Tensor]:
    """Divide a batch into parts for one optimizer step each, by whole groups (rows, where there are no ``group_ids``).

    A rank's share of a batch says in ``minibatch_ids`` how the whole batch was divided.

    Returns:
        ``count`` tensors of row indices. Groups stay in their order; their numbers differ by one at most.

    Raises:
        TrainingError: there are fewer groups than parts.
    """
    rows = int(batch["input_ids"].shape[0])
    device = batch["input_ids"].device
    if count == 1:
        return [torch.arange(rows, device=device)]
    if batch.get(MINIBATCH_IDS) is not None:
        return [torch.nonzero(batch[MINIBATCH_IDS] == part).flatten() for part in range(count)]
    groups = batch.get("group_ids")
    in_order: dict[int, int] = {}  # groups are numbered in order of appearance
    numbers = range(rows) if groups is None else [in_order.setdefault(group, len(in_order)) for group in groups.tolist()]
    unit_of_row = torch.tensor(numbers, dtype=torch.long)
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


def ranks_of_groups(tokens: Sequence[int], ranks: int, *, at_least: int = 1) -> list[int]:
    """Which rank trains each group, so that all have about as many tokens to compute; groups stay whole.

    The largest group left goes to the rank that has the fewest tokens, which gives no rank more than 4/3 of what the best division
    gives the fullest (Graham 1969, theorem 2).

    Args:
        tokens: distinct tokens of each group (``SortedRows.tokens_of_groups``).
        ranks: how many there are.
        at_least: groups that each rank needs (``ppo_n_minibatches``).

    Returns:
        A rank for each group, the same for the same numbers.

    Raises:
        TrainingError: there are too few groups.
    """
    if len(tokens) < ranks * at_least:
        raise TrainingError(
            f"A batch of {len(tokens)} groups cannot be divided over {ranks} ranks that need {at_least} each (actor.ppo_n_minibatches): "
            "train with fewer ranks, or raise train_dataset.batch_size."
        )
    loads, counts, result = [0] * ranks, [0] * ranks, [0] * len(tokens)
    for left, group in zip(range(len(tokens), 0, -1), sorted(range(len(tokens)), key=lambda g: -tokens[g]), strict=True):
        lacking = sum(max(0, at_least - count) for count in counts)
        choices = [r for r in range(ranks) if counts[r] < at_least or lacking < left]
        result[group] = rank = min(choices, key=lambda r: (loads[r], r))
        loads[rank] += tokens[group]
        counts[rank] += 1
    return result


def rows_of_ranks(batch: Trajectory, ranks: int, *, at_least: int = 1) -> list[torch.Tensor]:
    """The rows that each rank trains, by ``ranks_of_groups``, in their order; a row is a group where there are no ``group_ids``."""
    rows = batch["input_ids"].shape[0]
    groups = range(rows) if batch.get("group_ids") is None else batch["group_ids"].tolist()
    if KEPT in batch:  # what rows share is not known here
        tokens: dict[int, int] = {}
        for group, length in zip(groups, row_lengths(batch).tolist(), strict=True):
            tokens[group] = tokens.get(group, 0) + length
    else:
        tokens = SortedRows({**batch, "group_ids": torch.as_tensor(groups)}).tokens_of_groups()
    chosen = dict(zip(tokens, ranks_of_groups(list(tokens.values()), ranks, at_least=at_least), strict=True))
    rank_B = torch.tensor([chosen[group] for group in groups], device=batch["input_ids"].device)
    return [torch.nonzero(rank_B == rank).flatten() for rank in range(ranks)]
