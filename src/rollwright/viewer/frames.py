"""A run as pandas data frames: what ``Run.frame`` gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollwright.errors import DataError

FRAMES = ("samples", "tokens", "metrics", "publications")
#: Columns of ``tokens``: their names in plain rows, and in the frame.
_COLUMNS = {
    "ids": "token",
    "texts": "text",
    "mask": "trained",
    "logprobs": "logprob",
    "versions": "version",
    "advantages": "advantage",
    "trainer_logprobs": "trainer_logprob",
    "entropies": "entropy",
}


def import_pandas(what: str) -> Any:
    """The module.

    Raises:
        DataError: ``what`` is no frame, or pandas is not installed.
    """
    if what not in FRAMES:
        raise DataError(f"there is no frame of {what!r}: choose from {', '.join(FRAMES)}.")
    try:
        import pandas
    except ModuleNotFoundError:
        raise DataError("frames need pandas: pip install pandas; run.steps(), run.search() and run.sample() do not.") from None
    return pandas


def tokens_of(key: str, rows: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Each token of the plain ``rows`` of a sample, as a line of the frame."""
    for number, row in enumerate(rows):
        columns = {name: row[column] or [None] * len(row["ids"]) for column, name in _COLUMNS.items()}
        for position, values in enumerate(zip(*columns.values(), strict=True)):
            place = {"key": key, "step": row["step"], "row": number, "position": position}
            yield {**place, **dict(zip(columns, values, strict=True))}
