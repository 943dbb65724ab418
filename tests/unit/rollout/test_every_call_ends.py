"""Random programs of the executor's calls: each ends, with what was asked for or with an error that says why not."""

import asyncio
import faulthandler
import random
import threading

import hypothesis.strategies as st
from echo import EchoEngine
from hypothesis import given, settings

from rollwright.config.sections import RolloutConfig
from rollwright.errors import RolloutError
from rollwright.inference.request import ModelRequest
from rollwright.rollout.executor import RolloutExecutor

SECONDS = 150  # of a whole program; it takes a fraction of one

ENDS = ["answer"] * 5 + ["equal", "reject", "raise", "exit", "cancel itself", "hang"]
STEPS = [
    "submit", "submit evaluation", "wait", "wait a moment", "wait for evaluation", "wait for a task", "rollout_batch",
    "prepare_batch", "prepare_batch", "prepare_batch", "publish", "publish", "release", "pause", "resume", "another executor",
]  # fmt: skip


class Scripted:
    """Ends as its task says."""

    async def arun_episode(self, engine, data):
        await asyncio.sleep(data["seconds"])
        how = data["ends"]
        if how == "reject":
            return None
        if how == "raise":
            raise ValueError("on schedule")
        if how == "exit":
            await asyncio.gather(self._exit(), asyncio.sleep(0))
        if how == "cancel itself":
            raise asyncio.CancelledError
        if how == "hang":
            await asyncio.sleep(3600)
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2]))
        reward = 0.0 if how == "equal" else float(engine.name.index)
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}

    async def _exit(self):
        raise SystemExit(1)


class Program:
    """A trainer of a kind: one thread that makes the calls, in whatever order."""

    def __init__(self, config: RolloutConfig, deterministic: bool, batch: int, rows: int, repeats: bool, seed: int) -> None:
        self.draw = random.Random(seed)
        self.config, self.deterministic, self.batch = config, deterministic, batch
        self.engine = EchoEngine()
        self.executor = RolloutExecutor(self.engine, config, deterministic=deterministic)
        dataset = [self.task() for _ in range(rows)]
        self.source = dataset if repeats else iter(dataset)
        self.submitted: list[int] = []
        self.paused = False
        self.told: list[str] = []
        self.is_over = False

    def task(self) -> dict:
        # Deterministic mode has no limit by the clock, so that nothing may hang there.
        ends = self.draw.choice(ENDS[:-1] if self.deterministic else ENDS)
        return {"ends": ends, "seconds": self.draw.choice([0, 0, 0.001, 0.003])}

    def do(self, step: str) -> None:
        executor, count = self.executor, self.draw.randint(1, 3)
        # A call waits while rollout is paused, and says so: somebody else has to resume it.
        limit = 0.02 if self.paused else None
        if step in ("submit", "submit evaluation"):
            for _ in range(count):
                is_eval = step != "submit"
                self.submitted.append(executor.submit(self.task(), Scripted(), group_size=2, is_eval=is_eval))
        elif step == "wait":
            executor.wait(count, limit)
        elif step == "wait a moment":
            executor.wait(count, timeout=0.01)
        elif step == "wait for evaluation":
            executor.wait(count, limit, is_eval=True)
        elif step == "wait for a task":
            executor.wait_for_task(self.draw.choice(self.submitted or [99]), limit)
        elif step == "rollout_batch" and not self.paused:
            executor.rollout_batch([self.task() for _ in range(count)], Scripted(), group_size=2, is_eval=bool(count % 2))
        elif step == "prepare_batch" and not self.paused:
            executor.prepare_batch(self.source, Scripted(), group_size=2, batch_size=self.batch)
        elif step == "publish":
            self.engine.set_version(self.engine.version + 1)
            executor.set_version(self.engine.version)
        elif step == "release":
            executor.release_batch()
        elif step in ("pause", "resume"):
            self.paused = step == "pause"
            (executor.pause if self.paused else executor.resume)()
        elif step == "another executor":
            state = executor.state_dict()
            executor.destroy()
            self.executor = RolloutExecutor(self.engine, self.config, deterministic=self.deterministic)
            self.executor.load_state_dict(state)
            self.submitted, self.paused = [], False

    def run(self, steps: list[str]) -> None:
        for step in steps:
            self.told.append(step)
            try:
                self.do(step)
            except (RolloutError, TimeoutError) as error:
                self.told[-1] += f": {str(error)[:80]}"
        self.executor.destroy()
        self.is_over = True


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(0, 2),
    on_stale=st.sampled_from(["wait", "drop"]),
    over_sampling=st.sampled_from([0.0, 0.5]),
    concurrent=st.sampled_from([1, 2, 64]),
    dynamic_filter=st.sampled_from([None, "no_variance"]),
    deterministic=st.booleans(),
    batch=st.integers(1, 3),
    rows=st.integers(1, 9),
    repeats=st.booleans(),
    steps=st.lists(st.sampled_from(STEPS), max_size=25),
    seed=st.integers(0, 1000),
)
def test_every_call_ends(
    limit, on_stale, over_sampling, concurrent, dynamic_filter, deterministic, batch, rows, repeats, steps, seed
):
    config = RolloutConfig(
        max_head_offpolicyness=limit,
        on_stale=on_stale,
        over_sampling=0.0 if deterministic else over_sampling,
        max_concurrent_samples=concurrent,
        dynamic_filter=dynamic_filter,
        max_failed_share=1.0,
        max_sample_retries=seed % 2,
        sample_timeout=0.03,
    )
    program = Program(config, deterministic, batch, rows, repeats, seed)
    thread = threading.Thread(target=program.run, args=(steps,), daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        faulthandler.dump_traceback()
    assert not thread.is_alive(), f"{program.told} does not end: {program.executor.counters()}"
    assert program.is_over, f"{program.told} raised what no caller expects"
