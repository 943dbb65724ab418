"""The page that compares runs: their held-out tasks, configs and curves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from rollwright.viewer.charts import by_setting, chart_rows, charts_of
from rollwright.viewer.evaluation_pages import matrix
from rollwright.viewer.evaluations import Evaluation, answers_of, compare, last_evaluation, names_of_tasks
from rollwright.viewer.pages import Pages, as_file, indexed, number_in, pager, url_of_run, wants_file
from rollwright.viewer.run import Run
from rollwright.viewer.run_pages import metric_rows
from rollwright.viewer.runs import config_difference
from rollwright.viewer.tasks import differing_rows

_COMPARED = 60  # most runs in a comparison
_LINES = 6  # most lines in a chart: as many as there are colours
_TASKS = 25  # tasks on one page


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the page, and the address that says whether it has changed."""

    def compared(request: Request) -> Response:
        names = request.query_params.getlist("run")
        runs = [(name, pages.run_of_id(name)) for name in names[:_COMPARED]]
        settings = by_setting(runs)
        of_seeds = request.query_params.get("by", "setting" if len(runs) > _LINES else "run") == "setting"
        lines = settings if of_seeds else [(name, [run]) for name, run in runs]
        if wants_file(request):
            metric = request.query_params.get("metric")
            rows = [{"run": name, **row} for name, run in runs for row in metric_rows(run)] if metric is None else []
            return as_file(request, "compared", rows if metric is None else chart_rows(lines, metric))
        charts = charts_of(lines[:_LINES])
        for line, (_, members) in zip(charts["lines"], lines, strict=False):
            line["url"] = url_of_run(next(name for name, run in runs if run is members[0])) if not of_seeds else ""
        query = urlencode([("run", name) for name in names])
        here = f"/compare?{query}"
        evaluations = [(name, run, last_evaluation(run.index) if run.has_journal else None) for name, run in runs]
        evaluated = [(name, run, found) for name, run, found in evaluations if found is not None]
        return pages.page(
            "compare.html",
            title="Compare",
            crumbs=[{"text": "Compare", "url": None}],
            runs=[{"id": name, "url": url_of_run(name)} for name, _ in runs],
            indexed=indexed([run for _, run in runs]),
            charts=charts,
            lines=[label for label, _ in lines[:_LINES]],
            left_out=len(lines) - len(lines[:_LINES]) + len(names) - len(runs),
            seeds={"runs": f"{here}&by=run", "means": f"{here}&by=setting", "chosen": of_seeds}
            if len(settings) < len(runs)
            else None,
            differences=_differences([members[0] for _, members in lines[:_LINES]]),
            held_out=compare([(name, found.rewards if found else {}) for name, _, found in evaluations]),
            tasks=_tasks(evaluated, here, number_in(request, "offset")) if len(evaluated) == len(runs) == 2 else None,
            address=f"{here}&by={'setting' if of_seeds else 'run'}",
            stamp=_stamp([run for _, run in runs]),
            stamp_url=f"/compare/stamp?{query}",
        )

    def stamp(request: Request) -> Response:
        return PlainTextResponse(_stamp([pages.run_of_id(name) for name in request.query_params.getlist("run")[:_COMPARED]]))

    router.add_api_route("/compare", compared, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/compare/stamp", stamp, methods=["GET"], include_in_schema=False, response_model=None)


def _stamp(runs: Sequence[Run]) -> str:
    """Return a value that changes when one of the runs writes or its index grows."""
    return hashlib.sha256(" ".join(run.stamp for run in runs).encode()).hexdigest()[:16]


def _differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the config keys that differ between runs, with each run's value."""
    if len(runs) < 2:
        return []
    keys = dict.fromkeys(key for other in runs[1:] for key, *_ in config_difference(runs[0], other))
    return [(key, [str(run.config.get(key, "unset")) for run in runs]) for key in sorted(keys)]


def _tasks(both: Sequence[tuple[str, Run, Evaluation]], here: str, offset: int) -> dict[str, Any] | None:
    """Return the template values of the tasks on which two runs differ; None if they share no task.

    Args:
        both: id, run and last evaluation of each.
        here: address of the page.
        offset: index of the first task on this page.
    """
    columns = [evaluation for *_, evaluation in both]
    common = columns[0].rewards.keys() & columns[1].rewards.keys()
    if not common:
        return None
    rows = differing_rows(columns[0], columns[1])
    names = {task: words for _, run, _ in both for task, words in names_of_tasks(run.index).items()}

    def pair(task: str) -> str:
        samples = [("sample", f"{run_id} {evaluation.groups[task]}") for run_id, _, evaluation in both]
        return f"/pair?{urlencode(samples)}"

    shown = rows[offset : offset + _TASKS]
    table = matrix(shown, columns, ["1", "2"], names, pair)
    firsts = [[evaluation.firsts[row.task] for row in shown] for evaluation in columns]
    answers = [answers_of(run.index, own) for (_, run, _), own in zip(both, firsts, strict=True)]
    for row, *numbers in zip(table["rows"], *firsts, strict=True):
        row["answers"] = [found.get(number, "") for found, number in zip(answers, numbers, strict=True)]
    flips = sum(row.kind in ("lost", "gained") for row in rows)
    return {
        "table": {**table, "means": []},  # those of all tasks are in the table of runs
        "about": f"{len(rows)} of {len(common)} tasks in both: {flips} flipped, {len(rows) - flips} changed their reward",
        "pager": pager(here, offset, _TASKS, len(rows), len(shown)),
    }
