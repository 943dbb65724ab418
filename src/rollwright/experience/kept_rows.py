"""Rows whose tokens stay where they were made: what a controller knows of them, and how others fetch them.

Such a trajectory, an *outline*, has the row columns of the data contract, ``input_ids`` of no width, three columns that are counted from
the tokens (``row_lengths``, ``sampled_tokens``, ``oldest_versions``), the metrics of ``details``, and in the list ``KEPT`` for each row
the ``KeptRows`` that it lies in and its number there. It joins and divides as any trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from rollwright.errors import LostProcessError, TrajectoryError
from rollwright.experience.contract import COLUMNS, KEPT, NEUTRAL, Trajectory, is_token_column
from rollwright.experience.packed import pack_bytes, pack_rows, unpack_bytes, unpack_rows
from rollwright.experience.trajectory import concat_padded_tensors, row_lengths, select_rows

#: Columns of a row that are written after it was made: they are the outline's.
WRITTEN = ("group_ids", "sample_ids")


class ObjectStore(Protocol):
    """Keeps bytes for several processes, as that of a Ray cluster does."""

    def put(self, data: bytes) -> Any:
        """Keep bytes here; returns a reference."""
        ...

    def get(self, references: Sequence[Any]) -> list[bytes | None]:
        """Fetch bytes; None for what is lost."""
        ...


@dataclass(eq=False)
class KeptRows:
    """Packed rows in an object store.

    Attributes:
        reference: of the bytes (``pack_rows``); another one where they were lost and made again.
        store: that has them.
        columns: what decides whether they can be joined with others.
        lease: of the episode that they are the rows of, by which it is run again; None: they were made here.
        digest: of what they hold, by which rows that are made again are known to be the same.
    """

    reference: Any
    store: ObjectStore
    columns: str
    lease: tuple[Any, ...] | None = None
    digest: str = ""


def pack_outline(rows: Trajectory) -> bytes:
    """The outline of rows as bytes, without where they are."""
    count = len(rows["input_ids"])
    tensors = {key: value for key, value in rows.items() if key in COLUMNS and COLUMNS[key].shape == "B"}
    sampled_BL = rows["versions"] >= 0
    newest = torch.iinfo(rows["versions"].dtype).max
    oldest_B = torch.where(sampled_BL, rows["versions"], newest).amin(1)
    tensors |= {
        "input_ids": rows["input_ids"].new_empty(count, 0),
        "row_lengths": row_lengths(rows),
        "sampled_tokens": sampled_tokens(rows),
        "oldest_versions": torch.where(oldest_B == newest, -1, oldest_B),
    }
    details = [{"metrics": each.get("metrics", {})} for each in rows.get("details", [])]
    return pack_bytes(tensors, {"details": details, "columns": _columns(rows), "digest": _digest(rows)})


def _digest(rows: Trajectory) -> str:
    """Of the columns of the data contract that were there when the rows were made: tokens, log-probabilities, versions, rewards."""
    digest = xxhash.xxh3_128()
    for key in sorted(COLUMNS.keys() & rows.keys() - set(WRITTEN)):
        digest.update(f"{key} {list(rows[key].shape)}".encode())
        digest.update(rows[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def sampled_tokens(rows: Trajectory) -> torch.Tensor:
    """Sampled tokens of each row, ``[B]``; of an outline as well."""
    return rows["sampled_tokens"] if KEPT in rows else rows["loss_mask"].sum(1)


def _columns(rows: Trajectory) -> str:
    """The columns without which rows cannot be joined with others that have them, and the shapes that have to agree."""
    further = []
    for key, value in sorted(rows.items()):
        if key in NEUTRAL or key in WRITTEN or (key in COLUMNS and COLUMNS[key].required):
            continue
        if key not in COLUMNS and isinstance(value, torch.Tensor):
            goes_with_tokens = is_token_column(key, value, *rows["input_ids"].shape)
            key = f"{key} {list(value.shape[2 if goes_with_tokens else 1 :])}"
        further.append(key)
    return ", ".join(further)


def unpack_outline(data: bytes, reference: Any, store: ObjectStore, lease: tuple[Any, ...] | None = None) -> Trajectory:
    """The outline that ``pack_outline`` made, of rows that lie in a store."""
    tensors, rest = unpack_bytes(data)
    kept = KeptRows(reference, store, rest["columns"], lease, rest["digest"])
    outline: Trajectory = {**tensors, KEPT: [(kept, row) for row in range(len(tensors["input_ids"]))]}
    if rest["details"]:
        outline["details"] = rest["details"]
    return outline


def keep(rows: Trajectory, store: ObjectStore) -> Trajectory:
    """Put rows into a store; returns their outline."""
    return unpack_outline(pack_outline(rows), store.put(pack_rows(rows)), store)


def check_joinable(outline: Trajectory) -> None:
    """Refuse an outline whose rows could not be joined when they are fetched.

    Raises:
        TrajectoryError: their columns differ; the message says how.
    """
    kinds = dict.fromkeys(kept.columns for kept, _ in outline[KEPT])
    if len(kinds) > 1:
        named = " and others ".join(kind or "none" for kind in list(kinds)[:2])
        raise TrajectoryError(
            f"rows cannot be joined: some have the columns {named} besides; give each in all samples or in none."
        )


def places_of(outline: Trajectory) -> tuple[list[KeptRows], list[tuple[int, int]]]:
    """Where the rows of an outline lie: what to fetch, and for each row its number in that and the number of its part."""
    parts = {kept: number for number, kept in enumerate(dict.fromkeys(kept for kept, _ in outline[KEPT]))}
    return list(parts), [(parts[kept], row) for kept, row in outline[KEPT]]


def rows_at(places: Sequence[tuple[int, int]], parts: Sequence[bytes]) -> Trajectory:
    """Rows of packed parts, in the order of ``places``: the number of a part, and of the row in it; with none, the columns of the first."""
    if not places:
        return select_rows(unpack_rows(parts[0]), [], width=1)
    rows_of_part: dict[int, list[int]] = {}
    for part, row in places:
        rows_of_part.setdefault(part, []).append(row)
    joined = concat_padded_tensors([select_rows(unpack_rows(parts[part]), rows) for part, rows in rows_of_part.items()])
    order = {place: at for at, place in enumerate((part, row) for part, rows in rows_of_part.items() for row in rows)}
    wanted = [order[place] for place in places]
    return joined if wanted == list(range(len(wanted))) else select_rows(joined, wanted)


def fetched(rows: Trajectory) -> Trajectory:
    """The rows that an outline tells of, with the ids that it has; a trajectory with tokens is returned as it is.

    Raises:
        LostProcessError: they are lost.
    """
    if KEPT not in rows:
        return rows
    parts, places = places_of(rows)
    packed = parts[0].store.get([part.reference for part in parts])
    if None in packed:
        raise LostProcessError("rows are lost with the process that made them")
    return {**rows_at(places, packed), **{key: rows[key] for key in WRITTEN if key in rows}}  # type: ignore[arg-type]
