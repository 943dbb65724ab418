"""The list of runs: its filters, its order, chosen config keys as columns, and the tags and notes that readers give to runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rollwright.errors import DataError
from rollwright.tracking.readable import as_text
from rollwright.viewer.notes import Notes, write_notes
from rollwright.viewer.pages import Pages, as_file, id_of, number_in, pager, wants_file
from rollwright.viewer.pictures import curve_points
from rollwright.viewer.search import span
from rollwright.viewer.sweep_pages import grouped

ROWS = 100
_SECONDS = 0.3  # for which a request reads runs that are not known yet
_KEYS_OFFERED, _OFFERED_FROM = 200, 5  # config keys that are offered as columns, and runs that they are taken from
_MOST_KEYS = 8  # config keys as columns
STATES = ("running", "finished", "stopped")
#: Columns by which the list can be sorted and filtered: name in an address -> key of an entry.
COLUMNS = {
    "run": "id",
    "state": "state",
    "reward": "reward",
    "loss": "loss",
    "held_out": "eval",
    "step": "last_step",
    "samples": "samples",
    "began": "began",
    "updated": "updated",
}


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the list, and the address to which tags and notes are sent."""

    def runs(request: Request) -> Response:
        entries = pages.entries(_SECONDS)
        unread = sum(not entry["is_read"] for entry in entries)
        if unread:
            pages.runs.read_in_background()
        asked = {name: request.query_params.get(name, "") for name in ("q", "state", "tag", "keys", "sort")}
        keys = asked["keys"].replace(",", " ").split()[:_MOST_KEYS]
        try:
            found, problem = filtered(pages, entries, asked), ""
        except (ValueError, DataError) as error:
            found, problem = entries, str(error)
        ordered = in_order(pages, found, asked["sort"])
        if wants_file(request):
            return as_file(request, "runs", [_as_row(pages, entry, keys) for entry in ordered])
        offset = number_in(request, "offset")
        groups = [{"id": None, "runs": ordered, "members": []}] if asked["sort"] else grouped(ordered)
        rows = [(group, run) for group in groups for run in group["runs"]][offset : offset + ROWS]
        for _, run in rows:
            run["line"] = curve_points(run["sparkline"] or [])
            run["values"] = [_shown(_config_of(pages, run).get(key)) for key in keys]
        chosen = {id(run): group for group, run in rows}
        shown = [{**group, "runs": own} for group in groups if (own := [run for run in group["runs"] if id(run) in chosen])]
        query = {name: value for name, value in asked.items() if value}
        unsorted = {name: value for name, value in query.items() if name != "sort"}
        here = "/" + (f"?{urlencode(query)}" if query else "")
        followed: dict[str, Any] = {"stamp": pages.runs.stamp, "stamp_url": "/stamp"} if unread else {}
        return pages.page(
            "runs.html",
            title="Runs",
            crumbs=[{"text": "Runs", "url": None}],
            runs=entries,
            found=len(found),
            rows=len(rows),
            unread=unread,
            groups=shown,
            root=", ".join(map(str, pages.runs.roots)),
            asked=asked,
            states=STATES,
            tags=sorted({tag for entry in entries for tag in entry["notes"]["tags"]}, key=str.lower),
            keys=keys,
            offered=_offered(pages, rows),
            problem=problem,
            is_filtered=bool(unsorted.keys() - {"keys"}),
            sorting={"by": asked["sort"].lstrip("-"), "down": asked["sort"].startswith("-")},
            sort_address="/" + (f"?{urlencode(unsorted)}" if unsorted else ""),
            address=here,
            pager=pager(here, offset, ROWS, len(found), len(rows)),
            **followed,
        )

    def stamp() -> Response:
        return PlainTextResponse(pages.runs.stamp)

    def notes(name: str, written: Notes) -> Response:
        whole = pages.runs.whole(id_of(name))
        directory = pages.runs.get(id_of(name)).root if whole is None else whole.path
        try:
            return JSONResponse(write_notes(directory, written))
        except DataError as error:
            return JSONResponse({"error": str(error)}, status_code=409)

    router.add_api_route("/", runs, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/stamp", stamp, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/run/{name}/notes", notes, methods=["POST"], include_in_schema=False, response_model=None)


def filtered(pages: Pages, entries: Sequence[dict[str, Any]], asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the entries that a search leaves.

    Args:
        pages: the pages, which know the configs.
        entries: entries of runs.
        asked: ``q`` with words that a run's name, tags or note has, and conditions ``column=range`` or ``config.key=value``; ``state``; ``tag``.

    Raises:
        ValueError: a range is none.
    """
    words = asked["q"].lower().split()
    conditions = [word.partition("=")[::2] for word in asked["q"].split() if "=" in word]
    words = [word for word in words if "=" not in word]
    found = []
    for entry in entries:
        notes = entry["notes"]
        text = " ".join([entry["id"], entry["name"], notes["note"], *notes["tags"]]).lower()
        if (asked["state"] and entry["state"] != asked["state"]) or (asked["tag"] and asked["tag"] not in notes["tags"]):
            continue
        if all(word in text for word in words) and all(_holds(pages, entry, *each) for each in conditions):
            found.append(entry)
    return found


def _holds(pages: Pages, entry: Mapping[str, Any], name: str, wanted: str) -> bool:
    value = entry[COLUMNS[name]] if name in COLUMNS else _config_of(pages, entry).get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = span(wanted) or (None, None)
        return (low is None or value >= low) and (high is None or value <= high)
    return value is not None and as_text(value).lower() == wanted.lower()


def in_order(pages: Pages, entries: Sequence[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Return entries sorted by a column or a config key, descending if ``sort`` begins with ``-``; those without a value come last."""
    by = sort.lstrip("-")
    if not by:
        return list(entries)

    def value_of(entry: Mapping[str, Any]) -> Any:
        return entry[COLUMNS[by]] if by in COLUMNS else _config_of(pages, entry).get(by)

    known = [(value, entry) for entry in entries if (value := value_of(entry)) is not None and value != ""]
    unknown = [entry for entry in entries if (value := value_of(entry)) is None or value == ""]
    known.sort(key=lambda pair: _sort_key(pair[0]), reverse=sort.startswith("-"))
    return [*(entry for _, entry in known), *unknown]


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return 0, float(value), ""
    return 1, 0.0, as_text(value).lower()


def _config_of(pages: Pages, entry: Mapping[str, Any]) -> dict[str, Any]:
    return pages.runs.get(entry["id"]).config


def _shown(value: Any) -> str:
    return "" if value is None else as_text(value)


def _offered(pages: Pages, rows: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[str]:
    """Return config keys of the runs that are shown, those whose values differ first."""
    values: dict[str, set[str]] = {}
    for _, run in rows[:_OFFERED_FROM]:
        for key, value in _config_of(pages, run).items():
            values.setdefault(key, set()).add(str(value))
    return sorted(values, key=lambda key: (len(values[key]) < 2, key))[:_KEYS_OFFERED]


def _as_row(pages: Pages, entry: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    config = _config_of(pages, entry) if keys else {}
    notes = {"tags": " ".join(entry["notes"]["tags"]), "note": entry["notes"]["note"]}
    rest = {name: value for name, value in entry.items() if name not in ("notes", "is_read")}
    return {**rest, **notes, **{key: config.get(key) for key in keys}}
