"""Attempts to leave the real sandbox: each is contained, the next script runs, and nothing is left behind.

``test_sandbox`` has the limits and ordinary code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from attacks import (
    COUNT_PROCESSES,
    DISK_FILL,
    EMPTY_FILES,
    FORGERY,
    FORK_BOMB,
    MEMORY_OF_FOUR,
    ON_DEVICES,
    ON_READ_ONLY_FILES,
    ON_SECRETS,
    ON_THE_SERVER,
    PRIVILEGES,
    REFUSED_CALLS,
    RUNAWAYS,
    SURVIVOR,
    THREAD_BOMB,
    UNCOUNTED_MEMORY,
    Attack,
    by_links,
    flood,
    is_x86,
    on_files_outside,
    on_the_network,
    on_the_root,
    signals_to,
)

from rollwright.processes.sandbox import SandboxLimits, SandboxResult, close_jails, run_python, sandboxed


@pytest.fixture(autouse=True)
def _jail(bubblewrap, tmp_path):
    """One jail for a test; what a test tries leaves no process and no file outside, and the next script runs."""
    before = machine()
    others = children()
    with sandboxed(bubblewrap):
        yield
        result = asyncio.run(run_python("import os; print(6 * 7, os.listdir('.'), os.listdir('/dev/shm'))", timeout=60))
    assert (result.stdout, result.stderr) == ("42 ['main.py'] []\n", "")
    close_jails()
    deadline = time.monotonic() + 30
    while left := [child for child in children() - others if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert machine() == before


def children() -> set[psutil.Process]:
    """What runs below this process; other tests may have left some of it."""
    return set(psutil.Process().children(recursive=True))


def machine() -> list[object]:
    """What no script may change."""
    return [
        os.getcwd(),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/sys/kernel/core_pattern").read_text(),
        os.stat("/dev/null").st_mode,
    ]


async def script(source: str, *, timeout: float = 60.0, **limits) -> SandboxResult:
    return await run_python(textwrap.dedent(source), timeout=timeout, limits=SandboxLimits(**limits))


async def stays(*attacks: Attack, **limits) -> None:
    """Assert that attacks are contained."""
    for attack in attacks:
        attack.check(await script(attack.source, **limits))


async def refused(source: str, **limits) -> None:
    """Assert that a script fails because it may not, or because what it wants is not there."""
    await stays(Attack(source), **limits)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def treasure(tmp_path) -> Path:
    file = tmp_path / "own" / "treasure"
    file.parent.mkdir()
    file.write_text("gold")
    return file


async def test_files_outside_are_not_there(treasure):
    await stays(
        *on_files_outside(treasure), Attack("open('/etc/passwd')"), Attack("import rollwright", ["ModuleNotFoundError"])
    )
    assert treasure.read_text() == "gold"
    assert [path.name for path in treasure.parent.iterdir()] == ["treasure"]


async def test_what_is_there_cannot_be_written():
    await stays(ON_READ_ONLY_FILES)


async def test_every_place_that_can_be_written_is_bounded():
    """Disk fill: of the working directory, of shared memory, and of wherever else a file can be made."""
    result = await script(DISK_FILL, disk_bytes=32 * 2**20)
    assert result.ok, result
    assert 32 * 2**20 <= int(result.stdout) <= 50 * 2**20


async def test_files_without_content_are_bounded_too():
    result = await script(EMPTY_FILES, timeout=120)
    assert "sandbox: more than 10000 files" in result.stderr


async def test_links_lead_nowhere(treasure):
    await stays(*by_links(treasure))
    assert treasure.read_text() == "gold"


async def test_the_root_is_the_root(treasure):
    await stays(*on_the_root(treasure))
    result = await script("import os; print(sorted(os.listdir('/')))")
    assert not {"home", "var", "sys", "boot", "opt"} & set(eval(result.stdout))  # noqa: S307 - of names


async def test_no_device_but_the_harmless_ones():
    await stays(*ON_DEVICES)


# -- what the machine tells ---------------------------------------------------------------------------------------------


async def test_the_environment_and_other_processes_are_not_seen(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret-key")
    close_jails()
    await stays(ON_SECRETS)
    result = await script("""
        import os
        print({int(name) for name in os.listdir("/proc") if name.isdigit()} == {1, os.getpid()}, os.uname().nodename, os.getuid())
    """)
    assert result.stdout == "True sandbox 65534\n"


async def test_the_server_is_out_of_reach():
    await stays(*ON_THE_SERVER)
    await stays(
        Attack("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", ["not allowed to raise maximum limit"])
    )


# -- the network -------------------------------------------------------------------------------------------------------


async def test_no_network_in_any_family():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        await stays(*on_the_network(port))


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_fork_bomb():
    await refused("import os\nwhile True: os.fork()")
    result = await script(FORK_BOMB, processes=10, timeout=30)
    assert not result.ok
    assert result.timed_out or "sandbox: more than" in result.stderr


@is_x86
async def test_a_bomb_of_threads_that_python_does_not_know():
    result = await script(THREAD_BOMB, timeout=30)
    assert not result.ok, result
    assert result.timed_out or "sandbox: more than 256 threads" in result.stderr, result


async def test_no_survivor():
    """A double fork in a session of its own outlives the script that started it, not the call."""
    assert (await script(SURVIVOR, processes=8)).ok
    result = await script(
        "import os, time; time.sleep(0.3); print(os.listdir('.'), len([n for n in os.listdir('/proc') if n.isdigit()]))"
    )
    assert result.stdout == "['main.py'] 2\n"


async def test_processes_of_its_own_that_fork_away_from_being_killed():
    await script(RUNAWAYS, processes=16, timeout=1.0)
    assert (await script(COUNT_PROCESSES)).stdout == "2\n"


async def test_fork_exec_without_an_audit_event():
    await refused(
        "import _posixsubprocess, os; _posixsubprocess.fork_exec([b'/bin/true'], [b'/bin/true'], True, (), None, None, -1, -1, -1, -1, -1, -1, *os.pipe(), True, False, 0, None, None, None, -1, None, True)"
    )
    await refused("import ctypes; libc = ctypes.CDLL(None, use_errno=True); assert libc.fork() >= 0, 'Operation not permitted'")
    await refused("import ctypes; assert ctypes.CDLL(None).system(b'true') == 0, 'Operation not permitted'")


# -- signals -----------------------------------------------------------------------------------------------------------


async def test_no_signal_gets_out():
    victim = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        result = await script(signals_to([os.getpid(), victim.pid]))
        assert result.stdout == "alive\n", result
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


BACKGROUND = """
import asyncio, os, sys, time
from rollwright.processes.sandbox import run_python
leader = os.getpgid(0)
while leader != os.getpid() and os.path.exists(f"/proc/{leader}"): time.sleep(0.01)
attack = f'''
import os
for target in ({leader}, {os.getpid()}):
    for send in (os.kill, os.killpg):
        try: send(target, 9)
        except OSError as error: print(type(error).__name__)
'''
print(asyncio.run(run_python(attack, timeout=60)).stdout.split(), flush=True)
"""


def test_a_run_whose_group_has_lost_its_leader_lives(tmp_path):
    """A shell that starts a run in the background and ends leaves a process group without a leader."""
    out = tmp_path / "out"
    shell = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1" >"$2" 2>&1 & sleep 0.2', sys.executable, BACKGROUND, str(out)], start_new_session=True
    )
    assert shell.wait() == 0
    deadline = time.monotonic() + 60
    while not out.read_text().endswith("\n"):
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.05)
    assert out.read_text() == "['ProcessLookupError', 'ProcessLookupError', 'ProcessLookupError', 'ProcessLookupError']\n"


# -- memory and output -------------------------------------------------------------------------------------------------


async def test_memory_of_one_and_of_several_processes():
    result = await script("x = []\nwhile True: x.append(bytearray(2**24))", memory_bytes=2**28)
    assert "MemoryError" in result.stderr
    result = await script(MEMORY_OF_FOUR, memory_bytes=2**28, processes=8)
    assert f"sandbox: more than {2**28} bytes of memory" in result.stderr


@is_x86
async def test_memory_that_no_limit_counts():
    await stays(*UNCOUNTED_MEMORY)


async def test_floods_of_output_in_every_way():
    for stream in (1, 2):
        result = await script(flood(stream), timeout=1.0, output_bytes=1000)
        assert (result.timed_out, result.output_truncated) == (True, True)
        assert len(result.stdout) + len(result.stderr) == 1000
    both = await script(
        "import sys\nfor _ in range(2000): print('x' * 1000); print('y' * 1000, file=sys.stderr)", output_bytes=10
    )
    assert (both.ok, both.stdout, both.stderr) == (True, "x" * 10, "y" * 10)
    odd = await script(r"import os; os.write(1, bytes(range(256)) + b'\0\n{}\n')")
    assert odd.ok


async def test_answers_cannot_be_forged():
    """A script that finds the server's channel could say that it succeeded."""
    assert (await script(FORGERY)).exit_code == 3


# -- the kernel --------------------------------------------------------------------------------------------------------


@is_x86
async def test_calls_that_lead_out_are_refused():
    await stays(*REFUSED_CALLS, processes=4)


async def test_no_capability_and_no_new_privilege():
    await stays(PRIVILEGES)


def test_a_jail_ends_with_a_process_that_is_killed(tmp_path):
    code = "import asyncio\nfrom rollwright.processes.sandbox import run_python\nasyncio.run(run_python('import time; time.sleep(3600)', timeout=3600))"
    run = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(run.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert alive == []
