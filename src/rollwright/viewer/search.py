"""Finding samples: by their text, and by what the index has of each."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from rollwright.errors import DataError
from rollwright.viewer.index import Index
from rollwright.viewer.samples import NOT_UNDONE, SELECT, Samples
from rollwright.viewer.texts import SNIPPET, marked_snippet, match_query

#: Orders of results; a leading ``-`` reverses one.
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
_LARGEST_PATTERN = 100_000  # parts after its counted repeats are written out, as compiling does; about 60 MiB
_PATTERN_SECONDS = 0.8  # time limit of a search for a pattern
_FRAME_SECONDS = 60.0  # its time limit if all samples are wanted
_WAIT_SECONDS = 10.0  # for another search to end
_SEARCHES = threading.BoundedSemaphore(2)  # for patterns at the same time
_AT_ONCE = 10_000
_AROUND = 60  # characters shown before and after a match
_LONGEST_MATCH = 400  # characters shown of it

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
    """Find samples.

    Returns:
        ``total`` (None if not all texts were searched), ``samples`` with a ``snippet`` each, ``scanned`` (number of samples whose text
        was searched for a pattern), and ``is_cut`` (True if the time limit ended the search before enough were found).

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


def _pattern(query: Query, match: str | None) -> regex.Pattern[str] | None:
    """The pattern to search texts for: the query's, or its words if the full-text search has no token for them."""
    if not query.regex:
        return regex.compile(regex.escape(query.text)) if query.text and match is None else None
    if len(query.regex) > _LONGEST_PATTERN:
        raise DataError(f"the pattern has {len(query.regex)} characters; at most {_LONGEST_PATTERN} are taken.")
    try:
        re.compile(query.regex)  # the dialect that is promised, and its messages
        if _expanded_size(query.regex) > _LARGEST_PATTERN:
            raise DataError(
                f"{query.regex!r} repeats too much: its counted repeats come to more than {_LARGEST_PATTERN:,} parts."
            )
        return regex.compile(query.regex)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise DataError(f"{query.regex!r} is no regular expression: {error}.") from None


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\{(?P<least>\d*)(?:,(?P<most>\d*))?\}|.", re.DOTALL)


def _expanded_size(pattern: str) -> int:
    """Number of parts of a pattern after its counted repeats are written out; ``(?:a{100}){100}`` has 10,000."""
    groups, last = [0], 0
    for part in _PARTS.finditer(pattern):
        times = part["most"] or part["least"]
        if times:
            groups[-1] += last * (int(times) - 1)
        elif part[0] == "(":
            groups.append(0)
        else:
            last = groups.pop() if part[0] == ")" and len(groups) > 1 else 1
            groups[-1] += last
    return sum(groups)


def _scan(
    index: Index,
    samples: Samples,
    query: Query,
    conditions: list[str],
    values: list[Any],
    match: str | None,
    pattern: regex.Pattern[str],
    order: str,
) -> dict[str, Any]:
    """Search the texts, in the requested order, until there are enough matches or the time is over."""
    tables = " JOIN texts ON texts.id = samples.id"
    if match is not None:
        tables += " JOIN found ON found.rowid = samples.id"
        conditions, values = ["found MATCH ?", *conditions], [match, *values]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    is_limited = query.limit >= 0
    last = query.offset + query.limit if is_limited else None
    if not _SEARCHES.acquire(timeout=_WAIT_SECONDS):
        raise DataError("other patterns are being looked for: try again in a moment.")
    try:
        # a connection of its own, because the search may take long and the index may be made again meanwhile
        with contextlib.closing(sqlite3.connect(index.path, timeout=2.0)) as connection:
            connection.execute("PRAGMA query_only = 1")
            texts = connection.execute(
                f"SELECT samples.id, texts.given, texts.said FROM samples{tables}{where} ORDER BY {order}", values
            )
            seconds = _PATTERN_SECONDS if is_limited else _FRAME_SECONDS
            matches, scanned, is_whole = _matches(texts, pattern, query.where, None if last is None else last + 1, seconds)
    finally:
        _SEARCHES.release()
    shown = matches[query.offset : last]
    rows_of = {row["id"]: row for row in _by_number(index, [number for number, _ in shown])}
    found = [{**samples.plain(rows_of[number]), "snippet": snippet} for number, snippet in shown if number in rows_of]
    return {
        "total": len(matches) if is_whole else None,
        "samples": found,
        "scanned": scanned,
        "is_cut": not is_whole and (last is None or len(matches) <= last),
    }


def _matches(
    texts: sqlite3.Cursor, pattern: regex.Pattern[str], where: str, enough: int | None, seconds: float
) -> tuple[list[tuple[int, list[list[Any]]]], int, bool]:
    """Search texts for a pattern.

    Returns:
        Number and snippet of each sample with a match, the number of samples searched, and whether those were all.
    """
    deadline = time.monotonic() + seconds
    matches: list[tuple[int, list[list[Any]]]] = []
    for scanned, (number, given, said) in enumerate(texts):
        if enough is not None and len(matches) >= enough:
            return matches, scanned, False
        try:
            for name, text in (("said", said), ("given", given)):
                left = max(1e-3, deadline - time.monotonic())
                if where in ("any", name) and (found := pattern.search(text, timeout=left, concurrent=True)):
                    matches.append((number, _snippet(text, found.start(), found.end())))
                    break
        except TimeoutError:
            return matches, scanned, False
        if time.monotonic() > deadline:
            return matches, scanned + 1, False
    return matches, 0, True


def _snippet(text: str, start: int, stop: int) -> list[list[Any]]:
    """The characters around a match, in parts, each with whether it is the match."""
    before, after = text[max(0, start - _AROUND) : start], text[stop : stop + _AROUND]
    before = f"…{before}" if start > _AROUND else before
    after = f"{after}…" if stop + _AROUND < len(text) else after
    match = text[start:stop] if stop - start <= _LONGEST_MATCH else f"{text[start : start + _LONGEST_MATCH]}…"
    return [part for part in ([before, False], [match, True], [after, False]) if part[0]]


def _by_number(index: Index, numbers: list[int]) -> list[Any]:
    rows: list[Any] = []
    for start in range(0, len(numbers), _AT_ONCE):
        some = numbers[start : start + _AT_ONCE]
        rows += index.rows(f"{SELECT} WHERE samples.id IN ({', '.join('?' * len(some))})", *some)
    return rows


# -- what an address asks for ---------------------------------------------------------------------------------------------

_ASKED_RANGES = ("step", "reward", "tokens", "version")
#: Parameters of an address that the search accepts.
ASKED = ("text", "regex", "where", *_ASKED_RANGES, "status", "tool", "tag", "eval", "truncated", "undone", "order")


def filters(query: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``Run.search`` from an address.

    Raises:
        ValueError: a range is invalid.
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
    """Parse a range from an address: ``12``, ``5-20``, ``0.5..1``, ``100..``, ``..3``; None for an empty text.

    Raises:
        ValueError: it is not a range.
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
