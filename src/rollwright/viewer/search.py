"""Finding samples: by what they say, and by what the index has of each."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollwright.errors import DataError
from rollwright.viewer import patterns
from rollwright.viewer.index import Index
from rollwright.viewer.samples import NOT_UNDONE, SELECT, Samples
from rollwright.viewer.texts import SNIPPET, marked_snippet, match_query

#: Orders of what is found; ``-`` before one turns it around.
ORDERS = {
    "step": "step, samples.id",
    "reward": "reward, advantage, samples.id",
    "tokens": "tokens, samples.id",
    "length": "length, samples.id",
    "began": "began, samples.id",
    "seconds": "ended - began, samples.id",
    "advantage": "advantage, samples.id",
}
WHERES = ("any", "given", "said")
_RANGES = {"step": "step", "reward": "reward", "tokens": "tokens", "length": "length", "advantage": "advantage"}
_LONGEST_PATTERN = 1_000
_PATTERN_SECONDS = 0.8  # in which texts are looked through for a pattern
_FRAME_SECONDS = 60.0  # the same where all samples are asked for
_WAITED = 10.0  # for a process to start, or another one to end
_PROCESSES = threading.BoundedSemaphore(2)  # that look for patterns at once
_AT_ONCE = 10_000

Bounds = int | float | tuple[float | None, float | None] | None


@dataclass
class Query:
    """Search filters; None disables a filter.

    Attributes:
        text: words that must all occur, and phrases in quotes.
        regex: a pattern of Python's ``re``.
        where: text to search: what the sample was ``given``, what it ``said``, or ``any`` of both.
        step, reward, tokens, length, advantage, version: a value, or a (lowest, highest) pair, in which None means no limit.
        status: accepted, rejected, failed or cut.
        tag: name of the workflow.
        tool: name of a durable call, or part of it.
        is_eval: True for evaluations, False for training.
        truncated: cut by a length limit.
        undone: include samples that a resume undid: those of lost steps, and those that ran again.
        order: one of ``ORDERS``.
    """

    text: str | None = None
    regex: str | None = None
    where: str = "any"
    step: Bounds = None
    reward: Bounds = None
    tokens: Bounds = None
    length: Bounds = None
    advantage: Bounds = None
    version: Bounds = None
    status: str | None = None
    tag: str | None = None
    tool: str | None = None
    is_eval: bool | None = None
    truncated: bool | None = None
    undone: bool = False
    order: str = "began"
    offset: int = 0
    limit: int = 50


def search(index: Index, samples: Samples, query: Query) -> dict[str, Any]:
    """The samples that a query finds.

    Returns:
        ``total`` (None where texts were not looked through to the end), ``samples`` with a ``snippet`` each, and ``scanned`` (how many
        samples' texts a pattern was looked for in), ``is_cut``: the time was over before there was enough.

    Raises:
        DataError: a filter, an order or a pattern is wrong; the message says which.
    """
    conditions, values = _conditions(query)
    order = _order(query.order)
    if query.where not in WHERES:
        raise DataError(f"where is {query.where!r}: choose from {', '.join(WHERES)}.")
    match = match_query(query.text, query.where) if query.text else None
    pattern = _pattern(query, match)
    if pattern is not None:
        return _scan(index, samples, query, conditions, values, match, pattern, order)
    tables = ""
    if match is not None:
        tables = " JOIN found ON found.rowid = samples.id"
        conditions, values = ["found MATCH ?", *conditions], [match, *values]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    (counted,) = index.rows(f"SELECT count(*) FROM samples{tables}{where}", *values)
    select = SELECT.replace(" FROM", f", {SNIPPET} AS snippet FROM") if match is not None else SELECT
    rows = index.rows(f"{select}{tables}{where} ORDER BY {order} LIMIT ? OFFSET ?", *values, query.limit, query.offset)
    found = []
    for row in rows:
        snippet = marked_snippet(row["snippet"]) if match is not None else [[row["preview"], False]] if row["preview"] else []
        found.append({**samples.plain(row), "snippet": snippet})
    return {"total": counted[0], "samples": found, "scanned": 0, "is_cut": False}


def _conditions(query: Query) -> tuple[list[str], list[Any]]:
    conditions: list[str] = []
    values: list[Any] = []

    def add(condition: str, *given: Any) -> None:
        conditions.append(condition)
        values.extend(given)

    for name, column in _RANGES.items():
        low, high = _bounds(name, getattr(query, name))
        if low is not None:
            add(f"{column} >= ?", low)
        if high is not None:
            add(f"{column} <= ?", high)
    low, high = _bounds("version", query.version)
    if low is not None:
        add("last_version >= ?", low)
    if high is not None:
        add("first_version <= ?", high)
    if query.status is not None:
        add("status = ?", query.status)
    if query.tag is not None:
        add("workflow = ?", query.tag)
    if query.tool is not None:
        add("instr(tool_names, ?) > 0", query.tool)
    if query.is_eval is not None:
        add("is_eval = ?", query.is_eval)
    if query.truncated is not None:
        add("truncated = ?", query.truncated)
    if not query.undone:
        add(NOT_UNDONE)
    return conditions, values


def _bounds(name: str, given: Bounds) -> tuple[float | None, float | None]:
    if given is None:
        return None, None
    if isinstance(given, int | float):
        return given, given
    try:
        low, high = given
    except (TypeError, ValueError):
        raise DataError(f"{name} is {given!r}: give a number, or the lowest and the highest one.") from None
    return low, high


def _order(given: str) -> str:
    order = ORDERS.get(given.removeprefix("-"))
    if order is None:
        raise DataError(f"order is {given!r}: choose from {', '.join(ORDERS)}, with - before it for the other way round.")
    turned = " DESC" if given.startswith("-") else ""
    return ", ".join(f"{part}{turned} NULLS LAST" for part in order.split(", "))


def _pattern(query: Query, match: str | None) -> re.Pattern[str] | None:
    """What texts are looked through for: the pattern, or words that the full-text search has no token for."""
    if query.regex:
        if len(query.regex) > _LONGEST_PATTERN:
            raise DataError(f"the pattern has {len(query.regex)} characters; at most {_LONGEST_PATTERN} are taken.")
        try:
            return re.compile(query.regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise DataError(f"{query.regex!r} is no regular expression: {error}.") from None
    return re.compile(re.escape(query.text)) if query.text and match is None else None


def _scan(
    index: Index,
    samples: Samples,
    query: Query,
    conditions: list[str],
    values: list[Any],
    match: str | None,
    pattern: re.Pattern[str],
    order: str,
) -> dict[str, Any]:
    """Look through the texts in the order that is asked for, until there are enough or the time is over."""
    tables = " JOIN texts ON texts.id = samples.id"
    if match is not None:
        tables += " JOIN found ON found.rowid = samples.id"
        conditions, values = ["found MATCH ?", *conditions], [match, *values]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    is_limited = query.limit >= 0
    lines = _looked_through(
        {
            "index": str(index.path),
            "select": f"SELECT samples.id, texts.given, texts.said FROM samples{tables}{where} ORDER BY {order}",
            "values": values,
            "pattern": pattern.pattern,
            "where": query.where,
            "enough": query.offset + query.limit + 1 if is_limited else None,
            "seconds": _PATTERN_SECONDS if is_limited else _FRAME_SECONDS,
        }
    )
    hits = [(line["hit"], line["snippet"]) for line in lines if "hit" in line]
    is_whole = any("is_whole" in line for line in lines)
    shown = hits[query.offset : query.offset + query.limit if is_limited else None]
    rows_of = {row["id"]: row for row in _by_number(index, [number for number, _ in shown])}
    found = [{**samples.plain(rows_of[number]), "snippet": snippet} for number, snippet in shown if number in rows_of]
    return {
        "total": len(hits) if is_whole else None,
        "samples": found,
        "scanned": max((line["scanned"] for line in lines if "scanned" in line), default=0),
        "is_cut": not is_whole and (not is_limited or len(hits) <= query.offset + query.limit),
    }


def _looked_through(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``viewer.patterns`` says, in a process that ends when its time is over.

    Raises:
        DataError: too many look for patterns at once.
    """
    if not _PROCESSES.acquire(timeout=_WAITED):
        raise DataError("other patterns are being looked for: try again in a moment.")
    try:
        with subprocess.Popen(
            [sys.executable, "-I", patterns.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                said, _ = process.communicate(json.dumps(asked).encode() + b"\n", timeout=asked["seconds"] + _WAITED)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            except BaseException:
                process.kill()
                raise
    finally:
        _PROCESSES.release()
    whole_lines = said[: said.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole_lines]


def _by_number(index: Index, numbers: list[int]) -> list[Any]:
    rows: list[Any] = []
    for start in range(0, len(numbers), _AT_ONCE):
        some = numbers[start : start + _AT_ONCE]
        rows += index.rows(f"{SELECT} WHERE samples.id IN ({', '.join('?' * len(some))})", *some)
    return rows


# -- what an address asks for ---------------------------------------------------------------------------------------------

_ASKED_RANGES = ("step", "reward", "tokens", "version")
#: What an address may ask the search for.
ASKED = ("text", "regex", "where", *_ASKED_RANGES, "status", "tool", "tag", "eval", "truncated", "undone", "order")


def filters(query: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``Run.search`` that an address asks for.

    Raises:
        ValueError: a range is none.
    """
    text = query.get("text", "").strip()
    found: dict[str, Any] = {}
    if text:
        found["regex" if query.get("regex") else "text"] = text
    if query.get("where") in ("given", "said"):
        found["where"] = query["where"]
    for name in _ASKED_RANGES:
        if (asked := span(query.get(name, ""))) is not None:
            found[name] = asked
    for name in ("status", "tool", "tag"):
        if query.get(name, "").strip():
            found[name] = query[name].strip()
    if query.get("eval") in ("0", "1"):
        found["is_eval"] = query["eval"] == "1"
    if query.get("truncated") in ("0", "1"):
        found["truncated"] = query["truncated"] == "1"
    if query.get("undone") == "1":
        found["undone"] = True
    if query.get("order"):
        found["order"] = query["order"]
    return found


def span(text: str) -> tuple[float | None, float | None] | None:
    """A range as addresses have it: ``12``, ``5-20``, ``0.5..1``, ``100..``, ``..3``; empty: None.

    Raises:
        ValueError: it is no range.
    """
    text = text.strip().replace("…", "..").replace("−", "-")
    if not text:
        return None
    low, dots, high = text.partition("..")
    if not dots and not text.startswith("-") and "e-" not in text:
        low, dots, high = text.partition("-")
    try:
        first = float(low) if low.strip() else None
        last = (float(high) if high.strip() else None) if dots else first
        if not all(value is None or math.isfinite(value) for value in (first, last)):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is no number and no range: write 12, 5-20, 0.5..1, 100.. or ..3.") from None
    return first, last
