"""Layout of the pictures in pages: histograms, curves, the prefix tree of a group, and swimlanes. The templates render it as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unicodedata import east_asian_width

from rollwright.tracking.readable import clock, number, seconds, share, signed, stopwatch, without_noise

SHADES = 6  # classes of a value from low to high: q0 to q6
SIGNED_SHADES = 5  # classes n5 to n1, z, p1 to p5

#: Kinds of spans, and their names in a legend. Kinds not in ``_KINDS`` are drawn as ``other``.
SPANS = {
    "sample": "episode",
    "generate": "sampling",
    "tool": "tool",
    "reward": "reward",
    "wait": "waiting",
    "train": "training",
    "publish": "publishing",
    "checkpoint": "checkpoint",
    "eval": "evaluation",
    "failed": "failed",
    "other": "other",
}
_KINDS = {kind: kind for kind in SPANS} | {"call": "generate"}


def shade(value: float | None, low: float, high: float) -> str:
    """Return the CSS class of a value between ``low`` and ``high``; empty if there is no value."""
    if value is None or not math.isfinite(value):
        return ""
    part = 0.5 if high <= low else (value - low) / (high - low)
    return f"q{round(SHADES * min(1.0, max(0.0, part)))}"


def bounds(values: Iterable[float | None]) -> tuple[float, float]:
    """Return the lowest and the highest value that is known; 0 and 1 if there is none."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else (0.0, 1.0)


def signed_shade(value: float | None, largest: float) -> str:
    """Return the CSS class of a value that is good above 0 and bad below; empty if there is no value."""
    if value is None or not math.isfinite(value):
        return ""
    if not value or largest <= 0:
        return "z"
    strength = math.ceil(SIGNED_SHADES * min(1.0, abs(value) / largest))
    return f"{'p' if value > 0 else 'n'}{strength}"


def curve_points(values: Sequence[float | None], width: int = 120, height: int = 28) -> str:
    """Return the points of an SVG line; empty if fewer than two values are known."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    room, last = (high - low) or 1.0, len(values) - 1
    return " ".join(
        f"{index / last * (width - 4) + 2:.1f},{height - 3 - (value - low) / room * (height - 6):.1f}" for index, value in known
    )


def histogram(bins: Sequence[Mapping[str, Any]], hrefs: Sequence[str], chosen: int | None) -> dict[str, Any]:
    """Lay out the bars of a histogram, each of which is a link."""
    width, height, top = 520, 150, 20
    base = height - 16
    if not bins:
        return {"bars": [], "width": width, "height": height, "base": base, "ticks": []}
    most = max(max(each["count"] for each in bins), 1)
    step = width / len(bins)
    bars = []
    for index, each in enumerate(bins):
        bar_height = max(round((base - top) * each["count"] / most, 1), 2 if each["count"] else 0)
        label = number(each["low"]) if each["low"] == each["high"] else f"{number(each['low'])} to {number(each['high'])}"
        bars.append(
            {
                "x": round(index * step, 1),
                "width": round(step, 1),
                "y": base - bar_height,
                "height": bar_height,
                "count": each["count"],
                "label": label,
                "href": hrefs[index],
                "chosen": index == chosen,
            }
        )
    ticks = [
        {"x": 0, "anchor": "start", "text": number(bins[0]["low"])},
        {"x": width, "anchor": "end", "text": number(bins[-1]["high"])},
    ]
    if bins[0]["low"] == bins[-1]["high"]:
        ticks = [{"x": width / 2, "anchor": "middle", "text": number(bins[0]["low"])}]
    return {"bars": bars, "width": width, "height": height, "base": base, "ticks": ticks}


def range_box(step: Mapping[str, Any], low: float, high: float, width: int = 120) -> dict[str, float] | None:
    """Lay out a small picture of a step's lowest, mean and highest reward within the run's range."""
    values = [step[name] for name in ("reward_min", "reward", "reward_max")]
    if any(value is None for value in values):
        return None
    scale = (width - 8) / ((high - low) or 1.0)
    lowest, mean, highest = (round(4 + (value - low) * scale, 1) for value in values)
    return {"x": lowest - 2, "width": round(highest - lowest + 4, 1), "mean": mean - 1.2}


# -- the prefix tree -----------------------------------------------------------------------------------------------------

_CHARACTER = 6.9  # pixels of a character in a box
_BROAD = "mwMW@%—…<>|"  # characters that are half as broad again
_LEAF_HEIGHT, _NODE_HEIGHT = 30, 22
_TREE_WIDTH, _END_WIDTH = 1200, 230


def prefix_tree(tree: Mapping[str, Any], href_of: Mapping[str, str]) -> dict[str, Any]:
    """Lay out a group's tree: each shared part is drawn once, as wide as its tokens, with its branches below each other."""
    nodes: list[dict[str, Any]] = list(tree["nodes"])
    children: dict[Any, list[dict[str, Any]]] = {}
    for node in nodes:
        children.setdefault(node["parent"], []).append(node)
    largest = max((abs(node["advantage"]) for node in nodes if node["advantage"] is not None), default=0.0)
    nodes = [{**node, "advantage": without_noise(node["advantage"], largest)} for node in nodes]
    largest = max((abs(node["advantage"]) for node in nodes if node["advantage"] is not None), default=0.0)
    scale = (_TREE_WIDTH - _END_WIDTH) / max(tree["width"], 1)
    drawn: dict[Any, dict[str, Any]] = {}
    edges: list[str] = []
    rows = 0
    for node in _parents_last(children):
        below = [drawn[child["id"]] for child in children.get(node["id"], [])]
        if below:
            y = (below[0]["y"] + below[-1]["y"]) / 2
        else:
            y, rows = rows * _LEAF_HEIGHT + 4, rows + 1
        x, width = node["start"] * scale, max(node["tokens"] * scale - 1.5, 3.0)
        keys, is_leaf = node["samples"], not below
        drawn[node["id"]] = {
            "x": round(x, 1),
            "y": round(y, 1),
            "width": round(width, 1),
            "height": _NODE_HEIGHT,
            "shade": signed_shade(node["advantage"], largest) if node["trained"] else "",
            "trained": node["trained"],
            "caption": _fitting(node["text"], width),
            "text": node["text"],
            "label": _label(node, keys),
            "href": href_of.get(keys[0]) if len(keys) == 1 else None,
            "end": _end_of(node, keys) if is_leaf else "",
        }
        for child in below:
            start, end = x + width, child["x"]
            middle, top, bottom = (start + end) / 2, y + _NODE_HEIGHT / 2, child["y"] + _NODE_HEIGHT / 2
            edges.append(
                f"M{start:.1f} {top:.1f}C{middle + 6:.1f} {top:.1f} {middle - 6:.1f} {bottom:.1f} {end:.1f} {bottom:.1f}"
            )
    total, distinct = sum(n["tokens"] * max(len(n["rows"]), 1) for n in nodes), sum(n["tokens"] for n in nodes)
    note = f"{distinct:,} distinct of {total:,} tokens" if total > distinct else f"{distinct:,} tokens, none shared"
    return {
        "nodes": [drawn[node["id"]] for node in nodes],
        "edges": edges,
        "width": _TREE_WIDTH,
        "height": rows * _LEAF_HEIGHT + 8,
        "note": note,
    }


def _parents_last(children: Mapping[Any, list[dict[str, Any]]]) -> Iterable[dict[str, Any]]:
    """Yield all nodes, leaves from top to bottom and each parent after its children. Not recursive, because trees may be deep."""
    waiting = [(node, False) for node in reversed(children.get(None, []))]
    while waiting:
        node, is_done = waiting.pop()
        if is_done or node["id"] not in children:
            yield node
            continue
        waiting.append((node, True))
        waiting += [(child, False) for child in reversed(children[node["id"]])]


def _label(node: Mapping[str, Any], keys: Sequence[str]) -> str:
    has_advantage = node["advantage"] is not None and node["trained"]
    parts = [
        f"sample {keys[0]}" if len(keys) == 1 else f"shared by {len(keys)} samples",
        f"{node['tokens']:,} tokens",
        "trained" if node["trained"] else "not trained",
        f"isolated branch {node['branch']}" if node["branch"] else "",
        f"advantage {signed(node['advantage'])}" if has_advantage else "",
    ]
    return ", ".join(filter(None, parts))


def _end_of(node: Mapping[str, Any], keys: Sequence[str]) -> str:
    parts = [
        f"#{keys[0].rpartition('/')[2]}" if len(keys) == 1 else f"{len(keys)} samples",
        f"branch {node['branch']}" if node["branch"] else "",
        f"reward {number(node['reward'])}" if node["reward"] is not None else "",
        signed(node["advantage"]) if node["advantage"] is not None else "",
    ]
    return " · ".join(filter(None, parts))


def _fitting(text: str, width: float) -> str:
    """Return as much of a text as a box of this width holds; characters are measured generously, because fonts differ."""
    text, room, used = " ".join(text.split()), width - 12, 0.0
    if room < 4 * _CHARACTER or not text:
        return ""
    for at, character in enumerate(text):
        used += _CHARACTER * (2.0 if east_asian_width(character) in "WF" else 1.5 if character in _BROAD else 1.0)
        if used > room:
            return text[: max(1, at - 1)] + "…"
    return text


# -- swimlanes -----------------------------------------------------------------------------------------------------------

_LANES_WIDTH, _LANES_LEFT, _LANE_HEIGHT = 1400, 190, 26


def swimlanes(timeline: Mapping[str, Any], began: float, href_of: Any) -> dict[str, Any]:
    """Lay out the bars of a timeline. Spans too short to be distinguished are drawn as one."""
    start, end = timeline["start"] or 0.0, timeline["end"] or 0.0
    scale = (_LANES_WIDTH - _LANES_LEFT) / max(end - start, 1e-6)
    lanes: list[dict[str, Any]] = []
    kinds: dict[str, None] = {}
    for index, lane in enumerate(timeline["lanes"]):
        y, bars, last = 22 + index * _LANE_HEIGHT, [], dict[str, float]()
        for span in sorted(lane["spans"], key=lambda each: (each["kind"] != "sample", each["start"])):
            left, right = (max(start, min(end, span[side])) for side in ("start", "end"))
            x, width = _LANES_LEFT + (left - start) * scale, (right - left) * scale
            kind = "failed" if span.get("status") == "failed" else _KINDS.get(span["kind"], "other")
            if right < left or (width < 0.7 and x - last.get(kind, -9.0) < 0.7):
                continue
            last[kind], kinds[kind] = x + width, None
            is_episode = span["kind"] == "sample"
            bars.append(
                {
                    "kind": kind,
                    "x": round(x, 2),
                    "y": y if is_episode else y + 4,
                    "height": 20 if is_episode else 12,
                    "width": round(max(width, 0.7), 2),
                    "label": f"{span['label']}, {seconds(span['end'] - span['start'])}, at {clock(span['start'])}",
                    "href": href_of(span["key"]) if span.get("key") else None,
                }
            )
        busy = timeline.get("busy", {}).get(lane["name"])
        lanes.append({**lane, "y": y, "bars": bars, "busy": "" if busy is None else share(busy)})
    return {
        "width": _LANES_WIDTH,
        "height": 26 + _LANE_HEIGHT * len(lanes),
        "left": _LANES_LEFT,
        "start": start,
        "end": end,
        "lanes": lanes,
        "ticks": [
            {
                "x": round(_LANES_LEFT + (at - start) * scale, 1),
                "text": f"{at - began:.4g} s" if abs(at - began) < 60 else stopwatch(at - began),
            }
            for at in _ticks(start, end, began)
        ],
        "legend": [(kind, SPANS[kind]) for kind in SPANS if kind in kinds],
    }


def _ticks(start: float, end: float, began: float) -> list[float]:
    rough = max(end - start, 1e-6) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    if step > 30:
        step = next((each for each in (60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400) if each >= rough), 86400.0 * 7)
    first = math.ceil((start - began) / step) * step
    return [began + first + index * step for index in range(20) if began + first + index * step <= end]


def lanes_of_sample(began: float, ended: float, spans: Sequence[tuple[str, float, float, str]]) -> dict[str, Any] | None:
    """Lay out a sample's requests, tools and rewards as bars, one row for each kind."""
    if not spans or ended <= began:
        return None
    kinds = list(dict.fromkeys(kind for kind, *_ in spans))
    scale, bars = 300 / (ended - began), []
    for kind, left, right, label in spans:
        x = max(0.0, (left - began) * scale)
        width = min(max((right - left) * scale, 1.5), max(300 - x, 1.5))
        bars.append({"kind": kind, "x": round(x, 1), "y": 2 + 18 * kinds.index(kind), "width": round(width, 1), "label": label})
    return {
        "bars": bars,
        "height": 18 * len(kinds),
        "legend": [(kind, SPANS[kind]) for kind in kinds],
        "about": f"{seconds(ended - began)} in all",
    }
