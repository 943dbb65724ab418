"""Where groups come from: rows drawn from dataloaders over epochs, their ordinals, and the workflow that runs them."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollwright.errors import DataError, RolloutError
from rollwright.rollout.delivery import AcceptFunction, Group
from rollwright.tracking.logging import getLogger
from rollwright.workflows.registry import resolve_function, resolve_workflow, workflow_name

logger = getLogger("rollout")

WORKFLOWS_KEPT = 8  # instances that are used again for the same arguments


class TaskSource:
    """Rows of a dataloader in order, after those that a checkpoint had drawn.

    A dataloader that can be iterated again begins its next epoch when one ends; an iterator ends with its last row.

    Args:
        loader: gives rows (dicts) or lists of rows.
        restored: rows of a checkpoint, which sources share.
    """

    def __init__(self, loader: Iterable[Any], restored: deque[dict[str, Any]]) -> None:
        self.loader = loader
        self.epochs = 0  # passes begun
        self.rows: list[dict[str, Any]] = []  # taken from the loader and not drawn yet
        self._restored = restored
        self._batches: Iterator[Any] | None = None
        self._batch_size: int | None = None
        self._has_ended = False
        self._pass_is_empty = True

    @property
    def batch_size(self) -> int:
        """Rows in a batch of the loader: what it says, else the length of its first batch; 0 where it has none."""
        if self._batch_size is None:
            said = getattr(self.loader, "batch_size", None)
            while not said and not self.rows and not self._has_ended:
                self._read_batch()
            self._batch_size = int(said or len(self.rows))
        return self._batch_size

    @property
    def is_over(self) -> bool:
        """True where no task is left."""
        return self._has_ended and not self._restored

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` rows; fewer only where the source is over.

        Raises:
            DataError: the loader gives no row at all, or something that is no row.
        """
        drawn = [self._restored.popleft() for _ in range(min(count, len(self._restored)))]
        count -= len(drawn)
        while len(self.rows) < count and not self._has_ended:
            self._read_batch()
        drawn += self.rows[:count]
        del self.rows[:count]
        return drawn

    def _read_batch(self) -> None:
        if self._batches is None:
            self._batches = iter(self.loader)
            self.epochs += 1
            self._pass_is_empty = True
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            if isinstance(self.loader, Iterator):
                self._has_ended = True
            elif self._pass_is_empty:
                raise DataError(
                    f"{type(self.loader).__name__} gave no task in a whole pass: the dataset is empty, or smaller than a batch "
                    "with drop_last. Give more tasks or a smaller batch_size."
                ) from None
            return
        self._pass_is_empty = False
        rows = [batch] if isinstance(batch, Mapping) else list(batch)
        for row in rows:
            if not isinstance(row, Mapping):
                raise DataError(
                    f"the dataloader gave a {type(row).__name__} where a task (a dict) was expected: "
                    "build it with collate_fn=lambda rows: rows, so that a batch is a list of rows."
                )
        self.rows.extend(dict(row) for row in rows)


class GroupFactory:
    """Makes groups, and numbers their tasks. Safe to use from several threads."""

    def __init__(self) -> None:
        self.next_ordinal = 0  # of training tasks that carry none
        self._task_ids = itertools.count()
        self._eval_ordinals = itertools.count()
        self._instances: list[tuple[Any, dict[str, Any] | None, Any]] = []
        self._lock = threading.Lock()
        self._has_warned = False

    def make(
        self,
        data: dict[str, Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFunction | str | None = None,
        group_size: int = 1,
        is_eval: bool = False,
        place: int | None = None,
    ) -> Group:
        """A group of ``group_size`` samples of the task ``data``.

        A workflow that has a method ``group_size(data)`` says itself how often each task is repeated. One that the executor
        repeats must not make ``n_samples`` samples itself: it is copied with 1.

        Args:
            place: ordinal of an evaluation task that carries none; None: counted.
        """
        instance = self._instance(workflow, workflow_kwargs)
        own_size: Any = getattr(instance, "group_size", None)
        gconfig: Any = getattr(instance, "gconfig", None)
        name = workflow_name(instance)
        if callable(own_size):
            group_size = int(instance.group_size(data))
        if group_size < 1:
            raise RolloutError(f"group_size={group_size}: a group has at least one sample.")
        if group_size > 1 and not is_eval and isinstance(own_size, int) and own_size > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s makes groups of %d itself, and each task is repeated %d times besides: %d episodes a task. Set n_samples to 1 "
                "(gconfig.n_samples in a config) to have groups of %d.",
                name,
                own_size,
                group_size,
                own_size * group_size,
                own_size,
            )
        if group_size > 1 and getattr(gconfig, "n_samples", 1) != 1:
            instance = copy.copy(instance)
            instance.gconfig = gconfig.new(n_samples=1)
        ordinal = data.get("ordinal")
        if not isinstance(ordinal, int) or isinstance(ordinal, bool):
            ordinal = place if is_eval else None
        with self._lock:  # evaluation has ordinals of its own: it must not shift the seeds of training
            if ordinal is None:
                ordinal = next(self._eval_ordinals) if is_eval else self.next_ordinal
            if not is_eval:
                self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        accept = None if should_accept_fn is None else resolve_function(should_accept_fn, "should_accept_fn")
        group = Group(next(self._task_ids), ordinal, data, instance, name, group_size, is_eval, accept)
        group.rows, group.missing = [None] * group_size, group_size
        return group

    def restored(self, entry: dict[str, Any]) -> Group:
        """A complete group from a checkpoint."""
        group = Group(next(self._task_ids), entry["task"]["ordinal"], entry["task"], None, "", entry["size"])
        group.admitted, group.rows = entry["admitted"], [entry["trajectory"]]
        return group

    def _instance(self, workflow: Any, kwargs: dict[str, Any] | None) -> Any:
        """The workflow's instance; the same one for equal arguments, since building one may load a tokenizer."""
        with self._lock:
            for known, known_kwargs, instance in self._instances:
                if known is workflow and known_kwargs == kwargs:
                    return instance
        instance = resolve_workflow(workflow, kwargs)
        kept = None if kwargs is None else {name: _snapshot(value) for name, value in kwargs.items()}
        with self._lock:
            self._instances = [(workflow, kept, instance), *self._instances[: WORKFLOWS_KEPT - 1]]
        return instance


def _snapshot(value: Any) -> Any:
    """Arguments that their owner may change later are compared with what they were."""
    return copy.copy(value) if hasattr(value, "__dataclass_fields__") or isinstance(value, dict | list) else value
