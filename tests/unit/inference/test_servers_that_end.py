"""A server that its user started from ``build_cmd`` and that died ends ``initialize`` at once; anything else is waited for."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollwright import LocalServerConfig, SGLangConfig, VLLMConfig
from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.launcher import ended_child
from rollwright.inference.network import find_free_ports

DIES = [sys.executable, "-c", "raise SystemExit(3)"]


@pytest.fixture
def port():
    return find_free_ports(1)[0]


@pytest.fixture
def start():
    started = []

    def start(command):
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def zombie(process):
    """Wait until it has ended, without waiting for it as its parent does."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_polled", [False, True])
def test_initialize_ends_with_the_server(port, start, is_polled):
    command = SGLangConfig.build_cmd(SGLangConfig(implementation="builtin", model_path="missing"), port=port)
    process = start(DIES)
    process.wait() if is_polled else zombie(process)
    client = SGLangClient(RolloutConfig(setup_timeout=300), addresses=[f"localhost:{port}"])
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"server at localhost:{port} ended before it was healthy") as raised:
        client.initialize()
    assert time.monotonic() - began < 60
    assert command[-1] in str(raised.value)


def test_a_child_that_ended_before_says_nothing(port, start):
    zombie(start(DIES))
    time.sleep(0.2)  # the kernel counts in hundredths
    LocalServerConfig.build_cmd(LocalServerConfig(model_path="m"), port=port)
    assert ended_child(f"127.0.0.1:{port}") is None


@pytest.mark.parametrize("config", [LocalServerConfig(model_path="m"), VLLMConfig(model_path="m", env={"A": "1"})])
def test_a_server_that_runs_is_waited_for(port, start, config):
    command = type(config).build_cmd(config, port=port)
    zombie(start(DIES))
    assert ended_child(f"127.0.0.1:{port}") is not None
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    start([*waits, *command[command.index("-m") - 1 :]])  # a wrapper of it
    assert ended_child(f"127.0.0.1:{port}") is None


def test_other_addresses_are_waited_for(port, start):
    LocalServerConfig.build_cmd(LocalServerConfig(model_path="m"), port=port)
    zombie(start(DIES))
    assert ended_child(f"10.0.0.1:{port}") is None
    assert ended_child(f"127.0.0.1:{port + 1 if port < 65535 else 1}") is None


def test_servers_that_were_launched_for_the_client_say_why_they_ended(port):
    class Launched:
        def check(self, address=None):
            raise EngineError("The end of server.log:\nno such model")

        def close(self): ...

    client = SGLangClient(RolloutConfig(setup_timeout=300), addresses=[f"127.0.0.1:{port}"])
    client.own(Launched())
    with pytest.raises(EngineError, match="no such model"):
        client.initialize()
