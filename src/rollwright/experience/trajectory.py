"""Trajectories, the tensor form of experiences: convert a workflow's result to tensors, pad and join rows, select rows.

``contract`` defines the columns. The functions here return new trajectories and do not modify their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import (
    COLUMNS,
    MULTI_MODAL,
    NEUTRAL,
    PACKED,
    PLAYER_NAMES,
    ROUTED_EXPERTS,
    Origin,
    Trajectory,
    is_token_column,
)

#: Alternative names that workflows use for a column.
ALIASES = {"reward": "rewards", "multi_modal_input": MULTI_MODAL, "temperatures": "temperature"}

#: Outputs of Hugging Face processors that describe images rather than tokens.
PROCESSOR_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "image_sizes",
    "second_per_grid_ts",
)


def row_lengths(trajectory: Mapping[str, Any]) -> torch.Tensor:
    """Count the tokens of each row without padding, ``[B]`` int64. Accepts packed batches, too."""
    if PACKED in trajectory:
        return trajectory["row_lengths"]
    mask = trajectory.get("attention_mask")
    if mask is None:
        ids = trajectory["input_ids"]
        return torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
    return mask.sum(dim=1)


def sampled_tokens(trajectory: Mapping[str, Any]) -> torch.Tensor:
    """Count the sampled tokens of each row, ``[B]``. Accepts packed batches, too."""
    return trajectory["sampled_tokens"] if PACKED in trajectory else trajectory["loss_mask"].sum(1)


def concat_padded_tensors(trajectories: Sequence[Mapping[str, Any]], pad_value: float = 0) -> Trajectory:
    """Join trajectories into one; token columns are right-padded to the longest row.

    Each value is copied once, so join all samples of a batch in one call rather than group by group.

    Args:
        trajectories: dicts with the same keys; the optional keys of ``contract.NEUTRAL`` may be missing in some dicts. ``[B]`` tensors,
            lists and tensors of images (``pixel_values``) are concatenated along their first dimension.
        pad_value: padding of token columns that are not in the data contract.

    Returns:
        A trajectory of ``sum(B)`` rows. If padding was needed, it has an ``attention_mask`` even if no item had one.

    Raises:
        TrajectoryError: there is nothing to join, or keys, row counts or shapes disagree; the message says which and where.
    """
    items = list(trajectories)
    if not items:
        raise _cannot_join("got an empty list: there is nothing to join; return None to reject a sample.")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise _cannot_join(
                f"item {index} is {type(item).__name__}, not a dict of tensors; leave a rejected member out, or reject the whole "
                "sample by returning None."
            )
    keys = list(dict.fromkeys(key for item in items for key in item))
    for key in keys:
        if key not in NEUTRAL and (missing := [index for index, item in enumerate(items) if key not in item]):
            raise _cannot_join(
                f"key {key!r} is in {len(items) - len(missing)} of {len(items)} items and missing in item "
                f"{', '.join(map(str, missing[:8]))}; give it in all of them or in none."
            )
    if "input_ids" not in keys:
        raise _cannot_join(f"no input_ids among the keys {', '.join(keys)}; every trajectory has them.")
    sizes = []
    for index, item in enumerate(items):
        ids = item["input_ids"]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise _cannot_join(f"input_ids of item {index} is {shape}, not [B, L]; use unsqueeze(0).")
        sizes.append((int(ids.shape[0]), int(ids.shape[1])))
    width = max(size[1] for size in sizes)
    if "attention_mask" not in keys and any(size[1] != width for size in sizes):
        items = [{**item, "attention_mask": torch.ones_like(item["input_ids"], dtype=torch.bool)} for item in items]
        keys.append("attention_mask")
    joined: Trajectory = {}
    experts = next((item[ROUTED_EXPERTS] for item in items if ROUTED_EXPERTS in item), None)
    for key in keys:
        values = [item[key] if key in item else _neutral(key, item, experts) for item in items]
        joined[key] = _join(key, values, sizes, width, COLUMNS[key].pad if key in COLUMNS else pad_value)
    return joined


def _cannot_join(why: str) -> TrajectoryError:
    return TrajectoryError(f"concat_padded_tensors{' ' if why.startswith('got') else ': '}{why}")


def _neutral(key: str, trajectory: Mapping[str, Any], experts: Any) -> Any:
    """Make the default values of an optional column for a trajectory that lacks it; ``experts`` are those of another trajectory."""
    ids_BL = trajectory["input_ids"]
    if key == ROUTED_EXPERTS:
        return experts.new_zeros((*ids_BL.shape, experts.shape[-1]))
    if key in PLAYER_NAMES:
        return [""] * len(ids_BL)
    if key in (MULTI_MODAL, "details"):
        return [None if key == MULTI_MODAL else {} for _ in ids_BL]
    if key == "position_ids":
        present_BL = torch.ones_like(ids_BL) if "attention_mask" not in trajectory else trajectory["attention_mask"].long()
        return (present_BL.cumsum(dim=1) - 1) * present_BL
    column = COLUMNS[key]
    shape = ids_BL.shape[: len(column.shape)]
    return torch.full(shape, column.neutral, dtype=column.dtype or torch.int32, device=ids_BL.device)


def _join(key: str, values: list[Any], sizes: list[tuple[int, int]], width: int, fill: float) -> Any:
    """Join one column of all items; token columns are padded to ``width`` in the same copy."""
    if all(isinstance(value, list | tuple) for value in values):
        for index, (value, (rows, _)) in enumerate(zip(values, sizes, strict=True)):
            if len(value) != rows:
                raise _cannot_join(f"list {key!r} of item {index} has {len(value)} entries for {rows} rows; give one a row.")
        return [entry for value in values for entry in value]
    if key in COLUMNS:
        goes_with_tokens = COLUMNS[key].shape == "BL"
    else:
        goes_with_tokens = all(is_token_column(key, value, *size) for value, size in zip(values, sizes, strict=True))
    for index, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if not isinstance(value, torch.Tensor):
            raise _cannot_join(
                f"key {key!r} of item {index} is {type(value).__name__} while others are tensors or unknown; give tensors "
                "everywhere, or one list entry a row everywhere."
            )
        if goes_with_tokens and tuple(value.shape[:2]) != size:
            raise _cannot_join(
                f"{key!r} of item {index} is {list(value.shape)}, but input_ids is {list(size)}; every token needs one entry in "
                "each key. Where input_ids is the longer one, look for resp.output_tokens appended to it twice."
            )
        if key in COLUMNS and not goes_with_tokens and tuple(value.shape) != size[:1]:
            raise _cannot_join(f"{key!r} of item {index} is {list(value.shape)} for {size[0]} rows; it is [B].")
        if value.dim() == 0:
            raise _cannot_join(f"{key!r} has no dimension for the rows; use unsqueeze(0).")
    if len({value.shape[2 if goes_with_tokens else 1 :] for value in values}) > 1:
        shapes = ", ".join(str(list(value.shape)) for value in values[:4])
        raise _cannot_join(f"{key!r} has shapes {shapes}, which cannot be joined; put it in a per-row list ({MULTI_MODAL}).")
    if not goes_with_tokens or all(size[1] == width for size in sizes):
        return torch.cat(values)
    dtype = reduce(torch.promote_types, {value.dtype for value in values})
    return pad_sequence([row for value in values for row in value.to(dtype)], batch_first=True, padding_value=fill)


def tensor_container_to(container: Any, *args: Any, **kwargs: Any) -> Any:
    """Copy nested dicts, lists and tuples, with ``tensor.to(*args, **kwargs)`` in place of every tensor.

    Other values are kept. Lists, tuples and named tuples keep their type; mappings become dicts.
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


def select_rows(trajectory: Mapping[str, Any], rows: Sequence[int] | torch.Tensor, *, width: int | None = None) -> Trajectory:
    """Select rows in the given order, truncated to ``width`` columns (default: the full width)."""
    row_total, full_width = trajectory["input_ids"].shape
    index = torch.as_tensor(rows, dtype=torch.int64, device=trajectory["input_ids"].device)
    out: Trajectory = {}
    for key, value in trajectory.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == row_total:
            cut = width is not None and is_token_column(key, value, row_total, full_width)
            value = value[index.to(value.device)]
            value = value[:, :width] if cut else value
        elif isinstance(value, list | tuple) and len(value) == row_total:
            value = [value[row] for row in index.tolist()]
        out[key] = value
    return out


def trim_padding(trajectory: Mapping[str, Any]) -> Trajectory:
    """Remove the columns in which every row is padding; at least one column remains."""
    rows, width = trajectory["input_ids"].shape
    longest = max(1, int(row_lengths(trajectory).max())) if rows else width
    return dict(trajectory) if longest == width else select_rows(trajectory, range(rows), width=longest)


def trajectory_rows(trajectory: Mapping[str, Any]) -> list[Trajectory]:
    """Split into trajectories ``[1, length]``, one for each row, without padding."""
    lengths = row_lengths(trajectory).clamp(min=1).tolist()
    return [select_rows(trajectory, [row], width=length) for row, length in enumerate(lengths)]


# -- results of workflows ----------------------------------------------------------------------------------------------


def tensor_form(result: Mapping[str, Any], place: Origin, recorder: Any = None) -> Trajectory:
    """Convert a dict in any accepted form to CPU tensors of the contract's types; missing keys are not filled in.

    Args:
        result: a trajectory, one row of it in one dimension, or the short form with ``output_ids``.
        place: origin of the result, for messages.
        recorder: recorder of the sample, for messages.

    Raises:
        TrajectoryError: lengths disagree, a key is missing, or a value is not a number.
    """
    given: dict[str, Any] = {}
    for key, value in result.items():
        name = ALIASES.get(key, key)
        if name in given:
            raise place.error(key, f"it is another name for {name!r}, which is there too", "give one of the two")
        if value is not None:
            given[name] = value
    if "input_ids" not in given:
        named = ", ".join(map(str, result)) or "no keys"
        raise place.error("input_ids", f"it is missing; there are {named}", "return the token ids")
    if "rewards" not in given:
        raise place.error("rewards", "there is no reward", "return 'rewards' (or 'reward'), one number a row")
    if "output_ids" in given:
        given = _from_short_form(given, place)
    elif "loss_mask" not in given:
        remedy = "return 1 for sampled tokens, else 0"
        raise place.error("loss_mask", "it is missing, so nobody knows which tokens the policy sampled", remedy)
    one_row = _depth(given["input_ids"]) == 1
    ids, lengths = _token_column("input_ids", given.pop("input_ids"), one_row, place)
    rows, width = ids.shape
    out: Trajectory = {"input_ids": ids}
    sizes = {"input_ids": lengths}
    for key, value in given.items():
        if key not in COLUMNS:
            out[key] = _further_column(key, value, rows, width, one_row, place)
        elif COLUMNS[key].shape == "B":
            out[key] = _row_column(key, value, rows, place)
        else:
            out[key], sizes[key] = _token_column(key, value, one_row, place)
    for key, size in sizes.items():
        if out[key].shape != ids.shape or (size and lengths and size != lengths):
            raise _lengths_disagree(key, out, sizes, place, recorder)
    if "attention_mask" not in out:
        out["attention_mask"] = torch.arange(width) < torch.tensor(lengths or [width] * rows)[:, None]
    images = {key: out.pop(key) for key in PROCESSOR_KEYS if isinstance(out.get(key), torch.Tensor)}
    if images and rows != 1:
        wrong = f"{rows} rows share one tensor, so nobody knows which images are whose"
        raise place.error(next(iter(images)), wrong, f"return {MULTI_MODAL!r}: a list with one dict of tensors a row")
    if images:
        out[MULTI_MODAL] = [{**(out.get(MULTI_MODAL, [None])[0] or {}), **images}]
    return out


def _from_short_form(given: dict[str, Any], place: Origin) -> dict[str, Any]:
    """Join prompt and sampled tokens into one row; log-probabilities and versions may cover only the sampled tokens."""
    parts = {}
    for key in ("input_ids", "output_ids"):
        ids = torch.as_tensor(given[key]).detach().cpu()
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1 or (ids.numel() and ids.is_floating_point()):
            remedy = "the short form has ids in one dimension, [P] and [N], as integers"
            raise place.error(key, f"it is {list(ids.shape)} {ids.dtype}", remedy)
        parts[key] = ids.to(torch.int64)
    prompt, output = parts.values()
    if not len(prompt) or not len(output):
        raise place.error("output_ids", f"{len(prompt)} prompt and {len(output)} sampled tokens", "neither may be empty")
    row = {key: value for key, value in given.items() if key not in ("output_ids", "loss_mask")}
    row["input_ids"] = torch.cat([prompt, output])
    row["loss_mask"] = torch.cat([torch.zeros_like(prompt), torch.ones_like(output)])
    for key in row.keys() & {"logprobs", "versions"}:
        values = torch.as_tensor(row[key]).detach().cpu().flatten()
        if len(values) == len(output):
            row[key] = torch.cat([values.new_full((len(prompt),), COLUMNS[key].pad), values])
    return row


def _depth(value: Any) -> int:
    """Return the number of dimensions of a value; rows of a list may differ in length."""
    return 1 + np.ndim(value[0]) if isinstance(value, list | tuple) and len(value) else np.ndim(value)


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(value) if isinstance(value, list | tuple) else value).detach().cpu()


def _token_column(key: str, value: Any, one_row: bool, place: Origin) -> tuple[torch.Tensor, list[int] | None]:
    """Convert a token column to ``[B, L]`` in its type. A list of rows is right-padded and returned with the length of each row."""
    column = COLUMNS[key]
    dtype = column.dtype or torch.int32
    lengths = None
    try:
        if isinstance(value, list | tuple) and _depth(value) > 1:
            parts = [_as_tensor(row) for row in value]
            lengths = [len(part) for part in parts]
            tensor = pad_sequence(parts, batch_first=True, padding_value=column.pad)
        else:
            tensor = _as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise place.error(key, f"it is no tensor ({error})", f"return {key} as [B, L] or, for one row, as [L]") from error
    if one_row and tensor.dim() == 1:
        tensor = tensor.unsqueeze(0)
    if tensor.dim() != 2:
        raise place.error(key, f"its shape is {list(tensor.shape)}", "it is [B, L], or [L] where all token keys are one row")
    if tensor.numel() == 0:
        raise place.error(key, f"its shape is {list(tensor.shape)}: no tokens", "return at least one token, or None to reject")
    if key == "loss_mask":
        if tensor.dtype != torch.bool and bool(((tensor != 0) & (tensor != 1)).any()):
            remedy = "1 where the policy sampled the token; weights go elsewhere"
            raise place.error(key, "it holds values other than 0 and 1", remedy)
    elif not dtype.is_floating_point and tensor.is_floating_point():
        raise place.error(key, f"it is {tensor.dtype}", f"return {'true and false' if dtype == torch.bool else 'integers'}")
    return tensor.to(dtype), lengths


def _row_column(key: str, value: Any, rows: int, place: Origin) -> torch.Tensor:
    """Convert a row column to ``[B]``; a single number applies to all rows of the sample."""
    try:
        tensor = _as_tensor(value).to(COLUMNS[key].dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise place.error(key, f"{value!r} is no number", f"return {key} as a number or as [B]") from error
    if tensor.numel() == 1:
        return tensor.reshape(1).expand(rows).clone()
    if tensor.numel() != rows:
        per_token = "; per-token rewards are the key 'token_rewards'" if key == "rewards" else ""
        raise place.error(key, f"its shape is {list(tensor.shape)} for {rows} rows", f"return one number a row{per_token}")
    return tensor.reshape(rows)


def _further_column(key: str, value: Any, rows: int, width: int, one_row: bool, place: Origin) -> Any:
    """Convert a column outside the contract: one entry per token, one per row, or one value for a single row."""
    if key == MULTI_MODAL and isinstance(value, Mapping):
        value = [dict(value)]
    is_list = isinstance(value, list | tuple)
    if is_list and one_row and len(value) == width and all(isinstance(entry, int | float) for entry in value):
        return torch.as_tensor(value).unsqueeze(0)
    if not isinstance(value, torch.Tensor | np.ndarray):
        return list(value) if is_list and len(value) == rows and not (one_row and len(value) == width) else [value] * rows
    tensor = _as_tensor(value)
    if key in PROCESSOR_KEYS:
        return tensor
    if tensor.dim() == 0:
        return tensor.reshape(1).expand(rows).clone()
    if one_row and tensor.shape[0] == width and not (tensor.dim() > 1 and tensor.shape[0] == 1):
        return tensor.unsqueeze(0)
    if tensor.shape[0] != rows:
        raise place.error(
            key,
            f"its shape is {list(tensor.shape)} for {rows} rows of {width} tokens",
            f"its first dimension is the row; images go into {MULTI_MODAL!r}, one dict a row",
        )
    return tensor


def _lengths_disagree(
    key: str, trajectory: Trajectory, sizes: dict[str, list[int] | None], place: Origin, recorder: Any
) -> TrajectoryError:
    """Make the error for disagreeing lengths; it names all lengths and says if ``input_ids`` contains a response twice."""
    rows, width = trajectory["input_ids"].shape
    named = ", ".join(f"{name} {size or list(trajectory[name].shape)}" for name, size in sizes.items())
    remedy = "every token needs one entry in each key"
    excess = width - int(trajectory[key].shape[1])
    responses = [len(record.output) for record in recorder.records] if recorder is not None else []
    if rows == 1 and excess > 0 and excess in (sum(responses), *responses):
        remedy += (
            f"; the {excess} tokens too many are as many as the engine sampled: is resp.output_tokens appended to input_ids twice "
            "(the line `input_ids += resp.output_tokens` stands there two times)? Append it once"
        )
    return place.error(key, f"lengths disagree: {named}", remedy)
