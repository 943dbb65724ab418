"""The forms in which workflows return rows, brought to tensors ``[B, L]`` of the data contract's types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollwright.experience.contract import COLUMNS, MULTI_MODAL, Place, Trajectory

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
