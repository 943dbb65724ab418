"""Several tasksets drawn from as one: by their ratios, each in the order of its own selector."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from rollwright.config.tasksets import TasksetConfig
from rollwright.data.examples import read_taskset_rows
from rollwright.data.selectors import Selector, make_selector
from rollwright.errors import DataError

Row = dict[str, Any]

#: Draws whose place is remembered until their reward comes in.
REMEMBERED_DRAWS = 100_000


class TaskMixture:
    """Batches of rows from several tasksets; a row carries ``taskset`` (the name of its own) and its ``ordinal``.

    The taskset of each draw is the one furthest behind its ratio, so that any stretch of draws holds the ratios.

    Args:
        tasksets: their names, selectors and ratios.
        rows: the rows of each.
        batch_size: rows in a batch.
        seed: of the selectors whose ``selector_args`` set none.

    Raises:
        DataError: a taskset has no rows, two have one name, or there are fewer rows than a batch.
    """

    def __init__(
        self, tasksets: Sequence[TasksetConfig], rows: Sequence[Sequence[Row]], batch_size: int, seed: int = 1
    ) -> None:
        names = [taskset.name for taskset in tasksets]
        if len(set(names)) < len(names):
            raise DataError(f"two tasksets share a name ({', '.join(names)}): give each its own, metrics are kept by it.")
        for taskset, own in zip(tasksets, rows, strict=True):
            if not own:
                raise DataError(f"taskset {taskset.name} ({taskset.path}) has no rows: check its path and split.")
        total = sum(map(len, rows))
        if total < batch_size:
            raise DataError(f"the tasksets have {total} rows together, fewer than a batch of {batch_size}; lower batch_size.")
        self.tasksets = list(tasksets)
        self.rows = [list(own) for own in rows]
        self.batch_size = batch_size
        self.selectors: list[Selector] = [
            make_selector(taskset.selector, len(own), seed, taskset.selector_args)
            for taskset, own in zip(tasksets, rows, strict=True)
        ]
        self.ordinal = 0
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        """Batches in which as many rows are drawn as there are."""
        return sum(map(len, self.rows)) // self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        for _ in range(len(self)):
            yield self.draw()

    def forever(self) -> Iterator[list[Row]]:
        """Batches without end."""
        while True:
            yield self.draw()

    def draw(self) -> list[Row]:
        """The next batch."""
        return [self._draw_one() for _ in range(self.batch_size)]

    def feedback(self, ordinal: int, reward: float) -> None:
        """A sample of the task that was drawn as ``ordinal`` got this reward."""
        place = self._places.get(ordinal)
        if place is not None:
            self.selectors[place[0]].feedback(place[1], reward)

    def state_dict(self) -> dict[str, Any]:
        """Draws so far, and the state of each selector."""
        return {"ordinal": self.ordinal, "selectors": [selector.state_dict() for selector in self.selectors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another mixture of the same tasksets stood."""
        if len(state["selectors"]) != len(self.selectors):
            raise DataError(
                f"the saved position is of {len(state['selectors'])} tasksets, but there are {len(self.selectors)} now; resume "
                "with the same tasksets."
            )
        self.ordinal = state["ordinal"]
        for selector, own in zip(self.selectors, state["selectors"], strict=True):
            selector.load_state_dict(own)

    def _draw_one(self) -> Row:
        behind = min(
            range(len(self.tasksets)), key=lambda index: ((self.selectors[index].draws + 1) / self.tasksets[index].ratio, index)
        )
        position = self.selectors[behind].next()
        row = {**self.rows[behind][position], "taskset": self.tasksets[behind].name, "ordinal": self.ordinal}
        self._places[self.ordinal] = (behind, position)
        while len(self._places) > REMEMBERED_DRAWS:
            self._places.popitem(last=False)
        self.ordinal += 1
        return row


def taskset_rows(taskset: TasksetConfig) -> list[Row]:
    """The rows of a taskset as they stand in its file: the workflow reads them by the taskset's format."""
    return list(read_taskset_rows(taskset))
