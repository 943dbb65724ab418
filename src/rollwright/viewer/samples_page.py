"""The page Samples: a table of samples with what they reported, filters, an order, and how their values are spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollwright.errors import DataError
from rollwright.tracking.readable import advantage, count, counted, number, seconds
from rollwright.viewer.pages import Pages, as_file, key_in_address, number_in, pager, wants_file
from rollwright.viewer.pictures import bounds, histogram, shade
from rollwright.viewer.reported import PREFIX, SPREAD
from rollwright.viewer.search import ASKED, filters, is_asked, span
from rollwright.viewer.words import one_line, title_of

#: Samples on one page, and in one downloaded file.
RESULTS, IN_FILE = 50, 10_000
_COLUMNS = 8  # reported values in the table, if the address does not choose some
_LONGEST = 140  # characters of a reported text in the table
#: Parameters of the page that filter nothing.
_OWN = ("columns", "by")

_ORDERS = {
    "": "first to last",
    "-began": "last first",
    "reward": "lowest reward first",
    "-reward": "highest reward first",
    "-tokens": "longest first",
    "tokens": "shortest first",
    "-seconds": "slowest first",
    "advantage": "lowest advantage first",
    "-advantage": "highest advantage first",
}
#: Values of the histogram whose bars are filters of the same name.
_RANGES = ("reward", "tokens")


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the page."""

    def search(request: Request, name: str) -> Response:
        run = pages.run(name)
        offset, problem = number_in(request, "offset"), ""
        limit = IN_FILE if wants_file(request) else RESULTS
        found: dict[str, Any] = {"samples": [], "total": 0, "indexed": 1.0, "is_cut": False, "spread": None}
        asked: dict[str, Any] = {}
        by = request.query_params.get("by") or "reward"
        try:
            asked = filters(request.query_params)
            counted_by = None if wants_file(request) or "regex" in asked else by
            found = run.search(**asked, offset=offset, limit=limit, counted_by=counted_by)
        except (DataError, ValueError) as error:
            problem = str(error)
        if wants_file(request):
            return as_file(request, f"{name}-samples", map(_flat, found["samples"]))
        context = pages.of_run(name, run, "/search", title="Samples", is_followed=not request.query_params)
        url = context["run"]["url"]
        query = {key: value for key, value in request.query_params.items() if value and (is_asked(key) or key in _OWN)}
        total, shown = found["total"], _rows(found["samples"], query, url, offset)
        heading = f"{count(total)} samples" if total is not None else f"at least {count(offset + len(shown))} samples"
        here = f"{url}/search" + (f"?{urlencode(query)}" if query else "")
        names = run.reported()
        columns = _columns(query.get("columns", ""), names)
        return pages.page(
            "search.html",
            **context,
            asked={name: request.query_params.get(name, "") for name in ASKED},
            is_filtered=any(map(is_asked, query)),
            problem=problem,
            samples=shown,
            columns=[{**each, "sort": _sorted_by(each["order"], query, url)} for each in columns],
            reported=[{"name": PREFIX + each, "text": each, "asked": query.get(PREFIX + each, "")} for each in names],
            orders=_orders(names),
            counts=_counts(found["spread"], query, url),
            kinds=_kinds(by, names, query, url),
            heading=heading,
            cut=f"the pattern takes long: {counted(found['scanned'], 'sample')} looked through" if found["is_cut"] else "",
            indexed=found["indexed"],
            address=here,
            pager=pager(here, offset, RESULTS, total, len(shown)),
        )

    router.add_api_route("/run/{name}/search", search, methods=["GET"], include_in_schema=False, response_model=None)


def about(sample: Mapping[str, Any]) -> str:
    """Return the facts about a sample that lists show on one line."""
    parts = [
        f"step {sample['step']}" if sample["step"] is not None else "",
        f"{sample['tokens'] or 0:,} tokens",
        f"advantage {advantage(sample['advantage'])}" if sample["advantage"] is not None else "",
        counted(sample["tools"], "tool call") if sample["tools"] else "",
        seconds(sample["ended"] - sample["began"]) if sample["ended"] and sample["began"] else "",
        sample["reason"],
    ]
    return " · ".join(filter(None, parts))


def _flat(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample for a file: a column for each value that it reported."""
    figures = {f"{PREFIX}{name}": value for name, value in sample["figures"].items()}
    return {**{name: value for name, value in sample.items() if name != "figures"}, **figures}


def _rows(samples: list[dict[str, Any]], query: Mapping[str, str], url: str, offset: int) -> list[dict[str, Any]]:
    low, high = bounds(sample["reward"] for sample in samples)
    listed = urlencode({name: value for name, value in query.items() if name not in _OWN})
    view = {"view": "tokens"} if query.get("text") and query.get("where") == "said" else {}
    return [
        {
            **each,
            "shade": shade(each["reward"], low, high),
            "href": f"{url}/sample/{key_in_address(each['key'])}?{urlencode({**view, 'list': listed, 'at': offset + index})}",
            "title": title_of(each["words"], each["group"]),
            "snippet": each["snippet"] if query.get("text") else [[each["answer"] or "", False]],
            "about": about(each),
            "figures": {name: shown(value) for name, value in each["figures"].items()},
        }
        for index, each in enumerate(samples)
    ]


def shown(value: float | str) -> str:
    """Format a reported value."""
    return one_line(value, limit=_LONGEST) if isinstance(value, str) else number(value)


def _columns(chosen: str, names: Mapping[str, bool]) -> list[dict[str, Any]]:
    """Return the reported values that are columns: those that the address names, or else the first ones."""
    wanted = [name for name in chosen.split(",") if name in names] or list(names)[:_COLUMNS]
    return [{"name": name, "order": PREFIX + name, "is_text": names[name]} for name in wanted]


def _sorted_by(name: str, query: Mapping[str, str], url: str) -> dict[str, str]:
    """Return the link of a column's head, which sorts by it, and what it is sorted by now."""
    now = query.get("order", "")
    turned = f"-{name}" if now != f"-{name}" else name
    state = "descending" if now == f"-{name}" else "ascending" if now == name else ""
    return {"href": f"{url}/search?{urlencode({**query, 'order': turned})}", "state": state}


def _orders(names: Mapping[str, bool]) -> list[tuple[str, str]]:
    own = [
        (f"{sign}{PREFIX}{name}", f"{word} {name} first") for name in names for sign, word in (("", "lowest"), ("-", "highest"))
    ]
    return [*_ORDERS.items(), *own]


def _kinds(by: str, names: Mapping[str, bool], query: Mapping[str, str], url: str) -> list[dict[str, Any]]:
    """Return links to the histograms of all values."""
    kinds = {**{name: name for name in SPREAD}, **{PREFIX + name: name for name in names}}
    return [
        {"href": f"{url}/search?{urlencode({**query, 'by': name})}", "text": text, "chosen": name == by}
        for name, text in kinds.items()
    ]


def _counts(spread: Mapping[str, Any] | None, query: Mapping[str, str], url: str) -> dict[str, Any] | None:
    """Lay out how values are spread: a histogram whose bars filter, or a list of texts."""
    if spread is None or not spread["count"]:
        return None
    of, bins = spread["of"], spread["bins"]
    is_filter = of in _RANGES or of.startswith(PREFIX)

    def link(value: str) -> str:
        return f"{url}/search?{urlencode({**query, of: value} if is_filter else query)}"

    spans = [f"{each['low']!r}..{each['high']!r}" for each in bins]
    low, high = _asked_range(query.get(of, "")) if bins else (None, None)
    chosen = next((place for place, each in enumerate(bins) if (each["low"], each["high"]) == (low, high)), None)
    largest = max((each["count"] for each in spread["texts"]), default=1)
    return {
        "name": of.removeprefix(PREFIX),
        "about": f"{count(spread['count'])} samples"
        + (f", mean {number(spread['mean'])}" if spread["mean"] is not None else ""),
        "histogram": histogram(bins, [link(each) for each in spans], chosen),
        "texts": [
            {
                **each,
                "text": one_line(each["text"], limit=_LONGEST),
                "href": link(each["text"]),
                "share": each["count"] / largest,
            }
            for each in spread["texts"]
        ],
    }


def _asked_range(text: str) -> tuple[float | None, float | None]:
    try:
        return span(text) or (None, None)
    except ValueError:
        return None, None


def reported_by(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of what a sample reported, numbers first; texts are whole."""
    figures = sample["figures"]
    texts = [(name, value) for name, value in figures.items() if isinstance(value, str)]
    return [(name, number(value)) for name, value in figures.items() if not isinstance(value, str)] + texts
