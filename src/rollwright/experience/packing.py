"""Packing: rows of different lengths as one line of ``T`` tokens without padding, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, Trajectory, is_token_column
from rollwright.experience.trajectory import row_lengths

#: Keys of a packed batch that say where the rows are.
BOUNDARY_KEYS = ("cu_seqlens", "max_seqlen")


def pack_rows(trajectory: Mapping[str, Any]) -> Trajectory:
    """All rows one after another, without padding.

    Args:
        trajectory: ``[B, L]`` columns with an ``attention_mask``, right-padded.

    Returns:
        Token columns as ``[T]`` (``[T, ...]``), row columns unchanged, and ``cu_seqlens`` ``[B + 1]`` int32 (row ``b`` is
        ``cu_seqlens[b]:cu_seqlens[b + 1]``), ``max_seqlen`` (int) and ``position_ids`` ``[T]``, counted from 0 in each row
        unless the trajectory had its own. ``attention_mask`` is left out: every token is one.

    Raises:
        TrajectoryError: there is no attention mask, or it is not right-padded.
    """
    mask = trajectory.get("attention_mask")
    if mask is None:
        raise TrajectoryError("pack_rows: key 'attention_mask' is missing; nobody knows which tokens are padding.")
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise TrajectoryError("pack_rows: 'attention_mask' has tokens after padding; rows are padded on the right.")
    rows, width = mask.shape
    lengths = row_lengths({"attention_mask": mask})
    out: Trajectory = {
        key: value[mask] if is_token_column(key, value, rows, width) else value
        for key, value in trajectory.items()
        if key != "attention_mask"
    }
    cu_seqlens = torch.zeros(rows + 1, dtype=torch.int32, device=mask.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    out["cu_seqlens"] = cu_seqlens
    out["max_seqlen"] = int(lengths.max()) if rows else 0
    if "position_ids" not in out:
        out["position_ids"] = torch.arange(width, device=mask.device).expand(rows, width)[mask]
    return out


def unpack_tokens(values: torch.Tensor, cu_seqlens: torch.Tensor, width: int | None = None, fill: float = 0) -> torch.Tensor:
    """Packed ``[T, ...]`` values as ``[B, L, ...]``.

    Args:
        values: one entry for each packed token.
        cu_seqlens: ``[B + 1]`` row boundaries.
        width: ``L``; None: the longest row.
        fill: value of the padding.

    Raises:
        TrajectoryError: values and boundaries disagree, or a row is longer than ``width``.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if values.shape[0] != int(cu_seqlens[-1]):
        raise TrajectoryError(f"unpack_tokens: {values.shape[0]} values for {int(cu_seqlens[-1])} packed tokens.")
    if longest > width:
        raise TrajectoryError(f"unpack_tokens: a row of {longest} tokens does not fit into width {width}.")
    mask = torch.arange(width, device=values.device) < lengths.to(values.device)[:, None]
    out = values.new_full((len(lengths), width, *values.shape[1:]), fill)
    out[mask] = values
    return out


def unpack_rows(packed: Mapping[str, Any], width: int | None = None) -> Trajectory:
    """The inverse of ``pack_rows``: token columns as ``[B, L]`` with their contract's padding and an ``attention_mask``."""
    cu_seqlens = packed["cu_seqlens"]
    total, rows = int(cu_seqlens[-1]), len(cu_seqlens) - 1
    out: Trajectory = {}
    for key, value in packed.items():
        if key in BOUNDARY_KEYS:
            continue
        token_column = COLUMNS[key].shape == "BL" if key in COLUMNS else _is_packed(value, total, rows)
        fill = COLUMNS[key].pad if key in COLUMNS else 0
        out[key] = unpack_tokens(value, cu_seqlens, width, fill) if token_column else value
    ones = torch.ones(total, dtype=torch.bool, device=cu_seqlens.device)
    out["attention_mask"] = unpack_tokens(ones, cu_seqlens, width, False)
    return out


def _is_packed(value: Any, total: int, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 1 and value.shape[0] == total and total != rows
