"""What samples reported (numbers, parts of rewards, texts such as verdicts), as columns to filter and sort by, and how values are spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollwright.errors import DataError
from rollwright.viewer.index import Index

#: Prefix of the names of reported values in addresses, orders and frames.
PREFIX = "report."
#: Columns of the index whose spread can be shown, and their SQL.
SPREAD = {
    "reward": "reward",
    "tokens": "tokens",
    "advantage": "advantage",
    "seconds": "ended - began",
    "calls": "calls",
    "tools": "tools",
}
_MOST_TEXTS = 12  # texts that are counted apart


def reported(index: Index) -> dict[str, bool]:
    """Return the names that samples of this run reported, those of most samples first, each with True if its values are texts."""
    rows = index.rows("SELECT name, texts > numbers AS is_text FROM figures ORDER BY numbers + texts DESC, name")
    return {row["name"]: bool(row["is_text"]) for row in rows}


def sql_of(index: Index, name: str) -> str:
    """Return the SQL of the value that samples reported under a name.

    Raises:
        DataError: no sample reported it.
    """
    known = reported(index)
    if name not in known:
        there = ", ".join(f"{PREFIX}{each}" for each in known) or "none, because its workflow reports nothing"
        raise DataError(f"no sample of this run reported {name!r}; there are: {there}.")
    path = '$."' + name.replace('"', '\\"') + '"'
    quoted = path.replace("'", "''")
    return f"json_extract(samples.figures, '{quoted}')"


def spread(index: Index, of: str, rest: str, values: Sequence[Any], bins: int) -> dict[str, Any]:
    """Count samples by a value.

    Args:
        index: index of the journal.
        of: a name in ``SPREAD``, or ``report.NAME``.
        rest: the joins and conditions of a query for samples, and their ``values``.
        values: see ``rest``.
        bins: largest number of bins of numbers.

    Returns:
        ``of``; ``count`` of samples that have the value; ``mean`` (None for texts); ``bins`` with ``low``, ``high`` and ``count``, one for
        each value if there are few; or for texts ``texts``, the most frequent ones, with ``text`` and ``count``.

    Raises:
        DataError: there is no such value.
    """
    is_text = False
    if of.startswith(PREFIX):
        sql, is_text = sql_of(index, of.removeprefix(PREFIX)), reported(index)[of.removeprefix(PREFIX)]
    elif (sql := SPREAD.get(of, "")) == "":
        raise DataError(f"{of!r} cannot be counted: choose from {', '.join(SPREAD)}, or {PREFIX}NAME.")
    counted = f"SELECT {sql} AS value, count(*) AS count FROM samples{rest} AND value IS NOT NULL GROUP BY value"
    rows = [(row["value"], row["count"]) for row in index.rows(counted, *values)]
    if is_text:
        most = sorted(((str(value), count) for value, count in rows), key=lambda row: (-row[1], row[0]))[:_MOST_TEXTS]
        texts = [{"text": value, "count": count} for value, count in most]
        return {"of": of, "count": sum(count for _, count in rows), "mean": None, "bins": [], "texts": texts}
    numbers = [(float(value), count) for value, count in rows if isinstance(value, int | float) and math.isfinite(value)]
    total = sum(count for _, count in numbers)
    mean = sum(value * count for value, count in numbers) / total if total else None
    return {"of": of, "count": total, "mean": mean, "bins": binned(numbers, bins), "texts": []}


def binned(numbers: Sequence[tuple[float, int]], bins: int) -> list[dict[str, Any]]:
    """Put values, each with its count, into bins: one for each value if there are few, otherwise bins of equal width."""
    if not numbers:
        return []
    if len(numbers) <= bins:
        return [{"low": value, "high": value, "count": count} for value, count in sorted(numbers)]
    low, high = min(value for value, _ in numbers), max(value for value, _ in numbers)
    width = (high - low) / bins
    made = [{"low": low + place * width, "high": low + (place + 1) * width, "count": 0} for place in range(bins)]
    for value, count in numbers:
        made[min(bins - 1, int((value - low) / width))]["count"] += count
    return made
