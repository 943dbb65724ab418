"""A run's samples, tokens, metrics and publications as pandas tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rollwright.errors import DataError
from rollwright.viewer.curves import Curves
from rollwright.viewer.reported import PREFIX


class Tables(Protocol):
    """What is asked of a ``Run``; see there."""

    curves: Curves

    def search(self, **query: Any) -> dict[str, Any]: ...
    def publications(self, *, undone: bool = False) -> list[dict[str, Any]]: ...
    def token_rows(self, key: str) -> list[dict[str, Any]]: ...


FRAMES = ("samples", "tokens", "metrics", "publications")
#: Columns of the frame ``tokens``: name in a row -> name in the frame.
_TOKEN_COLUMNS = {
    "ids": "token",
    "texts": "text",
    "mask": "trained",
    "logprobs": "logprob",
    "versions": "version",
    "advantages": "advantage",
    "trainer_logprobs": "trainer_logprob",
    "entropies": "entropy",
    "teacher_logprobs": "teacher_logprob",
    "values": "value",
}


def frame(run: Tables, what: str, query: Mapping[str, Any]) -> Any:
    """Return a pandas ``DataFrame``; see ``Run.frame``."""
    if what not in FRAMES:
        raise DataError(f"there is no frame of {what!r}: choose from {', '.join(FRAMES)}.")
    try:
        import pandas
    except ModuleNotFoundError:
        said = "frames need pandas: pip install pandas; run.steps(), run.search() and run.sample() do not."
        raise DataError(said) from None
    if what == "metrics":
        series = {name: pandas.Series(dict(run.curves.points(name))) for name in run.curves.names()}
        return pandas.DataFrame(series).rename_axis("step")
    if what == "publications":
        return pandas.json_normalize(run.publications(**query))
    answer = run.search(**{"limit": -1, **query})
    if answer["is_cut"]:
        raise DataError(f"the pattern takes too long: {answer['scanned']} samples were looked through; add filters.")
    found = answer["samples"]
    if what == "samples":
        rows = [{**each, **{f"{PREFIX}{name}": value for name, value in each["figures"].items()}} for each in found]
        return pandas.DataFrame(rows).drop(columns=["snippet", "preview", "figures"], errors="ignore")
    return pandas.DataFrame([token for sample in found for token in tokens_of(run, sample["key"])])


def tokens_of(run: Tables, key: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the frame ``tokens``: one for each token of a sample's rows."""
    for number, row in enumerate(run.token_rows(key)):
        columns = {name: row[column] or [None] * len(row["ids"]) for column, name in _TOKEN_COLUMNS.items()}
        for position, values in enumerate(zip(*columns.values(), strict=True)):
            place = {"key": key, "step": row["step"], "row": number, "position": position}
            yield {**place, **dict(zip(columns, values, strict=True))}
