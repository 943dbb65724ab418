"""How values and texts of a run are shown: numbers, times, sizes, and text that a model wrote, which is never trusted."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

#: Characters that change how what follows is shown (controls, directions, separators of lines) or are no characters at all.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
#: Longest text of one message in a page; the whole is in the file that "Save as" gives.
LONGEST_TEXT = 60_000


def visible(text: str) -> str:
    """Text in which characters that are not seen, or that change the direction of others, are shown by their names."""
    return _UNSEEN.sub(_name_of, text)


def _name_of(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd" if 0xD800 <= code < 0xE000 else f"⟨U+{code:04X}⟩"


def clipped(text: str, limit: int = LONGEST_TEXT) -> str:
    """Text of at most about ``limit`` characters; what is left out is counted where it was."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… [{len(text) - limit:,} characters are left out here] …\n{text[len(text) - limit // 2 :]}"


def number(value: Any) -> str:
    """Four significant digits, without trailing zeros."""
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
    """A number that says its sign."""
    return f"+{number(value)}" if isinstance(value, int | float) and value > 0 else number(value)


def count(value: int) -> str:
    """An integer with separators."""
    return f"{value:,}"


def counted(value: int, name: str) -> str:
    """A number of things that have a name: ``1 step``, ``2 steps``."""
    return f"{value:,} {name}{'' if value == 1 else 's'}"


def share(value: float) -> str:
    """A share in percent."""
    return f"{value:.0%}".replace("%", " %")


def size(value: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.0f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} µs"
    if value < 60:
        return f"{value:.3g} s"
    minutes, left = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"


def day(value: float | None) -> str:
    """Day and minute of a unix time, where the viewer runs."""
    return "–" if value is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(value))


def clock(value: float | None) -> str:
    """Time of the day."""
    return "–" if value is None else time.strftime("%H:%M:%S", time.localtime(value))


def as_json(value: Any, indent: int | None = 2) -> str:
    """A value as JSON to read; what JSON has no form for as its text."""
    return json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


def as_text(value: Any) -> str:
    """A value as it is read best: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text


#: Filters of the templates.
FILTERS: Mapping[str, Any] = {
    "number": number,
    "signed": signed,
    "count": count,
    "share": share,
    "size": size,
    "seconds": seconds,
    "day": day,
    "clock": clock,
}
