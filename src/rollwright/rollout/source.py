"""Drawing tasks from dataloaders, one after the other, over epochs, to a defined end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollwright.errors import DataError


class TaskSource:
    """Rows of a dataloader in order.

    A dataloader that can be iterated anew begins its next epoch when one ends; an iterator ends with its last row.

    Args:
        loader: gives rows (dicts) or lists of rows.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epochs = 0  # passes begun
        self.is_over = False
        self._batches: Iterator[Any] | None = None
        self._rows: list[dict[str, Any]] = []
        self._empty_pass = True
        self._batch_size: int | None = None

    @property
    def batch_size(self) -> int:
        """Rows in a batch of the loader: what it says, else the length of its first batch; 0 where it has none."""
        if self._batch_size is None:
            said = getattr(self.loader, "batch_size", None)
            while not said and not self._rows and not self.is_over:
                self._rows.extend(self._next_batch())
            self._batch_size = int(said or len(self._rows))
        return self._batch_size

    @property
    def repeats(self) -> bool:
        """True where the loader can be iterated anew."""
        return not isinstance(self.loader, Iterator)

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` rows; fewer only where the source is over.

        Raises:
            DataError: the loader gives no row at all, or something that is no row.
        """
        while len(self._rows) < count and not self.is_over:
            self._rows.extend(self._next_batch())
        drawn, self._rows = self._rows[:count], self._rows[count:]
        return drawn

    @property
    def buffered(self) -> list[dict[str, Any]]:
        """Rows that were taken from the loader and not drawn yet."""
        return list(self._rows)

    def _next_batch(self) -> list[dict[str, Any]]:
        if self._batches is None:
            self._batches = iter(self.loader)
            self.epochs += 1
            self._empty_pass = True
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            if not self.repeats:
                self.is_over = True
            elif self._empty_pass:
                raise DataError(
                    f"{type(self.loader).__name__} gave no task in a whole pass: the dataset is empty, or smaller than a batch "
                    "with drop_last. Give more tasks or a smaller batch_size."
                ) from None
            return []
        self._empty_pass = False
        rows = [batch] if isinstance(batch, Mapping) else list(batch)
        for row in rows:
            if not isinstance(row, Mapping):
                raise DataError(
                    f"the dataloader gave a {type(row).__name__} where a task (a dict) was expected: "
                    "build it with collate_fn=lambda rows: rows, so that a batch is a list of rows."
                )
        return [dict(row) for row in rows]


class Draws:
    """What was drawn from which dataloader: tasks that a checkpoint had drawn and not trained come before new ones."""

    def __init__(self) -> None:
        self.restored: deque[dict[str, Any]] = deque()
        self._sources: list[tuple[Any, TaskSource]] = []

    def source(self, dataloader: Iterable[Any]) -> TaskSource:
        """The source over a dataloader; the same one for the same object."""
        for loader, source in self._sources:
            if loader is dataloader:
                return source
        source = TaskSource(dataloader)
        self._sources.append((dataloader, source))
        return source

    def take(self, source: TaskSource, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` tasks; fewer only where the source is over."""
        rows = [self.restored.popleft() for _ in range(min(count, len(self.restored)))]
        return rows + source.draw(count - len(rows))

    def is_over(self, source: TaskSource) -> bool:
        """True where no task is left."""
        return source.is_over and not self.restored

    @property
    def left(self) -> list[dict[str, Any]]:
        """Tasks that were taken from dataloaders or a checkpoint, and from here by nobody yet."""
        return [*self.restored, *(row for _, source in self._sources for row in source.buffered)]
