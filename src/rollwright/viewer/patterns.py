"""Looks for a regular expression in the texts of an index: run as a process of its own, because some expressions never end.

Python's ``re`` cannot be stopped and keeps all threads waiting. So this process has an alarm clock and a limit of memory, and imports
nothing but what Python brings. It reads one line of JSON, and writes a line for each hit, then one for the end.
"""

import contextlib
import json
import re
import signal
import sqlite3
import sys
import time

AROUND = 60  # characters shown before and behind a hit
LONGEST_HIT = 400  # characters shown of it
_MEMORY = 1 << 30
_GRACE = 0.7  # seconds after the time is over, in which one text has to be done


def snippet_around(text: str, start: int, stop: int) -> list[list]:
    """The characters around a hit, in parts, each with whether it was found."""
    before, behind = text[max(0, start - AROUND) : start], text[stop : stop + AROUND]
    before = f"…{before}" if start > AROUND else before
    behind = f"{behind}…" if stop + AROUND < len(text) else behind
    hit = text[start:stop] if stop - start <= LONGEST_HIT else f"{text[start : start + LONGEST_HIT]}…"
    return [part for part in ([before, False], [hit, True], [behind, False]) if part[0]]


def main() -> None:
    """Read what is asked, and answer it."""
    asked = json.loads(sys.stdin.readline())
    if sys.platform != "win32":  # there, who started it ends it
        import resource

        signal.setitimer(
            signal.ITIMER_REAL, asked["seconds"] + _GRACE
        )  # nothing handles it: it ends the process wherever it is
        with contextlib.suppress(ValueError, OSError):  # not every system has this limit
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    pattern, where, enough = re.compile(asked["pattern"]), asked["where"], asked["enough"]
    deadline = time.monotonic() + asked["seconds"]
    connection = sqlite3.connect(asked["index"], timeout=2.0)
    connection.execute("PRAGMA query_only = 1")
    hits = 0
    for scanned, (number, given, said) in enumerate(connection.execute(asked["select"], asked["values"])):
        if (enough is not None and hits >= enough) or time.monotonic() > deadline:
            _say(scanned=scanned)
            return
        if scanned % 200 == 0:
            _say(scanned=scanned)
        for name, text in (("said", said), ("given", given)):
            if where in ("any", name) and (found := pattern.search(text)):
                _say(hit=number, snippet=snippet_around(text, found.start(), found.end()))
                hits += 1
                break
    _say(is_whole=True)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
