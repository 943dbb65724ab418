"""Python's cyclic garbage collector while thousands of samples live.

A full collection looks at every object of the process and stops all its threads: up to 0.3 s with ten thousand samples in
flight, a sixth of the run in all. It comes by the number of new containers, and takes as long as there are old
ones, so that samples cost more, the more of them there are. What a sample leaves behind is freed by its reference counts and
needs no collection.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

#: For ``gc.set_threshold``: a full collection comes when a million more containers were made than freed (Python 3.11: 70,000).
THRESHOLDS = (2_000, 10, 50)

_lock = threading.Lock()
_users = 0
_before: tuple[int, int, int] | None = None


@contextlib.contextmanager
def rarer_collections() -> Iterator[None]:
    """Collect by ``THRESHOLDS`` while any user of this is inside.

    A process that collects more rarely already, or never, keeps its way; so does one that sets thresholds of its own meanwhile.
    """
    global _users, _before
    with _lock:
        _users += 1
        current = gc.get_threshold()
        if _users == 1 and _collects_more_often(current):
            _before = current
            gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _before is not None:
                if gc.get_threshold() == THRESHOLDS:
                    gc.set_threshold(*_before)
                _before = None


def _collects_more_often(current: tuple[int, int, int]) -> bool:
    return all(0 < now <= ours for now, ours in zip(current, THRESHOLDS, strict=True))
