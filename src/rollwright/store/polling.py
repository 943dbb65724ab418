"""Waiting for what other processes put into a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.25


def poll(look: Callable[[], tuple[Any, bool]], timeout: float | None, cancelled: Callable[[], bool]) -> Any:
    """Looks until there is something, nothing more can come, the time is over or the wait is cancelled."""
    limit = None if timeout is None else time.monotonic() + timeout
    pause = _SHORTEST_POLL
    while True:
        found, ended = look()
        if found or ended or cancelled() or (limit is not None and time.monotonic() >= limit):
            return found
        time.sleep(pause if limit is None else max(0.0, min(pause, limit - time.monotonic())))
        pause = min(_LONGEST_POLL, pause * 1.5)
