"""Trajectories: the tensor form of experiences. Check them, pad and join them, cut them into rows.

What the columns mean is said in ``contract``. The functions here return new trajectories and change none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.check import check_trajectory
from rollwright.experience.contract import COLUMNS, MULTI_MODAL, NEUTRAL, Trajectory, is_token_column, neutral, row_count

__all__ = [
    "COLUMNS",
    "Trajectory",
    "check_trajectory",
    "concat_padded_tensors",
    "row_count",
    "row_lengths",
    "select_rows",
    "sequence_texts",
    "tensor_container_to",
    "trajectory_rows",
    "trim_padding",
]


def row_lengths(trajectory: Mapping[str, Any]) -> torch.Tensor:
    """Tokens of each row without padding, ``[B]`` int64."""
    mask = trajectory.get("attention_mask")
    if mask is None:
        ids = trajectory["input_ids"]
        return torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
    return mask.sum(dim=1)


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]], pad_value: float = 0) -> Trajectory:
    """Join trajectories into one, right-padding what goes with the tokens to the longest.

    Args:
        trajectories: dicts with the same keys; the optional ones of ``contract.NEUTRAL`` may be missing in some. ``[B]`` tensors and lists are joined as they are; tensors that go with the
            images of a row rather than with its tokens (``pixel_values``) are joined along their first dimension.
        pad_value: filling of token columns that the data contract does not name.

    Returns:
        A trajectory of ``sum(B)`` rows. Where no item had an ``attention_mask`` and padding was needed, it has one.

    Raises:
        TrajectoryError: nothing to join, or keys, row counts or shapes disagree; the message says which and where.
    """
    items = list(trajectories)
    if not items:
        raise TrajectoryError(
            "concat_padded_tensors got an empty list: there is nothing to join; return None to reject a sample."
        )
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TrajectoryError(
                f"concat_padded_tensors: item {index} is {type(item).__name__}, not a dict of tensors; leave a rejected member "
                "out, or reject the whole sample by returning None."
            )
    keys = list(dict.fromkeys(key for item in items for key in item))
    for key in keys:
        if key not in NEUTRAL and (missing := [index for index, item in enumerate(items) if key not in item]):
            have = len(items) - len(missing)
            raise TrajectoryError(
                f"concat_padded_tensors: key {key!r} is in {have} of {len(items)} items and missing in item "
                f"{', '.join(map(str, missing[:8]))}; give it in all of them or in none."
            )
    if "input_ids" not in keys:
        raise TrajectoryError(
            f"concat_padded_tensors: no input_ids among the keys {', '.join(keys)}; every trajectory has them."
        )
    sizes = []
    for index, item in enumerate(items):
        ids = item["input_ids"]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TrajectoryError(f"concat_padded_tensors: input_ids of item {index} is {shape}, not [B, L]; use unsqueeze(0).")
        sizes.append((int(ids.shape[0]), int(ids.shape[1])))
    for key in (key for key in NEUTRAL if key in keys):
        items = [item if key in item else {**item, key: neutral(key, item)} for item in items]
    width = max(size[1] for size in sizes)
    if "attention_mask" not in keys and any(size[1] != width for size in sizes):
        items = [{**item, "attention_mask": torch.ones_like(item["input_ids"], dtype=torch.bool)} for item in items]
        keys.append("attention_mask")
    return {key: _join(key, [item[key] for item in items], sizes, width, pad_value) for key in keys}


def _join(key: str, values: list[Any], sizes: list[tuple[int, int]], width: int, pad_value: float) -> Any:
    if all(isinstance(value, list | tuple) for value in values):
        for index, (value, (rows, _)) in enumerate(zip(values, sizes, strict=True)):
            if len(value) != rows:
                raise TrajectoryError(
                    f"concat_padded_tensors: list {key!r} of item {index} has {len(value)} entries for {rows} rows; give one a row."
                )
        return [entry for value in values for entry in value]
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise TrajectoryError(
                f"concat_padded_tensors: key {key!r} of item {index} is {type(value).__name__} while others are tensors or "
                "unknown; give tensors everywhere, or one list entry a row everywhere."
            )
    if all(is_token_column(key, value, *size) for value, size in zip(values, sizes, strict=True)):
        for index, (value, size) in enumerate(zip(values, sizes, strict=True)):
            if tuple(value.shape[:2]) != size:
                raise TrajectoryError(
                    f"concat_padded_tensors: {key!r} of item {index} is {list(value.shape)}, but input_ids is {list(size)}; every "
                    "token needs one entry in each key. Where input_ids is the longer one, look for resp.output_tokens appended "
                    "to it twice."
                )
        fill = COLUMNS[key].pad if key in COLUMNS else pad_value
        values = [_pad(value, width, fill) for value in values]
    elif key in COLUMNS:
        for index, (value, (rows, _)) in enumerate(zip(values, sizes, strict=True)):
            if tuple(value.shape) != (rows,):
                raise TrajectoryError(
                    f"concat_padded_tensors: {key!r} of item {index} is {list(value.shape)} for {rows} rows; it is [B]."
                )
    elif any(value.dim() == 0 for value in values):
        raise TrajectoryError(f"concat_padded_tensors: {key!r} has no dimension for the rows; use unsqueeze(0).")
    if len({tuple(value.shape[1:]) for value in values}) > 1:
        shapes = ", ".join(str(list(value.shape)) for value in values[:4])
        raise TrajectoryError(
            f"concat_padded_tensors: {key!r} has shapes {shapes}, which cannot be joined; put it in a per-row list ({MULTI_MODAL})."
        )
    return torch.cat(values, dim=0)


def _pad(value: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    missing = width - value.shape[1]
    if missing == 0:
        return value
    return torch.cat([value, value.new_full((value.shape[0], missing, *value.shape[2:]), fill)], dim=1)


def tensor_container_to(container: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy of nested dicts, lists and tuples in which every tensor was moved by ``tensor.to(*args, **kwargs)``.

    What is no tensor stays as it is; named tuples and dataclass-free mappings keep their type where it can be rebuilt.
    """
    if isinstance(container, torch.Tensor):
        return container.to(*args, **kwargs)
    if isinstance(container, Mapping):
        return {key: tensor_container_to(value, *args, **kwargs) for key, value in container.items()}
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*(tensor_container_to(value, *args, **kwargs) for value in container))
    if isinstance(container, list | tuple):
        return type(container)(tensor_container_to(value, *args, **kwargs) for value in container)
    return container


def select_rows(trajectory: Mapping[str, Any], rows: Sequence[int] | torch.Tensor) -> Trajectory:
    """The given rows, in the given order, at the trajectory's width."""
    index = torch.as_tensor(rows, dtype=torch.int64)
    picks = index.tolist()
    out: Trajectory = {}
    for key, value in trajectory.items():
        if isinstance(value, torch.Tensor):
            out[key] = value[index.to(value.device)]
        else:
            out[key] = [value[row] for row in picks]
    return out


def trim_padding(trajectory: Mapping[str, Any]) -> Trajectory:
    """Without the columns in which every row is padding (at least one column is kept)."""
    rows, width = trajectory["input_ids"].shape
    longest = max(1, int(row_lengths(trajectory).max())) if rows else width
    if longest == width:
        return dict(trajectory)
    return {key: value[:, :longest] if is_token_column(key, value, rows, width) else value for key, value in trajectory.items()}


def trajectory_rows(trajectory: Mapping[str, Any]) -> list[Trajectory]:
    """One trajectory ``[1, length]`` for each row, without padding."""
    return [trim_padding(select_rows(trajectory, [row])) for row in range(row_count(trajectory))]


def sequence_texts(trajectory: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Each row decoded, special tokens and all, without padding."""
    lengths = row_lengths(trajectory).tolist()
    return [
        tokenizer.decode(ids[:length], skip_special_tokens=False)
        for ids, length in zip(trajectory["input_ids"].tolist(), lengths, strict=True)
    ]
