"""A task on its way: the group of its samples, and what decides whether a complete group is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from rollwright.errors import WorkflowError
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.rollout.failures import Failure
from rollwright.rollout.sample import SampleEngine

AcceptFunction = Callable[[Trajectory], bool]

_SAMPLES_OF_A_GROUP = 20  # bits: a sample's id is its group's id shifted by these, plus its place


class GroupState(Enum):
    """Where a group stands. A group leaves ``RUNNING`` once, and every group reaches one of the last three."""

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
    size: int
    is_eval: bool = False
    should_accept: AcceptFunction | None = None
    batch: Any = None  # the rollout_batch call that it belongs to; None: the stream of submit, wait and prepare_batch
    state: GroupState = GroupState.QUEUED
    admitted: int = 0  # version at which it was admitted
    rows: list[Trajectory | None] = field(default_factory=list)
    missing: int = 0
    running: dict[asyncio.Task[Any], SampleEngine] = field(default_factory=dict)
    head_version: int | None = None  # of the oldest token
    finished_order: int = 0
    trajectory: Trajectory | None = None
    reason: str = ""  # why it was dropped or given up
    failure: Failure | None = None  # of the sample that it was given up for

    def __post_init__(self) -> None:
        self.rows = [None] * self.size
        self.missing = self.size

    @property
    def in_stream(self) -> bool:
        """True where the admission rule counts the group: not evaluation, and not of a ``rollout_batch`` call."""
        return self.batch is None and not self.is_eval

    @property
    def is_over(self) -> bool:
        """True where no sample of the group has anything left to do."""
        return self.state not in (GroupState.QUEUED, GroupState.RUNNING)

    def __str__(self) -> str:
        text = repr(self.data)
        kind = "evaluation task" if self.is_eval else "task"
        return f"{kind} {self.ordinal} ({text if len(text) <= 160 else text[:157] + '…'})"

    def cancel(self, because: str) -> list[asyncio.Task[Any]]:
        """End the samples that run; a workflow that goes on all the same gets no answers.

        Returns:
            Their tasks.
        """
        for task, sample in self.running.items():
            sample.close(because)
            task.cancel()
        return list(self.running)

    def renumber(self) -> None:
        """Give the ids of this group to a trajectory that came from elsewhere (a checkpoint)."""
        assert self.trajectory is not None
        local = torch.unique(self.trajectory["sample_ids"], return_inverse=True)[1].to(torch.int64)
        self.trajectory["sample_ids"] = local + (self.task_id << _SAMPLES_OF_A_GROUP)
        self.trajectory["group_ids"] = torch.full_like(local, self.task_id)
        self.head_version = _oldest_version(self.trajectory)

    def assemble(self) -> Trajectory:
        """Join the samples' rows and fill ``group_ids`` and ``sample_ids``."""
        samples = [rows for rows in self.rows if rows is not None]
        base = self.task_id << _SAMPLES_OF_A_GROUP
        place = 0
        for rows in samples:
            count = rows["input_ids"].shape[0]
            own = rows.get("sample_ids")
            if own is not None:
                local = torch.unique(own, return_inverse=True)[1].to(torch.int64)
            elif self.size == 1:
                local = torch.arange(count)  # the workflow makes its own group: a row is a sample
            else:
                local = torch.zeros(count, dtype=torch.int64)
            rows["sample_ids"] = local + (base + place)
            rows["group_ids"] = torch.full((count,), self.task_id, dtype=torch.int64)
            place += int(local.max()) + 1
        joined = samples[0] if len(samples) == 1 else concat_padded_tensors(samples)
        self.head_version = _oldest_version(joined)
        self.rows = []
        return joined


def _oldest_version(trajectory: Trajectory) -> int | None:
    versions = trajectory["versions"]
    sampled = versions[versions >= 0]
    return int(sampled.min()) if sampled.numel() else None


def has_no_variance(trajectory: Trajectory) -> bool:
    """True where two or more samples all have the same reward, so that no advantage tells them apart."""
    rewards = trajectory["rewards"]
    several = trajectory["sample_ids"].unique().numel() > 1
    return several and bool((rewards == rewards[0]).all())


def policy_against(group: Group, dynamic_filter: str | None) -> str | None:
    """The name of the policy that refuses a complete group; None where it is accepted.

    Raises:
        WorkflowError: ``should_accept_fn`` returned something that is no truth value.
    """
    trajectory = group.trajectory
    assert trajectory is not None
    if group.should_accept is not None:
        verdict = group.should_accept(trajectory)
        if not isinstance(verdict, bool | int) and not hasattr(verdict, "__bool__"):
            raise WorkflowError(
                f"should_accept_fn returned {verdict!r} for {group}; it is given the group's trajectory and returns True or False."
            )
        if not verdict:
            return "should_accept_fn"
    if dynamic_filter == "no_variance" and not group.is_eval and has_no_variance(trajectory):
        return "no_variance"
    return None
