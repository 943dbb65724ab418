"""A caller that waits, as the runner sees it."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rollwright.rollout.group import Group


class Waiter(ABC):
    """A caller's thread waits for ``future``; the loop asks ``is_settled`` whenever something changed.

    Attributes:
        groups: that nobody else waits for: they are dropped when the caller gives up.
    """

    groups: Sequence[Group] = ()

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[list[Group]] = concurrent.futures.Future()

    @abstractmethod
    def is_settled(self) -> bool:
        """Answer the caller if possible; True where it was answered."""

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(error)
