"""Python programs whose imports are done, in a real box that is used again."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from rollwright.errors import SandboxError, WorkflowError
from rollwright.processes.box import BoxLimits, BoxSpec
from rollwright.processes.boxes import make_box
from rollwright.processes.sandbox import check_sandbox
from rollwright.processes.warm_boxes import WarmBoxes
from rollwright.processes.warm_python import python_of

MODULE = """
import os, pathlib
imported_by, told = os.getpid(), os.environ.get("TOLD")
seen = []
pathlib.Path(os.environ["HOME"], "left-by-import").touch()
print("a line that nobody asked for")
"""
PROGRAM = """#!/usr/bin/env python3
import atexit, os, pathlib, signal, subprocess, sys, time
import slow

atexit.register(print, "at exit")
slow.seen.append(1)
print(__name__, __file__.rpartition("/")[2], sys.argv[1:], os.getcwd(), os.environ.get("KEY"), slow.told, len(slow.seen))
print(slow.imported_by != os.getpid(), sorted(os.listdir()), sorted(os.listdir(os.environ["HOME"])), file=sys.stderr)
exec(sys.stdin.read())
"""


@pytest.fixture(autouse=True)
def _boxes_start():
    try:
        check_sandbox("bubblewrap")
    except SandboxError as error:
        pytest.skip(f"bubblewrap does not work here: {error}")


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "slow.py").write_text(MODULE)
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return tmp_path


def boxes_of(programs: Path, modules=("slow",), program="program", most=2, made=None) -> WarmBoxes:
    def make():
        box = make_box("bubblewrap", BoxSpec(BoxLimits(output_bytes=5000), readable={"/opt/programs": programs}))
        if made is not None:
            made.append(box)
        return box

    def command(words):
        return ["sh", "-c", 'PATH="/opt/programs:$PATH" exec "$@"', "sh", *words]

    return WarmBoxes(make, command, program, modules, {"TOLD": "told"}, most)


async def test_each_run_is_a_new_program_in_a_new_box(programs):
    made: list = []
    boxes = boxes_of(programs, made=made)
    leave = (
        "slow.seen.append(2); pathlib.Path('left').touch(); pathlib.Path('/tmp/left').touch(); os.environ['LEFT'] = '1'; "
        "subprocess.Popen(['setsid', 'sleep', '3600']); sys.exit(3)"
    )
    look = "print(os.environ.get('LEFT'), os.listdir('/tmp'), os.popen('pgrep -c sleep').read())"
    results = []
    for source, key in ((leave, "one"), (look, "two")):
        async with boxes.lent() as warm:
            results.append(await warm.exec(["a b", "-c"], timeout=30, stdin=source, env={"KEY": key}))
            ended = await warm.box.exec(["pgrep", "-c", "sleep"], timeout=30)
            assert ended.stdout == "0\n"
    first, second = results
    assert first.stdout == "__main__ program ['a b', '-c'] /work one told 1\nat exit\n"
    assert first.stderr == second.stderr == "True [] []\n"
    assert (first.exit_code, first.excess) == (3, "")
    assert second.stdout == "__main__ program ['a b', '-c'] /work two told 1\nNone [] 0\n\nat exit\n"
    assert second.ok
    assert len(made) == 1


async def test_limits_and_errors_of_a_program(programs):
    made: list = []
    boxes = boxes_of(programs, made=made)
    async with boxes.lent() as warm:
        cut = await warm.exec([], timeout=1, stdin="print('begun', flush=True); subprocess.run(['sleep', '3600'])")
        assert (cut.exit_code, cut.excess, cut.stdout.splitlines()[1:]) == (None, "time", ["begun"])
        long = await warm.exec([], timeout=30, stdin="print('x' * 100000)")
        assert long.output_truncated
        assert len(long.stdout) == 5000
        failed = await warm.exec([], timeout=30, stdin="1 / 0")
        assert failed.exit_code == 1
        assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert "warm_python" not in failed.stderr
        killed = await warm.exec([], timeout=30, stdin="os.kill(os.getpid(), signal.SIGKILL)")
        assert killed.exit_code == -9
        running = asyncio.create_task(warm.exec([], timeout=30, stdin="pathlib.Path('kept').touch(); time.sleep(3600)"))
        waited = await warm.box.exec(["sh", "-c", "until [ -e kept ]; do sleep 0.05; done"], timeout=30)
        assert waited.ok
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert (await warm.box.exec(["ls"], timeout=30)).stdout == "kept\n"
        assert (await warm.exec([], timeout=30)).ok
    async with boxes.lent() as warm:
        assert (await warm.exec([], timeout=30)).ok
    assert len(made) == 1


@pytest.mark.parametrize(
    "harm",
    [
        "os.kill(slow.imported_by, signal.SIGKILL); time.sleep(60)",
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
        "os.setpriority(os.PRIO_PROCESS, slow.imported_by, 19)",
        "os.sched_setaffinity(slow.imported_by, {min(os.sched_getaffinity(0))})",
    ],
)
async def test_a_box_whose_process_was_harmed_is_not_used_again(programs, harm):
    if "affinity" in harm and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one processor")
    made: list = []
    boxes = boxes_of(programs, made=made)
    async with boxes.lent() as warm:
        result = await warm.exec([], timeout=30, stdin=harm)
        assert result.ok or result.excess == "the end of the process that started the program"
    async with boxes.lent() as warm:
        assert (await warm.exec([], timeout=30)).ok
    assert len(made) == 2


async def test_a_program_reads_nothing_of_the_process_that_stays(programs):
    boxes = boxes_of(programs)
    for source in (
        "print(open(f'/proc/{slow.imported_by}/mem', 'rb'))",
        "print(os.readlink(f'/proc/{slow.imported_by}/fd/0'))",
        "print(open(f'/proc/{slow.imported_by}/fd/3'))",
        "print(open(f'/proc/{slow.imported_by}/environ').read())",
        "print(len(os.listdir('/proc/self/fd')))",
    ):
        async with boxes.lent() as warm:
            result = await warm.exec([], timeout=30, stdin=source)
            if "imported_by" in source:
                assert "PermissionError" in result.stderr
    assert result.stdout.splitlines()[1] == "4"  # the standard streams, and the directory itself


@pytest.mark.parametrize(
    ("modules", "program", "said"),
    [
        (("slow", "nowhere"), "program", "nowhere cannot be imported: ModuleNotFoundError"),
        (("threads",), "program", "the import of threads starts a thread"),
        (("slow",), "shell", "/opt/programs/shell is no Python script"),
        (("slow",), "absent", "absent is not there"),
    ],
)
async def test_what_cannot_be_started_so_is_refused(programs, modules, program, said):
    (programs / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()"
    )
    (programs / "shell").write_text("#!/bin/sh\necho python3\n")
    (programs / "shell").chmod(0o755)
    made: list = []
    with pytest.raises(WorkflowError, match=said):
        async with boxes_of(programs, modules, program, made=made).lent():
            pass
    with pytest.raises(SandboxError, match="was stopped"):
        await made[0].exec(["true"], timeout=5)


def test_boxes_are_few_and_end_with_the_loop(programs):
    made: list = []

    async def episode(boxes):
        async with boxes.lent() as warm:
            return await warm.exec([], timeout=30)

    async def episodes():
        boxes = boxes_of(programs, most=2, made=made)
        return await asyncio.gather(*(episode(boxes) for _ in range(5)))

    assert all(result.ok for result in asyncio.run(episodes()))
    assert len(made) == 2
    assert all(box._process is None for box in made)


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/opt/x/bin/python3.11\nimport sys\n", "/opt/x/bin/python3.11"),
        ("#!/bin/sh\n'''exec' /opt/long/bin/python \"$0\" \"$@\"\n' '''\n", "/opt/long/bin/python"),
        ("#!/bin/sh\nexec node /usr/lib/x.js\n", ""),
        ("\x7fELF", ""),
    ],
)
def test_the_python_of_a_script(tmp_path, head, python):
    (tmp_path / "script").write_text(head)
    assert python_of(str(tmp_path / "script")) == python
