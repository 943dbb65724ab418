"""The data contract: the columns of a trajectory, their shapes and types, and the check of both.

A trajectory is a dict of tensors over ``B`` rows, right-padded to ``L`` tokens. A workflow may add columns that are not listed here:
tensors ``[B, L, ...]`` have one entry per token, tensors ``[B, ...]`` and lists of length ``B`` one per row.

``branch_ids`` describe isolated branches: token ``i`` attends to token ``j <= i`` if ``branch_ids[j] == 0`` or ``branch_ids[i] == 0`` or
both are equal; 0 is the trunk. ``other_context`` marks tokens that were sampled after a different text than their row shows; the trainer's
log-probabilities of them differ from those at sampling and are compared separately. ``logprobs_shifted`` marks rows whose
log-probabilities were taken after top-p, top-k or penalties, because their server returns no others; the trainer replaces them with its own
and does not compare them. ``teacher_logprobs`` are a teacher's log-probabilities of tokens, and ``teacher_weights`` say how much it teaches each (0: not at all);
``teacher_top_ids`` and ``teacher_top_logprobs``, ``[B, L, K]``, are its most likely tokens there (``TEACHER_TOP``). ``routed_experts``,
``[B, L, W]``, are the experts that each token was sent to (``ROUTED_EXPERTS``). ``agent``, ``role``,
``environment``, ``trainable`` and ``turn_ids`` say which player made a row (``rollwright.experience.players``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError

Trajectory = dict[str, Any]

#: Largest accepted log-probability; float32 softmax may round that of a certain token to just above 0.
LARGEST_LOGPROB = 1e-3

#: Column with the multi-modal processor outputs of each row: a dict of tensors or None.
MULTI_MODAL = "multi_modal_inputs"

#: Columns ``[B, L, K]`` with a teacher's most likely tokens at the place of each token: ids (int64) and log-probabilities (float32).
TEACHER_TOP = ("teacher_top_ids", "teacher_top_logprobs")

#: Column of a micro-batch with the log-probabilities ``[B, L, K]`` of these tokens under the model that is trained.
CANDIDATE_LOGPROBS = "candidate_logprobs"

#: Column ``[B, L, W]``, uint8 or int16, with the experts that each token was sent to when the next one was sampled, for all layers one after
#: the other: the number of the expert plus one; 0 if nothing is recorded (``inference/routed_experts.py``).
ROUTED_EXPERTS = "routed_experts"

#: List of a packed batch with the packed row behind each row (``packed.packed_batch``).
PACKED = "packed_rows"


@dataclass(frozen=True)
class Column:
    """One column of the data contract."""

    shape: str  # "BL": one entry per token; "B": one per row
    dtype: torch.dtype | None  # None accepts any number that is 0 or 1
    pad: float = 0  # value after a row's last token
    required: bool = True
    neutral: float = 0  # value of rows without the column, if others have it


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
    "advantages": Column("BL", torch.float32, 0.0, required=False),
    "seeds": Column("B", torch.int64, required=False),
    "role_ids": Column("B", torch.int64, required=False),
    "trainable": Column("B", torch.bool, required=False, neutral=True),
    "turn_ids": Column("B", torch.int64, required=False),
    "teacher_logprobs": Column("BL", torch.float32, 0.0, required=False),
    "teacher_weights": Column("BL", torch.float32, 0.0, required=False),
}

#: Columns with names of the player behind each row, lists of text.
PLAYER_NAMES = ("agent", "role", "environment")

#: Optional columns with a neutral default (no mark, no token rewards, no branches, consecutive positions, no images, no details, a
#: player without a name that is trained, no recorded experts), so that rows with and without them can be joined into one batch.
NEUTRAL = (
    "other_context",
    "logprobs_shifted",
    "token_rewards",
    "branch_ids",
    "position_ids",
    MULTI_MODAL,
    ROUTED_EXPERTS,
    "details",
    *PLAYER_NAMES,
    "role_ids",
    "trainable",
    "turn_ids",
)


def is_token_column(name: str, value: Any, rows: int, width: int) -> bool:
    """Return True if a column has one entry per token (``[B, L, ...]``), False if it has one per row."""
    if name in COLUMNS:
        return COLUMNS[name].shape == "BL"
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (rows, width)


@dataclass(frozen=True)
class Origin:
    """Origin of a result, for error messages: workflow, task and, in a list, the index of the item."""

    workflow: str = ""
    task: object = ""  # its name, formatted only for a message
    index: int | None = None

    def error(self, key: str, wrong: str, remedy: str) -> TrajectoryError:
        """Make a ``TrajectoryError`` that says what is wrong, where, and what to do."""
        return TrajectoryError(f"{self}, key {key!r}: {wrong}; {remedy}.")

    def __str__(self) -> str:
        task = str(self.task) or "?"
        where = [f"workflow {self.workflow or '?'}", task if task.startswith("task ") else f"task {task}"]
        if self.index is not None:
            where.append(f"item {self.index}")
        return ", ".join(where)


def check_trajectory(trajectory: Any, *, workflow: str = "", task: object = "") -> None:
    """Check a trajectory against the data contract; runs by default between every workflow and the trainer.

    Args:
        trajectory: a dict of ``[B, L]`` and ``[B]`` tensors, as the normaliser returns it.
        workflow, task: names for the message.

    Raises:
        TrajectoryError: a key is missing or has the wrong shape or type, lengths disagree, padding is not on the right, a masked token
            lacks its log-probability or version, or a value is NaN, infinite or impossible. The message names workflow, task and key.
    """
    place = Origin(workflow, task)
    if not isinstance(trajectory, Mapping):
        raise place.error("trajectory", f"it is {type(trajectory).__name__}", "it is a dict of tensors")
    for key, column in COLUMNS.items():
        if key in trajectory:
            if not isinstance(trajectory[key], torch.Tensor):
                raise place.error(key, f"it is {type(trajectory[key]).__name__}", "it is a tensor")
        elif column.required:
            filled = "every masked token needs one; the normaliser fills it from the record"
            raise place.error(key, "it is missing", filled if column.shape == "BL" else "add it")
    shape = trajectory["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise place.error("input_ids", f"its shape is {list(shape)}", "it is [B, L] with at least one row and one token")
    columns = {key: column for key, column in COLUMNS.items() if key in trajectory}
    for key, column in columns.items():
        if column.shape == "BL" and trajectory[key].shape != shape:
            named = [f"{name} {list(trajectory[name].shape)}" for name, other in columns.items() if other.shape == "BL"]
            raise place.error(key, f"lengths disagree: {', '.join(named)}", "every token needs one entry in each key")
    for key, column in columns.items():
        if column.shape == "B" and trajectory[key].shape != shape[:1]:
            raise place.error(key, f"its shape is {list(trajectory[key].shape)} for {shape[0]} rows", "it is [B]")
    for key, value in trajectory.items():
        if key in COLUMNS:
            continue
        size = len(value) if isinstance(value, list | tuple) else value.shape[0] if getattr(value, "ndim", 0) else None
        if size != shape[0]:
            remedy = f"further keys have one entry a row; images go into {MULTI_MODAL!r}"
            raise place.error(key, f"it has {size} entries for {shape[0]} rows", remedy)
    routed = trajectory.get(ROUTED_EXPERTS)
    if routed is not None and (
        routed.dim() != 3 or routed.shape[:2] != shape or routed.dtype not in (torch.uint8, torch.int16)
    ):
        wrong = f"it is {list(routed.shape)} {routed.dtype} for {list(shape)} tokens"
        raise place.error(ROUTED_EXPERTS, wrong, "it is [B, L, W], uint8 or int16; leave it out: it is filled from the record")
    for key, column in columns.items():
        if column.dtype is not None and trajectory[key].dtype != column.dtype:
            raise place.error(key, f"its type is {trajectory[key].dtype}", f"it is {column.dtype}")
    # values as NumPy arrays, which are faster than tensors for small rows; masks first, because the other checks rely on them
    given = {key: trajectory[key] for key in columns}
    values = {key: (each.float() if each.dtype == torch.bfloat16 else each).numpy(force=True) for key, each in given.items()}
    attention, loss, logprobs, versions = (values[key] for key in ("attention_mask", "loss_mask", "logprobs", "versions"))
    masked = loss.astype(bool)
    outside = ~masked
    checks: list[tuple[str, np.ndarray, str, str]] = [
        ("attention_mask", ~attention[:, 0], "{first} does not begin with a token", "rows are padded on the right"),
        (
            "attention_mask",
            attention[:, 1:] > attention[:, :-1],
            "a token after padding, first at {first}",
            "rows are padded on the right",
        ),
        ("loss_mask", (loss != 0) & (loss != 1), "neither 0 nor 1, first at {first}", "1 where sampled, else 0"),
        ("loss_mask", masked & ~attention, "it covers padding, first at {first}", "mask only tokens"),
        ("loss_mask", masked[:, 0], "{first} trains its first token, which has no context", "a row begins with its prompt"),
        (
            "trainable",
            masked.any(axis=1) & ~values.get("trainable", np.ones(len(loss), dtype=bool)),
            "{first} is not trainable, but its loss_mask has tokens",
            "clear the mask of rows that are not trained",
        ),
        ("input_ids", values["input_ids"] < 0, "a negative id, first at {first}", "ids are 0 or more"),
    ]
    for key, value in values.items():
        if value.dtype.kind == "f" and not (is_finite := np.isfinite(value)).all():
            kind = "NaN" if np.isnan(value).any() else "infinite"
            checks.append((key, ~is_finite, f"{kind}, first at {{first}}", "it is a finite number"))
    checks += [
        (
            "logprobs",
            masked & (logprobs > LARGEST_LOGPROB),
            "{value:g} at {first}",
            "natural log-probabilities are at most 0 (not probabilities)",
        ),
        ("logprobs", outside & (logprobs != 0), "not 0.0 outside loss_mask, first at {first}", "set it to 0.0 there"),
        ("versions", masked & (versions < 0), "negative under loss_mask, first at {first}", "a sampled token has its version"),
        ("versions", outside & (versions != -1), "not -1 outside loss_mask, first at {first}", "set it to -1 there"),
        ("temperature", values["temperature"] <= 0, "not positive, first at {first}", "greedy sampling counts as 1"),
    ]
    for key, where, wrong, remedy in checks:
        if where.any():
            index = np.argwhere(where)[0].tolist()
            first = f"row {index[0]}" + (f", position {index[1]}" if len(index) > 1 else "")
            raise place.error(key, wrong.format(first=first, value=float(values[key][tuple(index)].flat[0])), remedy)
