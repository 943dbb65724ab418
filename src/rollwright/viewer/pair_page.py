"""The page of two samples side by side, token by token: of one group, of two versions, stages or runs."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any
from urllib.parse import unquote, urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rollwright.errors import DataError
from rollwright.tracking.readable import advantage, counted, number
from rollwright.viewer import sample_view
from rollwright.viewer.pages import Pages, key_in_address, url_of_run

_LARGEST = 4_000_000  # product of two lengths that are aligned; about two seconds
_DIFFERS = "differs"  # class of a token that the other sample does not have at its place
_FACTS = ("weights", "sampled", "requests", "took", "reason")
_KEY = "Underlined: tokens that only this sample has. ▸ marks the first one."


def add_routes(router: APIRouter, pages: Pages) -> None:
    """Add the page of two samples."""

    def pair(request: Request) -> Response:
        asked = request.query_params.getlist("sample")
        if (other := request.query_params.get("beside", "").strip()) and len(asked) == 1:
            asked.append(other if " " in other else f"{asked[0].rpartition(' ')[0]} {other}")
        asked = [unquote(each) if "%" in each.rpartition(" ")[2] else each for each in asked]
        if len(asked) != 2:
            raise DataError(f"Two samples are compared, and {len(asked)} are chosen: choose two.")
        rows = [int(each) if each.isdecimal() else 0 for each in request.query_params.get("rows", "0,0").split(",")]
        sides = [_side(pages, each, row) for each, row in zip(asked, [*rows, 0, 0][:2], strict=True)]
        overlay = request.query_params.get("overlay", "")
        limit = None if request.query_params.get("all") else sample_view.TOKENS_SHOWN

        def link(**changes: str) -> str:
            kept = {"rows": ",".join(str(side["number"]) for side in sides), "overlay": overlay, "all": "" if limit else "1"}
            query = [(name, value) for name, value in {**kept, **changes}.items() if value]
            return f"/pair?{urlencode([*(('sample', each) for each in asked), *query])}"

        def of_rows(place: int, number: int) -> str:
            return ",".join(str(number if other == place else side["number"]) for other, side in enumerate(sides))

        first, second = ([] if side["row"] is None else side["row"]["ids"] for side in sides)
        shared = shared_tokens(first, second)
        prefix = sum(1 for _ in takewhile(bool, shared[0]))
        known = [side["row"] for side in sides if side["row"] is not None]
        overlays = [name for name in sample_view.overlays_of(known[0]) if name != "trained"] if known else []
        chosen = overlay if overlay in overlays else ""
        for place, (side, own) in enumerate(zip(sides, shared, strict=True)):
            if side["row"] is not None:
                links = [
                    {"href": link(rows=of_rows(place, n)), "text": f"row {n + 1}", "chosen": n == side["number"]}
                    for n in range(side["count"])
                ]
                side["shown"] = {**_tokens(side, own, prefix, chosen, limit), "links": links}
                side["shown"]["more"] = link(all="1") if limit is not None and len(own) > limit else None
        names = [("", "Differences"), *((name, sample_view.OVERLAYS[name][0]) for name in overlays)]
        return pages.page(
            "pair.html",
            title="Two samples",
            crumbs=[{"text": "Two samples", "url": None}],
            sides=sides,
            about=_about(first, second, prefix, shared[0]),
            overlays=[{"href": link(overlay=name), "text": text, "chosen": name == chosen} for name, text in names],
        )

    router.add_api_route("/pair", pair, methods=["GET"], include_in_schema=False, response_model=None)


def _side(pages: Pages, asked: str, row: int) -> dict[str, Any]:
    """Return one of the two samples, which an address names by the id of its run and its key."""
    run_id, _, key = asked.rpartition(" ")
    run = pages.run_of_id(run_id)
    sample = run.sample(key)
    url, count = url_of_run(run_id), len(sample["rows"])
    place = min(row, max(0, count - 1))
    facts = [
        ("run", run_id),
        ("reward", None if sample["reward"] is None else number(sample["reward"])),
        ("advantage", None if sample["advantage"] is None else advantage(sample["advantage"])),
        *(fact for fact in sample_view.facts(sample) if fact[0] in _FACTS),
    ]
    return {
        "sample": sample,
        "name": sample["key"],
        "href": f"{url}/sample/{key_in_address(sample['key'])}?view=tokens",
        "facts": facts,
        "number": place,
        "count": count,
        "row": sample["rows"][place] if count else None,
        "shown": None,
    }


def _tokens(side: dict[str, Any], shared: Sequence[bool], prefix: int, overlay: str, limit: int | None) -> dict[str, Any]:
    """Return the template values of a row of tokens, as the page of a sample has them, with the differing ones marked."""
    row, length = side["row"], len(shared)
    shown = sample_view.tokens(row, overlay or "trained", limit, prefix if prefix < length else None)
    for token, is_shared in zip(shown["tokens"], shared, strict=False):
        classes = [each for each in token["shade"].split() if overlay or each != "trained"]
        token["shade"] = "".join(f" {each}" for each in [*classes, *([] if is_shared else [_DIFFERS])])
    return {
        **shown,
        "key": shown["key"] if overlay else _KEY,
        "number": side["number"],
        "count": side["count"],
        "overlays": [],
        "parts": None,
    }


def _about(first: Sequence[int], second: Sequence[int], prefix: int, shared: Sequence[bool]) -> str:
    if list(first) == list(second):
        return f"the same {counted(len(first), 'token')}" if first else "no tokens"
    common = sum(shared)
    return f"the first {counted(prefix, 'token')} are equal; {common:,} of {len(first):,} and {len(second):,} are in both, in order"


def shared_tokens(first: Sequence[int], second: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Align two sequences of tokens.

    Returns:
        For each token of either, whether the other has it, too, in the same order. Between an equal beginning and an equal end, very long
        sequences are not aligned.
    """
    shortest = min(len(first), len(second))
    prefix = next((place for place in range(shortest) if first[place] != second[place]), shortest)
    suffix = next((place for place in range(shortest - prefix) if first[-1 - place] != second[-1 - place]), shortest - prefix)
    inner = [list(each[prefix : len(each) - suffix]) for each in (first, second)]
    found = [[False] * len(each) for each in inner]
    if len(inner[0]) * len(inner[1]) <= _LARGEST:
        for block in SequenceMatcher(None, *inner, autojunk=False).get_matching_blocks():
            for place in range(block.size):
                found[0][block.a + place] = found[1][block.b + place] = True
    left, right = ([True] * prefix + each + [True] * suffix for each in found)
    return left, right
