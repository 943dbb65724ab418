"""The wrapper: limits, crashes, retries, and that one function's trouble is not another's."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rollwright import AsyncRewardWrapper
from rollwright.errors import BrokenRewardError, RewardError
from rollwright.processes.pool import close_pools, shared_pool


async def ask(wrapper, completion="c", **data):
    return await wrapper("the prompt", completion, [1], [2], **data)


#: A lambda is sent by value, so that workers need not import this module and torch with it.
length = lambda prompt, completion, prompt_ids, completion_ids, **data: len(completion)  # noqa: E731


async def test_sync_functions_lambdas_closures_and_objects_run_apart():
    parent, bonus = os.getpid(), 3
    apart = AsyncRewardWrapper(lambda p, c, pi, ci, **d: float(os.getpid() != parent) + bonus)
    assert await ask(apart) == 4.0

    class Scorer:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, prompt, completion, prompt_ids, completion_ids, answer=None):
            return self.scale * (completion == answer)

    assert await ask(AsyncRewardWrapper(Scorer(2.5)), "x", answer="x", other=1) == 2.5
    assert await ask(AsyncRewardWrapper(functools.partial(length)), "abc") == 3.0
    assert await ask(AsyncRewardWrapper(lambda p, c, pi, ci: pi[0] + ci[0])) == 3.0


async def test_rows_may_have_columns_of_any_name():
    wrapper = AsyncRewardWrapper(lambda prompt, completion, prompt_ids, completion_ids, **d: len(d))
    assert await wrapper("p", "c", [1], [2], **{"prompt": "x", "completion": "y", "self": 1, "data": 2, "args": 3}) == 3.0


async def test_async_functions_are_awaited_here_and_sync_ones_that_return_awaitables_there():
    async def here(prompt, completion, prompt_ids, completion_ids, **data):
        await asyncio.sleep(0)
        return float(threading.current_thread() is threading.main_thread())

    async def elsewhere():
        return 7

    assert await ask(AsyncRewardWrapper(here)) == 1.0
    assert await ask(AsyncRewardWrapper(lambda p, c, pi, ci: elsewhere())) == 7.0


@pytest.mark.parametrize("value", [1, True, 0.25, np.float32(0.25), np.array([2]), torch.tensor(0.5), torch.tensor([1.0])])
async def test_what_is_one_number_is_a_reward(value):
    assert await ask(AsyncRewardWrapper(lambda p, c, pi, ci: value)) == float(value.item() if hasattr(value, "item") else value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "nan, not a finite number"),
        (math.inf, "inf, not a finite number"),
        (None, "None, not a number"),
        ("1.0", "'1.0', not a number"),
        ([1, 2], "list, not one number"),
        (np.ones(2), "ndarray, not one number"),
    ],
)
async def test_what_is_no_number_is_refused(value, message):
    async def waiting(p, c, pi, ci):
        return value

    for function in (lambda p, c, pi, ci: value, waiting):
        with pytest.raises(RewardError, match=message):
            await ask(AsyncRewardWrapper(function, max_retries=0))


async def test_a_function_that_hangs_is_killed_and_the_next_call_is_served():
    def hang(prompt, completion, prompt_ids, completion_ids, **data):
        while completion == "hang":
            pass
        return 1.0

    wrapper = AsyncRewardWrapper(hang, max_workers=1, timeout_seconds=60)
    hurried = AsyncRewardWrapper(hang, max_workers=1, timeout_seconds=0.3)  # over the same worker
    assert await ask(wrapper) == 1.0
    with pytest.raises(RewardError, match=r"task ordinal 17: did not return within 0\.3 s"):
        await ask(hurried, "hang", ordinal=17)
    assert await ask(wrapper) == 1.0
    assert await ask(hurried) == 1.0
    with pytest.raises(RewardError, match=r"did not return within 0\.3 s"):  # also where the worker has the function
        await ask(hurried, "hang")


async def test_a_call_that_waits_for_a_worker_does_not_use_up_its_time():
    def wrapper_of(limit):
        return AsyncRewardWrapper(lambda p, c, pi, ci: time.sleep(limit / 4) or 1.0, timeout_seconds=limit, max_workers=1)

    for limit in (0.8, 3.2, 12.8):  # a machine that is too busy for one limit is given the next
        wrapper = wrapper_of(limit)
        values = await asyncio.gather(*(ask(wrapper) for _ in range(8)), return_exceptions=True)
        if not any(isinstance(value, RewardError) for value in values):
            break
    assert values == [1.0] * 8


async def test_a_function_that_takes_its_worker_down_harms_no_other():
    crash = AsyncRewardWrapper(lambda p, c, pi, ci: os.kill(os.getpid(), signal.SIGSEGV), max_retries=1, max_workers=1)
    other = AsyncRewardWrapper(length, max_workers=1)
    results = await asyncio.gather(ask(crash), ask(other, "ab"), ask(crash), ask(other, "abc"), return_exceptions=True)
    assert results[1::2] == [2.0, 3.0]
    for error in results[::2]:
        assert isinstance(error, RewardError)
        assert "died (signal SIGSEGV) in each of 2 attempts" in str(error)


async def test_failures_are_tried_again_and_then_told_with_the_workers_traceback(tmp_path):
    count = tmp_path / "count"

    def fails(prompt, completion, prompt_ids, completion_ids, until, **data):
        tries = len(count.read_text()) + 1 if count.exists() else 1
        count.write_text("x" * tries)
        if tries < until:
            raise KeyError("a colour")
        return tries

    wrapper = AsyncRewardWrapper(fails, max_retries=3)
    assert await ask(wrapper, until=4) == 4.0
    count.unlink()
    with pytest.raises(
        RewardError, match=r"(?s)fails, task id t1: failed in each of 4 attempts:.*in fails.*KeyError: 'a colour'"
    ):
        await ask(wrapper, until=9, id="t1")


async def test_an_end_of_file_in_a_function_is_its_failure_and_its_worker_lives_on():
    processes = AsyncRewardWrapper(lambda p, c, pi, ci: float(os.getpid()), max_workers=1)
    before = await ask(processes)
    with pytest.raises(RewardError, match="EOFError"):
        await ask(AsyncRewardWrapper(lambda p, c, pi, ci: float(input()), max_workers=1, max_retries=0))
    assert await ask(processes) == before


async def test_async_functions_have_the_same_limit_and_retries():
    tries = []

    async def flaky(prompt, completion, prompt_ids, completion_ids, **data):
        tries.append(1)
        if completion == "hang":
            await asyncio.sleep(60)
        if len(tries) < 3:
            raise TimeoutError("of a connection of its own")
        return 1.0

    assert await ask(AsyncRewardWrapper(flaky)) == 1.0
    assert len(tries) == 3
    with pytest.raises(RewardError, match=r"did not return within 0\.05 s"):
        await ask(AsyncRewardWrapper(flaky, timeout_seconds=0.05), "hang")
    assert len(tries) == 4


async def test_what_cannot_be_sent_is_told_at_once():
    lock = threading.Lock()
    with pytest.raises(RewardError, match="the function cannot be sent to a worker process"):
        await ask(AsyncRewardWrapper(lambda p, c, pi, ci: float(lock.locked())))
    with pytest.raises(RewardError, match="the task's columns cannot be sent"):
        await ask(AsyncRewardWrapper(length), client=lock)


async def test_columns_that_the_function_does_not_take_are_not_sent():
    wrapper = AsyncRewardWrapper(lambda prompt, completion, prompt_ids, completion_ids, answer: float(answer))
    assert await ask(wrapper, answer="2", client=threading.Lock()) == 2.0


async def test_prints_and_reads_of_a_function_do_not_disturb_its_answers():
    def noisy(prompt, completion, prompt_ids, completion_ids):
        print("x" * 100_000)
        os.write(1, b"raw")
        return float(sys.stdin.read() == "")

    assert await ask(AsyncRewardWrapper(noisy)) == 1.0


async def test_long_sequences_pass_through_the_pipe():
    wrapper = AsyncRewardWrapper(lambda p, c, pi, ci: len(c) + len(ci))
    assert await wrapper("p", "c" * 1_000_000, [], list(range(200_000))) == 1_200_000


def test_one_wrapper_serves_several_event_loops_at_once():
    wrapper, results = AsyncRewardWrapper(length), []

    async def several():
        return await asyncio.gather(*(ask(wrapper, "a" * n) for n in range(20)))

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(several()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[float(n) for n in range(20)]] * 4


async def test_a_cancelled_call_leaves_its_worker_usable():
    wrapper = AsyncRewardWrapper(lambda p, c, pi, ci: time.sleep(0.2 if c == "slow" else 0) or 1.0, max_workers=1)
    task = asyncio.create_task(ask(wrapper, "slow"))
    waiting = asyncio.create_task(ask(wrapper, "slow"))
    await asyncio.sleep(0.1)
    task.cancel()
    waiting.cancel()
    assert await ask(wrapper) == 1.0


async def test_inline_functions_start_no_worker():
    close_pools()

    def quick(prompt, completion, prompt_ids, completion_ids):
        return float(os.getpid() == parent) if completion else math.nan

    parent, quick.runs_inline = os.getpid(), True
    wrapper = AsyncRewardWrapper(quick)
    assert await ask(wrapper) == 1.0
    with pytest.raises(RewardError, match="nan, not a finite number"):
        await ask(wrapper, "")
    assert not shared_pool()._threads


async def test_a_registered_name_an_import_path_and_a_class_are_functions_too():
    assert await ask(AsyncRewardWrapper("numeric_reward"), "it is 42", answer="42") == 1.0
    assert await ask(AsyncRewardWrapper("rollwright.rewards.text.exact_match_reward"), "a", answer=["b", "a"]) == 1.0
    with pytest.raises(RewardError, match="is no reward function"):
        AsyncRewardWrapper(3)


@pytest.mark.parametrize("wrong", [{"timeout_seconds": 0}, {"max_retries": -1}, {"max_workers": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(RewardError, match="the limit is above 0"):
        AsyncRewardWrapper(length, **wrong)


async def test_closed_pools_are_opened_anew():
    wrapper = AsyncRewardWrapper(length)
    assert await ask(wrapper) == 1.0
    close_pools()
    assert await ask(wrapper) == 1.0


async def test_a_worker_does_not_import_torch_for_a_function_that_does_not():
    assert await ask(AsyncRewardWrapper(lambda p, c, pi, ci: float("torch" in __import__("sys").modules), max_workers=3)) == 0.0


async def test_a_function_of_a_file_that_is_not_importable_by_name_is_sent_by_value(tmp_path):
    import importlib.util

    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(
        "BONUS = 5\ndef score(prompt, completion, prompt_ids, completion_ids):\n    return len(completion) + BONUS\n"
    )
    spec = importlib.util.spec_from_file_location("my_plugin", plugin)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_plugin"] = module
    spec.loader.exec_module(module)
    try:
        assert await ask(AsyncRewardWrapper(module.score), "ab") == 7.0
    finally:
        del sys.modules["my_plugin"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_parent_that_is_killed_while_they_hang():
    script = textwrap.dedent("""
        import asyncio, os, time
        from rollwright import AsyncRewardWrapper
        def hang(prompt, completion, prompt_ids, completion_ids):
            print(os.getpid(), flush=True)
            while True: time.sleep(1)
        asyncio.run(AsyncRewardWrapper(hang)("p", "c", [], []))
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    worker = int(parent.stderr.readline())
    assert Path(f"/proc/{worker}").exists()
    parent.kill()
    parent.wait()
    parent.stderr.close()
    deadline = time.monotonic() + 60
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("is_async", [False, True])
async def test_three_equal_faults_of_the_code_are_enough(is_async, tmp_path, monkeypatch):
    """They were tried four times in each of thirteen samples before the run stopped."""
    monkeypatch.setattr("rollwright.rewards.wrapper.FIRST_PAUSE", 0.001)
    calls = tmp_path / "calls"

    def broken(prompt, completion, prompt_ids, completion_ids, **data):
        with open(calls, "a") as file:
            file.write("x")
        return len(completion) + data["bonus"]

    async def awaited(*arguments, **data):
        return broken(*arguments, **data)

    wrapper = AsyncRewardWrapper(awaited if is_async else broken, max_workers=1)
    with pytest.raises(RewardError, match=r"(?s)task id 1: failed in each of 3 attempts:.*TypeError") as raised:
        await ask(wrapper, id=1, bonus="one")
    assert type(raised.value) is RewardError  # it may be this row
    assert calls.read_text() == "xxx"
    with pytest.raises(BrokenRewardError, match=r"(?s)task id 2: failed.*the same 4 times, for several tasks.*TypeError"):
        await ask(wrapper, id=2, bonus="two")
    assert calls.read_text() == "xxxx"
    assert await ask(wrapper, "abc", id=3, bonus=1) == 4.0  # one success shows that it was the rows
    with pytest.raises(RewardError) as raised:
        await ask(wrapper, id=4, bonus="four")
    assert type(raised.value) is RewardError


async def test_faults_of_the_world_are_tried_as_often_as_asked(monkeypatch):
    monkeypatch.setattr("rollwright.rewards.wrapper.FIRST_PAUSE", 0.001)
    calls = []

    async def unreachable(prompt, completion, prompt_ids, completion_ids, **data):
        calls.append(1)
        raise ConnectionError("the judge is away")

    wrapper = AsyncRewardWrapper(unreachable, max_retries=4)
    for number in range(3):
        with pytest.raises(RewardError, match="in each of 5 attempts") as raised:
            await ask(wrapper, id=number)
        assert type(raised.value) is RewardError
    assert len(calls) == 15
