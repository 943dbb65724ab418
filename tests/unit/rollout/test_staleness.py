"""The admission rule, over random schedules: nothing too old is trained, and nothing waits for ever."""

import asyncio
import random
import time

import hypothesis.strategies as st
from echo import EchoEngine
from hypothesis import given, settings

from rollwright.config.sections import RolloutConfig
from rollwright.errors import DatasetEnded
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.scheduler import Frontier, Staleness


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
            running.append(state.admit())
            assert state.running + state.ready + state.in_training <= (limit + 1) * batch + -(-over_sampling * batch // 1)

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
        state.train(picked)
        for admitted in cut_running:
            running.remove(admitted)
            state.drop_running(admitted)
        for admitted in cut_ready:
            ready.remove(admitted)
            state.drop_ready(admitted)
        state.publish(state.version + 1)
        return True

    admit()
    for step in schedule:
        if step == "finish" and running:
            ready.append(running.pop(draw.randrange(len(running))))
            state.finish()
        elif step == "reject" and running:
            state.drop_running(running.pop(draw.randrange(len(running))))
        elif step == "drop ready" and ready:
            state.drop_ready(ready.pop(draw.randrange(len(ready))))
        elif step == "train":
            try_train()
        admit()
        assert (state.running, state.ready, state.in_training) == (len(running), len(ready), 0)
    # However it went: when all that runs finishes, a batch can leave.
    while running:
        ready.append(running.pop())
        state.finish()
    assert try_train()


def test_zero_is_exactly_synchronous():
    state = Staleness(0, 2)
    first = [state.admit(), state.admit()]
    assert state.capacity == 0
    state.finish()
    state.finish()
    state.train(first)
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
    assert frontier.frontier == next(n for n in range(31) if n not in done)
    assert frontier.beyond == sorted(n for n in done if n > frontier.frontier)
    assert all((n < frontier.frontier or n in frontier.beyond) == (n in done) for n in range(30))


class Scheduled:
    """Ends as the row says, after as long as the row says."""

    async def arun_episode(self, engine, data):
        from rollwright.inference.request import ModelRequest

        await asyncio.sleep(data["seconds"])
        if data["ends"] == "raise":
            raise ValueError("on schedule")
        if data["ends"] == "reject":
            return None
        response = await engine.agenerate(ModelRequest(input_ids=[1, data["ordinal"] + 1]))
        reward = 0.0 if data["ends"] == "equal" else float(engine.name.index)
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}


def test_versions_that_jump_drop_what_is_too_old_and_wait_for_nothing(caplog):
    """Somebody published without taking the batches between; what is fresh enough is still trained."""

    class AsksLate:
        async def arun_episode(self, engine, data):
            from rollwright.inference.request import ModelRequest

            if data["late"]:
                await released.wait()
            response = await engine.agenerate(ModelRequest(input_ids=[1, data["ordinal"] + 1]))
            return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}

    released = asyncio.Event()
    engine = EchoEngine()
    executor = RolloutExecutor(engine, RolloutConfig(max_head_offpolicyness=1), batch_size=2)
    try:
        for ordinal in range(4):
            executor.submit({"ordinal": ordinal, "late": ordinal > 0}, AsksLate())
        deadline = time.monotonic() + 30
        while executor.counters()["ready"] < 1:  # the first one is sampled at version 0
            assert time.monotonic() < deadline
            time.sleep(0.001)
        engine.set_version(3)
        executor.set_version(3)
        executor._call(released.set)
        first = executor.wait(2, timeout=60)  # admitted at 0, sampled at 3
        assert (first["versions"].max(dim=1).values == 3).all()
        assert executor.wait(1, timeout=60)["input_ids"].shape[0] == 1
        assert executor.counters()["groups/dropped/stale"] == 1
    finally:
        executor.destroy()


@settings(max_examples=25, deadline=None)
@given(
    limit=st.integers(0, 3),
    batch=st.integers(1, 4),
    on_stale=st.sampled_from(["wait", "drop"]),
    over_sampling=st.sampled_from([0.0, 0.5]),
    deterministic=st.booleans(),
    ends=st.lists(st.sampled_from(["answer"] * 6 + ["equal", "reject", "raise"]), min_size=1, max_size=24),
    resume_at=st.integers(0, 5),
    seed=st.integers(0, 100),
)
def test_the_executor_never_hangs_and_never_trains_what_is_too_old(
    limit, batch, on_stale, over_sampling, deterministic, ends, resume_at, seed
):
    """Rejections, failures, filters, drops, a resume in between, and the end of the dataset: each task has one end."""
    draw = random.Random(seed)
    rows = [{"ordinal": n, "ends": how, "seconds": draw.choice([0, 0, 0.001, 0.004])} for n, how in enumerate(ends)]
    source = iter(rows)
    config = RolloutConfig(
        max_head_offpolicyness=limit,
        on_stale=on_stale,
        over_sampling=0.0 if deterministic else over_sampling,
        dynamic_filter="no_variance",
        max_failed_share=1.0,
        max_sample_retries=0,
    )
    engine = EchoEngine()
    executor = RolloutExecutor(engine, config, deterministic=deterministic)
    trained, version, dropped = [], 0, 0
    try:
        for step in range(len(rows) + 2):
            if step == resume_at:
                state = executor.state_dict()
                dropped += sum(count for name, count in executor.counters().items() if name.startswith("groups/dropped/"))
                executor.destroy()
                executor = RolloutExecutor(engine, config, deterministic=deterministic)
                executor.load_state_dict(state)
            try:
                out = executor.prepare_batch(source, Scheduled(), group_size=2, batch_size=batch)
            except DatasetEnded:
                break
            mask = out["loss_mask"].bool()
            assert (version - out["versions"][mask]).max() <= limit
            trained += (out["input_ids"][::2, 1] - 1).tolist()
            version += 1
            engine.set_version(version)
            executor.set_version(version)
        else:
            raise AssertionError("the dataset never ended")
        state = executor.state_dict()
        assert state["frontier"] == len(rows)  # each task came to an end
        assert not state["pending"]
        assert not state["finished"]
        assert len(trained) == len(set(trained))
        answered = {row["ordinal"] for row in rows if row["ends"] == "answer"}
        assert set(trained) <= answered
        if on_stale == "wait" and (deterministic or over_sampling == 0.0):
            assert set(trained) == answered  # nothing was dropped for its age
    finally:
        executor.destroy()


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
            running.append(state.admit())
        picked = sorted(ready)[:batch]
        may_leave = len(picked) == batch and not state.must_wait(picked, batch)
        if not may_leave:
            assert running, "nothing runs that could be waited for"
            ready.append(running.pop(next(picks, 0) % len(running)))
            state.finish()
            continue
        assert state.head == step
        for admitted in picked:
            ready.remove(admitted)
        state.train(picked)
        oldest = max(oldest, step - min(picked))
        step += 1
        if step % every == 0:
            state.publish(step)
    assert oldest <= limit
    assert state.version == step
