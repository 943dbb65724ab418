"""The pages about sweeps: runs of one config with other values, grouped in the list, and the table of what they reached."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollwright.errors import DataError
from rollwright.tracking.logging import getLogger
from rollwright.tracking.sweeps import SUFFIX, SweepRun, read_sweep, spreads
from rollwright.viewer.charts import chart_rows, charts_of
from rollwright.viewer.pages import Pages, as_file, id_of, in_address, wants_file
from rollwright.viewer.run import Run

logger = getLogger("viewer")
_LINES = 6  # most lines in a chart: as many as there are colours


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the page of a sweep."""

    def sweep_page(request: Request, name: str) -> Response:
        found = {sweep["id"]: sweep for sweep in grouped(pages.entries()) if sweep["id"]}
        if (sweep := found.get(id_of(name))) is None:
            raise DataError(f"there is no sweep {id_of(name)} below {', '.join(map(str, pages.runs.roots))}.")
        rows = _table(sweep["members"])
        stages = _stages(sweep["runs"])
        stage = request.query_params.get("stage", "")
        if stage not in stages:
            stage = next((name for name, runs in stages.items() if any(run["curve"] == "reward" for run in runs)), "")
        lines = _lines(pages, stages.get(stage, []))
        if wants_file(request) and (metric := request.query_params.get("metric")) is not None:
            return as_file(request, f"{name}-{metric}", chart_rows(lines, metric))
        if wants_file(request):
            return as_file(request, f"{name}-sweep", rows)
        return pages.page(
            "sweep.html",
            title=f"Sweep · {sweep['id']}",
            crumbs=[{"text": sweep["id"], "url": None}],
            sweep=sweep,
            rows=rows,
            charts=charts_of(lines[:_LINES]),
            stage=stage,
            stages=[
                {"text": text, "href": f"{sweep['url']}?stage={quote(text)}", "chosen": text == stage}
                for text in stages
                if text
            ],
            compare="/compare?" + "&".join(f"run={quote(run['id'])}" for run in sweep["runs"]),
        )

    router.add_api_route("/sweep/{name}", sweep_page, methods=["GET"], include_in_schema=False, response_model=None)


def _stages(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each stage that has curves, by the name of the stage; runs of one stage have the name \"\"."""
    stages: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        path, trials = Path(run["path"]), run["trials"]
        if run["last_step"]:
            stages.setdefault("" if path.name in trials else path.name, []).append(run)
    return stages


def _lines(pages: Pages, runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Run]]]:
    """Return one line for each setting, with the runs of its seeds."""
    lines: dict[str, list[Run]] = {}
    for run in runs:
        lines.setdefault(run["setting"] or "all seeds", []).append(pages.runs.get(run["id"]))
    return list(lines.items())


def grouped(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group the entries of runs by sweep, in the order of their first run.

    Returns:
        Groups with ``id`` (None for runs that are in no sweep), ``url``, ``runs`` and ``members``, the ``SweepRun`` of the sweep.
    """
    parents = {parent for entry in entries for parent in list(Path(entry["path"]).parents)[:2]}
    files = {parent: _sweeps_in(parent) for parent in parents}
    groups: dict[str | None, dict[str, Any]] = {}
    for entry in entries:
        path = Path(entry["path"])
        found = [
            (place / name, members)
            for place, trial in zip(path.parents[:2], (path.name, path.parent.name), strict=False)
            for name, members in files[place].items()
            if trial in {member.trial for member in members}
        ]
        file, members = found[0] if found else (None, [])
        key = None if file is None else f"{file.parent.name}/{file.name.removesuffix(SUFFIX)}"
        url = None if key is None else f"/sweep/{in_address(key)}"
        group = groups.setdefault(key, {"id": key, "url": url, "runs": [], "members": members})
        group["runs"].append(entry)
    for group in groups.values():
        _settle(group)
    return list(groups.values())


def _sweeps_in(directory: Path) -> dict[str, list[SweepRun]]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    except OSError:  # removed meanwhile
        return {}
    found = {}
    for name in names:
        try:
            found[name] = read_sweep(directory / name)
        except (OSError, ValueError) as error:
            logger.info("%s cannot be read, so its runs are shown one by one: %s", directory / name, error)
    return found


def _settle(group: dict[str, Any]) -> None:
    """Mark the members whose process was killed, and add to each run its member's setting."""
    of_trial = {member.trial: member for member in group["members"]}
    running = {part for run in group["runs"] if run["state"] == "running" for part in Path(run["path"]).parts[-2:]}
    for member in group["members"]:
        if member.state == "running" and member.trial not in running:
            member.state = "stopped"
    for run in group["runs"]:
        member = next((of_trial[part] for part in Path(run["path"]).parts[-2:] if part in of_trial), None)
        run["trials"], run["setting"] = list(of_trial), member.setting if member else ""
        run["member"] = member and " ".join(filter(None, [member.setting, f"seed={member.seed}" if member.seed else ""]))
    order = {member.trial: index for index, member in enumerate(group["members"])}
    if group["id"] is not None:
        group["runs"].sort(key=lambda run: next((order[part] for part in Path(run["path"]).parts[-2:] if part in order), 0))


def _table(members: Sequence[SweepRun]) -> list[dict[str, Any]]:
    return [
        {
            "measure": row.measure,
            "setting": row.setting,
            "mean": row.mean,
            "low": None if row.half is None else row.mean - row.half,
            "high": None if row.half is None else row.mean + row.half,
            "values": row.values,
        }
        for row in spreads(members)
    ]
