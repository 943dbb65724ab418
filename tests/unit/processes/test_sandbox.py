"""The Python sandbox: each limit holds, and ordinary code is not disturbed."""

from __future__ import annotations

import asyncio
import os
import tempfile
import textwrap
import time

import psutil
import pytest

from rollwright.errors import RewardError
from rollwright.processes import sandbox
from rollwright.processes.sandbox import ForkServer, SandboxLimits, SandboxResult

#: Limits in seconds where one has to pass: a machine that is too busy for one is given the next.
LIMITS = (0.5, 2.0, 8.0, 32.0)


async def run_python(
    source: str, stdin: str = "", timeout: float = 60.0, memory_bytes: int | None = None, **options
) -> SandboxResult:
    """In the sandbox, with a limit that a busy machine keeps."""
    return await sandbox.run_python(source, stdin, timeout, memory_bytes, **options)


async def wait_until(what) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_output_input_and_exit_code():
    result = await run_python("name = input()\nprint('hello', name)", stdin="é\n")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("hello é\n", "", 0, True)
    assert (await run_python("import sys; sys.exit(7)")).exit_code == 7


@pytest.mark.parametrize(("source", "message"), [("x = 1\n1/0", 'File "main.py", line 2'), ("def f(:", "SyntaxError")])
async def test_tracebacks_are_those_of_the_code(source, message):
    result = await run_python(source)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "sandbox_script" not in result.stderr


async def test_ordinary_programs_run():
    source = """
        import asyncio, json, math, os, threading, tempfile, shutil
        from collections import Counter
        async def f(): return 3
        assert asyncio.run(f()) == 3
        t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
        os.mkdir("d"); open("d/f", "w").write("1"); os.rename("d/f", "d/g"); shutil.rmtree("d")
        with tempfile.TemporaryFile("w") as file: file.write("x")
        if __name__ == "__main__": print(sorted(os.listdir()))
    """
    result = await run_python(textwrap.dedent(source))
    assert result.stderr == ""
    assert result.stdout == "thread\n['main.py']\n"


async def test_time_is_limited_and_output_so_far_kept():
    for limit in LIMITS:
        result = await run_python("print('begun', flush=True)\nwhile True: pass", timeout=limit)
        assert (result.timed_out, result.exit_code, result.ok) == (True, None, False)
        if result.stdout:
            break
    assert result.stdout == "begun\n"


async def test_what_it_started_is_killed_with_it():
    """It holds the script's output open, and nobody waits for it."""
    source = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid)"
    result = await run_python(source, limits=SandboxLimits(processes=1))
    assert result.ok
    left = int(result.stdout)
    await wait_until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE)


async def test_memory_is_limited():
    result = await run_python("x = bytearray(2**30)", memory_bytes=2**28)
    assert "MemoryError" in result.stderr
    assert (await run_python("x = bytearray(2**26)", memory_bytes=2**28)).ok


async def test_files_are_limited_in_size_number_and_place(tmp_path):
    limits = SandboxLimits(file_bytes=1000, open_files=20)
    assert (
        "File too large"
        in (await run_python("open('a', 'wb', 0).write(b'x' * 2000)\nopen('a', 'ab', 0).write(b'x')", limits=limits)).stderr
    )
    assert "Too many open files" in (await run_python("f = [open(str(i), 'w') for i in range(30)]", limits=limits)).stderr
    treasure = tmp_path / "own" / "treasure"
    treasure.parent.mkdir()
    treasure.write_text("gold")
    for source in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(treasure)!r}, 'a')",
        f"import os; os.remove({str(treasure)!r})",
        f"import os; os.rename({str(treasure)!r}, 'mine')",
        f"import os; os.chdir({str(treasure.parent)!r}); os.remove('treasure')",
        f"import os; os.remove('treasure', dir_fd=os.open({str(treasure.parent)!r}, os.O_RDONLY))",
        f"import shutil; shutil.rmtree({str(treasure.parent)!r})",
        f"import os; os.symlink({str(treasure)!r}, 'link'); open('link', 'w')",
        f"import os; os.truncate({str(treasure)!r}, 0)",
    ):
        result = await run_python(source)
        assert "PermissionError: sandbox" in result.stderr, source
        assert treasure.read_text() == "gold"
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    assert (await run_python(f"print(open({str(treasure)!r}).read())")).stdout == "gold\n"


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    ],
)
async def test_processes_are_limited(source):
    assert "no more than 0 processes may be started" in (await run_python(source)).stderr


async def test_the_network_is_out_of_reach():
    async def answer(reader, writer):
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    source = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 2).recv(5).decode())"
    async with server:
        assert "PermissionError: sandbox: the network" in (await run_python(source)).stderr
        assert (await run_python(source, limits=SandboxLimits(network=True))).stdout == "hello\n"
    for other in ("import socket; socket.getaddrinfo('localhost', 80)", "import socket; socket.socket()"):
        assert "PermissionError: sandbox: the network" in (await run_python(other)).stderr


async def test_floods_of_output_are_cut():
    result = await run_python("print('x' * 10**7)", limits=SandboxLimits(output_bytes=1000))
    assert result.ok
    assert result.output_truncated
    assert result.stdout == "x" * 1000


async def test_secrets_of_the_environment_stay_outside(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    assert (await run_python("import os; print(os.environ.get('MY_API_KEY'))")).stdout == "None\n"


async def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await run_python("open('left', 'w').write('x')")
    await run_python("while True: pass", timeout=0.2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"memory_bytes": 1000}])
async def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(RewardError, match="allow more than 0 s and 64 MiB"):
        await run_python("1", **wrong)


async def test_each_script_starts_afresh():
    await run_python("import json, builtins; json.dumps = None; builtins.print = None; left = 1")
    result = await run_python("import json, os; print(json.dumps({}), 'left' in globals(), os.listdir())")
    assert result.stdout == "{} False ['main.py']\n"
    draws = [(await run_python("import random, uuid; print(random.random(), uuid.uuid4())")).stdout for _ in range(2)]
    assert draws[0] != draws[1]


async def test_a_script_ends_as_it_would_in_an_interpreter_of_its_own():
    source = """
        import atexit, pickle, sys, threading, time
        class Kept:
            def __del__(self): print("destructor", sys.argv)
        class Later(threading.Thread):
            def run(self): time.sleep(0.05); print("thread", pickle.loads(pickle.dumps(Kept)) is Kept)
        kept = Kept()
        Later().start()
        atexit.register(print, "atexit")
        sys.exit("sorry")
    """
    result = await run_python(textwrap.dedent(source))
    assert result.stdout == "thread True\natexit\ndestructor ['main.py']\n"
    assert (result.stderr, result.exit_code) == ("sorry\n", 1)
    assert (await run_python("import os; os.kill(os.getpid(), 9)")).exit_code == -9
    assert (await run_python("import sys; sys.stdout.close()")).ok


async def test_other_processes_get_no_signals():
    for source in (
        f"import os; os.kill({os.getpid()}, 15)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        f"import os; os.killpg({os.getpgid(0)}, 9)",
    ):
        assert "PermissionError: sandbox: signals" in (await run_python(source)).stderr, source


async def test_much_input_and_no_descriptors_but_its_own():
    assert (await run_python("import sys; print(len(sys.stdin.read()))", "x" * 300_000)).stdout == "300000\n"
    inherited = await run_python(
        "import os\nfor fd in range(3, 64):\n    try: print(fd, os.fstat(fd))\n    except OSError: pass"
    )
    assert inherited.stdout == ""


async def test_many_scripts_wait_for_a_place_and_their_time_does_not_run(monkeypatch):
    monkeypatch.setattr(sandbox, "SCRIPTS_AT_ONCE", 2)
    started = time.monotonic()
    results = await asyncio.gather(*(run_python("import time; time.sleep(0.2); print('done')") for _ in range(9)))
    assert [result.stdout for result in results] == ["done\n"] * 9
    # Where two run at once, they ran for at most twice the time that passed; waits counted, it would be near five times.
    assert sum(result.seconds for result in results) < 2.5 * (time.monotonic() - started)


async def test_a_fork_server_that_was_killed_is_replaced_and_takes_its_scripts_along(tmp_path):
    assert (await run_python("1")).ok
    server = ForkServer.shared(False)
    running = asyncio.create_task(run_python("import time; time.sleep(3600)", timeout=3600))
    await wait_until(_scripts_that_run)
    server._process.kill()
    with pytest.raises(RewardError, match="fork server has ended"):
        await running
    server._process.wait()
    assert (await run_python("print('again')")).stdout == "again\n"


async def test_a_caller_that_gives_up_ends_its_script():
    assert (await run_python("1")).ok  # the fork server is there
    running = asyncio.create_task(run_python("import time; time.sleep(3600)", timeout=3600))
    await wait_until(_scripts_that_run)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_until(lambda: not _scripts_that_run())


def _scripts_that_run():
    return psutil.Process(ForkServer.shared(False)._process.pid).children()


def test_it_runs_on_several_event_loops():
    assert [asyncio.run(run_python(f"print({n})")).stdout for n in range(2)] == ["0\n", "1\n"]


async def test_no_output_is_lost_where_the_event_loop_stands_still():
    running = asyncio.create_task(run_python("print('x' * 100_000)"))
    await asyncio.sleep(0.05)
    time.sleep(2.2)  # noqa: ASYNC251 - that is what is tested
    result = await running
    assert result.stdout == "x" * 100_000 + "\n"
    assert result.ok


async def test_a_script_that_ended_in_time_has_whenever_the_event_loop_looks():
    async def stands_still(seconds):
        await asyncio.sleep(0.2)
        time.sleep(seconds)  # noqa: ASYNC251 - that is what is tested

    await run_python("pass")  # the fork server is there
    source = "import time; time.sleep(0.3); print('done')"
    for limit in LIMITS:
        result, _ = await asyncio.gather(run_python(source, timeout=limit), stands_still(limit + 0.1))
        if not result.timed_out:
            break
    assert (result.stdout, result.timed_out, result.exit_code) == ("done\n", False, 0)
