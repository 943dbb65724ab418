"""The pages about one run: its curves, config, steps, timeline and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from rollwright.tracking.readable import count, counted, number, seconds
from rollwright.viewer.charts import charts_of
from rollwright.viewer.pages import (
    Pages,
    address,
    as_file,
    id_of,
    key_in_address,
    number_in,
    pager,
    wants_file,
    wants_undone,
)
from rollwright.viewer.pictures import range_box, swimlanes
from rollwright.viewer.run import Run

#: Rows of a table on one page.
ROWS = 200
#: Metrics in a run's tiles, and their titles.
_TILES = {
    "reward": "reward",
    "loss": "loss",
    "eval/reward": "held out",
    "response_tokens": "tokens a sample",
    "actor/entropy": "entropy",
    "actor/logprob_difference/mean": "engine to trainer",
    "actor/staleness/mean": "staleness",
    "tokens_per_second/generate": "tokens/s sampled",
}
#: Metrics by which a run is judged.
_JUDGED = ("reward", "eval/reward", "loss")


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the pages about runs."""

    def stamp(name: str) -> Response:
        if (whole := pages.runs.whole(id_of(name))) is not None:
            return PlainTextResponse(whole.stamp)
        return PlainTextResponse(pages.run(name).stamp)

    def config(request: Request, name: str) -> Response:
        run = pages.run(name)
        rows = sorted(run.config.items())
        if wants_file(request):
            return as_file(request, f"{name}-config", [{"key": key, "value": value} for key, value in rows])
        return pages.page("config.html", **pages.of_run(name, run, "", title="Config", is_followed=False), config=rows)

    def steps(request: Request, name: str) -> Response:
        run = pages.run(name)
        every = run.steps(undone=True)
        undone = sum(step["is_undone"] for step in every)
        if not wants_undone(request):
            every = [step for step in every if not step["is_undone"]]
        if wants_file(request):
            return as_file(request, f"{name}-steps", every)
        asked = request.query_params.get("sort", "-step")
        by, is_down = asked.lstrip("-"), asked.startswith("-")
        of = by if by in ("reward", "samples", "groups", "dropped") else "step"
        every.sort(key=lambda step: (step[of] is None, step[of] or 0), reverse=is_down)
        offset = number_in(request, "offset")
        low = min((step["reward_min"] for step in every if step["reward_min"] is not None), default=0.0)
        high = max((step["reward_max"] for step in every if step["reward_max"] is not None), default=1.0)
        shown = [{**step, "box": range_box(step, low, high)} for step in every[offset : offset + ROWS]]
        context = pages.of_run(name, run, "/steps", title="Steps")
        here = f"{context['run']['url']}/steps?sort={asked}{'&undone=1' if wants_undone(request) else ''}"
        return pages.page(
            "steps.html",
            **context,
            steps=shown,
            total=len(every) - (undone if wants_undone(request) else 0),
            undone=undone,
            shows_undone=wants_undone(request),
            sorting={"by": by, "down": is_down},
            pager=pager(here, offset, ROWS, len(every), len(shown)),
        )

    def weights(request: Request, name: str) -> Response:
        run = pages.run(name)
        publications, checkpoints = run.publications(), run.checkpoints()
        if wants_file(request):
            return as_file(request, f"{name}-weights", [{"kind": "publication", **each} for each in publications])
        context = pages.of_run(name, run, "/weights", title="Weights")
        offset = number_in(request, "offset")
        shown = publications[::-1][offset : offset + ROWS]
        about = f"{counted(len(publications), 'publication')}, {counted(len(checkpoints), 'recovery checkpoint')}"
        return pages.page(
            "weights.html",
            **context,
            publications=shown,
            audits=list(dict.fromkeys(name for each in shown for name in each["audit"])),
            checkpoints=checkpoints[::-1],
            about=about,
            pager=pager(f"{context['run']['url']}/weights", offset, ROWS, len(publications), len(shown)),
        )

    def timeline(request: Request, name: str) -> Response:
        run = pages.run(name)
        start, end = (_time(request.query_params.get(side)) for side in ("start", "end"))
        found = run.timeline(start, end)
        if wants_file(request):
            rows = [{"lane": lane["name"], **each} for lane in found["lanes"] for each in lane["spans"]]
            return as_file(request, f"{name}-timeline", rows)
        is_whole = start is None and end is None
        context = pages.of_run(name, run, "/timeline", title="Timeline", is_followed=is_whole)
        url = context["run"]["url"]
        began = min(context["run"]["began"] or math.inf, found["start"])
        drawing = swimlanes(found, began, lambda key: f"{url}/sample/{key_in_address(key)}")
        about = f"{seconds(drawing['end'] - drawing['start'])}; drag over a part to see it larger"
        zoom = _zoom(f"{url}/timeline", drawing["start"], drawing["end"])
        return pages.page("timeline.html", **context, drawing=drawing, zoom=zoom, about=about, address=address(request))

    for path, function in {
        "/run/{name}/stamp": stamp,
        "/run/{name}/config": config,
        "/run/{name}/steps": steps,
        "/run/{name}/weights": weights,
        "/run/{name}/timeline": timeline,
    }.items():
        router.add_api_route(path, function, methods=["GET"], include_in_schema=False, response_model=None)


# -- one run -------------------------------------------------------------------------------------------------------------


def overview(run: Run, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template values of a run's first page, which a report also shows."""
    charts = charts_of([(info["name"], [run])], always=_TILES)
    last = {chart["name"]: chart["last"] for _, group in charts["groups"] for chart in group}
    planned = f"of {info['total_steps']}" if info["total_steps"] else ""
    tiles = [{"name": "step", "value": info["last_step"] or 0, "more": planned}]
    tiles += [{"name": text, "value": last[name], "more": ""} for name, text in _TILES.items() if name in last]
    tiles += [{"name": "samples", "value": count(info["samples"]), "more": ""}] if info["samples"] is not None else []
    took = info["updated"] - info["began"] if info["updated"] and info["began"] else None
    so_far = " so far" if info["state"] == "running" else ""
    about = " · ".join(filter(None, [info["kind"], f"{seconds(took)}{so_far}" if took else None]))
    tiles += [{"name": name, "value": number(value), "more": ""} for name, value in run.scores().items()]
    if info["kind"] == "eval":
        tiles = tiles[1:]  # it makes no steps
    return {
        "charts": charts,
        "tiles": tiles,
        "signs": run.diagnosis(),
        "about": about,
        "ending": run.ending(),
        "held_out": run.held_out(),
    }


def main_charts(run: Run) -> dict[str, Any]:
    """Return the charts of what a run is judged by: reward, held-out reward and loss."""
    shown = charts_of([(run.name, [run])], always=_JUDGED)
    groups = [(title, [chart for chart in charts if chart["name"] in _JUDGED]) for title, charts in shown["groups"]]
    return {**shown, "groups": [(title, charts) for title, charts in groups if charts], "steady": []}


def metric_rows(run: Run) -> list[dict[str, Any]]:
    """Return every recorded step with its metrics."""
    rows: dict[int, dict[str, Any]] = {}
    for name, points in run.metrics(points=10**9)["series"].items():
        for step, value in points:
            rows.setdefault(step, {"step": step})[name] = value
    return [rows[step] for step in sorted(rows)]


def _time(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None


def _zoom(url: str, start: float, end: float) -> dict[str, str]:
    room = max(end - start, 1e-3)
    spans = {
        "left": (start - room / 2, end - room / 2),
        "right": (start + room / 2, end + room / 2),
        "inside": (start + room / 4, end - room / 4),
        "outside": (start - room / 2, end + room / 2),
    }
    return {name: f"{url}?start={low:.4f}&end={high:.4f}" for name, (low, high) in spans.items()}
