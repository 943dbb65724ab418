"""The resumable dataloader: tasks in a seeded order, each with the ordinal of its draw.

Invariants:

* the *n*-th task drawn over the whole run has ``ordinal`` n (from 0), across epochs and resumes;
* the draws depend on rows, batch size, shuffle and seed only: a loader that loads another's state continues with exactly the
  tasks that the other would have drawn next, even in the middle of an epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.rows import Row
from rollwright.errors import CheckpointError, DataError

T = TypeVar("T")


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """Return the positions from 0 to ``size - 1`` in the seeded order of an epoch."""
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def endless(source: Iterable[T]) -> Iterator[T]:
    """Iterate over a source again and again.

    Raises:
        DataError: a pass yielded nothing.
    """
    while True:
        is_empty = True
        for item in source:
            is_empty = False
            yield item
        if is_empty:
            raise DataError("the tasks give no batch: there are fewer than the batch size.")


@dataclass
class _NumberedRows(Dataset[Row]):
    """Rows for the reader: the key ``(position, ordinal)`` returns the row at that position, with ``ordinal`` added."""

    rows: Any

    def __getitem__(self, key: tuple[int, int]) -> Row:
        position, ordinal = key
        return {**self.rows[position], "ordinal": ordinal}


class TaskLoader:
    """Iterates over batches of tasks: lists of rows, each a dict that includes its ``ordinal``.

    Iterating yields the rest of the current epoch; iterating again yields the next epoch. ``forever()`` does not end.

    Args:
        rows: a list of dicts, a Hugging Face dataset, or any object that has a length and is indexed by position.
        batch_size: tasks in a batch.
        shuffle: draw in a new seeded order every epoch.
        seed: seed of the orders.
        drop_last: leave out the last batch of an epoch if it is not full.
        num_workers: number of processes that read rows ahead. With 0, rows are read when they are drawn.
        name: name of the dataset, for messages.

    Raises:
        DataError: there are no rows, fewer rows than one batch, rows that are not mappings, or a column called ``ordinal``.
    """

    def __init__(
        self,
        rows: Sequence[Row] | Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 1,
        drop_last: bool = True,
        num_workers: int = 0,
        name: str = "the dataset",
    ) -> None:
        size = len(rows)
        if size == 0:
            raise DataError(f"{name} has no rows: check its path, split and limits.")
        if drop_last and size < batch_size:
            raise DataError(
                f"{name} has {size} rows, fewer than one batch of {batch_size}, so no batch would ever be full; "
                "lower batch_size, or set drop_last: false."
            )
        first = rows[0]
        if not hasattr(first, "keys"):
            raise DataError(f"{name}: row 0 is a {type(first).__name__}, not a mapping of columns.")
        if "ordinal" in first:
            raise DataError(f"{name} has a column 'ordinal', which is where the loader puts the number of the draw; rename it.")
        self.rows = rows
        self.batch_size = batch_size
        self._draws_from = {"rows": size, "batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        self._batches = size // batch_size if drop_last else -(-size // batch_size)
        self._tasks = self._batches * batch_size if drop_last else size
        self._position = {"epoch": 0, "drawn": 0}  # of the batches drawn; workers may have read further
        self._num_workers = num_workers
        self._reader: Iterator[list[Row]] | None = None

    @classmethod
    def from_config(cls, rows: Any, config: DatasetConfig, seed: int) -> TaskLoader:
        """Build the loader of a ``train_dataset`` or ``valid_dataset`` section."""
        return cls(rows, config.batch_size, config.shuffle, seed, config.drop_last, name=config.source)

    def __len__(self) -> int:
        """Return the number of batches in one epoch."""
        return self._batches

    @property
    def epoch(self) -> int:
        """Number of epochs drawn completely."""
        return self._position["epoch"]

    @property
    def ordinal(self) -> int:
        """Ordinal of the next task to be drawn, which is the number of tasks drawn so far."""
        return self._position["epoch"] * self._tasks + self._position["drawn"] * self.batch_size

    def __iter__(self) -> Iterator[list[Row]]:
        """Yield batches until the current epoch ends."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.draw()

    def forever(self) -> Iterator[list[Row]]:
        """Iterate over batches without end, epoch after epoch."""
        return endless(self)

    def draw(self) -> list[Row]:
        """Return the next batch; if the current epoch has ended, the first batch of the next one."""
        if self._reader is None:
            self._reader = self._rest_of_epoch()
        batch = next(self._reader)
        self._position["drawn"] += 1
        if self._position["drawn"] == len(self):
            self._position = {"epoch": self._position["epoch"] + 1, "drawn": 0}
            self._reader = None
        return batch

    def _rest_of_epoch(self) -> Iterator[list[Row]]:
        """Iterate over the remaining batches of the current epoch."""
        size, first = len(self.rows), self._position["epoch"] * self._tasks
        is_shuffled, seed = self._draws_from["shuffle"], self._draws_from["seed"]
        order = shuffled(size, seed, self._position["epoch"]) if is_shuffled else range(size)
        keys = [(position, first + place) for place, position in enumerate(order[: self._tasks])]
        starts = range(self._position["drawn"] * self.batch_size, self._tasks, self.batch_size)
        batches = [keys[start : start + self.batch_size] for start in starts]
        rows = _NumberedRows(self.rows)
        # Without its own generator, every epoch would draw from the process's random state.
        return iter(
            DataLoader(rows, batch_sampler=batches, collate_fn=list, num_workers=self._num_workers, generator=torch.Generator())
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, and the settings that determine its draws."""
        return {**self._position, "ordinal": self.ordinal, "draws_from": self._draws_from}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another loader.

        Raises:
            CheckpointError: the other loader had different rows, or another batch size, order or seed.
        """
        here, there = self._draws_from, state["draws_from"]
        if different := [f"{key} was {there.get(key)}, is {here[key]}" for key in here if here[key] != there.get(key)]:
            raise CheckpointError(
                f"the checkpoint's data position does not fit this dataset ({'; '.join(different)}): tasks would be skipped or "
                "trained twice. Resume with the same dataset settings, or start a new trial."
            )
        self._position = {"epoch": state["epoch"], "drawn": state["drawn"]}
        self._reader = None
