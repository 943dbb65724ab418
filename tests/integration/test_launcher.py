"""Servers never outlive who started them, however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import BUILT_COMMANDS, BuiltCommand
from rollwright.errors import EngineError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.launcher import Launcher

#: A server that starts a child and a grandchild in the background, as real ones do, and says their process ids.
SERVER = textwrap.dedent(
    """
    import http.server, os, subprocess, sys
    if "--stubborn" in sys.argv:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    print("pids", os.getpid(), child.pid, child.stdout.readline().strip(), flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *a): ...
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)

#: A program that launches two of them and then waits, or ends in one of several ways.
OWNER = textwrap.dedent(
    """
    import sys, time, os, pathlib, signal
    from rollwright.inference.launcher import Launcher
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background of a shell inherits that it is ignored
    server, logs, ending = sys.argv[1:4]
    launcher = Launcher(logs)
    launcher.start(lambda host, port, index: [sys.executable, server, str(port)], count=2, shared=pathlib.Path(logs) / "shared")
    launcher.wait_healthy(120)
    if ending == "forked":  # a child that inherits every descriptor and lives on
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    print("ready", flush=True)
    if ending == "raise":
        raise RuntimeError("on purpose")
    if ending == "exit":
        sys.exit(0)
    if ending == "abandon":
        os._exit(3)
    time.sleep(600)
    """
)


@pytest.fixture
def server_script(tmp_path: Path) -> Path:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


def family(logs: Path) -> list[psutil.Process]:
    """Every process of the servers that is there, by what they wrote into their logs: server, child, grandchild."""
    members: list[psutil.Process] = []
    for log in logs.glob("*.log"):
        line = next(line for line in log.read_text().splitlines() if line.startswith("pids"))
        for pid in map(int, line.split()[1:]):
            with contextlib.suppress(psutil.NoSuchProcess):
                members.append(psutil.Process(pid))
    return members


def wait_gone(processes: list[psutil.Process], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_start_health_logs_and_close(server_script, tmp_path):
    logs = tmp_path / "logs"
    with Launcher(logs) as launcher:
        addresses = launcher.start(
            lambda host, port, index: [sys.executable, str(server_script), str(port)], count=2, name="fake"
        )
        assert launcher.wait_healthy(120) == addresses
        assert all(httpx.get(f"http://{address}/health", timeout=120).status_code == 200 for address in addresses)
        assert sorted(path.name for path in logs.iterdir()) == ["fake-0.log", "fake-1.log"]
        launcher.check()
        processes = family(logs)
        assert len(processes) == 6  # two servers, their children and grandchildren
    wait_gone(processes)


def test_a_server_that_ends_early_is_an_error_with_its_log(tmp_path):
    with Launcher(tmp_path) as launcher:
        launcher.start(lambda host, port, index: [sys.executable, "-c", "print('no such model'); raise SystemExit(7)"])
        with pytest.raises(EngineError, match=r"status 7[\s\S]*no such model"):
            launcher.wait_healthy(120)
        assert launcher.servers == []


def test_a_server_whose_port_was_taken_is_started_on_another(server_script, tmp_path):
    """Between the moment at which a port was free and the server's bind, another process may take it."""
    started = []
    with socket.socket() as taken, Launcher(tmp_path) as launcher:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def build(host, port, index):
            started.append(taken.getsockname()[1] if index == 1 and len(started) < 3 else port)
            return [sys.executable, str(server_script), str(started[-1])]

        launcher.start(build, count=2)
        addresses = launcher.wait_healthy(120)
        assert [int(address.rpartition(":")[2]) for address in addresses] == [started[0], started[-1]]
        assert len(started) == 4  # the second had to be started three times
        assert all(httpx.get(f"http://{address}/health", timeout=120).status_code == 200 for address in addresses)
        assert len(launcher.servers) == 2
        processes = [psutil.Process(server.pid) for server in launcher.servers]
    wait_gone(processes)


def test_a_server_that_is_too_slow_is_ended(tmp_path):
    with Launcher(tmp_path) as launcher:
        launcher.start(lambda host, port, index: [sys.executable, "-c", "import time; time.sleep(600)"])
        (server,) = launcher.servers
        with pytest.raises(EngineError, match="logged nothing for 1 s"):
            launcher.wait_healthy(1.0)
        assert server.exit_status is not None


SLOW = textwrap.dedent(
    """
    import http.server, sys, threading, time
    ready = threading.Event()
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if ready.is_set() else 503)
            self.end_headers()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    threading.Thread(target=server.serve_forever).start()
    for shard in range(int(sys.argv[2])):
        print("loaded shard", shard, flush=True)
        time.sleep(0.5)
    if sys.argv[2] != "0":
        ready.set()
    """
)


def test_a_server_may_load_as_long_as_its_log_moves(tmp_path):
    """Its lines about our own health checks do not count."""
    with Launcher(tmp_path) as launcher:
        launcher.start(lambda host, port, index: [sys.executable, "-c", SLOW, str(port), "16"])
        launcher.wait_healthy(5.0)
    with Launcher(tmp_path / "silent") as launcher:
        launcher.start(lambda host, port, index: [sys.executable, "-c", SLOW, str(port), "0"])
        with pytest.raises(EngineError, match=r"(?s)logged nothing for 5 s.*GET /health"):
            launcher.wait_healthy(5.0)


def test_a_command_that_ignores_requests_to_end_is_killed(server_script, tmp_path, monkeypatch):
    logs = tmp_path / "logs"
    with Launcher(logs) as launcher:
        launcher.start(lambda host, port, index: [sys.executable, str(server_script), str(port), "--stubborn"])
        launcher.wait_healthy(120)
        processes = family(logs)
    wait_gone(processes)


def test_a_killed_supervisor_takes_its_server_along(server_script, tmp_path):
    logs = tmp_path / "logs"
    with Launcher(logs) as launcher:
        launcher.start(lambda host, port, index: [sys.executable, str(server_script), str(port)])
        launcher.wait_healthy(120)
        (server,) = launcher.servers
        direct = family(logs)[0]
        os.kill(server.pid, signal.SIGKILL)
        wait_gone([direct])
        with pytest.raises(EngineError, match="ended with status"):
            launcher.check()
        for process in family(logs):  # a killed supervisor may leave descendants of its server, and nothing else
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, "raise", "exit", "abandon", "forked"])
def test_no_process_is_left_however_the_owner_ends(server_script, tmp_path, ending):
    owner, logs = tmp_path / "owner.py", tmp_path / "logs"
    owner.write_text(OWNER)
    shared = logs / "shared"
    shared.mkdir(parents=True)
    (shared / "weights").write_text("of this run")
    name = ending if isinstance(ending, str) else "wait"
    process = subprocess.Popen(
        [sys.executable, str(owner), str(server_script), str(logs), name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    forked: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        processes = family(logs) if isinstance(ending, signal.Signals) or ending == "forked" else []
        if isinstance(ending, signal.Signals):
            process.send_signal(ending)
        elif ending == "forked":
            itself = psutil.Process(process.pid)
            forked = [child for child in itself.children() if child.cmdline() == itself.cmdline()]
            assert len(forked) == 1
            process.kill()
        process.wait(120)
        wait_gone(processes or family(logs))  # where the owner ended by itself, what is still there of them
        deadline = time.monotonic() + 120
        while shared.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert all(map(is_alive, forked))
    finally:
        process.kill()
        process.wait()
        for child in forked:
            child.kill()


def test_a_client_is_told_at_once_which_of_its_servers_ended(server_script, tmp_path, monkeypatch):
    """The other one lives: waiting for the one that is gone would take all of ``setup_timeout``."""
    dies = "import time; time.sleep(0.5); print('out of memory'); raise SystemExit(3)"
    with Launcher(tmp_path) as launcher:
        commands = [[sys.executable, str(server_script)], [sys.executable, "-c", dies]]
        addresses = launcher.start(lambda host, port, index: [*commands[index], str(port)], count=2)
        client = SGLangClient(RolloutConfig(setup_timeout=300), addresses=addresses)
        client.own(launcher)
        port = int(addresses[1].rpartition(":")[2])  # that a server which build_cmd was asked for had before
        stale = BuiltCommand("127.0.0.1", [sys.executable, "-m", "sglang.launch_server"], 0.0, None)
        monkeypatch.setitem(BUILT_COMMANDS, port, stale)
        started = time.monotonic()
        with pytest.raises(EngineError, match=rf"{addresses[1]} ended with status 3\.[\s\S]*out of memory"):
            client.initialize()
        assert time.monotonic() - started < 120
