"""OpenMP's worker threads, which every Python thread that computes on CPU has of its own.

While there are more of them in a process than cores, GNU OpenMP lets workers sleep between two operations instead of spinning
for a moment, and waking them costs more than a second core brings to a decode step: one with 32 rows of a 4M model takes 7.1 ms on
two cores, 5.9 on one, and 3.8 on two where the trainer's thread has given its workers back. So whoever begins to wait
gives its workers back; the next operation makes new ones, which takes about 0.1 ms.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_SOFT = 1  # omp_pause_soft: settings such as the number of threads stay


@functools.cache
def _pause_resources() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the OpenMP that torch has loaded (OpenMP 5.0, GNU's and LLVM's); None where there is none."""
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def release_workers() -> None:
    """End the OpenMP workers of the calling thread, where it has any. Costs a microsecond where it has none."""
    pause = _pause_resources()
    if pause is not None:
        pause(_SOFT)
