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
        self._postponed = False

    def due(self, step: int) -> bool:
        """True where it is due after ``step`` steps, counted from 1."""
        interval = self._interval
        by_steps = interval.every_steps is not None and step % interval.every_steps == 0
        by_epochs = interval.every_epochs is not None and step % (interval.every_epochs * self._steps_per_epoch) == 0
        by_clock = interval.every_seconds is not None and time.monotonic() - self._last >= interval.every_seconds
        if by_clock:
            self._last = time.monotonic()
        return by_steps or by_epochs or by_clock

    def due_by_now(self, step: int, possible: bool) -> bool:
        """True where it is due after ``step`` steps, or was due after an earlier one at which it was not possible."""
        self._postponed = self.due(step) or self._postponed
        if not (self._postponed and possible):
            return False
        self._postponed = False
        return True


def is_publication(step: int, every_steps: int, total: int) -> bool:
    """True where the weights after ``step`` steps are published: every so many steps, and those of the last."""
    return step % every_steps == 0 or step == total
