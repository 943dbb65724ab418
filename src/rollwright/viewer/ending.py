"""Why a run ended early: the error, its traceback, the samples that failed, and the last lines of the log."""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_LOG_LINES = 25
_LOG_BYTES = 32_000  # of the end of a log
_LINE_BYTES = 400  # a long line of a log
_FAILURE_BYTES = 400_000  # of the end of failure.log
_REASON, _HEAD = 200, 80
_ENTRY = re.compile(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)$", re.MULTILINE)
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


def ending_of(path: Path, root: Path, last_step: float, failed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return why a run stopped.

    Args:
        path: directory of the run or stage.
        root: directory of the whole run.
        last_step: Unix time of the last step; 0 if there was none.
        failed: the latest failed samples.

    Returns:
        ``cause`` (class and message of the error; empty if none was recorded), ``traceback``, ``when`` and ``command`` of the failed
        process, ``is_older`` (True if steps were made after that error), ``failed`` (the latest failed samples) and ``log`` (last lines).
    """
    found = next(filter(None, (_last_failure(place / "logs" / "failure.log") for place in (path, root))), {})
    return {
        "cause": "",
        "traceback": "",
        "when": "",
        "command": "",
        **found,
        "is_older": bool(found) and last_step > _latest(found["when"]),
        "failed": [{"key": each["key"], "reason": _shortened(each["reason"])} for each in failed],
        "log": last_lines(path / "logs" / "run.log") or last_lines(root / "logs" / "run.log"),
    }


def _shortened(reason: str) -> str:
    line = " ".join(reason.split())
    return (
        line if len(line) <= _REASON else f"{line[:_HEAD]} … {line[_HEAD - _REASON :]}"
    )  # the cause is at the end of a traceback


def _last_failure(file: Path) -> dict[str, str] | None:
    """Return the last entry of a ``failure.log``, as ``cli.failures`` writes it."""
    text = _end_of(file, _FAILURE_BYTES)
    entries = list(_ENTRY.finditer(text))
    if not entries:
        return None
    entry = entries[-1]
    shown = text[entry.end() :].strip("\n")
    return {"when": entry[1], "command": entry[2], "traceback": shown, "cause": _cause(shown)}


def _cause(traceback: str) -> str:
    """Return class and message of the exception that a traceback ends with; its notes may be tracebacks, too."""
    lines = iter(traceback.split("\n"))
    cause = ""
    for line in lines:
        if not line or line[0].isspace() or line.startswith("Traceback ("):
            continue
        if line.startswith(_CHAINED):
            continue
        cause = line
        if not _goes_on(lines):
            break
    return cause


def _goes_on(lines: Iterator[str]) -> bool:
    """Return True if another traceback of the chain follows; reads the lines up to there."""
    for line in lines:
        if line:
            return line.startswith(_CHAINED)
    return False


def _latest(when: str) -> float:
    """Return the latest Unix time that a local time of any time zone can mean."""
    return calendar.timegm(time.strptime(when, "%Y-%m-%d %H:%M:%S")) + 12 * 3600.0


def last_lines(file: Path, lines: int = _LOG_LINES) -> list[str]:
    """Return the last lines of a log that are not empty; none if there is no such file."""
    size = max(_LOG_BYTES, lines * _LINE_BYTES)
    return [line for line in _end_of(file, size).split("\n") if line.strip()][-lines:]


def _end_of(file: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text, from the beginning of a line; empty if there is no such file."""
    try:
        with file.open("rb") as opened:
            begin = max(0, opened.seek(0, os.SEEK_END) - size)
            opened.seek(begin)
            content = opened.read(size)
    except OSError:
        return ""
    text = content.decode("utf-8", "replace")
    return text.partition("\n")[2] if begin else text
