"""The packed form in which experiences are stored and sent: safetensors bytes with JSON in their metadata. Nothing is pickled.

``pack_bytes`` packs any tensors. ``pack_rows`` packs rows of a trajectory: the length of each row, and every token column as one flat
tensor of all rows' tokens, without padding.

A *packed batch* (``packed_batch``) is a trajectory whose tokens stay packed until a trainer needs them. The controller of a run on a Ray
cluster passes rows from the workers to the ranks in this form, so that one long row does not pad all others. It has the row columns of
the data contract, the names of players, the metrics of ``details``, an ``input_ids`` of width 0, three columns computed from the tokens (``row_lengths``,
``sampled_tokens``, ``oldest_versions``), and a list ``PACKED`` that gives for each row its ``PackedRows`` and its index in them. A packed
batch is joined and split like any other trajectory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, MULTI_MODAL, NEUTRAL, PACKED, PLAYER_NAMES, Trajectory, is_token_column
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths, select_rows

FORMAT = "rollwright.experience"
VERSION = 2
_FIRST_WITH_CHECKSUM = 2
_CHECKSUM, _NO_CHECKSUM = "checksum", "0" * 16  # over all bytes, with this field set to zeros


#: Names of the types in the format (https://github.com/huggingface/safetensors#format).
TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack_bytes(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> bytes:
    """Pack named tensors and JSON values; equal values give equal bytes.

    The header is written here because ``safetensors.torch.save`` takes four times as long for such small tensors and orders its
    metadata at random.

    Raises:
        TrajectoryError: ``rest`` contains a value that JSON cannot represent; the message names its path.
    """
    document = json.dumps(plain_json(rest, ""), separators=(",", ":"), allow_nan=True)
    metadata = {_CHECKSUM: _NO_CHECKSUM, "format": FORMAT, "version": str(VERSION), "rest": document}
    named = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # keeps every block aligned
    try:
        head = safetensors_head(named, metadata)
    except TypeError as error:
        raise TrajectoryError(f"{error} that can be stored; convert it.") from None
    blocks = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in named)
    body = b"".join(blocks)
    checksum = _checksum_of(head, body)
    return head.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1) + body


def _checksum_of(head: bytes, body: bytes) -> str:
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    return digest.hexdigest()


def _check(data: bytes, size: int, metadata: Mapping[str, str]) -> None:
    """Verify the checksum of packed bytes; the first version of the format has none.

    Raises:
        ValueError: the checksum is missing or does not match.
    """
    expected = metadata.get(_CHECKSUM)
    if expected is None and int(metadata["version"]) >= _FIRST_WITH_CHECKSUM:
        raise ValueError("they have no checksum")
    if expected is not None:
        head, body = data[: 8 + size], data[8 + size :]
        if _checksum_of(head.replace(expected.encode(), _NO_CHECKSUM.encode(), 1), body) != expected:
            raise ValueError("their checksum does not match")


def safetensors_head(named: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Make the header of a safetensors file: its length, then the position of each tensor as JSON, padded to a multiple of 8 bytes.

    Args:
        named: the tensors in the order of their bytes; they may be on the meta device.
        metadata: the file's metadata.

    Raises:
        TypeError: the format does not support a tensor's type; the message begins with the tensor's name.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in named:
        if tensor.dtype not in TYPE_NAMES:
            raise TypeError(f"{name}: {tensor.dtype} is no type of tensors")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head


def unpack_bytes(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Unpack the result of ``pack_bytes``.

    Raises:
        TrajectoryError: the bytes are damaged, another format or a later version.
    """
    try:
        (size,) = struct.unpack_from("<Q", data)
        data = bytes(data)
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise TrajectoryError(f"the bytes are safetensors of format {metadata.get('format')!r}, not {FORMAT!r}.")
        if int(metadata["version"]) > VERSION:
            raise TrajectoryError(
                f"the bytes were written in version {metadata['version']} of the format; this installation reads up to {VERSION}: update it."
            )
        _check(data, size, metadata)
        return load(data), json.loads(metadata["rest"])
    except (struct.error, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise TrajectoryError(f"the bytes are no serialised experience ({error}); they are damaged or cut.") from error


def plain_json(value: Any, path: str) -> Any:
    """Convert plain values, numbers and arrays of NumPy and torch, and tuples to JSON types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TrajectoryError(f"{path or 'top level'}: key {key!r} is no string; JSON has only string keys.")
        return {key: plain_json(part, f"{path}.{key}" if path else key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(part, f"{path}[{index}]") for index, part in enumerate(value)]
    if hasattr(value, "tolist"):  # numbers, arrays and tensors
        return plain_json(value.tolist(), path)
    raise TrajectoryError(f"{path}: {type(value).__name__} cannot be stored; use numbers, text, lists and dicts.")


# -- rows of a trajectory ----------------------------------------------------------------------------------------------

_LENGTHS = "lengths"


def pack_rows(trajectory: Mapping[str, Any], rows: Sequence[int] | None = None) -> bytes:
    """Pack rows of a trajectory, without padding.

    Args:
        trajectory: tensors ``[B, L, ...]`` and ``[B, ...]``, and lists with one entry per row.
        rows: the rows to pack, in order. None packs all.

    Raises:
        TrajectoryError: padding is not on the right, or a value has no entry for each row or cannot be stored.
    """
    row_total, width = trajectory["input_ids"].shape
    index_B = torch.arange(row_total) if rows is None else torch.as_tensor(rows, dtype=torch.int64)
    lengths_B = row_lengths(trajectory).cpu()[index_B]
    places = list(zip(index_B.tolist(), lengths_B.tolist(), strict=True))
    attention = trajectory.get("attention_mask")
    if attention is not None and not all(bool(attention[row, :length].all()) for row, length in places):
        raise TrajectoryError("pack_rows: attention_mask has padding that is not on the right, so rows have no length.")
    tensors: dict[str, torch.Tensor] = {_LENGTHS: lengths_B}
    lists: dict[str, Any] = {}
    for key, value in trajectory.items():
        if key == "attention_mask":
            continue  # the lengths define it
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == row_total:
            value = value.detach().cpu()
            if value.dim() > 1 and is_token_column(key, value, row_total, width):
                tokens = [value[row, :length] for row, length in places]  # each copied once, and padding not at all
                tensors[f"token.{key}"] = torch.cat(tokens) if tokens else value[0:0].flatten(0, 1)
            else:
                tensors[f"row.{key}"] = value[index_B]
        elif isinstance(value, list | tuple) and len(value) == row_total:
            chosen_list = [value[row] for row in index_B.tolist()]
            if key == MULTI_MODAL:
                for row, images in enumerate(chosen_list):
                    tensors |= {f"image.{row}.{name}": torch.as_tensor(part) for name, part in (images or {}).items()}
                chosen_list = [images is not None for images in chosen_list]
            lists[key] = chosen_list
        else:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TrajectoryError(f"pack_rows: {key!r} is {shape} for {row_total} rows; give one entry a row.")
    return pack_bytes(tensors, {"has_mask": attention is not None, "lists": lists})


@dataclass(frozen=True)
class PackedColumns:
    """Columns of packed rows, still without padding.

    Attributes:
        lengths: tokens of each row.
        by_token: columns with one entry per token; the rows are concatenated.
        by_row: columns with one entry per row.
        lists: lists with one entry per row; the entry for images says whether the row has any.
        images: image tensors by row index.
        has_mask: whether the packed trajectory had an ``attention_mask``.
    """

    lengths: torch.Tensor
    by_token: dict[str, torch.Tensor]
    by_row: dict[str, torch.Tensor]
    lists: dict[str, Any]
    images: dict[int, dict[str, torch.Tensor]]
    has_mask: bool

    @classmethod
    def read(cls, data: bytes) -> PackedColumns:
        """Read the columns from the bytes of ``pack_rows``.

        Raises:
            TrajectoryError: the bytes are damaged or hold no rows.
        """
        tensors, rest = unpack_bytes(data)
        if _LENGTHS not in tensors or "lists" not in rest:
            raise TrajectoryError("the bytes are no packed rows of a trajectory: they have no lengths.")
        columns = cls(tensors.pop(_LENGTHS), {}, {}, rest["lists"], {}, rest["has_mask"])
        for name, tensor in tensors.items():
            kind, key = name.split(".", 1)
            if kind == "image":
                row, part = key.split(".", 1)
                columns.images.setdefault(int(row), {})[part] = tensor
            else:
                (columns.by_token if kind == "token" else columns.by_row)[key] = tensor
        return columns

    def padded(self) -> Trajectory:
        """Return the rows, right-padded to the longest row (to one column at least)."""
        lengths = self.lengths.tolist()
        rows, width = len(lengths), max([1, *lengths])
        out: Trajectory = {**self.by_row, **self.lists}
        for key, tensor in self.by_token.items():
            out[key] = tensor.new_full((rows, width, *tensor.shape[1:]), COLUMNS[key].pad if key in COLUMNS else 0)
            for row, part in enumerate(tensor.split(lengths)):
                out[key][row, : len(part)] = part
        if self.has_mask:
            out["attention_mask"] = torch.arange(width) < self.lengths[:, None]
        if MULTI_MODAL in out:
            out[MULTI_MODAL] = [
                self.images.get(row, {}) if has_images else None for row, has_images in enumerate(out[MULTI_MODAL])
            ]
        return out


def unpack_rows(data: bytes) -> Trajectory:
    """Unpack the bytes of ``pack_rows`` to rows, right-padded to the longest row (to one column at least).

    Raises:
        TrajectoryError: the bytes are damaged or hold no rows.
    """
    return PackedColumns.read(data).padded()


# -- packed batches ------------------------------------------------------------------------------------------------------

#: Columns that the controller writes after packing; when a batch is unpacked, its own values replace the packed ones.
WRITTEN = ("group_ids", "sample_ids")


@dataclass(eq=False)
class PackedRows:
    """Rows packed by ``pack_rows``.

    Attributes:
        data: the bytes.
        layout: optional columns and their shapes; rows can only be joined with rows of the same layout.
    """

    data: bytes
    layout: str


def packed_batch(data: bytes) -> Trajectory:
    """Make a packed batch from rows that ``pack_rows`` packed."""
    columns = PackedColumns.read(data)
    count, lengths = len(columns.lengths), columns.lengths.tolist()
    batch: Trajectory = {key: value for key, value in columns.by_row.items() if key in COLUMNS}
    batch["input_ids"] = torch.empty(count, 0, dtype=torch.int64)
    batch["row_lengths"] = columns.lengths
    sampled = [int(mask_T.sum()) for mask_T in columns.by_token["loss_mask"].split(lengths)]
    batch["sampled_tokens"] = torch.tensor(sampled, dtype=torch.int64)
    if "versions" in columns.by_token:
        oldest = [_oldest(versions_T) for versions_T in columns.by_token["versions"].split(lengths)]
        batch["oldest_versions"] = torch.tensor(oldest, dtype=torch.int32)
    if "details" in columns.lists:
        batch["details"] = [{"metrics": details.get("metrics", {})} for details in columns.lists["details"]]
    batch |= {key: columns.lists[key] for key in PLAYER_NAMES if key in columns.lists}
    rows = PackedRows(data, _layout(columns))
    return {**batch, PACKED: [(rows, row) for row in range(count)]}


def _oldest(versions_T: torch.Tensor) -> int:
    """Return the oldest version of a row's sampled tokens; -1 if there are none."""
    sampled_T = versions_T[versions_T >= 0]
    return int(sampled_T.min()) if len(sampled_T) else -1


def _layout(columns: PackedColumns) -> str:
    """Name the columns that all rows of a batch must have in common, and the shapes that must agree."""
    shapes = {key: list(value.shape[1:]) for key, value in (*columns.by_token.items(), *columns.by_row.items())}
    names = sorted({*shapes, *columns.lists} - set(NEUTRAL) - set(WRITTEN) - {key for key in COLUMNS if COLUMNS[key].required})
    return ", ".join(f"{key} {shapes[key]}" if key in shapes and key not in COLUMNS else key for key in names)


def as_packed(rows: Trajectory) -> Trajectory:
    """Pack a trajectory; a packed batch is returned unchanged."""
    return rows if PACKED in rows else packed_batch(pack_rows(rows))


def unpacked(batch: Trajectory) -> Trajectory:
    """Unpack a packed batch to padded rows that have the batch's group and sample ids; return any other trajectory unchanged."""
    if PACKED not in batch:
        return batch
    return {**rows_of(*parts_of(batch)), **{key: batch[key] for key in WRITTEN if key in batch}}


def check_joined(batch: Trajectory) -> None:
    """Raise if the rows of a packed batch could not be joined when they are unpacked.

    Raises:
        TrajectoryError: their columns differ; the message names them.
    """
    layouts = list(dict.fromkeys(rows.layout for rows, _ in batch.get(PACKED, [])))
    if len(layouts) > 1:
        named = " and others ".join(layout or "none" for layout in layouts[:2])
        raise TrajectoryError(
            f"rows cannot be joined: some have the columns {named} besides; give each in all samples or in none."
        )


def parts_of(batch: Trajectory) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Return the packed rows behind a packed batch and, for each row of the batch, the index of its part and its index in that part."""
    parts = {rows: number for number, rows in enumerate(dict.fromkeys(rows for rows, _ in batch[PACKED]))}
    return [rows.data for rows in parts], [(parts[rows], row) for rows, row in batch[PACKED]]


def rows_of(parts: Sequence[bytes], places: Sequence[tuple[int, int]]) -> Trajectory:
    """Unpack and join rows; see ``parts_of``.

    Args:
        parts: packed rows.
        places: for each wanted row, the index of its part and its index in that part. If empty, the result has no rows and the columns
            of the first part.
    """
    if not places:
        return select_rows(unpack_rows(parts[0]), [], width=1)
    rows_of_part: dict[int, list[int]] = {}
    for part, row in places:
        rows_of_part.setdefault(part, []).append(row)
    joined = concat_padded_tensors([select_rows(unpack_rows(parts[part]), rows) for part, rows in rows_of_part.items()])
    order = {place: index for index, place in enumerate((part, row) for part, rows in rows_of_part.items() for row in rows)}
    wanted = [order[place] for place in places]
    return joined if wanted == list(range(len(wanted))) else select_rows(joined, wanted)
