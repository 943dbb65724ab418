"""The data contract: which columns a trajectory has, their shapes and types, and how a breach is reported.

A trajectory is a dict of tensors over ``B`` rows, right-padded to ``L`` tokens. A workflow may carry columns that are not
listed here: tensors ``[B, L, ...]`` go with the tokens, tensors ``[B, ...]`` and lists of length ``B`` go with the rows.

``branch_ids`` describe isolated branches: token ``i`` attends to token ``j <= i`` where ``branch_ids[j] == 0`` or
``branch_ids[i] == 0`` or both are equal; 0 is the trunk. ``other_context`` marks tokens that were sampled behind other text
than their row shows; the trainer's log-probabilities of them differ from those at sampling, and are compared apart.
``logprobs_shifted`` marks rows whose log-probabilities were taken after top-p, top-k or penalties, because their server gives
no others: the trainer uses its own in their place, and compares none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rollwright.errors import TrajectoryError

Trajectory = dict[str, Any]

#: Log-probabilities above this are refused; float32 softmax may round a certain token to just above 0.
LARGEST_LOGPROB = 1e-3

#: Name of the per-row list of multi-modal processor outputs: one dict of tensors, or None, for each row.
MULTI_MODAL = "multi_modal_inputs"


@dataclass(frozen=True)
class Column:
    """One column of the data contract."""

    shape: str  # "BL" with the tokens, "B" with the rows
    dtype: torch.dtype | None  # None: any number that is 0 or 1
    pad: float = 0  # value right of a row's last token
    required: bool = True


#: The data contract.
COLUMNS: dict[str, Column] = {
    "input_ids": Column("BL", torch.int64),
    "attention_mask": Column("BL", torch.bool, False),
    "loss_mask": Column("BL", None),
    "logprobs": Column("BL", torch.float32, 0.0),
    "versions": Column("BL", torch.int32, -1),
    "rewards": Column("B", torch.float32),
    "temperature": Column("B", torch.float32),
    "truncated": Column("B", torch.bool),
    "group_ids": Column("B", torch.int64, required=False),
    "sample_ids": Column("B", torch.int64, required=False),
    "position_ids": Column("BL", torch.int64, required=False),
    "branch_ids": Column("BL", torch.int64, required=False),
    "other_context": Column("BL", torch.bool, False, required=False),
    "logprobs_shifted": Column("B", torch.bool, required=False),
    "token_rewards": Column("BL", torch.float32, 0.0, required=False),
    "seeds": Column("B", torch.int64, required=False),
}

#: Optional columns that rows may be without while others have them: no mark, no reward of a token, no branch, counted positions,
#: no images, nothing besides. Workflows of different kinds share a batch by this.
NEUTRAL = ("other_context", "logprobs_shifted", "token_rewards", "branch_ids", "position_ids", MULTI_MODAL, "details")


def neutral(key: str, trajectory: Mapping[str, Any]) -> Any:
    """What a column of ``NEUTRAL`` says of the rows of a trajectory that is without it."""
    ids_BL = trajectory["input_ids"]
    rows, width = ids_BL.shape
    if key == MULTI_MODAL:
        return [None] * rows
    if key == "details":
        return [{} for _ in range(rows)]
    if key == "position_ids":
        counted_BL = torch.arange(width, device=ids_BL.device).expand(rows, width)
        attention_BL = trajectory.get("attention_mask")
        return counted_BL.clone() if attention_BL is None else counted_BL * attention_BL.bool()
    column = COLUMNS[key]
    return torch.zeros(ids_BL.shape[: len(column.shape)], dtype=column.dtype, device=ids_BL.device)


def row_count(trajectory: Mapping[str, Any]) -> int:
    """Number of rows ``B``."""
    return int(trajectory["input_ids"].shape[0])


def is_token_column(name: str, value: Any, rows: int, width: int) -> bool:
    """True where a column goes with the tokens (``[B, L, ...]``), false where it goes with the rows."""
    if name in COLUMNS:
        return COLUMNS[name].shape == "BL"
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (rows, width)


@dataclass(frozen=True)
class Place:
    """Where an error happened: workflow, task and, in a list, which item."""

    workflow: str = ""
    task: str = ""
    index: int | None = None

    def item(self, index: int) -> Place:
        """The place of one item of a list."""
        return replace(self, index=index)

    def error(self, key: str, wrong: str, remedy: str) -> TrajectoryError:
        """A ``TrajectoryError`` with its three parts: what, where, what to do."""
        return TrajectoryError(f"{self}, key {key!r}: {wrong}; {remedy}.")

    def __str__(self) -> str:
        task = self.task if self.task.startswith("task ") else f"task {self.task or '?'}"
        where = [f"workflow {self.workflow or '?'}", task]
        if self.index is not None:
            where.append(f"item {self.index}")
        return ", ".join(where)
