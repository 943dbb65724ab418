"""Packed batches: rows whose tokens stay packed until a trainer needs them.

The controller of a run on a Ray cluster passes rows on from the workers to the ranks. It keeps them as they arrive, packed, so that one
long row does not pad all others. A packed batch has the row columns of the data contract, the metrics of ``details``, an ``input_ids``
without width, three columns counted from the tokens (``row_lengths``, ``sampled_tokens``, ``oldest_versions``), and in the list ``PACKED``
the ``PackedRows`` of each row and the row's index in them. It is joined and divided like any other trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollwright.errors import TrajectoryError
from rollwright.experience.contract import COLUMNS, NEUTRAL, PACKED, Trajectory
from rollwright.experience.packed import PackedColumns, pack_rows, unpack_rows
from rollwright.experience.trajectory import concat_padded_tensors, select_rows

#: Columns that the controller writes after the rows were packed; those of the batch count.
WRITTEN = ("group_ids", "sample_ids")


@dataclass(eq=False)
class PackedRows:
    """Rows by ``pack_rows``.

    Attributes:
        data: the bytes.
        layout: optional columns and their shapes; rows can only be joined with rows of the same layout.
    """

    data: bytes
    layout: str


def packed_batch(data: bytes) -> Trajectory:
    """Make a packed batch of the rows in ``data`` (by ``pack_rows``)."""
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
    rows = PackedRows(data, _layout(columns))
    return {**batch, PACKED: [(rows, row) for row in range(count)]}


def _oldest(versions_T: torch.Tensor) -> int:
    """The oldest version of a row's sampled tokens; -1 without any."""
    sampled_T = versions_T[versions_T >= 0]
    return int(sampled_T.min()) if len(sampled_T) else -1


def _layout(columns: PackedColumns) -> str:
    """The columns that all rows of a batch must have in common, with the shapes that must agree."""
    shapes = {key: list(value.shape[1:]) for key, value in (*columns.by_token.items(), *columns.by_row.items())}
    names = sorted({*shapes, *columns.lists} - set(NEUTRAL) - set(WRITTEN) - {key for key in COLUMNS if COLUMNS[key].required})
    return ", ".join(f"{key} {shapes[key]}" if key in shapes and key not in COLUMNS else key for key in names)


def as_packed(rows: Trajectory) -> Trajectory:
    """Pack a trajectory; a packed batch is returned unchanged."""
    return rows if PACKED in rows else packed_batch(pack_rows(rows))


def unpacked(batch: Trajectory) -> Trajectory:
    """The rows of a packed batch with their tokens, padded, and the ids of the batch; any other trajectory is returned unchanged."""
    if PACKED not in batch:
        return batch
    return {**rows_of(*parts_of(batch)), **{key: batch[key] for key in WRITTEN if key in batch}}


def check_joined(batch: Trajectory) -> None:
    """Refuse a packed batch whose rows could not be joined when they are unpacked.

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
    """The packed rows behind a packed batch, and for each row of the batch the index of its part and its index there."""
    parts = {rows: number for number, rows in enumerate(dict.fromkeys(rows for rows, _ in batch[PACKED]))}
    return [rows.data for rows in parts], [(parts[rows], row) for rows, row in batch[PACKED]]


def rows_of(parts: Sequence[bytes], places: Sequence[tuple[int, int]]) -> Trajectory:
    """Unpack and join rows; see ``parts_of``.

    Args:
        parts: packed rows.
        places: of each wanted row the index of its part, and its index there. Without any, the result has the columns of the first part.
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
