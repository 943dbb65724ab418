"""Tasks by the ordinal of their draw, for explorers that are given ordinals by the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.data.loader import TaskLoader
from rollwright.data.mixture import TaskMixture
from rollwright.errors import DataError
from rollwright.trainers import tasks

Row = dict[str, Any]

#: Rows that stay at hand. An ordinal from before them, which another explorer lost, is found by drawing anew from the start.
REMEMBERED = 65_536


class DrawnTasks:
    """The rows of a dataset that is drawn without end, by ordinal.

    Every explorer of a run makes the same draws, so an ordinal is the same task in each of them. (A selector that learns from
    rewards draws by what its own explorer has seen.)

    Args:
        make_source: makes the batches of rows from the first; each row has its ``ordinal``, counted from 0.
    """

    def __init__(self, make_source: Callable[[], Iterable[list[Row]]]) -> None:
        self._make_source = make_source
        self.source = make_source()
        self._batches = _without_end(self.source)
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._next = 0

    def row(self, ordinal: int) -> Row:
        """The row of a draw; see the class for what is the same everywhere."""
        if ordinal < self._next and ordinal not in self._rows:
            return self._drawn_anew(ordinal)
        while ordinal >= self._next:
            for row in next(self._batches):
                self._rows[row["ordinal"]] = row
                self._next = row["ordinal"] + 1
            while len(self._rows) > REMEMBERED:
                self._rows.popitem(last=False)
        return self._rows[ordinal]

    def _drawn_anew(self, ordinal: int) -> Row:
        for batch in _without_end(self._make_source()):
            for row in batch:
                if row["ordinal"] == ordinal:
                    return row
        raise AssertionError("an endless source ended")


def _without_end(source: Iterable[list[Row]]) -> Iterator[list[Row]]:
    while True:
        drawn = False
        for batch in source:
            drawn = True
            yield batch
        if not drawn:
            raise DataError("the training tasks give no batch: there are fewer than train_dataset.batch_size.")


def training_tasks(config: PPOConfig) -> DrawnTasks:
    """The tasks of a config, from its tasksets or its ``train_dataset``."""
    if config.tasksets:
        return DrawnTasks(lambda: tasks.task_mixture(config))
    from rollwright.data.examples import get_dataset

    dataset = config.train_dataset
    rows = get_dataset(dataset, config.tokenizer_path or config.actor.path)
    return DrawnTasks(
        lambda: TaskLoader(rows, dataset.batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, seed=config.seed)
    )


def count_tasks(source: Iterable[list[Row]]) -> int:
    """Tasks of one epoch."""
    if isinstance(source, TaskMixture):
        return len(source) * source.batch_size
    assert isinstance(source, TaskLoader)
    return len(source) * source.batch_size
