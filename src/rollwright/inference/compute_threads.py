"""CPU compute threads: find the fastest number, and release the OpenMP workers that each computing Python thread owns.

If a process has more workers than cores, GNU OpenMP lets them sleep between two operations instead of spinning for a moment, and
waking them costs a decode step more than a second core gains: with 32 rows of a 4M model the step takes 7.1 ms on two cores, 5.9 on one,
and 3.8 on two after the trainer's thread has released its workers. So a thread that begins to wait releases its workers; its next
operation creates new workers, which takes about 0.1 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator

_SOFT = 1  # omp_pause_soft keeps settings such as the number of threads
_MEASURED_CALLS, _MEASURED_SECONDS = 8, 0.1  # limits for each number of threads
_AS_FAST = 1.1  # fewer threads are preferred if they take at most this many times as long: other work needs processors, too


@functools.cache
def _pause_resources() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of torch's OpenMP (since OpenMP 5.0, in GNU's and LLVM's), or None if it is missing."""
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


def release_workers() -> None:
    """End the OpenMP workers of the calling thread, if any. Costs a microsecond without workers."""
    pause = _pause_resources()
    if pause is not None:
        pause(_SOFT)


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Compute with this number of torch threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest_number(compute: Callable[[], object]) -> int:
    """Measure and return the smallest number of torch threads, up to the current one, that is about as fast as any."""
    import torch

    most, seconds = torch.get_num_threads(), dict[int, float]()
    for count in sorted({1, *(1 << power for power in range(1, most.bit_length())), most}):
        with compute_threads(count):
            compute()
            began, measured = time.perf_counter(), list[float]()
            while len(measured) < _MEASURED_CALLS and (not measured or time.perf_counter() - began < _MEASURED_SECONDS):
                start = time.perf_counter()
                compute()
                measured.append(time.perf_counter() - start)
            seconds[count] = min(measured)
    limit = _AS_FAST * min(seconds.values())
    return next(count for count, value in seconds.items() if value <= limit)
