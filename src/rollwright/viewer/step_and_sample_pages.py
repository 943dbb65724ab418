"""The pages about samples: a step with its groups, a group with its prefix tree, and one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollwright.errors import DataError
from rollwright.tracking.readable import as_json, clipped, number, seconds
from rollwright.viewer import sample_view
from rollwright.viewer.pages import Pages, address, as_file, key_in_address, number_in, pager, wants_file, wants_undone, without
from rollwright.viewer.pictures import bounds, histogram, prefix_tree, shade
from rollwright.viewer.run import Run
from rollwright.viewer.samples_page import about, reported_by
from rollwright.viewer.search import filters, span
from rollwright.viewer.transcript import transcript
from rollwright.viewer.words import title_of

GROUPS = 100  # groups of a step on one page


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the pages about samples."""

    def step(request: Request, name: str, number_of_step: int) -> Response:
        run = pages.run(name)
        found = run.step(number_of_step)
        if wants_file(request):
            return as_file(request, f"{name}-step-{number_of_step}", _samples_of(found["groups"]))
        context = pages.of_run(name, run, "/steps", ("Steps", "/steps"), title=f"Step {number_of_step}")
        return pages.page("step.html", **context, **step_context(run, found, context["run"]["url"], request))

    def group(request: Request, name: str, key: str) -> Response:
        run = pages.run(name)
        found = run.group(key, undone=wants_undone(request))
        if wants_file(request):
            return as_file(request, f"{name}-group-{key}", found["samples"])
        shown = decorated(found)
        context = pages.of_run(
            name, run, "/steps", *_place(found), title=shown["title"], is_followed=found["state"] == "running"
        )
        url = context["run"]["url"]
        hrefs = {sample["key"]: f"{url}/sample/{key_in_address(sample['key'])}?view=tokens" for sample in found["samples"]}
        shown["task_text"] = clipped(as_json(found["task"])) if found["task"] is not None else found["task_error"] or ""
        rewards = _rewards(found["samples"])
        mean = f"mean reward {_mean(rewards)}" if rewards else ""
        versions = f"weights v{found['version']}" if found["version"] is not None else ""
        of_task = [f"task {found['ordinal']}", f"expected {found['expected']}" if found["expected"] else ""]
        shown["about"] = " · ".join(filter(None, [*of_task, f"{len(found['samples'])} samples", mean, versions]))
        tree = prefix_tree(found["tree"], hrefs)
        worst = _worst(run, found["samples"], url)
        return pages.page("group.html", **context, group=shown, tree=tree, worst=worst, address=address(request))

    def sample(request: Request, name: str, key: str) -> Response:
        run = pages.run(name)
        found = run.sample(key)
        row_number = min(number_in(request, "row"), max(0, len(found["rows"]) - 1))
        if wants_file(request):
            if request.query_params["format"] == "jsonl":
                return as_file(request, f"{name}-{key}", [found])
            table = sample_view.table(found["rows"][row_number], None) if found["rows"] else {"names": [], "lines": []}
            return as_file(request, f"{name}-{key}", [dict(zip(table["names"], line, strict=True)) for line in table["lines"]])
        group_key = found["group"]
        places = [*_place(found), (title_of(found["words"], group_key), f"/group/{key_in_address(group_key)}")]
        context = pages.of_run(
            name, run, "/steps", *places, title=f"Sample {found['index']}", is_followed=found["status"] == "running"
        )
        return pages.page("sample.html", **context, **sample_context(run, found, context["run"]["url"], request, row_number))

    for path, function in {
        "/run/{name}/step/{number_of_step:int}": step,
        "/run/{name}/group/{key:path}": group,
        "/run/{name}/sample/{key:path}": sample,
    }.items():
        router.add_api_route(path, function, methods=["GET"], include_in_schema=False, response_model=None)


# -- steps and groups ----------------------------------------------------------------------------------------------------


def step_context(run: Run, found: Mapping[str, Any], url: str, request: Request) -> dict[str, Any]:
    """Return the template values of a step's page."""
    here = f"{url}/step/{found['step']}"
    asked, bins = request.query_params.get("reward", ""), found["bins"]
    chosen = span(asked)
    spans = [f"{each['low']!r}..{each['high']!r}" for each in bins]
    index = spans.index(asked) if asked in spans else None
    is_last = index is None or index == len(bins) - 1

    def fits(sample: Mapping[str, Any]) -> bool:
        reward = sample["reward"]
        if chosen is None:
            return True
        low, high = chosen
        if reward is None or (low is not None and reward < low):
            return False
        return high is None or reward < high or (reward == high and (is_last or low == high))

    samples = _samples_of(found["groups"])
    fitting = [each for each in found["groups"] if chosen is None or any(map(fits, each["samples"]))]
    offset = number_in(request, "offset")
    groups = [decorated(each, bounds(each["reward"] for each in samples), fits) for each in fitting[offset : offset + GROUPS]]
    steps = [each["step"] for each in run.steps()]
    before = max((step for step in steps if step < found["step"]), default=None)
    after = min((step for step in steps if step > found["step"]), default=None)
    counts = found["counts"]
    rows = [{"mark": "trained", "name": "", "count": counts["trained"]}]
    rows += [{"mark": "dropped", "name": reason, "count": each} for reason, each in counts["dropped"].items()]
    rewards, held = _rewards(samples), _rewards(_samples_of(found["evaluations"]))
    publication = found["publication"] or {}
    facts = [
        ("mean reward", _mean(rewards) if rewards else None),
        ("without variance", f"{counts['without_variance']} groups" if counts["without_variance"] else None),
        ("published", f"v{publication['version']}" if publication else None),
        *((name, seconds(value)) for name, value in found["phases"].items()),
        ("held out", f"{_mean(held)} over {len(found['evaluations'])} tasks" if held else None),
    ]
    lowest = run.search(step=found["step"], is_eval=False, order="reward", limit=1)["samples"]
    filtered = here + (f"?{urlencode({'reward': asked})}" if asked else "")
    from_the_worst = {"list": urlencode({"step": found["step"], "eval": 0, "order": "reward"}), "at": 0}
    return {
        "step": {"step": found["step"], "about": f"{len(rewards)} samples in {len(found['groups'])} groups"},
        "is_lost": found["is_lost"],
        "histogram": histogram(bins, [f"{here}?{urlencode({'reward': each})}" for each in spans], index),
        "chosen": f"reward {asked}" if chosen else "",
        "counts": rows,
        "facts": facts,
        "groups": groups,
        "total": len(found["groups"]),
        "fitting": len(fitting),
        "pager": pager(filtered, offset, GROUPS, len(fitting), len(groups)),
        "without_variance": counts["without_variance"],
        "worst": f"{url}/sample/{key_in_address(lowest[0]['key'])}?{urlencode(from_the_worst)}" if lowest else None,
        "address": filtered,
        "neighbours": {
            "before": f"{url}/step/{before}" if before is not None else None,
            "after": f"{url}/step/{after}" if after is not None else None,
            "previous": None,
            "next": None,
            "group": None,
        },
    }


def decorated(
    group: Mapping[str, Any],
    scale: tuple[float, float] | None = None,
    fits: Callable[[Mapping[str, Any]], bool] = lambda sample: True,
) -> dict[str, Any]:
    """Add to a group the values of its table row: title, outcome and reason, and a shade for each sample.

    ``scale`` is the lowest and the highest reward of the shades; by default, those of the group.
    """
    low, high = scale or bounds(sample["reward"] for sample in group["samples"])
    samples = [
        {
            **sample,
            "key": key_in_address(sample["key"]),
            "shade": shade(sample["reward"], low, high),
            "dim": not fits(sample),
            "about": about(sample),
        }
        for sample in group["samples"]
    ]
    why = group["reason"] or ""
    if not why and group["state"] == "trained" and not group["has_variance"] and len(group["samples"]) > 1:
        why = "one reward only"
    title, key = title_of(group["words"], group["key"]), key_in_address(group["key"])
    return {**group, "title": title, "address": key, "samples": samples, "mark": group["state"], "why": why}


def _place(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the breadcrumb of the step that a group or sample belongs to; empty if it has none."""
    return [(f"Step {of['step']}", f"/step/{of['step']}")] if of["step"] is not None else []


def _samples_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [sample for group in groups for sample in group["samples"]]


def _rewards(samples: Sequence[Mapping[str, Any]]) -> list[float]:
    return [sample["reward"] for sample in samples if sample["reward"] is not None]


def _mean(rewards: Sequence[float]) -> str:
    return number(sum(rewards) / len(rewards))


# -- one sample ----------------------------------------------------------------------------------------------------------


def sample_context(run: Run, found: Mapping[str, Any], url: str, request: Request, row_number: int) -> dict[str, Any]:
    """Return the template values of a sample's page, with the view and overlay that the address names."""
    query = dict(request.query_params)
    view = query.get("view") if query.get("view") in sample_view.VIEWS else "chat"
    here = f"{url}/sample/{key_in_address(found['key'])}"

    def link(**changes: str) -> str:
        return f"{here}?{urlencode({**without(query, 'format', *changes), **changes})}"

    rows = found["rows"]
    overlays = sample_view.overlays_of(rows[row_number]) if rows else []
    overlay = query["overlay"] if query.get("overlay") in overlays else "trained"
    shown = sample_view.LINES_SHOWN if view == "table" else sample_view.TOKENS_SHOWN
    limit = None if query.get("all") else shown
    row = table = None
    if rows and view in ("tokens", "table"):
        length = len(rows[row_number]["ids"])
        row = {
            "number": row_number,
            "count": len(rows),
            "length": length,
            "links": [{"href": link(row=str(n)), "text": f"row {n + 1}", "chosen": n == row_number} for n in range(len(rows))],
            "overlays": [
                {"href": link(overlay=name), "text": sample_view.OVERLAYS[name][0], "chosen": name == overlay}
                for name in overlays
            ],
            "more": link(all="1") if limit is not None and length > limit else None,
        }
        if view == "tokens":
            row |= _tokens(found, row_number, overlay, limit, url)
        else:
            table = sample_view.table(rows[row_number], limit)
    group_key = found["group"]
    neighbours = {**_neighbours(run, found, url, request), "group": f"{url}/group/{key_in_address(group_key)}"}
    own = next((each for each in found["attempts"] if each["key"] == found["key"]), None)
    failure = None
    if own is not None and own["class"]:
        failure = {"name": own["class"], "text": clipped(own["traceback"] or own["message"] or "")}
    asked = takewhile(lambda message: message["role"] != "assistant", found["messages"])
    prompt = [{"role": message["role"], "content": message["text"]} for message in asked]
    prompt = prompt or (found["calls"][0]["prompt"] if found["calls"] else [])
    return {
        "sample": {
            **found,
            "title": f"{title_of(found['words'], group_key)}, sample {found['index']}",
            "failure": failure,
            "task_text": clipped(as_json(found["task"])) if found["task"] is not None else "",
            "prompt_json": clipped(as_json(prompt)),
            "text": clipped("".join(rows[row_number]["texts"])) if rows else "",
        },
        "view": view,
        "views": [{"href": link(view=name), "text": text, "chosen": name == view} for name, text in sample_view.VIEWS.items()],
        "transcript": transcript(found, link(view="tokens"), _lane(query)) if view == "chat" else {"turns": [], "lanes": []},
        "lane_links": [link(lane=str(number)) for number in range(len(found["lanes"]))],
        "all_lanes": link(lane=""),
        "row": row,
        "table": table,
        "calls": sample_view.requests(found) if view == "requests" else [],
        "results": sample_view.results(found) if view == "requests" else [],
        "facts": sample_view.facts(found),
        "reported": reported_by(found),
        "lanes": sample_view.lanes(found),
        "beside": [
            (text, other)
            for text, other in (
                ("the better one that it parted from", (found["parts"] or {}).get("key")),
                ("the best of its group", found["neighbours"]["best"]),
                ("the worst of its group", found["neighbours"]["worst"]),
                ("the next of its group", found["neighbours"]["next"]),
            )
            if other is not None and other != found["key"]
        ],
        "attempts": [each for each in found["attempts"] if each["key"] != found["key"]],
        "neighbours": neighbours,
        "address": link(),
    }


def _tokens(found: Mapping[str, Any], number: int, overlay: str, limit: int | None, url: str) -> dict[str, Any]:
    """Return the tokens of a sample's row, and where it parts from better samples."""
    parts = found["parts"] if number == 0 else None
    href = parts and f"{url}/sample/{key_in_address(parts['key'])}?view=tokens"
    return {
        **sample_view.tokens(found["rows"][number], overlay, limit, parts and parts["token"]),
        "parts": parts and {**parts, "left": sample_view.left(parts), "href": href},
    }


def _worst(run: Run, samples: Sequence[Mapping[str, Any]], url: str) -> dict[str, Any] | None:
    """Return the tokens of a group's sample with the lowest reward, if it parts from better ones."""
    rewarded = [sample for sample in samples if sample["reward"] is not None]
    if not rewarded:
        return None
    found = run.sample(min(rewarded, key=lambda sample: sample["reward"])["key"])
    if found["parts"] is None:
        return None
    overlay = "advantage" if "advantage" in sample_view.overlays_of(found["rows"][0]) else "trained"
    href = f"{url}/sample/{key_in_address(found['key'])}?view=tokens"
    row = {"number": 0, "count": 1, "links": [], "overlays": [], "length": len(found["rows"][0]["ids"])}
    row |= _tokens(found, 0, overlay, sample_view.TOKENS_SHOWN, url)
    row["more"] = f"{href}&all=1" if row["length"] > sample_view.TOKENS_SHOWN else None
    return {"href": href, "index": found["index"], "reward": found["reward"], "row": row}


def _lane(query: Mapping[str, str]) -> int | None:
    """Return the number of the lane that an address names; None for all."""
    asked = query.get("lane", "")
    return int(asked) if asked.isdecimal() and len(asked) < 10 else None


def _neighbours(run: Run, sample: Mapping[str, Any], url: str, request: Request) -> dict[str, str | None]:
    """Return the previous and next sample in the list that the user came from, or else in the sample's group and step."""
    query = request.query_params
    kept = {name: query[name] for name in ("view", "overlay", "list") if query.get(name)}

    def link(key: str | None, **more: str) -> str | None:
        asked = urlencode({**kept, **more})
        return None if key is None else f"{url}/sample/{key_in_address(key)}" + (f"?{asked}" if asked else "")

    if query.get("at", "").isdecimal():
        place = number_in(request, "at")
        try:
            asked = filters(dict(parse_qsl(query.get("list", ""))))
            around = run.search(**asked, offset=max(0, place - 1), limit=3)["samples"]
        except (DataError, ValueError):
            around = []  # the address was changed by hand
        mine = next((index for index, each in enumerate(around) if each["key"] == sample["key"]), None)
        if mine is not None:
            before, after = around[:mine][-1:], around[mine + 1 :][:1]
            return {
                "previous": link(before[0]["key"], at=str(place - 1)) if before else None,
                "next": link(after[0]["key"], at=str(place + 1)) if after else None,
            }
    found = dict(sample["neighbours"])
    if sample["step"] is not None and not sample["is_eval"] and not (found["previous"] and found["next"]):
        groups = run.step(sample["step"])["groups"]
        place = next((index for index, group in enumerate(groups) if group["key"] == sample["group"]), None)
        if place is not None:
            before = [each["key"] for group in groups[:place] for each in group["samples"]]
            behind = [each["key"] for group in groups[place + 1 :] for each in group["samples"]]
            found["previous"] = found["previous"] or (before[-1] if before else None)
            found["next"] = found["next"] or (behind[0] if behind else None)
    return {name: link(found[name]) for name in ("previous", "next")}
