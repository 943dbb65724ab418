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


# ----------------------------------------------------------------------
# The checker of the data contract: on by default, between every workflow and the trainer.


def check_trajectory(trajectory: Any, *, workflow: str = "", task: str = "") -> None:
    """Refuse a trajectory that breaks the data contract.

    Args:
        trajectory: a dict of ``[B, L]`` and ``[B]`` tensors, complete as the normaliser makes it.
        workflow, task: names for the message.

    Raises:
        TrajectoryError: names workflow, task and key: a key is missing or has another shape or type, lengths disagree,
            padding is not on the right, a masked token lacks its log-probability or version, or a value is NaN, infinite or
            impossible.
    """
    place = Place(workflow, task)
    if not isinstance(trajectory, Mapping):
        raise place.error("trajectory", f"it is {type(trajectory).__name__}", "it is a dict of tensors")
    _check_shapes(trajectory, place)
    _check_types(trajectory, place)
    _check_masks(trajectory, place)
    _check_values(trajectory, place)


def _check_shapes(trajectory: Mapping[str, Any], place: Place) -> None:
    for key, column in COLUMNS.items():
        if key not in trajectory:
            if column.required:
                remedy = (
                    "every masked token needs one; the normaliser fills it from the record"
                    if column.shape == "BL"
                    else "add it"
                )
                raise place.error(key, "it is missing", remedy)
        elif not isinstance(trajectory[key], torch.Tensor):
            raise place.error(key, f"it is {type(trajectory[key]).__name__}", "it is a tensor")
    ids = trajectory["input_ids"]
    if ids.dim() != 2 or 0 in ids.shape:
        raise place.error("input_ids", f"its shape is {list(ids.shape)}", "it is [B, L] with at least one row and one token")
    rows = ids.shape[0]
    token_keys = [key for key, column in COLUMNS.items() if key in trajectory and column.shape == "BL"]
    for key in token_keys:
        if trajectory[key].shape != ids.shape:
            named = ", ".join(f"{name} {list(trajectory[name].shape)}" for name in token_keys)
            raise place.error(key, f"lengths disagree: {named}", "every token needs one entry in each key")
    for key, column in COLUMNS.items():
        if key in trajectory and column.shape == "B" and trajectory[key].shape != (rows,):
            raise place.error(key, f"its shape is {list(trajectory[key].shape)} for {rows} rows", "it is [B]")
    for key, value in trajectory.items():
        if key in COLUMNS:
            continue
        size = len(value) if isinstance(value, list | tuple) else value.shape[0] if getattr(value, "ndim", 0) else None
        if size != rows:
            raise place.error(
                key,
                f"it has {size} entries for {rows} rows",
                f"further keys have one entry a row; images go into {MULTI_MODAL!r}",
            )


def _check_types(trajectory: Mapping[str, Any], place: Place) -> None:
    for key, column in COLUMNS.items():
        if key in trajectory and column.dtype is not None and trajectory[key].dtype != column.dtype:
            raise place.error(key, f"its type is {trajectory[key].dtype}", f"it is {column.dtype}")


def _first(where: torch.Tensor) -> str:
    index = where.nonzero()[0].tolist()
    return f"row {index[0]}" + (f", position {index[1]}" if len(index) > 1 else "")


def _check_masks(trajectory: Mapping[str, Any], place: Place) -> None:
    attention, loss = trajectory["attention_mask"], trajectory["loss_mask"]
    if not attention[:, 0].all():
        raise place.error(
            "attention_mask", f"{_first(~attention[:, 0])} does not begin with a token", "rows are padded on the right"
        )
    holes = attention[:, 1:] & ~attention[:, :-1]
    if holes.any():
        raise place.error("attention_mask", f"a token after padding, first at {_first(holes)}", "rows are padded on the right")
    if loss.dtype != torch.bool and ((loss != 0) & (loss != 1)).any():
        raise place.error(
            "loss_mask", f"neither 0 nor 1, first at {_first((loss != 0) & (loss != 1))}", "1 where sampled, else 0"
        )
    masked = loss.bool()
    if (masked & ~attention).any():
        raise place.error("loss_mask", f"it covers padding, first at {_first(masked & ~attention)}", "mask only tokens")
    if masked[:, 0].any():
        raise place.error(
            "loss_mask", f"{_first(masked[:, 0])} trains its first token, which has no context", "a row begins with its prompt"
        )
    if (trajectory["input_ids"] < 0).any():
        raise place.error("input_ids", f"a negative id, first at {_first(trajectory['input_ids'] < 0)}", "ids are 0 or more")


def _check_values(trajectory: Mapping[str, Any], place: Place) -> None:
    masked = trajectory["loss_mask"].bool()
    logprobs, versions = trajectory["logprobs"], trajectory["versions"]
    for key, value in trajectory.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and key in COLUMNS:
            bad = ~torch.isfinite(value)
            if bad.any():
                kind = "NaN" if torch.isnan(value).any() else "infinite"
                raise place.error(key, f"{kind}, first at {_first(bad)}", "it is a finite number")
    if (masked & (logprobs > LARGEST_LOGPROB)).any():
        where = masked & (logprobs > LARGEST_LOGPROB)
        raise place.error(
            "logprobs",
            f"{float(logprobs[where][0]):g} at {_first(where)}",
            "natural log-probabilities are at most 0 (not probabilities)",
        )
    if (~masked & (logprobs != 0)).any():
        raise place.error(
            "logprobs", f"not 0.0 outside loss_mask, first at {_first(~masked & (logprobs != 0))}", "set it to 0.0 there"
        )
    if (masked & (versions < 0)).any():
        raise place.error(
            "versions",
            f"negative under loss_mask, first at {_first(masked & (versions < 0))}",
            "a sampled token has its version",
        )
    if (~masked & (versions != -1)).any():
        raise place.error(
            "versions", f"not -1 outside loss_mask, first at {_first(~masked & (versions != -1))}", "set it to -1 there"
        )
    if (trajectory["temperature"] <= 0).any():
        raise place.error(
            "temperature", f"not positive, first at {_first(trajectory['temperature'] <= 0)}", "greedy sampling counts as 1"
        )
