"""A child process: what it says, and that nothing that it started is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
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


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end between two looks
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
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
    assert set(started) < set(descendants(child.pid))
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


DAEMONS = """
import os, subprocess, sys, time
from rollwright.processes.child import connect

def daemon():
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))

def main():
    channel, how = connect()
    pids = [daemon() for _ in range(3)]
    channel.send(b"P", ",".join(map(str, [os.getpid(), *pids])).encode())
    if how == "crashes":
        os.kill(os.getpid(), 11)
    if how != "returns":
        time.sleep(600)
    return 4
"""


@pytest.fixture
def daemons(tmp_path, monkeypatch):
    (tmp_path / "program_of_daemons.py").write_text(DAEMONS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return "program_of_daemons"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a process of ours")
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("is killed", "signal SIGKILL"),
        ("is terminated", "signal SIGTERM"),
        ("crashes", "signal SIGSEGV"),
        ("returns", "exit code 4"),
    ],
)
def test_daemons_that_forked_twice_end_with_the_child_however_it_ends(daemons, how, cause):
    child = ChildProcess(daemons, how)
    pids = list(map(int, child.channel.receive(60)[1].decode().split(",")))
    if how == "is killed":
        assert all(map(psutil.pid_exists, pids))
        child.kill()
    elif how == "is terminated":
        os.kill(pids[0], signal.SIGTERM)
    assert child.cause_of_death() == cause
    wait_gone([child.pid, *pids])
    child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a process of ours")
@pytest.mark.parametrize("ignored", [False, True])
def test_daemons_end_with_a_run_that_is_killed(daemons, ignored):
    """Also where whoever started the run ignores signals that end or tell of processes, as some supervisors do."""
    source = f"""if True:
        import signal, sys
        if {ignored}:
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        from rollwright.processes.child import ChildProcess
        child = ChildProcess("program_of_daemons", "stays")
        print(child.pid, child.channel.receive(60)[1].decode(), flush=True)
        sys.stdin.read()
    """
    run = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdin is not None
    assert run.stdout is not None
    with run.stdin, run.stdout:
        guard, pids = run.stdout.readline().split()
        run.kill()
        run.wait()
        wait_gone([int(guard), *map(int, pids.split(","))])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes a second")
def test_a_child_that_is_still_importing_ends_with_its_parent(tmp_path, monkeypatch):
    note = tmp_path / "pid"
    (tmp_path / "slow_to_import.py").write_text(f"""if True:
        import os, pathlib, time
        pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
        time.sleep(600)
    """)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    source = "from rollwright.processes.child import ChildProcess; c = ChildProcess('slow_to_import'); input()"
    run = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE)
    assert run.stdin is not None
    with run.stdin:
        deadline = time.monotonic() + 60
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.kill()
        run.wait()
        wait_gone([int(note.read_text())])


@pytest.mark.parametrize("start", ["guarded({})", "die_with_parent({})"])
def test_a_parent_that_has_ended_before_its_child_could_ask_is_noticed(start):
    ended = subprocess.Popen(["true"])
    ended.wait()
    source = f"from rollwright.processes.tree import *; {start.format(ended.pid)}; import time; time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", source], timeout=60).returncode == 1
