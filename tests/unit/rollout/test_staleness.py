"""The admission rule in the executor, over random schedules: nothing too old is trained, and nothing waits for ever."""

import asyncio
import random
import time

import hypothesis.strategies as st
from echo import EchoEngine
from hypothesis import given, settings

from rollwright.config.sections import RolloutConfig
from rollwright.errors import DatasetEnded
from rollwright.rollout.executor import RolloutExecutor


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
