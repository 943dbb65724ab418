"""Callers that wait: each kind knows when it can be answered, and when it never will be."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rollwright.errors import RolloutError
from rollwright.rollout.group import Group, GroupState

if TYPE_CHECKING:
    from rollwright.rollout.runner import Runner


class Waiter(ABC):
    """A caller's thread waits for ``future``; the loop asks ``is_settled`` whenever something changed."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[list[Group]] = concurrent.futures.Future()

    @abstractmethod
    def is_settled(self, runner: Runner) -> bool:
        """Answer the caller if possible; True where it was answered."""

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(error)

    def _answer(self, runner: Runner, groups: list[Group], caller: int | None = None) -> bool:
        for group in groups:
            runner.tasks.pop(group.task_id, None)
        if caller is not None and not all(group.is_eval for group in groups):
            runner.delivery.taken_by = caller
        if not self.future.done():
            self.future.set_result(groups)
        return True

    def _refuse(self, message: str) -> bool:
        self.fail(RolloutError(message))
        return True


class BatchWaiter(Waiter):
    """``rollout_batch``: waits until each of its own groups has ended."""

    def __init__(self, groups: list[Group]) -> None:
        super().__init__()
        self.groups = groups
        self._left = len(groups)

    def group_ended(self, group: Group) -> None:
        """One of the groups is ready, dropped or failed."""
        self._left -= 1

    def is_settled(self, runner: Runner) -> bool:
        if self._left > 0:
            return False
        accepted = [group for group in self.groups if group.state is GroupState.READY]
        for group in accepted:
            group.state = GroupState.DELIVERED
            if not group.is_eval:
                runner.delivery.in_training.append(group)
        return self._answer(runner, accepted)


class TaskWaiter(Waiter):
    """``wait_for_task``."""

    def __init__(self, group: Group, caller: int) -> None:
        super().__init__()
        self.group = group
        self.caller = caller

    def is_settled(self, runner: Runner) -> bool:
        if runner.delivery.take_task(self.group):
            return self._answer(runner, [self.group], self.caller)
        if self.group.state in (GroupState.DROPPED, GroupState.FAILED):
            return self._refuse(f"{self.group} gives no trajectory: {self.group.reason}.")
        if self.group.state is GroupState.DELIVERED:
            return self._refuse(f"{self.group} was delivered already; a group is delivered once.")
        if self.group.state is GroupState.QUEUED and not self.group.is_eval and is_stuck(runner, self.caller):
            return self._refuse(f"{self.group} cannot start: {why_full(runner)}")
        return False


class StreamWaiter(Waiter):
    """``wait`` and ``prepare_batch``: a number of groups of the stream.

    Args:
        count: groups that are waited for.
        caller: identity of the waiting thread.
        may_give_up: refuse when nothing that runs or is queued can bring the count (``wait`` without a time limit).
        is_eval: groups of evaluation.
    """

    def __init__(self, count: int, caller: int, *, may_give_up: bool, is_eval: bool = False) -> None:
        super().__init__()
        self.count = count
        self.caller = caller
        self.may_give_up = may_give_up
        self.is_eval = is_eval

    def is_settled(self, runner: Runner) -> bool:
        delivery = runner.delivery
        groups = delivery.take_evaluation(self.count) if self.is_eval else delivery.take(self.count)
        if groups is not None:
            return self._answer(runner, groups, self.caller)
        if not self.is_eval and is_stuck(runner, self.caller):
            return self._refuse(f"{self.count} groups are asked for, but {why_full(runner)}")
        if self.may_give_up and not runner.is_paused and not runner.may_bring_more(self.is_eval):
            return self._refuse(
                f"wait({self.count}): only {runner.count_ready(self.is_eval)} groups are ready, and no task is queued or running that "
                f"could bring more ({describe(runner)}). Submit more tasks, or wait with a timeout for those of another thread. "
                + runner.failures.describe_first()
            )
        return False


class PrepareWaiter(StreamWaiter):
    """``prepare_batch``: also answered, with no group, when more tasks should be drawn.

    Args:
        count, caller: as for a ``StreamWaiter``.
        source_is_over: no task is left to draw: the last batch may be smaller.
    """

    def __init__(self, count: int, caller: int, *, source_is_over: bool) -> None:
        super().__init__(count, caller, may_give_up=False)
        self.source_is_over = source_is_over

    def is_settled(self, runner: Runner) -> bool:
        if self.source_is_over and runner.unfinished == 0:
            groups = runner.delivery.take(self.count, final=True)
            return self._answer(runner, groups or [], self.caller)
        groups = runner.delivery.take(self.count)
        if groups is None and not self.source_is_over and wanted(runner) > 0:
            return self._answer(runner, [])
        if groups is None:
            return super().is_settled(runner)
        return self._answer(runner, groups, self.caller)


def wanted(runner: Runner) -> int:
    """Tasks to draw now, so that every place is taken and, where sampling runs ahead, the next batch is at hand."""
    state = runner.delivery.staleness
    if state.batch is None or runner.is_paused:
        return 0
    ahead = state.batch if state.limit > 0 else 0
    return max(0, int(state.capacity) + ahead - runner.queued)


def is_stuck(runner: Runner, caller: int) -> bool:
    """True where no place is free and only this caller, who is about to wait, could free one."""
    state = runner.delivery.staleness
    if runner.is_paused or state.running > 0 or state.capacity >= 1:
        return False
    return state.in_training == 0 or runner.delivery.taken_by == caller


def why_full(runner: Runner) -> str:
    """Why no place is free, and what to do."""
    state = runner.delivery.staleness
    rule = (
        f"max_head_offpolicyness={state.limit} and batches of {state.batch} groups let {state.places:.0f} groups live at once"
    )
    if state.in_training:
        return (
            f"{state.in_training} are still in training: {rule}, and places are given back when the next version is published. "
            "Call update_weights (or set_version) first, or release_batch() for a batch that is not trained."
        )
    return (
        f"{state.ready} complete groups hold all places: {rule}. Take them with wait or prepare_batch, in batches of that size."
    )


def describe(runner: Runner) -> str:
    """How the tasks so far ended, in words."""
    ends = ", ".join(f"{count} {name}" for name, count in sorted(runner.groups.items())) or "no task has ended"
    return f"{ends}; {runner.delivery.staleness.running} running, {runner.queued} queued, {runner.delivery.staleness.in_training} in training"
