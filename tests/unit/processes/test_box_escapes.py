"""Attempts to leave real boxes: each is contained, the box goes on, and nothing is left behind.

``attacks`` has the scripts, which ``test_escapes`` tries on the sandbox's jails. All attacks on one kind share a box, which is reset
after each test; those that may break it have one of their own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
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

from rollwright.processes.box import Box, BoxLimits, BoxSpec, ExecResult
from rollwright.processes.boxes import make_box
from rollwright.processes.pids_limit import pids_limited
from tests.conftest import usable_box

#: The boxes that isolate. ``unsafe`` does not, and is attacked by nobody.
KINDS = ("bubblewrap", "http", "docker", "podman")
PROCESSES = 64
LIMITS = BoxLimits(memory_bytes=2**28, disk_bytes=32 * 2**20, processes=PROCESSES, output_bytes=1000)
#: Box server, the keeper of the command, and the command.
OWN_PROCESSES = "3\n"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def started(name: str):
    """A box that is stopped at the end."""
    box = make_box(name, BoxSpec(limits=LIMITS))
    await box.start()
    try:
        yield box
    finally:
        await box.stop()


async def script(box: Box, source: str, timeout: float = 60.0) -> ExecResult:
    return await box.exec(["python3", "-c", source], timeout=timeout)


async def stays(box: Box, *attacks: Attack) -> None:
    """Assert that attacks are contained."""
    for attack in attacks:
        attack.check(await script(box, attack.source))


async def is_new(box: Box) -> None:
    """Reset a box, and assert that it works and has nothing of what ran in it."""
    await box.reset()
    assert (await script(box, COUNT_PROCESSES)).stdout == OWN_PROCESSES
    directories = [*box.spec.writable, "/dev/shm"]
    left = await box.exec(["find", *directories, "-mindepth", "1"], timeout=60)
    assert (left.ok, left.stdout, left.stderr) == (True, "", "")


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return usable_box(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_box(kind):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_KEY", "secret-key")
        async with started(kind) as box:
            yield box


@pytest_asyncio.fixture(loop_scope="module")
async def box(shared_box):
    before = machine()
    yield shared_box
    await is_new(shared_box)
    assert machine() == before


def machine() -> list[object]:
    """What no program may change."""
    return [
        os.getcwd(),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/sys/kernel/core_pattern").read_text(),
        os.stat("/dev/null").st_mode,
    ]


@pytest.fixture
def treasure(tmp_path) -> Path:
    file = tmp_path / "own" / "treasure"
    file.parent.mkdir()
    file.write_text("gold")
    return file


# -- files -------------------------------------------------------------------------------------------------------------


async def test_files_outside_are_not_there(box, treasure):
    await stays(box, *on_files_outside(treasure))
    assert treasure.read_text() == "gold"
    assert [path.name for path in treasure.parent.iterdir()] == ["treasure"]


async def test_what_is_there_cannot_be_written(box):
    await stays(box, ON_READ_ONLY_FILES)


async def test_every_place_that_can_be_written_is_bounded(box):
    result = await script(box, f"{DISK_FILL}\nimport time; time.sleep(60)")
    assert result.excess == f"more than {LIMITS.disk_bytes} bytes of files", result


async def test_files_without_content_are_bounded_too(box):
    assert (await script(box, EMPTY_FILES, timeout=120)).excess == "more than 100000 files"


async def test_links_lead_nowhere(box, treasure):
    await stays(box, *by_links(treasure))
    assert treasure.read_text() == "gold"


async def test_the_root_is_the_root(box, treasure):
    await stays(box, *on_the_root(treasure))


async def test_no_device_but_the_harmless_ones(box):
    await stays(box, *ON_DEVICES)


# -- what the machine tells, and the server ----------------------------------------------------------------------------


async def test_the_environment_and_other_processes_are_not_seen(box):
    await stays(box, ON_SECRETS)
    result = await script(box, f"import os; print(os.uname().nodename, os.getuid())\n{COUNT_PROCESSES}")
    assert result.stdout == f"box 1000\n{OWN_PROCESSES}"


async def test_the_server_is_out_of_reach(box):
    await stays(box, *ON_THE_SERVER)


async def test_answers_cannot_be_forged(box):
    """A program that finds the server's channel could say that another one succeeded."""
    assert (await script(box, FORGERY)).exit_code == 3


# -- the network -------------------------------------------------------------------------------------------------------


async def test_no_network_in_any_family(box):
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        await stays(box, *on_the_network(server.sockets[0].getsockname()[1]))


# -- processes and signals ---------------------------------------------------------------------------------------------


@pytest.fixture
def bounded(kind) -> str:
    """A kind in which the kernel limits the number of processes: nothing else stops a bomb in time."""
    if kind == "bubblewrap" and os.geteuid() == 0:
        limited, clean = pids_limited(["true"], PROCESSES)
        clean()
        if limited == ["true"]:
            pytest.skip("root cannot make a control group here, which limits the processes of a bubblewrap box of root")
    return kind


async def test_a_fork_bomb(bounded):
    async with started(bounded) as box:
        most = await most_processes_during(script(box, FORK_BOMB, timeout=20))
        assert most <= PROCESSES + 40
        await is_new(box)


@is_x86
async def test_a_bomb_of_threads_that_python_does_not_know(bounded):
    async with started(bounded) as box:
        assert (await script(box, THREAD_BOMB, timeout=20)).excess == f"more than {PROCESSES} processes and threads"
        await is_new(box)


async def test_processes_that_fork_away_from_being_killed(bounded):
    async with started(bounded) as box:
        await script(box, RUNAWAYS, timeout=1.0)
        await is_new(box)


async def most_processes_during(awaited) -> int:
    """Run a command that exceeds a limit, and return by how many processes this machine had more meanwhile."""
    before, most = len(psutil.pids()), 0
    running = asyncio.ensure_future(awaited)
    while not running.done():
        await asyncio.wait({running}, timeout=0.05)
        most = max(most, len(psutil.pids()) - before)
    assert running.result().excess
    return most


async def test_no_survivor(box):
    assert (await script(box, SURVIVOR)).ok
    size = await script(box, "import os; print(os.path.getsize('mark'))")
    await asyncio.sleep(0.2)
    assert (await script(box, "import os; print(os.path.getsize('mark'))")).stdout == size.stdout
    assert (await script(box, COUNT_PROCESSES)).stdout == OWN_PROCESSES


async def test_no_signal_gets_out(box):
    """A program may end its own keeper, and itself with it; nothing else."""
    victim = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        await script(box, signals_to([os.getpid(), victim.pid]))
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


# -- memory and output -------------------------------------------------------------------------------------------------


async def test_memory_of_one_and_of_several_processes(box):
    for source in ("x = []\nwhile True: x.append(bytearray(b'1') * 2**24)", MEMORY_OF_FOUR):
        assert (await script(box, source)).excess == f"more than {LIMITS.memory_bytes} bytes of memory"


@is_x86
async def test_memory_that_no_limit_counts(box):
    await stays(box, *UNCOUNTED_MEMORY)


async def test_floods_of_output_in_every_way(box):
    for stream in (1, 2):
        result = await script(box, flood(stream), timeout=0.5)
        assert (result.excess, result.output_truncated) == ("time", True)
        assert len(result.stdout) + len(result.stderr) == LIMITS.output_bytes


# -- the kernel --------------------------------------------------------------------------------------------------------


@is_x86
async def test_calls_that_lead_out_are_refused(box):
    await stays(box, *REFUSED_CALLS)


async def test_no_capability_and_no_new_privilege(box):
    await stays(box, PRIVILEGES)
