"""Trajectories: the tensor form of experiences. Check them, pad and join them, cut them into rows.

What the columns mean is said in ``contract``. The functions here return new trajectories and change none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import (
    COLUMNS,
    MULTI_MODAL,
    NEUTRAL,
    Place,
    Trajectory,
    check_trajectory,
    is_token_column,
    neutral,
    row_count,
)

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


# ----------------------------------------------------------------------
# The forms in which workflows return rows, brought to tensors ``[B, L]`` of the data contract's types.

#: Other names that workflows use for a column.
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


def tensor_form(result: Mapping[str, Any], place: Place, recorder: Any = None) -> Trajectory:
    """A dict in any accepted form as tensors on the CPU, in the contract's types, keys not yet complete.

    Raises:
        TrajectoryError: lengths disagree, a key is missing, or a value is no number where one belongs.
    """
    renamed: dict[str, Any] = {}
    for key, value in result.items():
        name = ALIASES.get(key, key)
        if name in renamed:
            raise place.error(key, f"it is another name for {name!r}, which is there too", "give one of the two")
        if value is not None:
            renamed[name] = value
    if "input_ids" not in renamed:
        raise place.error(
            "input_ids", f"it is missing; there are {', '.join(map(str, result)) or 'no keys'}", "return the token ids"
        )
    if "rewards" not in renamed:
        raise place.error("rewards", "there is no reward", "return 'rewards' (or 'reward'), one number a row")
    if "output_ids" in renamed:
        renamed = _from_short_form(renamed, place)
    elif "loss_mask" not in renamed:
        raise place.error(
            "loss_mask", "it is missing, so nobody knows which tokens the policy sampled", "return 1 for sampled tokens, else 0"
        )
    one_row = np.ndim(_plain(renamed["input_ids"])) == 1 if not _is_ragged(renamed["input_ids"]) else False
    ids = _token_tensor("input_ids", renamed["input_ids"], one_row, place)
    rows, width = ids.shape
    lengths = _ragged_lengths(renamed["input_ids"])
    out: Trajectory = {"input_ids": ids}
    sizes: dict[str, list[int]] = {"input_ids": lengths or [width]}
    for key, value in renamed.items():
        column = COLUMNS.get(key)
        if key == "input_ids":
            continue
        if column is not None and column.shape == "BL":
            out[key] = _token_tensor(key, value, one_row, place)
            sizes[key] = _ragged_lengths(value) or [int(out[key].shape[1])]
        elif column is not None:
            out[key] = _row_tensor(key, value, rows, place)
        else:
            out[key] = _extra(key, value, rows, width, one_row, place)
    _refuse_disagreement(out, sizes, place, recorder)
    if "attention_mask" not in out:
        mask = torch.ones(rows, width, dtype=torch.bool)
        if lengths:
            mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        out["attention_mask"] = mask
    _gather_multi_modal(out, rows, place)
    return out


def _from_short_form(values: dict[str, Any], place: Place) -> dict[str, Any]:
    prompt, output = (_plain(values[key]) for key in ("input_ids", "output_ids"))
    flat = []
    for key, ids in (("input_ids", prompt), ("output_ids", output)):
        ids = torch.as_tensor(np.asarray(ids)) if not isinstance(ids, torch.Tensor) else ids
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1 or (ids.numel() and ids.is_floating_point()):
            raise place.error(
                key, f"it is {list(ids.shape)} {ids.dtype}", "the short form has ids in one dimension, [P] and [N], as integers"
            )
        flat.append(ids.to(torch.int64))
    prompt, output = flat
    if not len(prompt) or not len(output):
        raise place.error("output_ids", f"{len(prompt)} prompt and {len(output)} sampled tokens", "neither may be empty")
    rest = {key: value for key, value in values.items() if key not in ("input_ids", "output_ids", "loss_mask")}
    for key, fill in (("logprobs", 0.0), ("versions", -1)):
        if key in rest:  # of the response only, as the response object has them
            given = torch.as_tensor(_plain(rest[key])).flatten()
            if len(given) == len(output):
                rest[key] = torch.cat([given.new_full((len(prompt),), fill), given])
    return {
        "input_ids": torch.cat([prompt, output]),
        "loss_mask": torch.cat([torch.zeros_like(prompt), torch.ones_like(output)]),
        **rest,
    }


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _is_ragged(value: Any) -> bool:
    """True for a list of rows: lists, arrays or 1-D tensors."""
    return isinstance(value, list | tuple) and bool(value) and np.ndim(value[0]) >= 1


def _ragged_lengths(value: Any) -> list[int] | None:
    return [len(row) for row in value] if _is_ragged(value) else None


def _token_tensor(key: str, value: Any, one_row: bool, place: Place) -> torch.Tensor:
    """A token column as ``[B, L]`` in its type; lists of rows are right-padded."""
    column = COLUMNS[key]
    dtype = column.dtype or torch.int32
    try:
        if _is_ragged(value):
            parts = [torch.as_tensor(_plain(row)) for row in value]
            tensor = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=column.pad)
        else:
            tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list | tuple) else _plain(value))
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
            raise place.error(
                key, "it holds values other than 0 and 1", "1 where the policy sampled the token; weights go elsewhere"
            )
    elif not dtype.is_floating_point and tensor.is_floating_point():
        raise place.error(key, f"it is {tensor.dtype}", f"return {'true and false' if dtype == torch.bool else 'integers'}")
    return tensor.to(dtype)


def _row_tensor(key: str, value: Any, rows: int, place: Place) -> torch.Tensor:
    """A row column as ``[B]``; one number goes to all rows of the sample."""
    try:
        tensor = torch.as_tensor(np.asarray(value) if isinstance(value, list | tuple) else _plain(value)).to(COLUMNS[key].dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise place.error(key, f"{value!r} is no number", f"return {key} as a number or as [B]") from error
    if tensor.numel() == 1:
        return tensor.reshape(1).expand(rows).clone()
    if tensor.numel() != rows:
        remedy = "one number a row; per-token rewards are the key 'token_rewards'" if key == "rewards" else "one number a row"
        raise place.error(key, f"its shape is {list(tensor.shape)} for {rows} rows", f"return {remedy}")
    return tensor.reshape(rows)


def _extra(key: str, value: Any, rows: int, width: int, one_row: bool, place: Place) -> Any:
    """A column of the workflow's own: with the tokens, with the rows, or one value for a single row."""
    if key == MULTI_MODAL and isinstance(value, Mapping):
        value = [dict(value)]
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if key in PROCESSOR_KEYS:
            return value
        if value.dim() == 0:
            return value.reshape(1).expand(rows).clone()
        if one_row and value.shape[0] == width and not (value.dim() > 1 and value.shape[0] == 1):
            return value.unsqueeze(0)
        if value.shape[0] != rows:
            raise place.error(
                key,
                f"its shape is {list(value.shape)} for {rows} rows of {width} tokens",
                f"its first dimension is the row; images go into {MULTI_MODAL!r}, one dict a row",
            )
        return value
    if isinstance(value, list | tuple) and len(value) == rows and not (one_row and len(value) == width):
        return list(value)
    if isinstance(value, list | tuple) and one_row and len(value) == width and all(isinstance(v, int | float) for v in value):
        return torch.as_tensor(value).unsqueeze(0)
    return [value] * rows


def _gather_multi_modal(trajectory: Trajectory, rows: int, place: Place) -> None:
    """Loose processor outputs of a single row move into its entry of the multi-modal list."""
    loose = {key: trajectory.pop(key) for key in PROCESSOR_KEYS if isinstance(trajectory.get(key), torch.Tensor)}
    if not loose:
        return
    if rows != 1:
        raise place.error(
            next(iter(loose)),
            f"{rows} rows share one tensor, so nobody knows which images are whose",
            f"return {MULTI_MODAL!r}: a list with one dict of tensors a row",
        )
    present = trajectory.get(MULTI_MODAL, [None])[0] or {}
    trajectory[MULTI_MODAL] = [{**present, **loose}]


def _refuse_disagreement(trajectory: Trajectory, sizes: dict[str, list[int]], place: Place, recorder: Any) -> None:
    """Every token column has as many entries as there are tokens, row by row; the message names all lengths."""
    rows, width = trajectory["input_ids"].shape
    tokens = [name for name in sizes if trajectory[name].shape != (rows, width)]
    ragged = sizes["input_ids"]
    tokens += [name for name in sizes if name not in tokens and len(sizes[name]) == len(ragged) and sizes[name] != ragged]
    if not tokens:
        return
    named = ", ".join(f"{name} {list(trajectory[name].shape) if len(sizes[name]) == 1 else sizes[name]}" for name in sizes)
    remedy = "every token needs one entry in each key"
    excess = width - int(trajectory[tokens[0]].shape[1])
    records = recorder.records if recorder is not None else []
    sampled = sum(len(record.output_ids) for record in records)
    if rows == 1 and excess > 0 and excess in (sampled, *(len(record.output_ids) for record in records)):
        remedy += (
            f"; the {excess} tokens too many are as many as the engine sampled: is resp.output_tokens appended to input_ids twice "
            "(the line `input_ids += resp.output_tokens` stands there two times)?"
        ).rstrip("?") + "? Append it once"
    raise place.error(tokens[0], f"lengths disagree: {named}", remedy)
