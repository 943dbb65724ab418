"""Shared parts of the viewer's pages: templates, static files, the frame of a run's pages, and tables as CSV and JSONL."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from rollwright.errors import DataError
from rollwright.tracking.readable import FILTERS, day, seconds, visible
from rollwright.viewer.notes import read_notes
from rollwright.viewer.run import Run
from rollwright.viewer.run_parts import root_of
from rollwright.viewer.runs import Runs
from rollwright.viewer.whole_run import WholeRun

_STATIC = files("rollwright.viewer") / "static"
#: First characters of a cell that spreadsheet programs interpret as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Pages:
    """The runs, templates and static files that all pages use.

    Args:
        places: directories that are searched for runs.
    """

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.runs = Runs(places)
        self.environment = jinja2.Environment(
            loader=jinja2.PackageLoader("rollwright.viewer"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
            finalize=_visible,
        )
        self.environment.filters.update({**FILTERS, "path_from_here": _path_from_here})
        self.static = {each.name: each.read_bytes() for each in _STATIC.iterdir() if each.is_file()}
        self.environment.globals["static"] = self._address_of_static

    def _address_of_static(self, name: str) -> str:
        return f"/static/{name}?{hashlib.sha256(self.static[name]).hexdigest()[:12]}"

    def entries(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Return ``Run.info`` of each run with its notes, the ``url`` of its page, and the ``whole`` run if it is a stage of one.

        Args:
            seconds: time after which no further run is read; see ``Runs.list``.
        """
        wholes = {str(path): name for name, path in self.runs.wholes().items()}
        entries = [{**entry, **_place_of(entry["id"], Path(entry["path"]), wholes)} for entry in self.runs.list(seconds)]
        roots = {entry["id"]: root_of(Path(entry["path"])) for entry in entries}
        notes = {root: read_notes(root) for root in set(roots.values())}
        return [{**entry, "notes": notes[roots[entry["id"]]]} for entry in entries]

    def run(self, name: str) -> Run:
        """Return the run that an address names, and keep its index up to date. No part of an address is used as a path.

        Raises:
            DataError: there is no run of that name.
        """
        return self.run_of_id(id_of(name))

    def run_of_id(self, run_id: str) -> Run:
        """Return the run with an id; see ``run``."""
        run = self.runs.get(run_id)
        run.follow()
        return run

    def render(self, template: str, **context: Any) -> str:
        """Render a template to a string."""
        return self.environment.get_template(template).render(**context)

    def page(self, template: str, *, status: int = 200, **context: Any) -> HTMLResponse:
        """Render a template to an HTTP response."""
        html = self.render(template, **context).encode("utf-8", "replace")
        return HTMLResponse(html, status_code=status)

    def error(self, status: int, title: str, message: str) -> HTMLResponse:
        """Render a page with an error message."""
        return self.page("error.html", status=status, title=title, message=message, crumbs=[{"text": title, "url": None}])

    def indexing(self, request: Request) -> HTMLResponse | None:
        """Render the progress of a run's index, for an address that it may still find; None if the index is complete.

        The page is replaced by the one that was asked for as soon as the index has it.
        """
        name = request.path_params.get("name")
        try:
            run = None if name is None else self.runs.get(id_of(name))
        except DataError:
            return None
        if run is None or not run.has_journal or (progress := run.progress())["is_complete"]:
            return None
        read = progress["bytes"] / max(1, progress["of_bytes"])
        context = self.of_run(str(name), run, "", title="Reading the journal")
        return self.page("indexing.html", status=202, **context, read=read, samples=progress["samples"])

    def of_run(
        self, name: str, run: Run, tab: str, *places: tuple[str, str], title: str = "", is_followed: bool = True
    ) -> dict[str, Any]:
        """Return the template values that every page of a run needs.

        Args:
            name: name of the run in addresses.
            run: the run.
            tab: the selected view.
            places: text and address (relative to the run's) of the breadcrumbs between the run and this page.
            title: title of this page; empty for the run's first page.
            is_followed: True if the page changes while the run writes.
        """
        entry = {"id": id_of(name), **run.info(), "missing": [each["message"] for each in run.missing()]}
        entry |= _place_of(entry["id"], run.path, {str(path): name for name, path in self.runs.wholes().items()})
        entry["notes"] = read_notes(run.root)
        url = entry["url"]
        crumbs = [{"text": entry["whole"], "url": entry["whole_url"]}] if entry["whole"] is not None else []
        crumbs += [{"text": entry["stage"], "url": url if title else None}]
        crumbs += [{"text": text, "url": url + address} for text, address in places]
        crumbs += [{"text": title, "url": None}] if title else []
        entry["indexed"] = indexed([run])
        context = {"run": entry, "tab": tab, "crumbs": crumbs, "title": f"{title or 'Run'} · {entry['id']}"}
        if is_followed:
            context.update(stamp=run.stamp, stamp_url=f"{url}/stamp")
        return context

    def of_whole(self, name: str, whole: WholeRun, tab: str, *places: tuple[str, str], title: str = "") -> dict[str, Any]:
        """Return the template values that every page of a run of several stages needs; see ``of_run``."""
        run_id = id_of(name)
        url = url_of_run(run_id)
        runs = [part.run for part in whole.parts() if part.run is not None]
        entry = {"id": run_id, "url": url, "whole": None, "path": str(whole.path), "state": whole.state, "kind": "run"}
        entry |= {
            "has_journal": False,
            "indexed": indexed(runs),
            "about": _about_whole(whole),
            "notes": read_notes(whole.path),
        }
        entry["missing"] = list(dict.fromkeys(each["message"] for run in runs for each in run.missing()))
        crumbs = [{"text": run_id, "url": url if title else None}]
        crumbs += [{"text": text, "url": url + address} for text, address in places]
        crumbs += [{"text": title, "url": None}] if title else []
        context = {"run": entry, "tab": tab, "crumbs": crumbs, "title": f"{title or 'Run'} · {run_id}"}
        return {**context, "stamp": whole.stamp, "stamp_url": f"{url}/stamp"}


def indexed(runs: Sequence[Run]) -> float:
    """Return the share of the runs' journals that their indexes have read; 1 only if that is all."""
    progress = [run.progress() for run in runs]
    if all(each["is_complete"] for each in progress):
        return 1.0
    read, every = (sum(each[key] for each in progress) for key in ("bytes", "of_bytes"))
    return min(0.99, read / max(1, every))


def _about_whole(whole: WholeRun) -> str:
    """Return when a run began and how long it took, for its first line."""
    began, updated = whole.began, whole.updated
    took = updated - began if began and updated else None
    so_far = " so far" if whole.state == "running" else ""
    parts = (f"began {day(began)}" if began else "", f"{seconds(took)}{so_far}" if took else "")
    return " · ".join(filter(None, parts))


def _place_of(run_id: str, path: Path, wholes: Mapping[str, str]) -> dict[str, Any]:
    """Return the address of a run, and the run of several stages that it is a stage of; ``wholes`` has the ids of those by path."""
    whole = next((wholes[str(above)] for above in path.parents if str(above) in wholes), None)
    whole_url = None if whole is None else url_of_run(whole)
    return {"url": url_of_run(run_id), "whole": whole, "whole_url": whole_url, "stage": run_id.removeprefix(f"{whole}/")}


def _path_from_here(path: str) -> str:
    """Return a path relative to the directory in which the viewer was started if it is below it, else unchanged."""
    here = Path.cwd()
    return Path(path).relative_to(here).as_posix() if Path(path).is_relative_to(here) else path


def _visible(value: Any) -> Any:
    """Make a template value safe to show: replace invisible characters in strings that are not markup."""
    return visible(value) if type(value) is str else value


def url_of_run(run_id: str) -> str:
    """Return the address of a run's page, in which the slashes of the id are replaced."""
    return f"/run/{in_address(run_id)}"


def in_address(run_id: str) -> str:
    """Quote the id of a run or sweep for an address, in which its slashes are replaced."""
    return quote(run_id.replace("~", "~~").replace("/", "~"), safe="~")


def id_of(name: str) -> str:
    """Return the id that ``in_address`` quoted."""
    return re.sub("~~|~", lambda match: "~" if match[0] == "~~" else "/", name)


def address(request: Request) -> str:
    """Return path and query of a request, as a link to the same view."""
    query = request.url.query
    return quote(request.url.path, safe="/:@~#%") + (f"?{query}" if query else "")


def key_in_address(key: str) -> str:
    """Quote the key of a sample or group for an address."""
    return quote(key, safe="/:@")


def pager(address: str, offset: int, limit: int, total: int | None, count: int) -> dict[str, Any]:
    """Return the values of the macro that links to the previous and the next page.

    Args:
        address: address of the list, without an offset.
        offset: index of the first row on this page.
        limit: number of rows per page.
        total: number of rows in the list, or None if unknown.
        count: number of rows on this page.
    """
    more = count == limit if total is None else offset + count < total
    joined = f"{address}{'&' if '?' in address else '?'}offset="
    return {"address": joined, "offset": offset, "limit": limit, "total": total, "count": count, "more": more}


def number_in(request: Request, name: str) -> int:
    """Parse a non-negative integer in the query; 0 if it is missing or not a number."""
    asked = request.query_params.get(name, "")
    return int(asked) if asked.isdecimal() and len(asked) < 10 else 0


def without(query: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return a query without some of its parameters."""
    return {name: value for name, value in query.items() if name not in names}


def wants_file(request: Request) -> bool:
    """Return True if a file is requested instead of a page."""
    return request.query_params.get("format") in ("csv", "jsonl")


def wants_undone(request: Request) -> bool:
    """Return True if the request includes samples and steps that a resume undid."""
    return request.query_params.get("undone") == "1"


def as_file(request: Request, name: str, rows: Iterable[Mapping[str, Any]]) -> Response:
    """Return rows as CSV or JSONL. Strings in CSV never start like a formula; JSONL has all values unchanged."""
    kind = request.query_params["format"]
    rows = list(rows)
    if kind == "csv":
        columns = list(dict.fromkeys(column for row in rows for column in row))
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows([[_cell(row.get(column)) for column in columns] for row in rows])
        content = text.getvalue()
    else:
        content = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    safe = "".join(each if each.isalnum() or each in "-_." else "-" for each in name)
    return Response(
        content.encode("utf-8", "replace"),
        media_type="text/csv; charset=utf-8" if kind == "csv" else "application/x-ndjson",
        headers={"Content-Disposition": f'attachment; filename="{safe}.{kind}"'.encode("ascii", "replace").decode()},
    )


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return json.dumps(value, default=str) if isinstance(value, Mapping | list | tuple) else value
