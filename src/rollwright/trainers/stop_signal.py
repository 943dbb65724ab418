"""SIGTERM and Ctrl-C as a request: the step in hand is finished, everything is saved, then the run exits."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from rollwright.tracking.logging import getLogger

logger = getLogger("trainer")


class StopSignal:
    """Notices SIGTERM and SIGINT while it is entered; a second signal acts as it would have without us."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """What a process ended by the signal exits with, by the shell's convention."""
        return 128 + (self.received or 0)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        logger.warning("%s: this step is finished and saved, then the run exits", signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
