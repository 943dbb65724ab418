"""Callers that wait: each kind knows when it can be answered, and when it never will be."""

from __future__ import annotations

from rollwright.errors import RolloutError
from rollwright.rollout.group import Group, GroupState
from rollwright.rollout.runner import Runner
from rollwright.rollout.waiter import Waiter


class _RunnersWaiter(Waiter):
    """What the kinds share: the runner whose groups they wait for."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = runner

    def _answer(self, groups: list[Group], caller: int | None = None) -> bool:
        for group in groups:
            self.runner.tasks.pop(group.task_id, None)
        if caller is not None and not all(group.is_eval for group in groups):
            self.runner.delivery.taken_by = caller
        if not self.future.done():
            self.future.set_result(groups)
        return True

    def _refuse(self, message: str) -> bool:
        self.fail(RolloutError(message))
        return True


class BatchWaiter(_RunnersWaiter):
    """``rollout_batch``: waits until each of its own groups has ended."""

    def __init__(self, runner: Runner, groups: list[Group]) -> None:
        super().__init__(runner)
        self.groups = groups
        self._left = len(groups)

    def group_ended(self, group: Group) -> None:
        """One of the groups is ready, dropped or failed."""
        self._left -= 1

    def is_settled(self) -> bool:
        if self._left > 0:
            return False
        accepted = [group for group in self.groups if group.state is GroupState.READY]
        for group in accepted:
            group.state = GroupState.DELIVERED
            if not group.is_eval:
                self.runner.delivery.in_training.append(group)
        return self._answer(accepted)


class TaskWaiter(_RunnersWaiter):
    """``wait_for_task``."""

    def __init__(self, runner: Runner, group: Group, caller: int) -> None:
        super().__init__(runner)
        self.group = group
        self.caller = caller

    def is_settled(self) -> bool:
        if self.runner.delivery.take_task(self.group):
            return self._answer([self.group], self.caller)
        if self.group.state in (GroupState.DROPPED, GroupState.FAILED):
            return self._refuse(f"{self.group} gives no trajectory: {self.group.reason}.")
        if self.group.state is GroupState.DELIVERED:
            return self._refuse(f"{self.group} was delivered already; a group is delivered once.")
        if self.group.state is GroupState.QUEUED and not self.group.is_eval and is_stuck(self.runner, self.caller):
            return self._refuse(f"{self.group} cannot start: {why_full(self.runner)}")
        return False


class StreamWaiter(_RunnersWaiter):
    """``wait`` and ``prepare_batch``: a number of groups of the stream.

    Args:
        runner: has the groups.
        count: groups that are waited for.
        caller: identity of the waiting thread.
        may_give_up: refuse when nothing that runs or is queued can bring the count (``wait`` without a time limit).
        is_eval: groups of evaluation.
    """

    def __init__(self, runner: Runner, count: int, caller: int, *, may_give_up: bool, is_eval: bool = False) -> None:
        super().__init__(runner)
        self.count = count
        self.caller = caller
        self.may_give_up = may_give_up
        self.is_eval = is_eval

    def is_settled(self) -> bool:
        delivery = self.runner.delivery
        groups = delivery.take_evaluation(self.count) if self.is_eval else delivery.take(self.count)
        if groups is not None:
            return self._answer(groups, self.caller)
        if not self.is_eval and is_stuck(self.runner, self.caller):
            return self._refuse(f"{self.count} groups are asked for, but {why_full(self.runner)}")
        if self.may_give_up and not self.runner.is_paused and not self.runner.may_bring_more(self.is_eval):
            return self._refuse(
                f"wait({self.count}): only {self.runner.count_ready(self.is_eval)} groups are ready, and no task is queued or running that "
                f"could bring more ({describe(self.runner)}). Submit more tasks, or wait with a timeout for those of another thread. "
                + self.runner.failures.describe_first()
            )
        return False


class PrepareWaiter(StreamWaiter):
    """``prepare_batch``: also answered, with no group, when more tasks should be drawn.

    Args:
        runner, count, caller: as for a ``StreamWaiter``.
        source_is_over: no task is left to draw: the last batch may be smaller.
    """

    def __init__(self, runner: Runner, count: int, caller: int, *, source_is_over: bool) -> None:
        super().__init__(runner, count, caller, may_give_up=False)
        self.source_is_over = source_is_over

    def is_settled(self) -> bool:
        if self.source_is_over and self.runner.unfinished == 0:
            groups = self.runner.delivery.take(self.count, final=True)
            return self._answer(groups or [], self.caller)
        groups = self.runner.delivery.take(self.count)
        if groups is None and not self.source_is_over and wanted(self.runner) > 0:
            return self._answer([])
        if groups is None:
            return super().is_settled()
        return self._answer(groups, self.caller)


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
