"""Groups of samples: tasks drawn from dataloaders, the workflow that runs them, and the resulting rows.

``TaskSource`` draws dataset rows over epochs, and ``GroupFactory`` makes each into a ``Group`` that has an ordinal and a workflow.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from rollwright.errors import DataError, RolloutError, WorkflowError
from rollwright.experience.contract import COLUMNS, PACKED
from rollwright.experience.journal.episodes import RecordedEpisode
from rollwright.experience.journal.records import GroupEnd, pack_task, pack_value
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.packed import as_packed, check_joined, unpacked
from rollwright.experience.players import COMPARED, has_no_variance
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.rollout.failure_budget import Failure
from rollwright.rollout.lessons import Lesson, Lessons, draws_of
from rollwright.rollout.seeds import SampleName
from rollwright.tracking.logging import getLogger
from rollwright.workflows.registry import resolve_function, resolve_workflow, workflow_name
from rollwright.workflows.task_runner import TaskRunner

logger = getLogger("rollout")

AcceptFunction = Callable[[Trajectory], bool]

WORKFLOWS_KEPT = 8  # cached instances
SAMPLE_BITS = 20  # a sample's id is its group's id shifted by this, plus its number in the group


class GroupState(Enum):
    """State of a group. A group leaves ``RUNNING`` once and ends in one of the last three states."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    DELIVERED = "delivered"
    DROPPED = "dropped"  # rejected, filtered, stale or cut
    FAILED = "failed"


@dataclass(eq=False, slots=True)
class Group:
    """All samples of one task."""

    task_id: int
    ordinal: int
    data: dict[str, Any]
    workflow: Any
    workflow_name: str
    runs: list[int]  # number of samples requested from each run of the workflow
    is_eval: bool = False
    should_accept: AcceptFunction | None = None
    batch: Batch | None = None  # the rollout_batch call that it belongs to, if any
    in_stream: bool = field(init=False)  # counted by the admission rule: neither for evaluation nor from rollout_batch
    state: GroupState = GroupState.QUEUED
    admitted: int = 0  # version at its admission
    size: int = 0  # number of samples of the complete group
    samples: int = 0  # number of samples delivered so far
    rows: list[Any] = field(default_factory=list)  # trajectory of each run, or None until the run ends
    head_version: int | None = None  # version of its oldest token
    reason: str = ""  # why it was dropped or given up
    failure: Failure | None = None  # the failure that ended it
    packed_task: tuple[bytes | None, str] | None = (
        None  # for the journal: the packed row, or the reason why it cannot be packed
    )
    past: dict[int, RecordedEpisode] = field(default_factory=dict)  # what an earlier process recorded, by sample index
    result: Any = None  # what ``TaskDraws`` of the workflow learn from the complete group

    def __post_init__(self) -> None:
        self.in_stream = self.batch is None and not self.is_eval
        self.size = sum(self.runs)
        self.rows = [None] * len(self.runs)

    @property
    def is_over(self) -> bool:
        """True if no sample of the group has anything left to do."""
        return self.state is not GroupState.QUEUED and self.state is not GroupState.RUNNING

    @property
    def task(self) -> dict[str, Any]:
        """The task as stored in a checkpoint, so that it is drawn again with the same ordinal."""
        return {**self.data, "ordinal": self.ordinal}

    @property
    def lesson(self) -> Lesson:
        """What the draws of its workflow learn from it, if it is a training group."""
        return self.ordinal, self.workflow_name, self.result

    def __str__(self) -> str:
        text = repr(self.data)
        kind = "evaluation task" if self.is_eval else "task"
        return f"{kind} {self.ordinal} ({text if len(text) <= 160 else text[:157] + '…'})"

    def first_attempt(self, index: int) -> int:
        """Return the number of a sample's first attempt: the recorded attempt, the next if that one failed, or 0 without a record."""
        past = self.past.get(index)
        return 0 if past is None else past.begin.attempt + (past.end is not None and past.end.outcome == "failed")

    def begin_episode(self, journal: Journal | None, name: SampleName, version: int) -> EpisodeWriter:
        """Begin the journal of one sample of the group; ``version`` is the current weight version."""
        past = self.past.get(name.index)
        if past is not None and (past.begin.attempt != name.attempt or not past.can_go_on):
            past = None
        episode = EpisodeWriter(journal, past)
        if journal is not None:
            if self.packed_task is None:
                try:
                    self.packed_task = pack_task(self.data), ""
                except (TypeError, OverflowError) as error:
                    self.packed_task = None, str(error)
            task, task_error = self.packed_task
            episode.begin(
                ordinal=name.ordinal,
                index=name.index,
                attempt=name.attempt,
                is_eval=name.is_eval,
                version=version if past is None else min(version, past.begin.version),  # as old as its tokens
                workflow=self.workflow_name,
                samples_asked=self.runs[name.index],
                task=task,
                task_error=task_error,
            )
        return episode

    def note_end(self, journal: Journal | None, state: str) -> None:
        """Write the end of the group to the journal."""
        if journal is not None:
            about = (self.ordinal, self.task_id, self.is_eval, state, self.reason, self.samples)
            result = b"" if self.result is None else pack_value(self.result)
            journal.write(GroupEnd(*about, time.time(), self.admitted, result))

    def add(self, index: int, rows: Trajectory) -> range:
        """Store the rows of a run. If all runs of a ``TaskRunner`` have ended and samples are still missing, add further runs.

        Returns:
            Indices of the further runs.
        """
        runner = self.workflow if isinstance(self.workflow, TaskRunner) else None
        delivered = 1 if runner is None else runner.samples_in(rows)
        self.rows[index] = rows
        self.samples += delivered
        first = len(self.runs)
        if runner is not None and self.samples < self.size and None not in self.rows:
            self.runs += runner.further_runs(delivered, self.size - self.samples)
            self.rows += [None] * (len(self.runs) - first)
        return range(first, len(self.runs))

    def complete(self) -> None:
        """Fill ``group_ids`` and ``sample_ids`` of the rows, and find the oldest version and the group's ``result``.

        Samples are normally joined together with their batch. If their columns differ, they are joined here, so that rows that cannot be
        joined fail their group and not the batch.
        """
        first_id = self.task_id << SAMPLE_BITS
        self.rows = [rows for rows in self.rows if rows is not None]
        for rows in self.rows:
            count = rows["input_ids"].shape[0]
            if "sample_ids" in rows:
                local = torch.unique(rows["sample_ids"], return_inverse=True)[1]
            else:  # a workflow that makes its own group: each row is a sample
                local = torch.arange(count) if self.size == 1 else torch.zeros(count, dtype=torch.int64)
            rows["sample_ids"] = local + first_id
            rows["group_ids"] = torch.full((count,), self.task_id, dtype=torch.int64)
            first_id += int(local.max()) + 1
        versions = torch.cat([rows["oldest_versions" if PACKED in rows else "versions"].flatten() for rows in self.rows])
        sampled = versions[versions >= 0]
        self.head_version = int(sampled.min()) if sampled.numel() else None
        draws = draws_of(self.workflow)
        if draws is not None and not self.is_eval:
            self.result = draws.result(self.data, self.rows)
        if any(_layout(rows) != _layout(self.rows[0]) for rows in self.rows[1:]):
            self.join()

    def join(self) -> Trajectory:
        """Join the rows of all samples.

        Raises:
            TrajectoryError: their columns differ.
        """
        if len(self.rows) > 1:
            self.rows = [concat_padded_tensors(self.rows)]
            check_joined(self.rows[0])
        return self.rows[0]

    def refused_by(self, dynamic_filter: str | None) -> str | None:
        """Return the name of the policy that rejects the complete group, or None if it is accepted.

        Raises:
            WorkflowError: ``should_accept_fn`` did not return a truth value.
        """
        if self.should_accept is not None:
            joined, rows = self.join(), unpacked(self.join())
            verdict = self.should_accept(rows)
            if not isinstance(verdict, bool | int) and not hasattr(verdict, "__bool__"):
                raise WorkflowError(
                    f"should_accept_fn returned {verdict!r} for {self}; it is given the group's trajectory and returns True or False."
                )
            if not verdict:
                return "should_accept_fn"
            if rows is not joined:  # the filter may have changed its copy
                self.rows = [as_packed(rows)]
        if dynamic_filter == "no_variance" and not self.is_eval:
            parts = {key: torch.cat([rows[key] for rows in self.rows]) for key in COMPARED if key in self.rows[0]}
            if has_no_variance(parts):  # all advantages are zero
                return "no_variance"
        return None


def _layout(rows: Trajectory) -> dict[str, Any]:
    """Return, by key, what must be equal for rows to be joined in their batch; columns of the contract can always be joined."""
    if PACKED in rows:
        return {**dict.fromkeys(rows), PACKED: {packed.layout for packed, _ in rows[PACKED]}}
    return {
        key: None if key in COLUMNS else value.shape[1:] if isinstance(value, torch.Tensor) else type(value)
        for key, value in rows.items()
    }


@dataclass
class Batch:
    """One ``rollout_batch`` call."""

    missing: int  # groups that have not ended


class TaskSource:
    """Draws the rows of a dataloader in order, after the rows restored from a checkpoint.

    A dataloader that can be iterated again starts its next epoch when one ends. An iterator ends with its last row.

    Args:
        loader: yields rows (dicts) or lists of rows.
        restored: rows restored from a checkpoint, shared by all sources.
    """

    def __init__(self, loader: Iterable[Any], restored: deque[dict[str, Any]]) -> None:
        self.loader = loader
        self.epochs = 0  # number of passes begun
        self.rows: list[dict[str, Any]] = []  # read from the loader and not drawn yet
        self._restored = restored
        self._batches: Iterator[Any] | None = None
        self._has_ended = False
        self._pass_is_empty = True

    @functools.cached_property
    def batch_size(self) -> int:
        """Rows in a batch: the loader's ``batch_size``, or else the length of its first batch; 0 if the loader is empty."""
        said = getattr(self.loader, "batch_size", None)
        while not said and not self.rows and not self._has_ended:
            self._read_batch()
        return int(said or len(self.rows))

    @property
    def is_over(self) -> bool:
        """True if no task is left."""
        return self._has_ended and not self._restored

    def draw(self, count: int) -> list[dict[str, Any]]:
        """Draw up to ``count`` rows; fewer only if the source is over.

        Raises:
            DataError: the loader yields no rows, or values that are not rows.
        """
        drawn = [self._restored.popleft() for _ in range(min(count, len(self._restored)))]
        count -= len(drawn)
        while len(self.rows) < count and not self._has_ended:
            self._read_batch()
        drawn += self.rows[:count]
        del self.rows[:count]
        return drawn

    def put_back(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put back rows that were drawn, so that they are drawn next."""
        self._restored.extendleft(reversed(rows))

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
    """Makes groups and numbers their tasks. Thread-safe.

    Args:
        lessons: what the draws of workflows learn. None, on a worker, leaves tasks as they are: the controller has completed them.
    """

    def __init__(self, lessons: Lessons | None = None) -> None:
        self._lessons = lessons
        self.next_ordinal = 0  # for the next training task without an ordinal
        self.next_task_id = 0
        self._eval_ordinals = itertools.count()
        self._instances: list[tuple[Any, dict[str, Any] | None, Any, str]] = []
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
        batch: Batch | None = None,
    ) -> Group:
        """Make a group of ``group_size`` samples of the task ``data``.

        A workflow that has a method ``group_size(data)`` decides how often each task is repeated. A ``TaskRunner`` decides how many
        samples to request from each run, and runs until the group is full. Any other workflow is run ``group_size`` times; if that is
        more than once, a copy of it with ``n_samples=1`` is run, so that it does not make a group of its own.

        Args:
            place: ordinal of an evaluation task whose ``data`` has none. If None, such tasks are numbered in order.
            batch: the ``rollout_batch`` call that the group belongs to.
        """
        instance, name = self._instance(workflow, workflow_kwargs)
        data = self._completed(data, instance, name, is_eval)
        own_size: Any = getattr(instance, "group_size", None)
        gconfig: Any = getattr(instance, "gconfig", None)
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
        with self._lock:  # evaluation has its own ordinals, so that it does not shift the seeds of training
            if ordinal is None:
                ordinal = next(self._eval_ordinals) if is_eval else self.next_ordinal
            if not is_eval:
                self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        accept = None if should_accept_fn is None else resolve_function(should_accept_fn, "should_accept_fn")
        runs = instance.first_runs(data) if isinstance(instance, TaskRunner) else [1] * group_size
        return Group(self._number(), ordinal, data, instance, name, runs, is_eval, accept, batch)

    def completed(self, data: dict[str, Any], workflow: Any, workflow_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a training task with what its workflow draws for it (``TaskDraws``)."""
        return self._completed(data, *self._instance(workflow, workflow_kwargs), is_eval=False)

    def _completed(self, data: dict[str, Any], instance: Any, name: str, is_eval: bool) -> dict[str, Any]:
        draws = draws_of(instance)
        return data if self._lessons is None or draws is None else self._lessons.complete(data, name, draws, is_eval)

    def restored(self, entry: dict[str, Any]) -> Group:
        """Restore a complete group from its entry in a checkpoint."""
        group = Group(self._number(), entry["task"]["ordinal"], entry["task"], None, "", [entry["size"]])
        group.admitted, group.rows, group.result = entry["admitted"], [entry["trajectory"]], entry.get("result")
        group.workflow_name = entry.get("workflow", "")
        return group

    def _number(self) -> int:
        """Return the id of the next group, unique in the run."""
        with self._lock:
            self.next_task_id += 1
            return self.next_task_id - 1

    def _instance(self, workflow: Any, kwargs: dict[str, Any] | None) -> tuple[Any, str]:
        """Return the workflow's instance and name. Instances are cached, because building one may load a tokenizer."""
        for known, known_kwargs, instance, name in self._instances:
            if known is workflow and known_kwargs == kwargs:
                return instance, name
        instance = resolve_workflow(workflow, kwargs)
        name = workflow_name(instance)
        kept = None if kwargs is None else {key: _snapshot(value) for key, value in kwargs.items()}
        with self._lock:
            self._instances = [(workflow, kept, instance, name), *self._instances[: WORKFLOWS_KEPT - 1]]
        return instance, name


def _snapshot(value: Any) -> Any:
    """Copy a mutable argument (shallowly), so that a later mutation does not look like a cache hit."""
    return copy.copy(value) if dataclasses.is_dataclass(value) or isinstance(value, dict | list) else value
