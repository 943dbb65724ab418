"""A child process: what it says, and that nothing that it started is left."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import psutil
import pytest

from rollwright.processes.child import Channel, ChildProcess
from rollwright.processes.tree import descendants


def channels() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_frames_of_any_size_arrive_whole_and_in_order():
    ours, theirs = channels()
    sent = [(b"A", b""), (b"B", b"x" * 3_000_000), (b"C", b"end")]
    sender = threading.Thread(target=lambda: [ours.send(*frame) for frame in sent])
    sender.start()
    assert [theirs.receive(60) for _ in sent] == sent
    sender.join()


def test_silence_and_the_other_sides_end_are_errors():
    ours, theirs = channels()
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.send(b"A")
    theirs.close()
    assert ours.receive() == (b"A", b"")
    with pytest.raises(EOFError):
        ours.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(b"A")


def test_a_side_that_closes_without_reading_is_gone():
    ours, theirs = channels()
    ours.send(b"A", b"never read")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


PROGRAM = """
import os, subprocess, sys, time
from rollwright.processes.child import connect

def main():
    channel, setup = connect()
    if setup["ends"]:
        os._exit(3)
    started = [subprocess.Popen(["sleep", "600"], start_new_session=new).pid for new in (False, True)]
    channel.send(b"P", ",".join(map(str, [*started, setup["extra"]])).encode())
    time.sleep(600)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "program_of_a_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "program_of_a_child"


def test_how_a_child_ended_is_told(module):
    child = ChildProcess(module, {"ends": True})
    with pytest.raises(EOFError):
        child.channel.receive(60)
    assert child.cause_of_death() == "exit code 3"
    child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="finds what left the group by /proc")
def test_a_child_is_killed_with_all_that_it_started_also_in_other_sessions(module):
    child = ChildProcess(module, {"ends": False, "extra": 7})
    kind, body = child.channel.receive(60)
    *started, extra = map(int, body.decode().split(","))
    assert (kind, extra) == (b"P", 7)
    assert set(descendants(child.pid)) == set(started)
    child.kill()
    assert child.cause_of_death() == "signal SIGKILL"
    wait_gone([child.pid, *started])
    child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes a second")
def test_a_child_ends_with_the_thread_that_started_it(module):
    found: list[ChildProcess] = []

    def start():
        child = ChildProcess(module, {"ends": False, "extra": 7})
        child.channel.receive(60)
        found.append(child)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found[0].cause_of_death() == "signal SIGKILL"
    found[0].close()
