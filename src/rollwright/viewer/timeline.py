"""The timeline of a run: lanes of samples, engines and the trainer."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from rollwright.errors import JournalError
from rollwright.experience.journal.records import DurableResult, ModelCall
from rollwright.viewer.collector import REWARD_CALLS
from rollwright.viewer.index import Index
from rollwright.viewer.samples import Samples, select

MOST_SAMPLES = 3_000  # drawn in one picture; if there are more, an evenly spaced selection
MOST_READ = 300  # with more samples than this, calls and tools are not drawn


def timeline(index: Index, samples: Samples, start: float | None, end: float | None, lanes: int) -> dict[str, Any]:
    """Return the spans between two times.

    Args:
        start, end: seconds since the epoch; those of the whole run if None.
        lanes: number of lanes for samples, divided among the processes that ran them. Samples that find no free lane are left out.

    Returns:
        ``start``, ``end``, ``lanes`` (``name``, ``kind``, ``spans`` of ``start``, ``end``, ``kind``, ``label`` and ``key``), ``busy`` (share
        of the time in which a lane had a span), and ``shown`` (share of the samples that are drawn).
    """
    (extent,) = index.rows("SELECT min(began), max(ended), (SELECT max(time) FROM steps) FROM samples")
    start = float(extent[0] or 0.0) if start is None else start
    end = float(max(extent[1] or start, extent[2] or start)) if end is None else end
    (counted,) = index.rows("SELECT count(*) FROM samples WHERE began < ? AND ended > ?", end, start)
    every = max(1, -(-counted[0] // MOST_SAMPLES))
    rows = index.rows(f"{select()} WHERE began < ? AND ended > ? AND samples.id % ? = 0 ORDER BY began", end, start, every)
    plain = [samples.plain(row) for row in rows]
    processes = sorted({sample["process"] for sample in plain})
    drawn: list[dict[str, Any]] = []
    for process in processes:
        own = [sample for sample in plain if sample["process"] == process]
        name = f"process {process}, sampling" if len(processes) > 1 else "sampling"
        drawn += _lanes_of(own, max(1, lanes // len(processes)), name)
    engines = _engines(index, [row["id"] for row in rows], plain) if len(rows) <= MOST_READ else []
    trainer = {"name": "trainer", "kind": "trainer", "spans": _phases(index, start, end)}
    shown = [lane for lane in [*([trainer] if trainer["spans"] else []), *engines, *drawn] if lane["spans"]]
    return {
        "start": start,
        "end": end,
        "lanes": shown,
        "busy": {lane["name"]: _busy(lane["spans"], start, end) for lane in shown},
        "shown": sum(len(lane["spans"]) for lane in drawn) / counted[0] if counted[0] else 1.0,
    }


def _lanes_of(samples: Sequence[dict[str, Any]], count: int, name: str) -> list[dict[str, Any]]:
    """Distribute samples over lanes without overlaps; a sample that finds no free lane is left out."""
    lanes: list[dict[str, Any]] = [{"name": f"{name} {number + 1}", "kind": "sampling", "spans": []} for number in range(count)]
    free = list(range(count))
    taken: list[tuple[float, int]] = []
    for sample in samples:
        while taken and taken[0][0] <= sample["began"]:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            continue
        lane = heapq.heappop(free)
        heapq.heappush(taken, (sample["ended"], lane))
        same = {name: sample[name] for name in ("key", "status", "reward")}
        span = {"start": sample["began"], "end": sample["ended"], "kind": "sample", "label": sample["key"]}
        lanes[lane]["spans"].append({**span, **same})
    return lanes


def _engines(index: Index, numbers: Sequence[int], samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lanes of model requests, one per server that answered, and lanes of tool and reward calls."""
    lanes: dict[str, dict[str, Any]] = {}
    for number, sample in zip(numbers, samples, strict=True):
        (row,) = index.rows("SELECT places FROM samples WHERE id = ?", number)
        try:
            records = index.records(row["places"])
        except (JournalError, OSError):
            continue  # its file was removed
        for record in records:
            if isinstance(record, ModelCall):
                name, kind = record.server or "engine in this process", "engine"
                span = {"start": record.started, "end": record.finished, "kind": "call", "label": f"call {record.index}"}
            elif isinstance(record, DurableResult):
                name, kind = ("rewards", "reward") if record.name.startswith(REWARD_CALLS) else ("tools", "tool")
                span = {"start": record.time - record.seconds, "end": record.time, "kind": kind, "label": record.name}
            else:
                continue
            lane = lanes.setdefault(name, {"name": name, "kind": kind, "spans": []})
            lane["spans"].append({**span, "key": sample["key"]})
    return list(lanes.values())


def _phases(index: Index, start: float, end: float) -> list[dict[str, Any]]:
    """Return the trainer's phases. Phases without a recorded beginning are placed one after another, up to the end of their step."""
    timed = "SELECT phases.*, steps.time AS ended FROM phases JOIN steps USING (step, writer) WHERE steps.time > ? ORDER BY step, place"
    rows = index.rows(timed, start)
    spans: list[dict[str, Any]] = []
    step, free = None, 0.0
    for row in reversed(rows):
        if row["step"] != step:
            step, free = row["step"], row["ended"]
        began = row["began"]
        if began is None:
            free -= row["seconds"]
            began = free
        if began < end and began + row["seconds"] > start:
            label = f"{row['name']}, step {step}"
            spans.append({"start": began, "end": began + row["seconds"], "kind": row["name"], "label": label, "key": None})
    return spans[::-1]


def _busy(spans: Sequence[dict[str, Any]], start: float, end: float) -> float:
    """Return the share of a time range that the spans cover."""
    covered, until = 0.0, start
    for span in sorted(spans, key=lambda span: span["start"]):
        begin, stop = max(until, span["start"]), min(end, span["end"])
        covered += max(0.0, stop - begin)
        until = max(until, stop)
    return covered / (end - start) if end > start else 0.0
