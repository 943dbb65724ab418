"""A workflow that blocks the loop is named, with the line."""

import asyncio
import re
import subprocess
import sys
import threading
import time

import pytest
from echo import EchoEngine

from rollwright.inference.request import ModelRequest
from rollwright.rollout.event_loop import BlockedLoopMonitor, ThreadTimes, own_time
from rollwright.rollout.executor import RolloutExecutor


class Blocks:
    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        time.sleep(0.9)  # noqa: ASYNC251 - the line that the report names
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def roll_out_until_reported(executor, workflow) -> str:
    """Where the whole process stands still with the line, nobody looks, and the line is run again; returns the place."""
    for _ in range(10):
        executor.rollout_batch([{}], workflow)
        if executor.counters()["slow_loop_reports"]:
            break
    assert executor.counters()["slow_loop_reports"] == 1
    return executor._thread.monitor.latest


def test_a_blocking_call_is_reported_with_workflow_and_line(caplog):
    import logging

    root = logging.getLogger("rollwright")
    root.propagate, before = True, root.propagate
    executor = RolloutExecutor(EchoEngine())
    try:
        roll_out_until_reported(executor, Blocks())
        report = next(record.getMessage() for record in caplog.records if "stood still" in record.getMessage())
        assert "Blocks at " in report
        assert re.search(r"test_blocked_loop.py:\d+ in arun_episode: time.sleep\(0.9\)", report)
    finally:
        root.propagate = before
        executor.destroy()


def test_a_step_that_is_seen_at_its_very_end_is_none():
    """asyncio has then forgotten the handle; the thread is held there by a trace function."""
    monitor, at_end, looked = BlockedLoopMonitor(), threading.Event(), threading.Event()

    def hold(frame, event, _):
        if frame.f_code is not asyncio.Handle._run.__code__:
            return None
        if event == "return" and frame.f_locals["self"] is None and not at_end.is_set():
            at_end.set()
            looked.wait(30)
        return hold

    def run():
        monitor._thread_id = threading.get_ident()
        sys.settrace(hold)
        asyncio.run(asyncio.sleep(0))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert at_end.wait(30)
        assert monitor._step() is None
        assert "in hold" in (monitor.where() or "")
    finally:
        looked.set()
        thread.join()


class Fine:
    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_an_idle_or_busy_loop_is_not_reported():
    executor = RolloutExecutor(EchoEngine(latency=0.01))
    executor.rollout_batch([{}] * 200, Fine())
    assert executor.counters()["slow_loop_reports"] == 0
    executor.destroy()


def test_short_steps_are_not_taken_for_one_long_step():
    loop = asyncio.new_event_loop()
    watch, seen = BlockedLoopMonitor(), []

    def step():
        seen.append((watch._step(), watch._step()))

    loop.call_soon(watch.start)
    for _ in range(100):  # one after another in one turn of the loop
        loop.call_soon(step)
    loop.call_soon(loop.stop)
    loop.run_forever()
    watch.stop()
    loop.close()
    assert all(first is again for first, again in seen)
    assert len({id(first) for first, _ in seen}) == 100


def test_an_idle_loop_is_not_woken(monkeypatch):
    turns = []
    executor = RolloutExecutor(EchoEngine())
    try:
        executor.rollout_batch([{}], Fine())
        loop = executor._thread.loop
        turn = loop._run_once
        monkeypatch.setattr(loop, "_run_once", lambda: (turns.append(1), turn()))
        executor._call(lambda: None)
        time.sleep(0.1)
        turns.clear()
        time.sleep(0.5)
        assert not turns
    finally:
        executor.destroy()


class BlocksInAPart:
    """Blocks in a task that the episode started."""

    async def arun_episode(self, engine, data):
        async def part():
            time.sleep(0.9)  # noqa: ASYNC251 - the line that the report names

        await asyncio.gather(part(), asyncio.sleep(0))
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_a_part_of_an_episode_is_known_by_its_sample():
    executor = RolloutExecutor(EchoEngine())
    try:
        place = roll_out_until_reported(executor, BlocksInAPart())
        assert re.match(r"BlocksInAPart at .*test_blocked_loop.py:\d+ in part: time.sleep\(0.9\)", place)
    finally:
        executor.destroy()


def test_a_workflow_of_an_installed_package_is_named_too(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "sold_workflows.py"
    package.parent.mkdir()
    package.write_text(
        "import time\n\nfrom rollwright import ModelRequest\n\n\nclass Sold:\n    async def arun_episode(self, engine, data):\n"
        "        time.sleep(0.9)\n        response = await engine.agenerate(ModelRequest(input_ids=[1]))\n"
        "        return {'input_ids': response.input_tokens, 'output_ids': response.output_tokens, 'reward': 0.0}\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    executor = RolloutExecutor(EchoEngine())
    try:
        place = roll_out_until_reported(executor, "sold_workflows.Sold")
        assert "Sold at " in place
        assert "sold_workflows.py:8 in arun_episode: time.sleep(0.9)" in place
    finally:
        executor.destroy()


class Mixed:
    """Stands in one line for a moment, and in another for most of its time."""

    async def arun_episode(self, engine, data):
        time.sleep(0.15)  # noqa: ASYNC251
        for _ in range(30):
            time.sleep(0.03)  # noqa: ASYNC251 - the line that the report names
        response = await engine.agenerate(ModelRequest(input_ids=[1]))
        return {"input_ids": response.input_tokens, "output_ids": response.output_tokens, "reward": 0.0}


def test_the_line_that_took_most_of_the_time_is_named():
    executor = RolloutExecutor(EchoEngine())
    try:
        assert "time.sleep(0.03)" in roll_out_until_reported(executor, Mixed())
    finally:
        executor.destroy()


@pytest.mark.parametrize(
    ("now", "own"),
    [
        (ThreadTimes(5.0, 2.0, False), 0.1),  # blocked
        (ThreadTimes(5.03, 2.07, False), 0.03),  # computed at last, after a wait
        (ThreadTimes(5.09, 2.01, True), 0.09),  # computes
        (ThreadTimes(5.0, 2.0, True), 0.0),  # waits: counted by the system when it ends
        (None, 0.1),
    ],
)
def test_waiting_for_a_processor_is_nobodys_time(now, own):
    assert own_time(0.1, ThreadTimes(5.0, 2.0, True), now) == pytest.approx(own)


CROWDED = """
import os, sys, time, threading
from rollwright.rollout.event_loop import BlockedLoopMonitor
import asyncio
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
parent, crowd = os.getpid(), []
for _ in range(4):
    crowd.append(os.fork())
    if crowd[-1] == 0:
        while os.getppid() == parent: pass
        os._exit(0)
def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
async def episode():
    await asyncio.sleep(0.05)
    began = time.monotonic()
    {"computes": lambda: compute(0.2), "sleeps": lambda: time.sleep(3)}[sys.argv[1]]()
    print(time.monotonic() - began)
loop = asyncio.new_event_loop()
watch = BlockedLoopMonitor()
loop.call_soon(watch.start)
loop.run_until_complete(episode())
watch.stop()
for process in crowd: os.kill(process, 9)
print(watch.reports)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the time that a thread waits for a processor")
@pytest.mark.parametrize(("what", "reports"), [("computes", 0), ("sleeps", 1)])
def test_on_a_crowded_processor_only_what_blocks_is_reported(what, reports, tmp_path):
    program = tmp_path / "crowded.py"  # a file: lines of the user's are looked for in files
    program.write_text(CROWDED)
    for _ in range(10):  # as above; what must not be reported is tried once
        done = subprocess.run([sys.executable, str(program), what], capture_output=True, text=True, timeout=200, check=True)
        took, reported = done.stdout.split()
        if int(reported) or not reports:
            break
    assert float(took) > 0.4  # at least twice what it computed
    assert int(reported) == reports, done.stderr


def test_code_without_line_numbers_is_named_by_its_first_line():
    place = []

    def look():
        place.append(monitor.where())

    look_without_lines = type(look)(look.__code__.replace(co_linetable=b""), globals(), closure=look.__closure__)
    monitor = BlockedLoopMonitor()
    monitor.start()
    try:
        look_without_lines()
    finally:
        monitor.stop()
    assert f"{__file__}:{look.__code__.co_firstlineno} in look" in place[0]
