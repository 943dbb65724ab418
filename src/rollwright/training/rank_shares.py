"""Division of a batch over ranks: whole groups, balanced by tokens within each optimizer step, and sent without padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollwright.experience.contract import MULTI_MODAL, PACKED
from rollwright.experience.packed import pack_rows, unpack_rows
from rollwright.experience.trajectory import Trajectory, select_rows, tensor_container_to
from rollwright.training import parallel
from rollwright.training.micro_batches import MINIBATCH_IDS, distinct_tokens, rows_of_ranks, split_minibatches


def own_share(batch: Trajectory | None, minibatches: int = 1) -> Trajectory:
    """Divide the first rank's batch into whole groups, and return this rank's rows. Collective.

    Args:
        batch: the batch; None on other ranks than the first.
        minibatches: optimizer steps that the batch will be divided into.
    """
    if parallel.world_size() == 1:
        assert batch is not None
        return batch
    parts: list[bytes] | None = None
    if batch is not None:
        sent = sent_columns(tensor_container_to(batch, "cpu"), minibatches)
        parts = [pack_rows(sent, rows) for rows in shares(sent, groups_of(batch), parallel.world_size(), minibatches)]
    with parallel.watched():
        return unpack_rows(parallel.scattered(parts))


def groups_of(batch: Trajectory) -> Tensor:
    """Number the group of each row; without ``group_ids``, each row is a group."""
    groups = batch.get("group_ids")
    return torch.arange(len(batch["input_ids"])) if groups is None else groups.cpu().unique(return_inverse=True)[1]


def sent_columns(batch: Trajectory, minibatches: int) -> Trajectory:
    """Select the columns that ranks need: tensors, images, packed rows and, with several minibatches, each row's minibatch."""
    sent = {key: value for key, value in batch.items() if isinstance(value, Tensor) or key in (MULTI_MODAL, PACKED)}
    if minibatches > 1:
        sent[MINIBATCH_IDS] = torch.zeros(len(batch["input_ids"]), dtype=torch.int64)
        for number, rows in enumerate(split_minibatches(batch, minibatches)):
            sent[MINIBATCH_IDS][rows.cpu()] = number
    return sent


def shares(
    batch: Trajectory,
    units_B: Tensor,
    ranks: int,
    minibatches: int = 1,
    count_tokens: Callable[[Trajectory], dict[int, int]] = distinct_tokens,
) -> list[list[int]]:
    """Divide rows over ranks without splitting a unit, with similar numbers of tokens per rank in every optimizer step.

    Args:
        batch: all rows.
        units_B: unit of each row.
        ranks: number of ranks; with fewer units than ranks, some ranks get no rows.
        minibatches: optimizer steps; see ``split_minibatches``.
        count_tokens: see ``rows_of_ranks``.

    Returns:
        The row indices of each rank.
    """
    columns = tensor_container_to({**sent_columns(batch, 1), "group_ids": units_B}, "cpu")
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for rows in split_minibatches(batch, minibatches):
        part, rows = select_rows(columns, rows.cpu()), rows.cpu()
        for own, chosen in zip(of_rank, rows_of_ranks(part, ranks, at_least=0, count_tokens=count_tokens), strict=True):
            own += rows[chosen].tolist()
    return of_rank
