"""Export of an experience store to Parquet, one experience a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from rollwright.atomic import replaced_file
from rollwright.errors import ConfigError
from rollwright.experience.experience import Experience
from rollwright.store.records import StoredGroup

_ROWS_AT_ONCE = 2048
#: Fields that are written as JSON.
_DOCUMENTS = ("messages", "tools", "chosen_messages", "rejected_messages", "info", "metrics")
#: Fields that have no column of their name: the id is one text, and images are left out.
_ELSEWHERE = ("eid", "multi_modal_inputs")


def _schema(pyarrow: Any) -> Any:
    ids, numbers = pyarrow.list_(pyarrow.int64()), pyarrow.list_(pyarrow.float32())
    return pyarrow.schema(
        [
            ("group", pyarrow.string()),
            ("ordinal", pyarrow.int64()),
            ("attempt", pyarrow.int32()),
            ("group_version", pyarrow.int64()),
            ("uses", pyarrow.int32()),
            ("complete", pyarrow.bool_()),
            ("row", pyarrow.int32()),
            ("eid", pyarrow.string()),
            ("tokens", ids),
            ("prompt_length", pyarrow.int32()),
            ("action_mask", pyarrow.list_(pyarrow.bool_())),
            ("logprobs", numbers),
            ("versions", pyarrow.list_(pyarrow.int32())),
            ("token_rewards", numbers),
            ("reward", pyarrow.float64()),
            ("temperature", pyarrow.float32()),
            ("truncated", pyarrow.bool_()),
            ("logprobs_shifted", pyarrow.bool_()),
            ("advantages", numbers),
            ("returns", numbers),
            ("position_ids", ids),
            ("branch_ids", ids),
            ("other_context", pyarrow.list_(pyarrow.bool_())),
            ("chosen", ids),
            ("rejected", ids),
            ("prompt_text", pyarrow.string()),
            ("response_text", pyarrow.string()),
            *((name, pyarrow.string()) for name in _DOCUMENTS),
        ]
    )


def _row(group: StoredGroup, index: int, experience: Experience) -> dict[str, Any]:
    def plain(name: str) -> Any:
        value = getattr(experience, name)
        return value.tolist() if hasattr(value, "tolist") else value

    def document(name: str) -> str | None:
        value = getattr(experience, name)
        return json.dumps(value) if value else None

    row = {
        "group": group.name,
        "ordinal": group.ordinal,
        "attempt": group.attempt,
        "group_version": group.version,
        "uses": group.uses,
        "complete": group.complete,
        "row": index,
        "eid": str(experience.eid),
    }
    for field in fields(Experience):
        if field.name in _DOCUMENTS:
            row[field.name] = document(field.name)
        elif field.name not in _ELSEWHERE:
            row[field.name] = plain(field.name)
    return row


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def export_parquet(groups: Iterable[StoredGroup], path: str | Path) -> int:
    """Writes groups to a Parquet file, whole or not at all.

    Args:
        groups: such as ``store.groups()`` yields; read as it is written, so that memory does not grow with the store.
        path: the file; one that exists is replaced. Multi-modal inputs are left out.

    Returns:
        How many rows were written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError("the export to Parquet needs pyarrow, which is not installed: pip install pyarrow.") from None
    schema = _schema(pyarrow)
    count = 0
    rows = (_row(group, index, each) for group in groups for index, each in enumerate(group.experiences))
    with replaced_file(path) as draft, pyarrow.parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        for chunk in _chunks(rows):
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count
