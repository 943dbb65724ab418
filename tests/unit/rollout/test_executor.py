"""The executor: groups, ends of samples, batches, and calls that must not wait for ever."""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from echo import EchoEngine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError, DatasetEnded, RequestAborted, RolloutError, WorkflowError
from rollwright.experience.trajectory import concat_padded_tensors
from rollwright.inference.request import ModelRequest
from rollwright.processes.pool import close_pools
from rollwright.processes.sandbox import sandbox_name
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.rollout.executor import RolloutExecutor
from rollwright.rollout.seeds import SampleName, request_seed
from rollwright.tracking import logging

GCONFIG = GenerationHyperparameters(max_new_tokens=3)


class OneTurn:
    """One request; the row's ``does`` says how it ends."""

    def __init__(self, reward=None):
        self.reward = reward
        self.started = 0

    async def arun_episode(self, engine, data):
        self.started += 1
        does = data.get("does", "answer")
        if does == "raise":
            raise ValueError("a bug in the workflow")
        if does == "reject":
            return None
        if does == "hang":
            await asyncio.sleep(3600)
        if does == "raise once" and engine.name.attempt == 0:
            raise ValueError("a passing fault")
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2, data.get("id", 0) + 1], gconfig=GCONFIG))
        reward = engine.name.index if self.reward is None else self.reward
        if does == "equal":
            reward = 1.0
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": float(reward)}


@pytest.fixture
def make():
    made = []

    def build(engine=None, **options):
        config = {name: options.pop(name) for name in list(options) if name in RolloutConfig.__dataclass_fields__}
        executor = RolloutExecutor(engine or EchoEngine(), RolloutConfig(**config), **options)
        made.append(executor)
        return executor

    yield build
    for executor in made:
        executor.destroy()


def wait_until(what, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def tasks(count, **more):
    return [{"id": index, **more} for index in range(count)]


def test_a_group_is_the_task_repeated_and_ids_say_so(make):
    batch = make().rollout_batch(tasks(3), OneTurn, group_size=4)
    assert batch["input_ids"].shape == (12, 6)
    assert batch["group_ids"].unique().numel() == 3
    assert batch["sample_ids"].unique().numel() == 12
    assert batch["rewards"].tolist() == [0, 1, 2, 3] * 3
    assert batch["input_ids"][:, 2].tolist() == [1] * 4 + [2] * 4 + [3] * 4  # the order of the list
    assert (batch["versions"][:, 3:] == 0).all()
    assert (batch["versions"][:, :3] == -1).all()


def test_a_workflow_that_returns_several_rows_makes_its_own_group(make):
    class Grouped:
        async def arun_episode(self, engine, data):
            rows = await asyncio.gather(*(OneTurn().arun_episode(engine, data) for _ in range(4)))
            return [
                {
                    "input_ids": torch.tensor([row["input_ids"] + row["output_ids"]]),
                    "loss_mask": torch.tensor([[0] * 3 + [1] * 3]),
                    "rewards": torch.tensor([row["reward"]]),
                    "attention_mask": torch.ones(1, 6, dtype=torch.bool),
                }
                for row in rows
            ]

    batch = make().rollout_batch(tasks(2), Grouped())
    assert batch["group_ids"].bincount().tolist() == [4, 4]
    assert batch["sample_ids"].unique().numel() == 8


def test_seeds_depend_on_the_place_in_the_run_and_on_nothing_else(make):
    first, second = EchoEngine(), EchoEngine(latency=lambda request: (request.seed % 7) / 1000)
    for engine in (first, second):
        make(engine, seed=5).rollout_batch(tasks(6), OneTurn, group_size=2)
    seeds = [sorted(request.seed for request in engine.requests) for engine in (first, second)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12
    assert seeds[0] == sorted(request_seed(5, SampleName(task, index), 0, 0) for task in range(6) for index in range(2))
    third = EchoEngine()
    make(third, seed=6).rollout_batch(tasks(6), OneTurn, group_size=2)
    assert not set(seeds[0]) & {request.seed for request in third.requests}


def test_the_seed_is_the_same_in_every_process_and_version():
    assert request_seed(1, SampleName(0, 0), 0, 0) == 7109760395788653183
    assert request_seed(1, SampleName(0, 0, attempt=3), 0, 0) == request_seed(1, SampleName(0, 0), 0, 0)
    assert request_seed(1, SampleName(0, 0, is_eval=True), 0, 0) != request_seed(1, SampleName(0, 0), 0, 0)


def test_rejected_failed_and_accepted_are_counted_apart(make):
    executor = make(max_failed_share=1.0)
    rows = [*tasks(2), {"id": 2, "does": "reject"}, {"id": 3, "does": "raise"}, {"id": 4, "does": "raise once"}]
    batch = executor.rollout_batch(rows, OneTurn)
    assert batch["input_ids"][:, 2].tolist() == [1, 2, 5]
    counters = executor.counters()
    assert [counters[f"groups/{name}"] for name in ("accepted", "rejected", "failed")] == [3, 1, 1]
    assert [counters[f"samples/{name}"] for name in ("accepted", "rejected", "failed", "retried")] == [3, 1, 1, 2]
    failure = executor.failures[0]
    assert "'does': 'raise'" in failure.task
    assert "a bug in the workflow" in failure.traceback
    assert "arun_episode" in failure.traceback


def test_a_group_trains_whole_or_not_at_all(make):
    class LastMemberFails(OneTurn):
        async def arun_episode(self, engine, data):
            if engine.name.index == 3 and data["id"] == 0:
                raise ValueError("one member of four")
            return await super().arun_episode(engine, data)

    batch = make().rollout_batch(tasks(2), LastMemberFails(), group_size=4)
    assert batch["input_ids"].shape[0] == 4
    assert set(batch["input_ids"][:, 2].tolist()) == {2}


@pytest.mark.parametrize(
    ("function", "ends_with"), [("fails", "at {place}/failing_scores.py:5"), ("text", "it returned '1', not a number")]
)
def test_a_reward_function_that_fails_is_named_with_its_own_line(make, function, ends_with):
    """Not with the line of the workflow that awaits it."""

    class Scored(OneTurn):
        async def arun_episode(self, engine, data):
            wrapper = AsyncRewardWrapper(f"failing_scores.{function}", max_retries=0)
            row = await super().arun_episode(engine, data)
            return {**row, "reward": await wrapper("", "", row["input_ids"], row["output_ids"])}

    with pytest.raises(RolloutError) as told:
        make(max_failed_share=1.0, max_sample_retries=0).rollout_batch(tasks(1), Scored)
    where = ends_with.format(place=Path(__file__).parent)
    assert "First cause: RewardError: reward function failing_scores." in str(told.value)
    assert str(told.value).endswith(f"{where} in Scored, task 0, sample 0: {tasks(1)[0]}.")


def test_the_place_of_a_failure_is_the_user_s_line_not_the_standard_library_s(make):
    class Parses(OneTurn):
        async def arun_episode(self, engine, data):
            return json.loads("{")

    with pytest.raises(RolloutError, match=r"JSONDecodeError: .* at .*test_executor\.py:\d+ in Parses, task 0, sample 0: \{"):
        make(max_failed_share=1.0, max_sample_retries=0).rollout_batch(tasks(1), Parses)


def test_nothing_accepted_is_an_error_that_names_the_first_cause(make):
    with pytest.raises(RolloutError, match=r"none of 2 tasks.*ValueError: a bug in the workflow"):
        make(max_failed_share=1.0).rollout_batch(tasks(2, does="raise"), OneTurn)
    with pytest.raises(RolloutError, match="rejected by its workflow"):
        make().rollout_batch(tasks(2, does="reject"), OneTurn)


def test_the_first_cause_is_one_of_the_call_s_own(make):
    class OtherBug(OneTurn):
        async def arun_episode(self, engine, data):
            raise KeyError("another bug")

    executor = make(max_failed_share=1.0)
    with pytest.raises(RolloutError, match="First cause: ValueError: a bug in the workflow"):
        executor.rollout_batch(tasks(2, does="raise"), OneTurn)
    with pytest.raises(RolloutError, match=r"First cause: KeyError: 'another bug' at .* in OtherBug"):
        executor.rollout_batch(tasks(2), OtherBug)
    with pytest.raises(RolloutError) as rejected:
        executor.rollout_batch(tasks(2, does="reject"), OneTurn)
    assert "cause" not in str(rejected.value)


def test_a_failing_workflow_takes_one_line_and_its_tracebacks_a_file(make, tmp_path, caplog):
    handler = logging.attach_file(tmp_path / "run.log")
    try:
        with caplog.at_level("INFO"), pytest.raises(RolloutError):
            make(max_failed_share=1.0).rollout_batch(tasks(8, does="raise"), OneTurn, group_size=4)
    finally:
        logging.detach_file(handler)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert re.search(r"failed in OneTurn and is run again: ValueError: a bug in the workflow at .*test_executor.py:\d+ ", line)
    assert f"further failures of this kind: {tmp_path / 'run.log'}" in line
    assert "\n" not in line
    assert (tmp_path / "run.log").read_text().count("Traceback") > 8


def test_too_many_failures_stop_the_run(make):
    executor = make(max_failed_share=0.1, max_sample_retries=0)
    with pytest.raises(RolloutError, match=r"max_failed_share=0.1 allows 6 of 64.*a bug in the workflow") as raised:
        executor.rollout_batch([*tasks(20), *tasks(20, does="raise")], OneTurn)
    assert "\n" not in str(raised.value)
    assert "Traceback" in raised.value.__notes__[0]
    with pytest.raises(RolloutError, match="a bug in the workflow"):
        executor.submit({"id": 0}, OneTurn)


def endless(**more):
    return ({"id": index, **more} for index in itertools.count())


def test_a_run_in_which_nothing_ever_succeeds_ends_whatever_share_may_fail(make):
    executor = make(max_failed_share=1.0, max_sample_retries=0, max_concurrent_samples=8)
    with pytest.raises(RolloutError, match=r"the last 512 samples all failed after their retries.*a bug in the workflow"):
        executor.prepare_batch(endless(does="raise"), OneTurn, batch_size=2)


def test_a_success_between_begins_the_count_anew(make):
    executor = make(max_failed_share=1.0, max_sample_retries=0, max_concurrent_samples=1, max_head_offpolicyness=1)
    rows = ({"id": i, "does": "answer" if i % 500 == 499 else "raise"} for i in itertools.count())
    assert len(executor.prepare_batch(rows, OneTurn, batch_size=2)["rewards"]) == 2
    assert executor.counters()["samples/failed"] >= 998


def test_a_run_that_is_asked_to_end_gives_up_sooner(make):
    executor = make(max_failed_share=1.0, max_sample_retries=0, max_concurrent_samples=8)
    executor.hurry()
    with pytest.raises(RolloutError, match=r"the last 64 samples all failed.* \(and the run was asked to end\)"):
        executor.prepare_batch(endless(does="raise"), OneTurn, batch_size=2)
    other = make(max_head_offpolicyness=0)
    other.hurry()  # what succeeds is waited for
    assert len(other.prepare_batch(endless(), OneTurn, batch_size=2)["rewards"]) == 2


class ScoredBy:
    def __init__(self, reward):
        self.reward = reward

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2], gconfig=GCONFIG))
        reward = await self.reward("p", "c", [1], [2], **data)
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": reward}


def test_a_reward_that_is_broken_stops_the_run_at_its_third_fault(make):
    calls = []

    def broken(prompt, completion, prompt_ids, completion_ids, **data):
        calls.append(data["id"])
        return len(completion) + "one"

    broken.runs_inline = True
    executor = make(max_concurrent_samples=1)
    with pytest.raises(
        RolloutError, match=r"further samples cannot be scored either.*the same 3 times, for several tasks.*TypeError"
    ):
        executor.prepare_batch(endless(), ScoredBy(AsyncRewardWrapper(broken)), batch_size=4, group_size=2)
    assert len(calls) <= 2 * (1 + executor.config.max_sample_retries) + 1


def test_the_start_of_a_process_is_no_part_of_a_samples_time(make, tmp_path, monkeypatch):
    close_pools()  # a worker that runs already has the import path of its start
    (tmp_path / "slow_to_load.py").write_text("import time\ntime.sleep(1.5)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))

    def reward(prompt, completion, prompt_ids, completion_ids, **data):
        time.sleep(data["seconds"])
        return 1.0

    reward.worker_imports = ("slow_to_load",)
    wrapper = AsyncRewardWrapper(reward, max_workers=1)
    executor = make(sample_timeout=1.0, max_sample_retries=0, max_failed_share=1.0)
    assert executor.rollout_batch([{"id": 0, "seconds": 0}], ScoredBy(wrapper))["rewards"].tolist() == [1.0]
    with pytest.raises(RolloutError, match=r"took longer than rollout.sample_timeout=1 s"):
        executor.rollout_batch([{"id": 1, "seconds": 60}], ScoredBy(wrapper))
    close_pools()


def test_no_task_that_is_left_makes_a_noise_at_the_end(make, caplog, monkeypatch):
    """Of one that begins while others end, and of one that keeps its cancellation to itself."""
    monkeypatch.setattr("rollwright.rollout.event_loop.STOP_SECONDS", 0.3)

    class Leaves:
        async def arun_episode(self, engine, data):
            try:
                await asyncio.sleep(3600)
            finally:
                asyncio.get_running_loop().create_task(asyncio.sleep(3600))

    class Stubborn:
        async def arun_episode(self, engine, data):
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)

    for workflow in (Leaves(), Stubborn()):
        executor = make()
        executor.submit({"id": 0}, workflow)
        wait_until(lambda: executor.counters()["running_samples"] == 1)  # noqa: B023
        executor.destroy()
    gc.collect()
    assert "was destroyed" not in caplog.text
    assert caplog.text.count("1 samples did not end within") == 1


def test_a_time_limit_ends_the_sample_and_its_later_model_calls(make):
    late = {}

    class Stubborn:
        async def arun_episode(self, engine, data):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                try:
                    await engine.agenerate(ModelRequest(input_ids=[1], gconfig=GCONFIG))
                except RequestAborted as error:
                    late["error"] = str(error)
                raise

    executor = make(sample_timeout=0.05, max_sample_retries=0)
    with pytest.raises(RolloutError, match=r"sample_timeout=0.05 s \(it had made 0 model calls\)"):
        executor.rollout_batch(tasks(1), Stubborn())

    sample_is_over = asyncio.Event()

    async def late_call(engine):
        await sample_is_over.wait()
        await engine.agenerate(ModelRequest(input_ids=[1], gconfig=GCONFIG))

    class LeavesATaskBehind:
        async def arun_episode(self, engine, data):
            late["task"] = asyncio.create_task(late_call(engine))
            await asyncio.sleep(3600)

    with pytest.raises(RolloutError):
        executor.rollout_batch(tasks(1), LeavesATaskBehind())
    executor._call(sample_is_over.set)
    wait_until(late["task"].done)
    assert isinstance(late["task"].exception(), RequestAborted)


def test_submit_wait_and_wait_for_task(make):
    executor = make()
    ids = [executor.submit(row, OneTurn, group_size=2) for row in tasks(4)]
    assert executor.wait_for_task(ids[2])["input_ids"][:, 2].tolist() == [3, 3]
    assert executor.wait(3, timeout=60)["input_ids"].shape[0] == 6
    with pytest.raises(RolloutError, match="delivered already"):
        executor.wait_for_task(ids[2])
    with pytest.raises(RolloutError, match="only 0 groups are ready, and no task is queued or running"):
        executor.wait(1)
    rejected = executor.submit({"id": 0, "does": "reject"}, OneTurn)
    with pytest.raises(RolloutError, match="rejected by its workflow"):
        executor.wait_for_task(rejected, timeout=60)
    executor.submit({"id": 0, "does": "hang"}, OneTurn)
    wait_until(lambda: executor.counters()["running"] == 1)
    with pytest.raises(TimeoutError, match="1 running"):
        executor.wait(1, timeout=0.05)


@pytest.mark.parametrize("is_eval", [False, True])
def test_what_is_submitted_and_never_taken_has_a_bound(make, monkeypatch, is_eval):
    """Queued, running or ready: none of them may pile up, however far behind the loop is."""
    monkeypatch.setattr("rollwright.rollout.executor.MAX_UNDELIVERED_TASKS", 20)
    executor = make()
    for index in range(20):
        executor.submit({"id": index}, OneTurn(), is_eval=is_eval)
    with pytest.raises(RolloutError, match="take results with wait"):
        executor.submit({"id": 20}, OneTurn(), is_eval=is_eval)
    executor.wait(15, timeout=60, is_eval=is_eval)
    for index in range(15):
        executor.submit({"id": index}, OneTurn(), is_eval=is_eval)
    with pytest.raises(RolloutError, match="take results with wait"):
        executor.submit({"id": 20}, OneTurn(), is_eval=is_eval)


def test_evaluation_is_apart_from_training(make):
    executor = make(dynamic_filter="no_variance", batch_size=1)
    executor.submit({"id": 0}, OneTurn, is_eval=True)
    executor.submit({"id": 1}, OneTurn)
    executor.submit({"id": 2}, OneTurn, is_eval=True)  # no place is free for training, and none is needed
    assert sorted(executor.wait(2, is_eval=True)["input_ids"][:, 2].tolist()) == [1, 3]
    assert executor.wait(1)["input_ids"][:, 2].tolist() == [2]
    with pytest.raises(RolloutError, match="no task is queued or running"):
        executor.wait(1, is_eval=True)
    batch = executor.rollout_batch(tasks(2, does="equal"), OneTurn, group_size=2, is_eval=True)
    assert batch["rewards"].tolist() == [1.0] * 4  # not filtered


def test_should_accept_fn_and_filters_are_counted_by_name(make):
    executor = make(dynamic_filter="no_variance")
    rows = [{"id": 0, "does": "equal"}, {"id": 1}, {"id": 2}]
    batch = executor.rollout_batch(
        rows, OneTurn, group_size=2, should_accept_fn=lambda trajectory: int(trajectory["input_ids"][0, 2]) != 2
    )
    assert set(batch["input_ids"][:, 2].tolist()) == {3}
    counters = executor.counters()
    assert counters["groups/dropped/no_variance"] == 1
    assert counters["groups/dropped/should_accept_fn"] == 1
    with pytest.raises(WorkflowError, match="there is no module 'accepting'"):
        executor.rollout_batch(rows, OneTurn, group_size=2, should_accept_fn="accepting.nothing")


class OfAnyLength:
    """Rows of several lengths; those of a task that is ``odd`` cannot be joined with each other."""

    async def arun_episode(self, engine, data):
        index = engine.name.index
        response = await engine.agenerate(ModelRequest(input_ids=[1] * (1 + (data["id"] + index) % 3), gconfig=GCONFIG))
        ids = response.input_tokens + response.output_tokens
        columns = {"scores": torch.zeros(1, 2)} if index or not data.get("odd") else {}
        mask = [0] * response.input_len + [1] * response.output_len
        return {"input_ids": ids, "loss_mask": mask, "reward": float(index), **columns}


def test_samples_are_joined_once_and_as_if_group_by_group(make, monkeypatch):
    joined = []
    monkeypatch.setattr(
        "rollwright.rollout.executor.concat_padded_tensors",
        lambda samples: joined.append(len(samples)) or concat_padded_tensors(samples),
    )
    once = make().rollout_batch(tasks(4), OfAnyLength(), group_size=3)
    twice = make().rollout_batch(tasks(4), OfAnyLength(), group_size=3, should_accept_fn=lambda trajectory: True)
    assert joined == [12, 4]
    assert list(once) == list(twice)
    assert all(torch.equal(once[key], twice[key]) and once[key].dtype == twice[key].dtype for key in once)


def test_samples_that_cannot_be_joined_fail_their_group_alone(make):
    executor = make()
    batch = executor.rollout_batch([*tasks(2), {"id": 2, "odd": True}], OfAnyLength(), group_size=2)
    assert batch["input_ids"].shape[0] == 4
    assert "key 'scores' is in 1 of 2 items" in executor.failures[0].cause


def test_synchronous_calls_work_while_the_callers_loop_runs(make):
    executor = make()

    async def notebook_cell():
        return executor.rollout_batch(tasks(2), OneTurn)

    assert asyncio.run(notebook_cell())["input_ids"].shape[0] == 2


def test_several_threads_share_an_executor(make):
    executor = make(EchoEngine(latency=0.005))
    batches = {}

    def work(name):
        batches[name] = executor.rollout_batch(tasks(5), OneTurn, group_size=name)

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: batch["input_ids"].shape[0] for name, batch in batches.items()} == {1: 5, 2: 10, 3: 15, 4: 20}


def test_a_synchronous_call_from_inside_a_workflow_is_refused(make):
    executor = make(max_sample_retries=0)

    class Inside:
        async def arun_episode(self, engine, data):
            return executor.rollout_batch(tasks(1), OneTurn)

    with pytest.raises(RolloutError, match="from inside a workflow"):
        executor.rollout_batch(tasks(1), Inside())


def test_prepare_batch_refills_for_what_is_filtered(make):
    executor = make(dynamic_filter="no_variance")
    loader = Loader([{"id": index, "does": "equal" if index % 3 == 0 else "answer"} for index in range(12)], 4)
    seen = []
    for version in range(1, 4):
        batch = executor.prepare_batch(loader, OneTurn, group_size=2)
        assert batch["group_ids"].unique().numel() == 4
        seen += batch["input_ids"][::2, 2].tolist()
        executor.set_version(version)
    assert executor.counters()["groups/dropped/no_variance"] >= 4
    assert not {1, 4, 7, 10} & set(seen)


class Loader:
    """Lists of rows, epoch after epoch."""

    def __init__(self, rows, batch_size):
        self.rows, self.batch_size = rows, batch_size

    def __iter__(self):
        for start in range(0, len(self.rows), self.batch_size):
            yield self.rows[start : start + self.batch_size]


def test_an_iterator_ends_with_a_smaller_batch_and_then_says_so(make):
    executor = make()
    rows = iter(Loader(tasks(5), 5))
    sizes = []
    for version in range(1, 4):
        sizes.append(executor.prepare_batch(rows, OneTurn, batch_size=2)["input_ids"].shape[0])
        executor.set_version(version)
    assert sizes == [2, 2, 1]
    with pytest.raises(DatasetEnded):
        executor.prepare_batch(rows, OneTurn, batch_size=2)


def test_a_dataset_that_is_rejected_as_a_whole_is_an_error_not_a_wait(make):
    with pytest.raises(RolloutError, match=r"no group was accepted in 2 whole epochs.*rejected.*None rejects a sample"):
        make().prepare_batch(Loader(tasks(4, does="reject"), 2), OneTurn)


def test_a_second_batch_without_a_publication_is_refused_not_waited_for(make):
    executor = make()
    loader = Loader(tasks(8), 4)
    executor.prepare_batch(loader, OneTurn)
    with pytest.raises(RolloutError, match=r"4 are still in training.*update_weights"):
        executor.prepare_batch(loader, OneTurn)
    executor.release_batch()
    executor.prepare_batch(loader, OneTurn)


def test_pause_starts_no_more_samples(make):
    executor = make()
    executor.pause()
    workflow = OneTurn()
    executor.submit({"id": 0}, workflow)
    with pytest.raises(TimeoutError):
        executor.wait(1, timeout=0.05)
    assert workflow.started == 0
    executor.resume()
    assert executor.wait(1, timeout=60)["input_ids"].shape[0] == 1


def test_over_sampling_cuts_the_stragglers(make):
    engine = EchoEngine(latency=lambda request: 3600.0 if request.input_ids[2] % 5 == 0 else 0.0)
    executor = make(engine, over_sampling=0.5)
    loader = Loader(tasks(40), 4)
    for version in range(1, 4):
        batch = executor.prepare_batch(loader, OneTurn)
        assert batch["input_ids"].shape[0] == 4
        assert (batch["versions"].max(dim=1).values == version - 1).all()
        assert executor.counters()["running"] == 0
        assert executor.counters()["ready"] == 0
        engine.set_version(version)
        executor.set_version(version)
    assert executor.counters()["groups/dropped/over_sampling"] >= 2
    with pytest.raises(ConfigError, match="over_sampling"):
        make(over_sampling=0.5, deterministic=True)


def test_destroy_with_work_in_flight(make):
    executor = make(EchoEngine(latency=3600.0))
    for row in tasks(50):
        executor.submit(row, OneTurn)
    errors = []

    def wait():
        try:
            executor.wait(1)
        except RolloutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    executor.destroy()
    thread.join(60)
    assert errors
    assert "destroyed" in errors[0]
    with pytest.raises(RolloutError, match="destroyed"):
        executor.submit({"id": 0}, OneTurn)


def test_a_resumed_executor_trains_each_task_once(make):
    rows = [{"id": index, "ordinal": index} for index in range(24)]
    trained, names = [], []
    loader = iter(Loader(rows, 4))

    def train(executor):
        batch = executor.prepare_batch(loader, OneTurn, batch_size=4)
        trained.extend((batch["input_ids"][:, 2] - 1).tolist())
        names.extend(zip(batch["group_ids"].tolist(), batch["sample_ids"].tolist(), strict=True))

    engine = EchoEngine(latency=lambda request: 0.001 * (request.input_ids[2] % 3))
    executor = make(engine, max_head_offpolicyness=2)
    for version in range(1, 3):
        train(executor)
        executor.set_version(version)
    state = executor.state_dict()
    executor.destroy()
    resumed = make(EchoEngine(), max_head_offpolicyness=2)
    resumed.engine.set_version(2)
    resumed.load_state_dict(state)
    for version in range(3, 7):
        train(resumed)
        resumed.set_version(version)
    assert sorted(trained) == list(range(24))
    assert [len(set(ids)) for ids in zip(*names, strict=True)] == [24, 24]
    assert resumed.state_dict()["frontier"] == 24


def accept_odd(trajectory):
    return bool(trajectory["input_ids"][0, 2] % 2)


def test_a_workflow_may_say_how_often_each_task_is_run(make):
    class Says(OneTurn):
        def group_size(self, data):
            return data["id"] + 1

    class HoldsANumber(OneTurn):
        group_size = 7

    assert make().rollout_batch(tasks(3), Says())["group_ids"].unique(return_counts=True)[1].tolist() == [1, 2, 3]
    assert make().rollout_batch(tasks(3), HoldsANumber())["input_ids"].shape[0] == 3


def test_should_accept_fn_by_import_path(make):
    batch = make().rollout_batch(tasks(4), OneTurn, should_accept_fn=f"{__name__}.accept_odd")
    assert batch["input_ids"][:, 2].tolist() == [1, 3]


def test_a_workflow_is_built_once_for_equal_arguments(make):
    built = []

    class Counted(OneTurn):
        def __init__(self, gconfig):
            built.append(gconfig.max_new_tokens)
            super().__init__()

    executor = make()
    gconfig = GenerationHyperparameters(max_new_tokens=3)
    for _ in range(3):
        executor.rollout_batch(tasks(2), Counted, {"gconfig": gconfig.new()})
    gconfig.max_new_tokens = 4
    executor.rollout_batch(tasks(2), Counted, {"gconfig": gconfig})
    gconfig.max_new_tokens = 5  # the same object, changed since
    executor.rollout_batch(tasks(2), Counted, {"gconfig": gconfig})
    assert built == [3, 4, 5]


def test_tasks_are_not_changed_by_what_a_workflow_does_to_them(make):
    class Pops(OneTurn):
        async def arun_episode(self, engine, data):
            identity = data.pop("id")
            return await super().arun_episode(engine, {"id": identity})

    rows = tasks(2)
    make().rollout_batch(rows, Pops(), group_size=3)
    assert rows == tasks(2)


def test_a_cut_sample_that_goes_on_gets_no_more_answers(make):
    seen, other_runs = [], asyncio.Event()

    class Stubborn:
        async def arun_episode(self, engine, data):
            if engine.name.index == 0:
                await other_runs.wait()
                return None  # the group is rejected while its other member runs
            other_runs.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                try:
                    await engine.agenerate(ModelRequest(input_ids=[1], gconfig=GCONFIG))
                except RequestAborted as error:
                    seen.append(str(error))

    executor = make()
    with pytest.raises(RolloutError, match=r"rejected by its workflow"):
        executor.rollout_batch(tasks(1), Stubborn(), group_size=2)
    wait_until(lambda: executor.counters()["samples/cut"])
    assert "belongs to a group that has come to its end" in seen[0]
    assert executor.counters()["running_samples"] == 0


def test_samples_that_are_cut_before_their_first_step_give_their_places_back(make):
    executor = make(max_concurrent_samples=4)
    for _ in range(3):
        with pytest.raises(RolloutError, match=r"rejected by its workflow"):
            executor.rollout_batch(tasks(3, does="reject"), OneTurn, group_size=4)
    assert executor.rollout_batch(tasks(3), OneTurn, group_size=4)["input_ids"].shape[0] == 12
    assert executor.counters()["running_samples"] == 0


def test_a_workflow_that_exits_or_cancels_itself_is_a_failure_not_the_end(make):
    class Exits:
        async def arun_episode(self, engine, data):
            if data["id"] == 0:
                raise SystemExit(3)
            raise asyncio.CancelledError

    executor = make(max_sample_retries=0)
    with pytest.raises(RolloutError, match=r"none of 2 tasks was accepted"):
        executor.rollout_batch(tasks(2), Exits())
    assert {failure.cause.partition(":")[0] for failure in executor.failures} == {
        "SystemExit",
        "RolloutError",
    }


class Undying:
    """Keeps its cancellation to itself, as a bare ``except:`` around a tool does."""

    async def arun_episode(self, engine, data):
        if data.get("does") == "answer":
            return await OneTurn().arun_episode(engine, data)
        if data.get("does") == "reject" and engine.name.index == 0:
            return None
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue


over = threading.Event()


@pytest.fixture
def soon_abandoned(monkeypatch):
    over.clear()
    monkeypatch.setattr("rollwright.rollout.episode.GRACE_SECONDS", 0.05)
    yield
    over.set()


def test_a_sample_that_will_not_end_is_abandoned_and_its_place_given_to_others(make, soon_abandoned, caplog):
    executor = make(sample_timeout=1.0, max_sample_retries=0, max_concurrent_samples=1, max_failed_share=1.0)
    batch = executor.rollout_batch([{"id": 0}, {"id": 1, "does": "answer"}], Undying())
    assert batch["input_ids"][:, 2].tolist() == [2]
    assert "did not end when it was cancelled" in executor.failures[0].cause
    assert "test_executor.py:" in executor.failures[0].cause
    assert executor.counters()["abandoned_samples"] == 1
    assert executor.counters()["running_samples"] == 0
    over.set()
    time.sleep(0.1)  # it ends after all, and counts no second time
    assert executor.counters()["running_samples"] == 0
    assert executor.counters()["samples/failed"] == 1


def test_members_that_outlive_their_group_give_their_places_back(make, soon_abandoned):
    executor = make(max_concurrent_samples=4)
    with pytest.raises(RolloutError, match="rejected by its workflow"):
        executor.rollout_batch(tasks(1, does="reject"), Undying(), group_size=4)
    wait_until(lambda: executor.counters()["samples/cut"] == 3)
    assert executor.counters()["running_samples"] == 0


def test_too_many_samples_that_will_not_end_stop_the_run(make, soon_abandoned):
    executor = make(sample_timeout=0.02, max_sample_retries=0, max_concurrent_samples=2, max_failed_share=1.0)
    with pytest.raises(RolloutError, match=r"3 samples did not end when they were cancelled.*Undying.*catch Exception"):
        executor.rollout_batch(tasks(8), Undying())


def test_a_part_of_a_workflow_that_exits_does_not_take_the_loop_with_it(make):
    class PartExits:
        async def arun_episode(self, engine, data):
            async def part():
                raise SystemExit(3)

            await asyncio.gather(part(), asyncio.sleep(0))

    executor = make(max_sample_retries=0, max_failed_share=1.0)
    with pytest.raises(RolloutError, match="SystemExit"):
        executor.rollout_batch(tasks(2), PartExits())
    assert executor.rollout_batch(tasks(2), OneTurn)["input_ids"].shape[0] == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fault_of_ours_reaches_those_who_wait(make, monkeypatch, deterministic):
    executor = make(deterministic=deterministic)
    executor.rollout_batch(tasks(1), OneTurn)
    monkeypatch.setattr(executor._scheduler, "_move", lambda group, state: 1 / 0)
    executor.pause()
    executor.submit({"id": 1}, OneTurn)
    with pytest.raises(TimeoutError):
        executor.wait(1, timeout=0.01)
    executor._scheduler.is_paused = False
    executor._call(executor._react)
    with pytest.raises(ZeroDivisionError):
        executor.wait(1, timeout=60)


def test_calls_that_race_with_destroy_end(make):
    """Whoever asks while the executor goes is answered or told; nobody waits for a loop that is gone."""
    for _ in range(20):
        executor = make()
        executor.submit({"id": 0}, OneTurn)
        told, go = [], threading.Event()

        def ask(executor=executor, told=told, go=go):
            go.set()
            try:
                while True:
                    executor.counters()
                    executor.pause()
                    executor.resume()
            except RolloutError as error:
                told.append(str(error))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        go.wait()
        executor.destroy()
        for thread in threads:
            thread.join(60)
        assert len(told) == 4
        assert all("destroyed" in message for message in told)


@pytest.mark.slow
def test_thousands_of_samples_at_once(make):
    """All of them wait at the same time; none is lost, and no batch is short (10,000: benchmarks/executor.py)."""
    count, all_wait = 2_000, asyncio.Event()

    class Together(EchoEngine):
        async def agenerate(self, request):
            if len(self.requests) == count - 1:
                all_wait.set()
            response = await super().agenerate(request)
            async with asyncio.timeout(200):
                await all_wait.wait()
            return response

    executor = make(Together(output_length=1), max_concurrent_samples=count)
    batch = executor.rollout_batch(tasks(count // 8), OneTurn, group_size=8)
    assert batch["input_ids"].shape[0] == count
    assert batch["sample_ids"].unique().numel() == count


def test_samples_run_their_scripts_in_the_sandbox_of_the_config(make):
    class Says(OneTurn):
        async def arun_episode(self, engine, data):
            seen.append(sandbox_name())
            return await super().arun_episode(engine, data)

    seen = []
    make(sandbox="unsafe").rollout_batch([{"id": 1}], Says())
    make().rollout_batch([{"id": 1}], Says())
    assert seen == ["unsafe", "bubblewrap"]


def test_tasks_are_taken_as_they_end_whichever_ends_first(make):
    executor = make(max_sample_retries=0)
    hangs, answers, rejects = (executor.submit({"does": does}, OneTurn()) for does in ("hang", "answer", "reject"))
    ended = {}
    while len(ended) < 2:
        ended |= executor.wait_for_any(60)
    assert ended.keys() == {answers, rejects}
    assert ended[answers]["rewards"].tolist() == [0.0]
    assert "rejected by its workflow" in ended[rejects]
    with pytest.raises(TimeoutError):
        executor.wait_for_any(0.05)  # each is taken once, and one still runs
    executor.abandon([hangs])
    assert "stopped waiting" in executor.wait_for_any(60)[hangs]
    assert executor.counters()["running"] == 0
