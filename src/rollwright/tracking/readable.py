"""Formatting for people, used by the display and the viewer: numbers, times, sizes, curves and untrusted text."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

#: Invisible characters, those that change how text is shown (controls, directions, line separators), and lone surrogates.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Longest text of one message in a page, in characters; "Save as" gives the whole text.
LONGEST_TEXT = 60_000


def visible(text: str) -> str:
    """Replace invisible characters, and those that change the text's direction, with visible names."""
    return _UNSEEN.sub(_name_of, text)


def _name_of(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd" if 0xD800 <= code < 0xE000 else f"⟨U+{code:04X}⟩"


def clipped(text: str, limit: int = LONGEST_TEXT) -> str:
    """Shorten text to about ``limit`` characters; a note in the middle gives the number of omitted ones."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… [{len(text) - limit:,} characters are left out here] …\n{text[len(text) - limit // 2 :]}"


def number(value: Any) -> str:
    """Format a number with about four significant digits, without trailing zeros."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size >= 1000:
        return _minus(f"{value:,.0f}")
    if size and size < 1e-3:
        return _minus(f"{value:.1e}")
    return _minus(f"{value:.4g}" if size < 1 else f"{value:.2f}".rstrip("0").rstrip("."))


def signed(value: Any) -> str:
    """Format a number with its sign."""
    return f"+{number(value)}" if isinstance(value, int | float) and value > 0 else number(value)


#: Smaller advantages are rounding errors of the group's mean.
NO_ADVANTAGE = 1e-6


def without_noise(value: float | None, largest: float = 1.0) -> float | None:
    """Return an advantage, or 0 if it is below a millionth of the largest one (at least of 1)."""
    return 0.0 if value is not None and abs(value) < NO_ADVANTAGE * max(1.0, largest) else value


def advantage(value: float | None) -> str:
    """Format an advantage with its sign; rounding errors are 0."""
    return signed(without_noise(value))


def count(value: int) -> str:
    """Format an integer with thousands separators."""
    return f"{value:,}"


def counted(value: int, name: str) -> str:
    """Format a count with its noun: ``1 step``, ``2 steps``."""
    return f"{value:,} {name}{'' if value == 1 else 's'}"


def share(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value:.0%}".replace("%", " %")


def size(value: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float | None) -> str:
    """Format a duration with units: ``48 s``, ``3 min 07 s`` or ``2 h 14 min``."""
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.0f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"
    if value < 60:
        return f"{value:.3g} s"
    minutes, left = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"


def stopwatch(value: float) -> str:
    """Format a duration like a stopwatch: ``48s``, ``3:07`` or ``2:14:09``."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole}s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def day(value: float | None) -> str:
    """Format the date, hour and minute of a Unix time, in local time."""
    return "–" if value is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(value))


def clock(value: float | None) -> str:
    """Format the time of day of a Unix time, in local time."""
    return "–" if value is None else time.strftime("%H:%M:%S", time.localtime(value))


def as_json(value: Any, indent: int | None = 2) -> str:
    """Format a value as JSON, indented by default; values that JSON cannot represent become strings."""
    return json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def sparkline(values: Sequence[float | None], width: int = 40, low: float | None = None, high: float | None = None) -> str:
    """Draw a curve in at most ``width`` block characters, each for one point or for the mean of neighbouring points.

    Args:
        values: the points. Missing ones (None) are left out, and values that are not finite are drawn as blanks.
        width: largest number of characters.
        low, high: values of the lowest and highest block. If None, those of the points are used.
    """
    points = [value for value in values if value is not None]
    if len(points) > width:
        edges = [round(index * len(points) / width) for index in range(width + 1)]
        buckets = [points[start:end] for start, end in pairwise(edges)]
        points = [sum(bucket) / len(bucket) for bucket in buckets]
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return " " * len(points)
    bottom = min(finite) if low is None else low
    span = (max(finite) if high is None else high) - bottom
    characters = []
    for point in points:
        share_of_span = (point - bottom) / span if span > 0 else 0.0
        is_finite = math.isfinite(point)
        characters.append(_BLOCKS[min(len(_BLOCKS) - 1, max(0, int(share_of_span * len(_BLOCKS))))] if is_finite else " ")
    return "".join(characters)


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text


#: Filters of the templates.
FILTERS: Mapping[str, Any] = {
    "number": number,
    "signed": signed,
    "advantage": advantage,
    "count": count,
    "share": share,
    "size": size,
    "seconds": seconds,
    "day": day,
    "clock": clock,
}
