"""The first page of a run: all of its stages in order, or, of a run or stage alone, its curves; and the page of its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollwright.tracking.readable import as_text, count, number, seconds
from rollwright.tracking.run_directory import MARKER
from rollwright.viewer.charts import chart_rows
from rollwright.viewer.evaluations import of_shared_tasks, progress
from rollwright.viewer.pages import Pages, as_file, id_of, url_of_run, wants_file
from rollwright.viewer.pictures import curve_points
from rollwright.viewer.run_pages import main_charts, metric_rows, overview
from rollwright.viewer.run_parts import read_file, stages_of
from rollwright.viewer.whole_run import StageOfRun, WholeRun, changed_keys

LOG_LINES, LOG_LINES_SHOWN = 2_000, 25


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the first page of a run, and the page of its log."""

    def run_page(request: Request, name: str) -> Response:
        if (whole := pages.runs.whole(id_of(name))) is not None:
            return whole_page(request, name, whole)
        run = pages.run(name)
        if wants_file(request):
            metric = request.query_params.get("metric")
            rows = metric_rows(run) if metric is None else chart_rows([(run.name, [run])], metric)
            return as_file(request, name if metric is None else f"{name}-{metric}", rows)
        context = pages.of_run(name, run, "")
        is_alone = context["run"]["whole"] is None
        marker = read_file(run.root / MARKER)
        own = [each for each in stages_of(marker) if run.path == run.root or each.get("name") == run.path.name]
        about = _about(marker, own) if is_alone else {"changed": [], "software": []}
        log = {"log": run.log(LOG_LINES_SHOWN), "log_url": f"{context['run']['url']}/log"}
        return pages.page("run.html", **context, **overview(run, context["run"]), changed_keys=about, **log)

    def whole_page(request: Request, name: str, whole: WholeRun) -> Response:
        parts = whole.parts()
        for part in parts:
            if part.run is not None:
                part.run.follow()
        rows = [_row(part, _url_of(part)) for part in parts]
        if wants_file(request):
            return as_file(
                request, name, [{key: row[key] for key in ("stage", "kind", "state", "steps", "took")} for row in rows]
            )
        context = pages.of_whole(name, whole, "")
        url, logs = context["run"]["url"], whole.log(LOG_LINES_SHOWN)
        ending = whole.ending()
        signs = [{**sign, "row": row} for row in rows if row["part"].run for sign in row["part"].run.diagnosis()]
        trained = next(((part, part.run) for part in reversed(parts) if part.run and part.run.curves.times), None)
        return pages.page(
            "whole.html",
            **context,
            rows=rows,
            ending=ending,
            ending_run={"url": _url_of(ending["part"])} if ending and ending["part"] and ending["part"].run else None,
            signs=[sign for sign in signs if sign["level"] != "info"],
            progress=[
                {**row, "set": place} for place, own in enumerate(of_shared_tasks(whole.evaluations())) for row in progress(own)
            ],
            trained=trained and {"name": trained[0].name, "url": _url_of(trained[0]), "charts": main_charts(trained[1])},
            changed_keys=_about(whole.marker, stages_of(whole.marker)),
            log=next(reversed(logs.values()), []),
            log_name=next(reversed(logs), ""),
            log_url=f"{url}/log",
        )

    def log(name: str) -> Response:
        if (whole := pages.runs.whole(id_of(name))) is not None:
            context, logs = pages.of_whole(name, whole, "/log", title="Log"), whole.log(LOG_LINES)
        else:
            run = pages.run(name)
            context, logs = pages.of_run(name, run, "", title="Log"), {"logs/run.log": run.log(LOG_LINES)}
        return pages.page(
            "log.html", **context, logs={name: lines for name, lines in reversed(logs.items()) if lines}, most=LOG_LINES
        )

    router.add_api_route("/run/{name}", run_page, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/run/{name}/log", log, methods=["GET"], include_in_schema=False, response_model=None)


def _url_of(part: StageOfRun) -> str | None:
    return None if part.run is None else url_of_run(part.id)


def _row(part: StageOfRun, url: str | None) -> dict[str, Any]:
    """Return the values of a stage's row."""
    info = part.run.info() if part.run is not None else None
    took = part.results.get("total_seconds")
    if took is None and part.run is not None and len(times := part.run.curves.times) > 1:
        took = times[-1][1] - times[0][1]
    return {
        "part": part,
        "stage": part.name,
        "kind": part.kind,
        "state": part.state,
        "url": url,
        "steps": info["last_step"] if info and part.kind != "eval" else None,
        "total_steps": info["total_steps"] if info and part.kind != "eval" else None,
        "line": curve_points(info["sparkline"] or []) if info else "",
        "curve": info["curve"] if info else "",
        "reached": _reached(part, info),
        "took": None if took is None else seconds(took),
    }


def _reached(part: StageOfRun, info: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return names and values of what a stage reached."""
    if part.kind == "model" and part.results.get("parameters"):
        return [("parameters", count(part.results["parameters"]))]
    if part.run is None or info is None:
        return []
    if scores := part.run.scores():
        return [(name, number(value)) for name, value in scores.items()]
    values = [("loss", info["loss"]), ("reward", info["reward"]), ("held out", info["eval"])]
    return [(name, number(value)) for name, value in values if value is not None]


def _about(marker: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the config keys that differ from their defaults, and what the run was made with."""
    changed = changed_keys(stages)
    for row in changed:
        row["value"], row["default"] = as_text(row["value"]), "" if row["default"] is None else as_text(row["default"])
        row["is_shared"] = len(row["stages"]) == len(stages)
    return {"changed": changed, "stages": len(stages), "software": list((marker.get("software") or {}).items())}
