"""When something that is done every so often is due."""

from __future__ import annotations

import time

from rollwright.config.sections import IntervalConfig


class Schedule:
    """Says after which steps an ``IntervalConfig`` is due.

    Args:
        interval: steps, epochs or seconds between two; all None: never due.
        steps_per_epoch: steps of one pass over the dataset.
    """

    def __init__(self, interval: IntervalConfig, steps_per_epoch: int) -> None:
        self._interval = interval
        self._steps_per_epoch = max(1, steps_per_epoch)
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """True where it is due after ``step`` steps, counted from 1."""
        interval = self._interval
        by_steps = interval.every_steps is not None and step % interval.every_steps == 0
        by_epochs = interval.every_epochs is not None and step % (interval.every_epochs * self._steps_per_epoch) == 0
        by_clock = interval.every_seconds is not None and time.monotonic() - self._last >= interval.every_seconds
        if by_clock:
            self._last = time.monotonic()
        return by_steps or by_epochs or by_clock
