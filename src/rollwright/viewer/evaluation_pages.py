"""The pages about evaluations: held-out tasks over versions, and one task over a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response
from markupsafe import Markup, escape

from rollwright.errors import DataError
from rollwright.tracking.readable import counted, number, signed
from rollwright.viewer.evaluations import Evaluation, interval_of_mean, names_of_tasks, of_shared_tasks
from rollwright.viewer.pages import Pages, as_file, id_of, key_in_address, number_in, pager, url_of_run, wants_file
from rollwright.viewer.pictures import bounds, shade
from rollwright.viewer.run import Run
from rollwright.viewer.tasks import KINDS, TaskRow, history_of, plain_rows, task_rows
from rollwright.viewer.whole_run import StageOfRun

ROWS = 300  # tasks on one page
_WITH_NUMBERS = 12  # most evaluations of a table that shows each reward as a number
_TEXTS = 4  # samples of a group whose answers are shown on a task's page
_GROUPS = 200  # groups on a task's page


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the pages about evaluations."""

    def evaluations(request: Request, name: str) -> Response:
        context, stages = _place(pages, name, title="Evaluations")
        sets = of_shared_tasks(each for stage, _ in stages for each in stage.evaluations())
        if not sets:
            return pages.page("evaluations.html", **context, sets=[])
        most = max(range(len(sets)), key=lambda place: (len(sets[place]), place))
        chosen = min(number_in(request, "set"), len(sets) - 1) if request.query_params.get("set") else most
        columns, names = sets[chosen], _names(stages)
        rows = task_rows(columns)
        if wants_file(request):
            return as_file(request, f"{name}-evaluations", plain_rows(rows, columns, names))
        show = request.query_params.get("show", "")
        here = f"{context['run']['url']}/evaluations"
        return pages.page(
            "evaluations.html",
            **context,
            sets=[
                {"href": f"{here}?set={place}", "text": _title(own), "chosen": place == chosen}
                for place, own in enumerate(sets)
            ],
            **_table(
                rows, columns, names, context["run"]["url"], chosen, show if show in KINDS else "", number_in(request, "offset")
            ),
        )

    def task(request: Request, name: str, task: str) -> Response:
        context, stages = _place(pages, name, ("Evaluations", "/evaluations"), title="Task")
        found = [(stage, group) for stage, run in stages for group in history_of(run, task)]
        if not found:
            raise DataError(f"there is no task {task} in what is indexed of this run.")
        first = found[0][1]["samples"][0]
        title = _names(stages).get(task) or first["words"] or f"Task {first['ordinal']}"
        context["crumbs"][-1]["text"], context["title"] = title, f"{title} · {context['run']['id']}"
        if wants_file(request):
            samples = [{"stage": stage.name, **sample} for stage, group in found for sample in group["samples"]]
            return as_file(request, f"{name}-task", samples)
        groups = [_group(place, stage, group) for place, (stage, group) in enumerate(found)]
        about = [f"expected {first['expected']}"] if first["expected"] else []
        about += [counted(len(groups), "group"), counted(sum(len(each["samples"]) for each in groups), "sample")]
        rewarded = [each["reward"] for each in groups if each["reward"] is not None]
        if len(rewarded) > 1:
            about.append(f"reward {number(rewarded[0])} at first, {number(rewarded[-1])} at the end")
        return pages.page(
            "task.html",
            **context,
            heading=title,
            about=" · ".join(about),
            groups=_shaded(groups[:_GROUPS]),
            left_out=max(0, len(groups) - _GROUPS),
            bars=_bars(groups[:_GROUPS]),
            address=f"{context['run']['url']}/task/{quote(task, safe='')}",
        )

    router.add_api_route("/run/{name}/evaluations", evaluations, methods=["GET"], include_in_schema=False, response_model=None)
    router.add_api_route("/run/{name}/task/{task:path}", task, methods=["GET"], include_in_schema=False, response_model=None)


def _place(
    pages: Pages, name: str, *places: tuple[str, str], title: str
) -> tuple[dict[str, Any], list[tuple[StageOfRun, Run]]]:
    """Return the template values of a page of a run or stage, and the stages with a journal that it is about, each with its run."""
    if (whole := pages.runs.whole(id_of(name))) is not None:
        found = [(part, part.run) for part in whole.parts() if part.run is not None and part.run.has_journal]
        for _, run in found:
            run.follow()
        return pages.of_whole(name, whole, "/evaluations", *places, title=title), found
    run = pages.run(name)
    alone = StageOfRun("", id_of(name), run.kind, run, run.results, run.state)
    return pages.of_run(name, run, "/evaluations", *places, title=title), [(alone, run)] if run.has_journal else []


def _names(stages: Sequence[tuple[StageOfRun, Run]]) -> dict[str, str]:
    return {task: words for _, run in stages for task, words in names_of_tasks(run.index).items()}


# -- tasks over versions -------------------------------------------------------------------------------------------------


def _title(evaluations: Sequence[Evaluation]) -> str:
    first, last = evaluations[0], evaluations[-1]
    tasks = counted(len({task for each in evaluations for task in each.rewards}), "task")
    if first is last:
        return f"{first.title}, {tasks}"
    stages = list(dict.fromkeys(each.stage for each in evaluations))
    between = (
        f"{first.title} → {last.title}" if len(stages) > 1 else f"{first.stage} v{first.version} → v{last.version}".strip()
    )
    return f"{between}, {tasks}"


def _table(
    rows: Sequence[TaskRow],
    columns: Sequence[Evaluation],
    names: Mapping[str, str],
    url: str,
    chosen: int,
    show: str,
    offset: int,
) -> dict[str, Any]:
    """Return the template values of the table of tasks over evaluations, its filters and its pages."""
    counts = {kind: sum(row.kind == kind for row in rows) for kind in KINDS}
    fitting = [row for row in rows if row.kind == show] if show else rows
    every = f"{url}/evaluations?set={chosen}"
    here = f"{every}&show={show}" if show else every
    several = len({each.stage for each in columns}) > 1
    heads = [each.title if several else f"v{each.version}" for each in columns]
    shown = fitting[offset : offset + ROWS]
    return {
        "table": matrix(shown, columns, heads, names, lambda task: f"{url}/task/{quote(task, safe='')}"),
        "count": len(columns),
        "filters": [{"href": every, "text": f"all {len(rows)}", "chosen": not show}]
        + [
            {"href": f"{every}&show={kind}", "text": f"{title} {counts[kind]}", "chosen": show == kind}
            for kind, title in KINDS.items()
            if counts[kind] and len(columns) > 1
        ],
        "flips": counts["lost"] + counts["gained"],
        "counts": counts,
        "tasks": len(rows),
        "address": here,
        "pager": pager(here, offset, ROWS, len(fitting), len(shown)),
    }


def matrix(
    rows: Sequence[TaskRow],
    columns: Sequence[Evaluation],
    heads: Sequence[str],
    names: Mapping[str, str],
    address_of: Callable[[str], str],
) -> dict[str, Any]:
    """Return the template values of a table with tasks as rows and evaluations as columns, for the macro ``matrix``.

    Args:
        rows: the tasks.
        columns: the evaluations.
        heads: titles of the columns.
        names: what people call the tasks.
        address_of: returns the address that a task's row leads to.
    """
    low, high = bounds(reward for each in columns for reward in each.rewards.values())
    has_numbers = len(columns) <= _WITH_NUMBERS
    titles = [escape(head) for head in heads]

    @cache
    def around(reward: float | None) -> tuple[str, str]:
        """Return the HTML of a cell before and after its column's title."""
        said = escape(number(reward))
        return f'<td class="cell {shade(reward, low, high)}" title="', f': {said}">{said if has_numbers else ""}</td>'

    def cells(row: TaskRow) -> Markup:  # a template takes seconds for tens of thousands of them
        parts = zip(titles, map(around, row.rewards), strict=True)
        return Markup("".join(f"{before}{title}{after}" for title, (before, after) in parts))

    stride = max(1, -(-len(columns) // _WITH_NUMBERS))
    return {
        "heads": [{"title": head, "text": head if place % stride == 0 else ""} for place, head in enumerate(heads)],
        "means": [
            {
                "text": number(each.mean),
                "about": f"{head}: mean {number(each.mean)}, 95 % interval {interval_of_mean(list(each.rewards.values()))}",
                "shade": shade(each.mean, low, high),
            }
            for head, each in zip(heads, columns, strict=True)
        ],
        "rows": [
            {
                "href": address_of(row.task),
                "name": names.get(row.task) or row.task,
                "kind": row.kind,
                "became": KINDS[row.kind],
                "change": signed(row.change) if len(columns) > 1 else "",
                "cells": cells(row),
                "answers": [],
            }
            for row in rows
        ],
        "has_numbers": has_numbers,
        "scale": [(shade(value, low, high), number(value)) for value in dict.fromkeys((low, (low + high) / 2, high))],
    }


# -- one task ------------------------------------------------------------------------------------------------------------


def _group(place: int, stage: StageOfRun, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template values of one group of a task's page."""
    url = url_of_run(stage.id)
    if group["is_eval"]:
        title, note = Evaluation(stage.name, group["version"] or 0, stage.kind == "eval").title, "held out"
    else:
        step = f"step {group['step']}" if group["step"] is not None else "not trained"
        title, note = f"{stage.name} {step}".strip(), "training"
    samples = [
        {
            **sample,
            "href": f"{url}/sample/{key_in_address(sample['key'])}",
            "chosen_as": f"{stage.id} {sample['key']}",
        }
        for sample in group["samples"]
    ]
    return {
        "place": place,
        "title": title,
        "note": note,
        "is_eval": group["is_eval"],
        "reward": group["reward"],
        "href": f"{url}/group/{key_in_address(group['group'])}",
        "samples": samples,
        "texts": samples[:_TEXTS],
        "more": max(0, len(samples) - _TEXTS),
    }


def _shaded(groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    low, high = bounds(sample["reward"] for group in groups for sample in group["samples"])
    for group in groups:
        for sample in group["samples"]:
            sample["shade"] = shade(sample["reward"], low, high)
    return groups


_HEIGHT, _WIDTH = 84.0, 900.0


def _bars(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a drawing of the reward of each group in order; None if fewer than two have one."""
    rewards = [group["reward"] for group in groups if group["reward"] is not None]
    if len(rewards) < 2:
        return None
    low, high = min(0.0, *rewards), max(0.0, *rewards)
    room, width = (high - low) or 1.0, min(40.0, _WIDTH / len(groups))
    bars = []
    for group in groups:
        if group["reward"] is None:
            continue
        top = _HEIGHT * (high - max(0.0, group["reward"])) / room
        height = max(2.0, _HEIGHT * abs(group["reward"]) / room)
        label = f"{group['title']}: {number(group['reward'])}"
        place = {
            "x": round(group["place"] * width, 1),
            "y": round(min(top, _HEIGHT - height) + 4, 1),
            "height": round(height, 1),
        }
        bars.append(
            {
                **place,
                "width": round(max(1.0, width - 2), 1),
                "label": label,
                "is_eval": group["is_eval"],
                "href": f"#group-{group['place']}",
            }
        )
    return {"bars": bars, "height": _HEIGHT + 8, "width": _WIDTH, "low": number(low), "high": number(high)}
