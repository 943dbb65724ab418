"""The scheduler alone: groups from their arrival to their end, without an event loop or a thread."""

import random
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollwright.config.sections import RolloutConfig
from rollwright.errors import RolloutError
from rollwright.rollout.failure_budget import Failure
from rollwright.rollout.resume import ReplayOrder
from rollwright.rollout.scheduler import Frontier, GroupScheduler, Staleness
from rollwright.rollout.seeds import SampleName
from rollwright.rollout.task_group import Batch, GroupFactory, GroupState

QUEUED, RUNNING, READY = GroupState.QUEUED, GroupState.RUNNING, GroupState.READY
DELIVERED, DROPPED, FAILED = GroupState.DELIVERED, GroupState.DROPPED, GroupState.FAILED


class NeverRun:
    """A workflow that the scheduler never calls."""

    async def arun_episode(self, engine, data): ...


def rows_of(version, reward=0.0):
    """One row of one sampled token."""
    return {
        "input_ids": torch.tensor([[1, 2]]),
        "attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "versions": torch.tensor([[-1, version]], dtype=torch.int32),
        "rewards": torch.tensor([reward]),
    }


class World:
    """A scheduler, and the samples that it has started."""

    def __init__(self, *, deterministic=False, batch_size=None, **config):
        self.scheduler = GroupScheduler(RolloutConfig(**config), deterministic, batch_size)
        self.factory = GroupFactory()
        self.samples = []

    def arrive(self, *ordinals, group_size=1, past=None, **place):
        """Queue tasks and start what there is room for; returns their groups."""
        groups = [self.factory.make({"ordinal": n}, NeverRun(), None, None, group_size, **place) for n in ordinals]
        for group in groups:
            group.past = dict(past or {})
        self.scheduler.enqueue(groups)
        self.start()
        return groups

    def start(self):
        """Start samples until there is no room; returns the ordinals of the new ones."""
        began = len(self.samples)
        while (sample := self.scheduler.next_sample()) is not None:
            self.samples.append(sample)
        return [group.ordinal for group, _, _ in self.samples[began:]]

    def end(self, group, ended="rows", index=0, reward=0.0):
        """Report the end of a sample that was started."""
        (sample,) = [each for each in self.samples if each[0] is group and each[1] == index]
        self.samples.remove(sample)
        self.scheduler.leave(group, is_cut=group.is_over)
        if not group.is_over:
            name = SampleName(group.ordinal, index, sample[2])
            self.scheduler.end_sample(group, name, rows_of(self.scheduler.version, reward) if ended == "rows" else ended)

    def take(self, count, **how):
        """Take a batch; the ordinals of its groups."""
        groups = self.scheduler.take(count, **how)
        return None if groups is None else [group.ordinal for group in groups]


def failure(is_final):
    return Failure("task 0", "{}", "Work", "it failed", "Traceback", is_final)


def test_a_group_runs_is_taken_and_releases_its_slot_with_the_next_version():
    world = World(batch_size=1, max_head_offpolicyness=0)
    first, second = world.arrive(0, 1)
    assert (first.state, second.state) == (RUNNING, QUEUED)
    assert world.take(1) is None
    world.end(first)
    assert first.state is READY
    assert world.take(1) == [0]
    assert world.start() == []  # it is in training
    world.scheduler.publish(1)
    assert world.start() == [1]
    assert second.admitted == 1
    assert world.scheduler.frontier.first_open == 1
    assert not world.scheduler.ended


def test_no_more_samples_start_than_may_run_at_once_and_none_while_paused():
    world = World(max_concurrent_samples=3)
    (first, *_) = world.arrive(0, 1, group_size=2)
    assert [(group.ordinal, index) for group, index, _ in world.samples] == [(0, 0), (0, 1), (1, 0)]
    world.scheduler.is_paused = True
    world.end(first, index=0)
    assert world.start() == []
    world.scheduler.is_paused = False
    assert world.start() == [1]


def test_a_failed_sample_is_retried_and_the_last_failure_ends_its_group():
    world = World(max_sample_retries=1)
    (group,) = world.arrive(0)
    world.end(group, failure(is_final=False))
    assert world.start() == [0]
    assert world.samples[-1][2] == 1  # the second attempt
    world.end(group, failure(is_final=True))
    assert group.state is FAILED
    assert group.reason == "sample 0 failed: it failed"
    assert [(ended.ordinal, count) for ended, count in world.scheduler.ended] == [(0, "failed")]
    assert world.scheduler.frontier.first_open == 1
    assert world.scheduler.counters()["samples/retried"] == 1


def test_a_rejected_sample_ends_its_group_and_its_slot_is_free():
    world = World(batch_size=1, max_head_offpolicyness=0)
    first, second = world.arrive(0, 1, group_size=2)
    world.end(first, None, index=0)
    assert (first.state, second.state) == (DROPPED, QUEUED)
    assert world.scheduler.may_start_more
    assert world.start() == [1, 1]
    world.end(first, index=1)  # its other sample was cut
    assert world.scheduler.counters()["samples/cut"] == 1


def test_a_sample_that_is_repeated_keeps_its_attempt_and_loses_its_past():
    world = World()
    (group,) = world.arrive(0)
    group.past = {0: "recorded"}
    world.scheduler.leave(group, is_cut=False)
    world.scheduler.repeat(group, SampleName(0, 0, 2))
    assert world.start() == [0]
    assert world.samples[-1][2] == 2
    assert group.past == {}


def test_groups_without_variance_are_filtered():
    world = World(dynamic_filter="no_variance")
    equal, varied = world.arrive(0, 1, group_size=2)
    for index in range(2):
        world.end(equal, index=index, reward=1.0)
        world.end(varied, index=index, reward=float(index))
    assert (equal.state, varied.state) == (DROPPED, READY)
    assert world.scheduler.counters()["groups/dropped/no_variance"] == 1


def test_a_batch_waits_for_an_older_group_that_could_not_be_trained_in_time():
    world = World(batch_size=1, max_head_offpolicyness=1)
    old, young, _ = world.arrive(0, 1, 2)
    world.end(young)
    assert world.take(1) == [1]  # both were admitted at version 0
    world.scheduler.publish(1)
    (newer,) = [group for group in world.scheduler.tasks.values() if group.ordinal == 2]
    world.start()
    world.end(newer)
    assert newer.admitted == 1
    assert world.take(1) is None  # task 0 must be trained at version 1
    world.end(old)
    assert world.take(1) == [0]


def test_with_drop_a_group_that_became_too_old_is_dropped_while_it_runs():
    world = World(batch_size=1, max_head_offpolicyness=0, on_stale="drop")
    (group,) = world.arrive(0)
    world.scheduler.publish(1)
    assert group.state is DROPPED
    assert [count for _, count in world.scheduler.ended] == ["dropped/stale"]


def test_what_over_sampling_started_in_excess_is_cut_with_its_batch():
    world = World(batch_size=2, max_head_offpolicyness=0, over_sampling=0.5)
    groups = world.arrive(0, 1, 2, 3)
    assert [group.state for group in groups] == [RUNNING] * 3 + [QUEUED]
    world.end(groups[2])
    world.end(groups[1])
    assert world.take(2) == [2, 1]
    assert groups[0].state is DROPPED
    assert groups[0].reason == "cut: its batch was complete"


def test_deterministic_batches_leave_in_the_order_of_their_ordinals():
    world = World(deterministic=True, batch_size=2, max_head_offpolicyness=1)
    groups = world.arrive(0, 1, 2)
    world.end(groups[2])
    world.end(groups[1])
    assert world.take(2) is None  # task 0 runs
    world.end(groups[0])
    assert world.take(2) == [0, 1]
    assert world.take(2) is None
    assert world.take(2, final=True) == [2]


def test_evaluation_and_rollout_batch_start_at_once_and_are_not_counted():
    world = World(batch_size=1, max_head_offpolicyness=0)
    world.arrive(0)
    batch = Batch(1)
    (evaluated,), (asked,) = world.arrive(7, is_eval=True), world.arrive(8, batch=batch)
    world.end(evaluated)
    world.end(asked)
    assert (evaluated.state, asked.state, batch.missing) == (READY, READY, 0)
    counters = world.scheduler.counters()
    assert (counters["running"], counters["ready"]) == (1, 0)
    assert world.scheduler.take_ready(2, is_eval=True) is None
    assert world.scheduler.take_ready(1, is_eval=True) == [evaluated]
    assert world.scheduler.frontier.first_open == 0


def test_a_caller_who_alone_could_free_a_slot_is_told_instead_of_waiting():
    world = World(batch_size=1, max_head_offpolicyness=0)
    first, _ = world.arrive(0, 1)
    world.scheduler.refuse_if_stuck(1, "asked")  # task 0 runs
    world.end(first)
    with pytest.raises(RolloutError, match="1 complete groups hold all places"):
        world.scheduler.refuse_if_stuck(1, "asked")
    assert world.take(1) == [0]
    world.scheduler.taken_by = 1
    world.scheduler.refuse_if_stuck(2, "asked")  # thread 1 may publish
    with pytest.raises(RolloutError, match="1 are still in training"):
        world.scheduler.refuse_if_stuck(1, "asked")
    world.scheduler.finish_training()
    world.scheduler.refuse_if_stuck(1, "asked")


def test_tasks_are_drawn_for_every_free_slot_and_a_batch_ahead():
    world = World(max_head_offpolicyness=1)
    assert world.scheduler.wanted() == 0  # the batch size is not known
    world.scheduler.use_batch_size(2)
    assert world.scheduler.wanted() == 6
    world.arrive(0, 1, 2, 3, 4)
    assert world.scheduler.wanted() == 1
    world.scheduler.is_paused = True
    assert world.scheduler.wanted() == 0


def test_interrupted_batches_are_replayed_in_their_order_and_later_samples_wait():
    world = World(batch_size=1, max_head_offpolicyness=3)
    world.scheduler.replay = ReplayOrder([1, 0])
    past = SimpleNamespace(newest_version=1, begin=SimpleNamespace(version=0, attempt=0), end=None)
    first, second = world.arrive(0, 1)
    world.end(first)
    (later,) = world.arrive(2, past={0: past})
    assert world.start() == []  # its tokens come from version 1
    assert world.take(1) is None  # task 1 was delivered first
    world.end(second)
    assert world.take(1) == [1]
    world.scheduler.publish(1)
    assert world.start() == [2]
    assert later.admitted == 0
    assert world.take(1) == [0]


def test_an_order_that_cannot_be_replayed_is_given_up():
    world = World(batch_size=1, max_head_offpolicyness=0)
    world.scheduler.replay = ReplayOrder([5])
    (group,) = world.arrive(0)
    world.end(group)
    assert world.take(1) == [0]  # task 5 cannot come: no slot is free
    assert not world.scheduler.replay.remaining


def test_a_state_restores_what_is_done_pending_and_finished():
    world = World(batch_size=1, max_head_offpolicyness=3)
    groups = world.arrive(0, 1, 2, 3)
    world.end(groups[0])
    world.end(groups[2])
    assert world.take(1) == [0]
    world.scheduler.publish(1)
    state = world.scheduler.state_dict(with_rows=True)
    assert (state["version"], state["frontier"], state["beyond"]) == (1, 1, [])
    assert [task["ordinal"] for task in state["pending"]] == [1, 3]
    assert [task["ordinal"] for task in world.scheduler.state_dict(with_rows=False)["pending"]] == [1, 2, 3]
    resumed = World(batch_size=1, max_head_offpolicyness=3)
    resumed.scheduler.load_state_dict(state, [resumed.factory.restored(entry) for entry in state["finished"]])
    assert resumed.scheduler.complete_ordinals() == [2]
    assert resumed.take(1) == [2]


@settings(max_examples=100, deadline=None)
@given(
    limit=st.integers(0, 3),
    batch=st.integers(1, 3),
    on_stale=st.sampled_from(["wait", "drop"]),
    over_sampling=st.sampled_from([0.0, 0.5]),
    schedule=st.lists(st.tuples(st.sampled_from(["rows", "reject", "fail", "take"]), st.integers(0, 100)), max_size=80),
)
def test_each_group_has_one_end_and_none_is_trained_too_old(limit, batch, on_stale, over_sampling, schedule):
    world = World(batch_size=batch, max_head_offpolicyness=limit, on_stale=on_stale, over_sampling=over_sampling)
    scheduler, groups, delivered = world.scheduler, world.arrive(*range(40)), []
    for step, choice in schedule:
        if step == "take":
            taken = scheduler.take(batch)
            if taken is not None:
                assert all(scheduler.version - int(group.rows[0]["versions"].max()) <= limit for group in taken)
                delivered += taken
                scheduler.publish(scheduler.version + 1)
        elif world.samples:
            group, index, _ = world.samples[choice % len(world.samples)]
            world.end(group, {"rows": "rows", "reject": None, "fail": failure(is_final=True)}[step], index)
        world.start()
        counters = scheduler.counters()
        assert counters["running"] + counters["ready"] <= (limit + 1) * batch + -(-over_sampling * batch // 1)
        assert counters["running"] == sum(group.state is RUNNING for group in groups)
        assert counters["ready"] == sum(group.state is READY for group in groups)
    ended = [group for group, _ in scheduler.ended]
    assert len(delivered) == len(set(delivered)) == sum(group.state is DELIVERED for group in groups)
    assert len(ended) == len(set(ended)) == sum(group.state in (DROPPED, FAILED) for group in groups)


# -- the rule over numbers ---------------------------------------------------------------------------------------------


def alive(state):
    """Groups that hold a slot."""
    return sum(state.groups[each] for each in (RUNNING, READY, DELIVERED))


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(0, 4),
    batch=st.integers(1, 5),
    over_sampling=st.sampled_from([0.0, 0.5]),
    schedule=st.lists(st.sampled_from(["finish", "reject", "train", "drop ready"]), max_size=120),
    seed=st.integers(0, 1000),
)
def test_living_groups_keep_the_rule_and_every_deadline_can_be_met(limit, batch, over_sampling, schedule, seed):
    """A model of the executor: oldest ready first, a batch leaves unless somebody could no longer be in time."""
    state = Staleness(limit, batch, over_sampling)
    draw = random.Random(seed)
    running, ready = [], []

    def admit():
        while state.capacity >= 1:
            running.append(state.version)
            state.move(state.version, QUEUED, RUNNING)
            assert alive(state) <= (limit + 1) * batch + -(-over_sampling * batch // 1)

    def try_train():
        picked = sorted(ready)[:batch]
        if len(picked) < batch:
            return False
        spare = sorted(ready)[batch:]
        cut_running = sorted(running)[: state.surplus]
        cut_ready = spare[: max(0, state.surplus - len(cut_running))]
        if state.must_wait([*picked, *cut_running, *cut_ready], batch):
            return False
        for admitted in picked:
            assert state.version - admitted <= limit
            ready.remove(admitted)
        assert min(picked) >= state.oldest
        for admitted in picked:
            state.move(admitted, READY, DELIVERED)
        for admitted in cut_running:
            running.remove(admitted)
            state.move(admitted, RUNNING, DROPPED)
        for admitted in cut_ready:
            ready.remove(admitted)
            state.move(admitted, READY, DROPPED)
        state.publish(state.version + 1)
        return True

    admit()
    for step in schedule:
        if step == "finish" and running:
            ready.append(running.pop(draw.randrange(len(running))))
            state.move(ready[-1], RUNNING, READY)
        elif step == "reject" and running:
            state.move(running.pop(draw.randrange(len(running))), RUNNING, DROPPED)
        elif step == "drop ready" and ready:
            state.move(ready.pop(draw.randrange(len(ready))), READY, DROPPED)
        elif step == "train":
            try_train()
        admit()
        assert [state.groups[each] for each in (RUNNING, READY, DELIVERED)] == [len(running), len(ready), 0]
    # However it went: when all that runs finishes, a batch can leave.
    while running:
        ready.append(running.pop())
        state.move(ready[-1], RUNNING, READY)
    assert try_train()


def test_zero_is_exactly_synchronous():
    state = Staleness(0, 2)
    for _ in range(2):
        state.move(0, QUEUED, RUNNING)
    assert state.capacity == 0
    for before, after in ((RUNNING, READY), (READY, DELIVERED)):
        for _ in range(2):
            state.move(0, before, after)
    assert state.capacity == 0  # training, and nothing runs beside it
    state.publish(1)
    assert state.capacity == 2


@given(st.permutations(list(range(30))), st.integers(0, 30))
def test_the_frontier_is_the_first_ordinal_that_is_not_done(order, count):
    frontier = Frontier()
    for ordinal in order[:count]:
        frontier.done(ordinal)
        frontier.done(ordinal)
    done = set(order[:count])
    assert frontier.first_open == next(n for n in range(31) if n not in done)
    assert frontier.beyond == sorted(n for n in done if n > frontier.first_open)
    assert all((n < frontier.first_open or n in frontier.beyond) == (n in done) for n in range(30))


@settings(max_examples=100, deadline=None)
@given(
    every=st.integers(1, 4),
    offset=st.integers(0, 3),
    batch=st.integers(1, 4),
    order=st.lists(st.integers(0, 1000), min_size=1, max_size=200),
)
def test_several_batches_between_two_publications_keep_the_bound(every, offset, batch, order):
    """Weights published every so many steps, groups that finish in any order: nothing is trained too old, nothing waits for ever."""
    limit = every - 1 + offset
    state = Staleness(limit, batch)
    running, ready, step, oldest = [], [], 0, 0
    picks = iter(order * 10)
    while step < 12 * every:
        while state.capacity >= 1:
            running.append(state.version)
            state.move(state.version, QUEUED, RUNNING)
        picked = sorted(ready)[:batch]
        may_leave = len(picked) == batch and not state.must_wait(picked, batch)
        if not may_leave:
            assert running, "nothing runs that could be waited for"
            ready.append(running.pop(next(picks, 0) % len(running)))
            state.move(ready[-1], RUNNING, READY)
            continue
        assert state.head == step
        for admitted in picked:
            ready.remove(admitted)
            state.move(admitted, READY, DELIVERED)
        oldest = max(oldest, step - min(picked))
        step += 1
        if step % every == 0:
            state.publish(step)
    assert oldest <= limit
    assert state.version == step
