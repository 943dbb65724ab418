"""Search for samples by their text and by the values in the index."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sqlite3
import threading
import time
from collections.abc import Mapping
from typing import Any

import regex

from rollwright.errors import DataError
from rollwright.viewer.index import Index
from rollwright.viewer.reported import PREFIX, reported, spread, sql_of
from rollwright.viewer.samples import NOT_UNDONE, Samples, select

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
_LONGEST_PATTERN = 1_000
_LARGEST_PATTERN = 100_000  # parts after counted repeats are expanded, as the compiler does; about 60 MiB
_PATTERN_SECONDS = 0.8  # time limit of a search for a pattern
_FRAME_SECONDS = 60.0  # its time limit if all samples are requested
_WAIT_SECONDS = 10.0  # longest wait for another search to end
_SEARCHES = threading.BoundedSemaphore(2)  # concurrent searches for patterns
_AROUND = 60  # characters shown before and after a match
_LONGEST_MATCH = 400  # characters shown of a match
_MARKS = ("\x02", "\x03")  # delimit matches in SQLite's snippets
_BINS = 20  # of a histogram
_SNIPPET = f"snippet(found, -1, '{_MARKS[0]}', '{_MARKS[1]}', '…', 24)"

Bounds = int | float | tuple[float | None, float | None] | None


def search(
    index: Index,
    samples: Samples,
    *,
    text: str | None = None,
    regex: str | None = None,
    where: str = "any",
    step: Bounds = None,
    reward: Bounds = None,
    tokens: Bounds = None,
    length: Bounds = None,
    advantage: Bounds = None,
    version: Bounds = None,
    status: str | None = None,
    tag: str | None = None,
    tool: str | None = None,
    is_eval: bool | None = None,
    truncated: bool | None = None,
    report: Mapping[str, Bounds | str] | None = None,
    undone: bool = False,
    order: str = "began",
    offset: int = 0,
    limit: int = 50,
    counted_by: str | None = None,
) -> dict[str, Any]:
    """Find samples. Filters that are None are not applied.

    Args:
        index: index of the journal.
        samples: samples of the index.
        text: words and quoted phrases, all of which must occur.
        regex: a pattern of Python's ``re``.
        where: text to search: what the sample was ``given``, what it ``said``, or ``any`` of both.
        step, reward, tokens, length, advantage, version: a value, or a (lowest, highest) pair in which None is no limit.
        status: accepted, rejected, failed or cut.
        tag: name of the workflow.
        tool: name of a durable call, or part of it.
        is_eval: True for evaluations, False for training.
        truncated: True for samples cut by a length limit, False for others.
        report: what samples reported, by name: a value or a pair as above, an address's range as a string, or a part of a text.
        undone: include samples that a resume undid, because their step was lost or they ran again.
        order: one of ``ORDERS``, or ``report.NAME``; a leading ``-`` reverses it.
        offset: number of results to skip.
        limit: largest number of results; -1 for all.
        counted_by: also count all samples that fit by this value (see ``reported.spread``); not with a pattern.

    Returns:
        ``total`` (None if not all texts were searched), ``samples`` with a ``snippet`` each, ``scanned`` (number of samples whose text
        was searched for a pattern), ``is_cut`` (True if the time limit ended the search before enough were found), and ``spread``.

    Raises:
        DataError: a filter, an order or a pattern is invalid; the message says which.
    """
    ranges = {"step": step, "reward": reward, "tokens": tokens, "length": length, "advantage": advantage, "version": version}
    conditions = [condition for name, given in ranges.items() for condition in _limits(name, given)]
    conditions += [("status = ?", status), ("workflow = ?", tag), ("instr(tool_names, ?) > 0", tool)]
    conditions += [("is_eval = ?", is_eval), ("truncated = ?", truncated)]
    conditions += [condition for name, given in (report or {}).items() for condition in _reported(index, name, given)]
    sql_order = _order(index, order)
    if where not in WHERES:
        raise DataError(f"where is {where!r}: choose from {', '.join(WHERES)}.")
    match = _match_query(text, where) if text else None
    pattern = _pattern(text, regex, match)
    conditions = [(condition, value) for condition, value in [("found MATCH ?", match), *conditions] if value is not None]
    wanted = " AND ".join([*(condition for condition, _ in conditions), "TRUE" if undone else NOT_UNDONE])
    joined = " JOIN found ON found.rowid = samples.id" if match is not None else ""
    rest, values = f"{joined} WHERE {wanted}", [value for _, value in conditions]
    if pattern is not None:
        texts = f"SELECT samples.id, texts.given, texts.said FROM samples JOIN texts ON texts.id = samples.id{rest} ORDER BY {sql_order}"
        return _scan(index, samples, texts, values, pattern, where, offset, limit)
    (counted,) = index.rows(f"SELECT count(*) FROM samples{rest}", *values)
    columns = select() if match is None else select(f"{_SNIPPET} AS snippet")
    found = []
    for row in index.rows(f"{columns}{rest} ORDER BY {sql_order} LIMIT ? OFFSET ?", *values, limit, offset):
        snippet = _marked_parts(row["snippet"]) if match is not None else [[row["preview"], False]] if row["preview"] else []
        found.append({**samples.plain(row), "snippet": snippet})
    counts = None if counted_by is None else spread(index, counted_by, rest, values, _BINS)
    return {"total": counted[0], "samples": found, "scanned": 0, "is_cut": False, "spread": counts}


def _limits(name: str, given: Bounds, sql: str = "") -> list[tuple[str, Any]]:
    """Return SQL conditions for the lowest and the highest value of a column, or of ``sql``.

    A sample has all versions from its first to its last one.
    """
    try:
        low, high = (given, given) if given is None or isinstance(given, int | float) else given
    except (TypeError, ValueError):
        raise DataError(f"{name} is {given!r}: give a number, or the lowest and the highest one.") from None
    first, last = ("first_version", "last_version") if name == "version" else (sql or name, sql or name)
    return [(f"{last} >= ?", low), (f"{first} <= ?", high)]


def _reported(index: Index, name: str, given: Bounds | str) -> list[tuple[str, Any]]:
    """Return SQL conditions for a value that samples reported."""
    sql = sql_of(index, name)
    if isinstance(given, str) and reported(index)[name]:
        return [(f"instr({sql}, ?) > 0", given)]
    if isinstance(given, str):
        try:
            given = span(given)
        except ValueError as error:
            raise DataError(f"{PREFIX}{name}: {error}") from None
    return _limits(f"{PREFIX}{name}", given, sql)


def _order(index: Index, given: str) -> str:
    name = given.removeprefix("-")
    order = (
        [sql_of(index, name.removeprefix(PREFIX)), "samples.id"]
        if name.startswith(PREFIX)
        else ORDERS.get(name, "").split(", ")
    )
    if order == [""]:
        known = f"{', '.join(ORDERS)} and {PREFIX}NAME"
        raise DataError(f"order is {given!r}: choose from {known}, with - before it for the other way round.")
    turned = " DESC" if given.startswith("-") else ""
    return ", ".join(f"{part}{turned} NULLS LAST" for part in order)


def _pattern(text: str | None, given: str | None, match: str | None) -> regex.Pattern[str] | None:
    """Compile the given pattern, or one for the words if full-text search has no token for them; None if neither is needed."""
    if not given:
        return regex.compile(regex.escape(text)) if text and match is None else None
    if len(given) > _LONGEST_PATTERN:
        raise DataError(f"the pattern has {len(given)} characters; at most {_LONGEST_PATTERN} are taken.")
    try:
        re.compile(given)  # checks Python's dialect, with its error messages
        if _expanded_size(given) > _LARGEST_PATTERN:
            raise DataError(f"{given!r} repeats too much: its counted repeats come to more than {_LARGEST_PATTERN:,} parts.")
        return regex.compile(given)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise DataError(f"{given!r} is no regular expression: {error}.") from None


_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\{(?P<least>\d*)(?:,(?P<most>\d*))?\}|.", re.DOTALL)


def _expanded_size(pattern: str) -> int:
    """Count the parts of a pattern after its counted repeats are expanded; ``(?:a{100}){100}`` has 10,000."""
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
    query: str,
    values: list[Any],
    pattern: regex.Pattern[str],
    where: str,
    offset: int,
    limit: int,
) -> dict[str, Any]:
    """Search the texts of a query, in its order, until there are enough matches or the time limit is reached."""
    last, seconds = (offset + limit, _PATTERN_SECONDS) if limit >= 0 else (None, _FRAME_SECONDS)
    if not _SEARCHES.acquire(timeout=_WAIT_SECONDS):
        raise DataError("other patterns are being looked for: try again in a moment.")
    try:
        # a separate connection, because the search may take long and the index may be rebuilt meanwhile
        with contextlib.closing(sqlite3.connect(index.path, timeout=2.0)) as connection:
            connection.execute("PRAGMA query_only = 1")
            texts = connection.execute(query, values)
            matches, scanned, is_whole = _matches(texts, pattern, where, None if last is None else last + 1, seconds)
    finally:
        _SEARCHES.release()
    shown = dict(matches[offset:last])
    chosen = samples.numbered(list(shown))
    return {
        "total": len(matches) if is_whole else None,
        "samples": [{**chosen[number], "snippet": snippet} for number, snippet in shown.items() if number in chosen],
        "scanned": scanned,
        "is_cut": not is_whole and (last is None or len(matches) <= last),
        "spread": None,
    }


def _matches(
    texts: sqlite3.Cursor, pattern: regex.Pattern[str], where: str, enough: int | None, seconds: float
) -> tuple[list[tuple[int, list[list[Any]]]], int, bool]:
    """Search texts for a pattern.

    Returns:
        Number and snippet of each sample with a match, the number of samples searched (0 if all), and whether all were searched.
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
    """Split the text around a match into parts, each flagged if it is the match."""
    before, after = text[max(0, start - _AROUND) : start], text[stop : stop + _AROUND]
    before = f"…{before}" if start > _AROUND else before
    after = f"{after}…" if stop + _AROUND < len(text) else after
    match = text[start:stop] if stop - start <= _LONGEST_MATCH else f"{text[start : start + _LONGEST_MATCH]}…"
    return [part for part in ([before, False], [match, True], [after, False]) if part[0]]


def _match_query(text: str, where: str) -> str | None:
    """Build a full-text query for words and quoted phrases; None if there is no word to search for.

    Args:
        text: the words that a user typed.
        where: any, given or said.
    """
    terms = re.findall(r'"([^"]*)"|(\S+)', text.replace("\0", " "))
    words = [phrase or word for phrase, word in terms]
    kept = ['"{}"'.format(word.replace('"', " ")) for word in words if re.search(r"\w", word)]
    if not kept:
        return None
    joined = " AND ".join(kept)
    return joined if where == "any" else f"{{{where}}} : ({joined})"


def _marked_parts(text: str) -> list[list[Any]]:
    """Split a snippet into parts, each flagged if it is a match."""
    pieces = re.split(f"[{''.join(_MARKS)}]", text)
    return [[piece, number % 2 == 1] for number, piece in enumerate(pieces) if piece]


# -- parameters of an address ---------------------------------------------------------------------------------------------

_ASKED_RANGES = ("step", "reward", "tokens", "version")
_FLAGS: dict[str | None, bool] = {"0": False, "1": True}
#: Parameters of an address that the search accepts.
ASKED = ("text", "regex", "where", *_ASKED_RANGES, "status", "tool", "tag", "eval", "truncated", "undone", "order")


_ARGUMENTS = frozenset(
    name for name, each in inspect.signature(search).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
)


def as_arguments(query: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the names and values of addresses among the arguments of ``Run.search``: ``eval=1``, ``step="5-20"``, ``truncated="0"``.

    Raises:
        DataError: a name is unknown, or a range is invalid.
    """
    given = dict(query)
    if "eval" in given:
        given["is_eval"] = given.pop("eval")
    if named := [name for name in given if name.startswith(PREFIX)]:
        given["report"] = {**(given.get("report") or {}), **{name.removeprefix(PREFIX): given.pop(name) for name in named}}
    if unknown := sorted(given.keys() - _ARGUMENTS):
        raise DataError(f"samples are not found by {unknown[0]!r}: choose from eval, {', '.join(sorted(_ARGUMENTS))}.")
    for name in ("is_eval", "truncated", "undone"):
        if given.get(name) is not None:
            given[name] = bool(_FLAGS.get(str(given[name]), given[name]))
    if str(given.get("regex")) in ("1", "True"):  # an address has the pattern in ``text``
        given["regex"] = given.pop("text", None)
    for name in (*_ASKED_RANGES, "length", "advantage"):
        if isinstance(given.get(name), str):
            try:
                given[name] = span(given[name])
            except ValueError as error:
                raise DataError(f"{name}: {error}") from None
    return given


def filters(query: Mapping[str, str]) -> dict[str, Any]:
    """Convert the parameters of an address to arguments of ``Run.search``.

    Raises:
        ValueError: a range is invalid.
    """
    given: dict[str, Any] = {name: query.get(name, "").strip() for name in ("status", "tool", "tag")}
    given |= {name: span(query.get(name, "")) for name in _ASKED_RANGES}
    given["regex" if query.get("regex") else "text"] = query.get("text", "").strip()
    given["where"] = query.get("where") if query.get("where") in ("given", "said") else None
    given |= {"is_eval": _FLAGS.get(query.get("eval")), "truncated": _FLAGS.get(query.get("truncated"))}
    given |= {"undone": query.get("undone") == "1" or None, "order": query.get("order")}
    given["report"] = {
        name.removeprefix(PREFIX): query[name].strip() for name in query if is_reported(name) and query[name].strip()
    }
    return {name: value for name, value in given.items() if value not in (None, "", {})}


def is_asked(name: str) -> bool:
    """Return True if a parameter of an address is one that the search accepts."""
    return name in ASKED or is_reported(name)


def is_reported(name: str) -> bool:
    """Return True if a parameter of an address names something that samples reported."""
    return name.startswith(PREFIX)


def span(text: str) -> tuple[float | None, float | None] | None:
    """Parse a range from an address: ``12``, ``5-20``, ``0.5..1``, ``100..``, ``..3``; None for an empty string.

    Raises:
        ValueError: ``text`` is not a range.
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
