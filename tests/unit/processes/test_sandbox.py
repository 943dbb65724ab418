"""The sandboxes: each limit holds, ordinary code is not disturbed, and what is missing is told. For attacks: ``test_escapes``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
import textwrap
import time

import psutil
import pytest

from rollwright.errors import ConfigError, SandboxError
from rollwright.processes import bubblewrap, sandbox
from rollwright.processes.sandbox import SandboxLimits, SandboxResult, check_sandbox, close_jails, sandboxed

#: Limits in seconds where one has to pass: a machine that is too busy for one is given the next.
LIMITS = (0.5, 2.0, 8.0, 32.0)


@pytest.fixture(autouse=True)
def _real(bubblewrap):
    """Without it nothing here can be said."""


@pytest.fixture(params=["bubblewrap", "unsafe"])
def kind(request):
    """Each kind of sandbox that needs no image, all of whose scripts share a jail."""
    with sandboxed(request.param):
        yield request.param


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


def that_live(code: str = "def _become_script") -> list[psutil.Process]:
    """What runs below this process with that code in its command; by default, jails."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if any(code in word for word in child.cmdline()):
                found.append(child)
    return found


async def test_output_input_and_exit_code(kind):
    result = await run_python("name = input()\nprint('hello', name)", stdin="é\n")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("hello é\n", "", 0, True)
    assert (await run_python("import sys; sys.exit(7)")).exit_code == 7
    assert (await run_python("import sys; print(len(sys.stdin.read()))", "x" * 300_000)).stdout == "300000\n"
    assert (await run_python("print('\\ud800'.encode('utf-8', 'replace'), input())", "\ud800")).exit_code in (0, 1)


@pytest.mark.parametrize(("source", "message"), [("x = 1\n1/0", 'File "main.py", line 2'), ("def f(:", "SyntaxError")])
async def test_tracebacks_are_those_of_the_code(kind, source, message):
    result = await run_python(source)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "<string>" not in result.stderr


async def test_ordinary_programs_run(kind):
    source = """
        import asyncio, json, math, os, sqlite3, threading, tempfile, shutil, subprocess
        from collections import Counter
        from concurrent.futures import ThreadPoolExecutor
        async def f(): return 3
        assert asyncio.run(f()) == 3
        t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
        assert list(ThreadPoolExecutor(4).map(abs, [-1, 2])) == [1, 2]
        os.mkdir("d"); open("d/f", "w").write("1"); os.rename("d/f", "d/g"); shutil.rmtree("d")
        with tempfile.TemporaryFile("w") as file: file.write("x")
        assert sqlite3.connect("base").execute("select 6*7").fetchone() == (42,)
        os.unlink("base")
        print(open("/dev/stdin").read())
        if __name__ == "__main__": print(sorted(os.listdir()))
    """
    result = await run_python(textwrap.dedent(source), "read", memory_bytes=2**30)
    assert result.stderr == ""
    assert result.stdout == "thread\nread\n['main.py']\n"


async def test_packages_of_this_python_can_be_imported(bubblewrap):
    result = await run_python("import numpy; print(numpy.ones((64, 64)).dot(numpy.ones(64)).sum())", memory_bytes=2**31)
    assert (result.stdout, result.stderr) == ("4096.0\n", "")


async def test_time_is_limited_and_output_so_far_kept(kind):
    for limit in LIMITS:
        result = await run_python("print('begun', flush=True)\nwhile True: pass", timeout=limit)
        assert (result.timed_out, result.exit_code, result.ok) == (True, None, False)
        if result.stdout:
            break
    assert result.stdout == "begun\n"


async def test_processes_may_be_allowed_and_end_with_the_script(kind):
    """What it started holds the script's output open, and nobody waits for it."""
    limits = SandboxLimits(processes=1)
    source = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']); print('done')"
    result = await run_python(source, limits=limits)
    assert (result.stdout, result.seconds < 50) == ("done\n", True)
    await wait_until(lambda: not that_live("import time; time.sleep(3600)"))


async def test_memory_is_limited(kind):
    result = await run_python("x = bytearray(2**30)", memory_bytes=2**28)
    assert "MemoryError" in result.stderr
    assert (await run_python("x = bytearray(2**26)", memory_bytes=2**28)).ok


async def test_files_are_limited_in_size_and_number(kind):
    limits = SandboxLimits(file_bytes=1000, open_files=20)
    source = "open('a', 'wb', 0).write(b'x' * 2000)\nopen('a', 'ab', 0).write(b'x')"
    assert "File too large" in (await run_python(source, limits=limits)).stderr
    assert "Too many open files" in (await run_python("f = [open(str(i), 'w') for i in range(30)]", limits=limits)).stderr


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess; subprocess.run(['true'])",
        "import os; os.fork()",
        "import os; assert os.system('true') == 0, 'Operation not permitted'",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    ],
)
async def test_processes_are_refused(source):
    assert "Operation not permitted" in (await run_python(source)).stderr


async def test_the_network_is_out_of_reach_unless_allowed():
    async def answer(reader, writer):
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    source = f"import socket; print(socket.create_connection(('127.0.0.1', {port}), 2).recv(5).decode())"
    async with server:
        assert "ConnectionRefusedError" in (await run_python(source)).stderr
        assert (await run_python(source, limits=SandboxLimits(network=True))).stdout == "hello\n"


async def test_floods_of_output_are_cut(kind):
    result = await run_python("print('x' * 10**7)", limits=SandboxLimits(output_bytes=1000))
    assert result.ok
    assert result.output_truncated
    assert result.stdout == "x" * 1000


async def test_secrets_of_the_environment_stay_outside(kind, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    close_jails()
    assert (await run_python("import os; print(os.environ.get('MY_API_KEY'))")).stdout == "None\n"


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"memory_bytes": 1000}])
async def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(SandboxError, match="allow more than 0 s and 64 MiB"):
        await run_python("1", **wrong)


async def test_each_script_starts_afresh(kind):
    await run_python("import json, builtins; json.dumps = None; builtins.print = None; left = 1; open('left', 'w')")
    result = await run_python("import json, os; print(json.dumps({}), 'left' in globals(), os.listdir())")
    assert result.stdout == "{} False ['main.py']\n"
    draws = [(await run_python("import random, uuid; print(random.random(), uuid.uuid4())")).stdout for _ in range(2)]
    assert draws[0] != draws[1]


async def test_a_script_ends_as_it_would_in_an_interpreter_of_its_own(kind):
    source = """
        import atexit, pickle, sys, threading, time
        class Kept:
            def __del__(self): print("destructor")
        class Later(threading.Thread):
            def run(self): time.sleep(0.05); print("thread", pickle.loads(pickle.dumps(Kept)) is Kept)
        kept = Kept()
        Later().start()
        atexit.register(print, "atexit")
        sys.exit("sorry")
    """
    result = await run_python(textwrap.dedent(source))
    assert result.stdout == "thread True\natexit\ndestructor\n"
    assert (result.stderr, result.exit_code) == ("sorry\n", 1)
    assert (await run_python("import os; os.kill(os.getpid(), 9)")).exit_code == -9
    assert (await run_python("import sys; sys.stdout.close()")).ok


async def test_a_script_has_no_descriptors_but_its_own(kind):
    inherited = await run_python(
        "import os\nfor fd in range(3, 64):\n    try: print(fd, os.fstat(fd))\n    except OSError: pass"
    )
    assert inherited.stdout == ""


# -- jails and episodes ------------------------------------------------------------------------------------------------


async def test_an_episode_keeps_its_jail_and_no_other_gets_it():
    async def jail() -> str:
        return (await run_python("import os; print(os.readlink('/proc/self/ns/pid'))")).stdout

    with sandboxed():
        first = [await jail() for _ in range(3)]
        with sandboxed():
            inner = await jail()
    with sandboxed():
        second = await jail()
    assert len(set(first)) == 1
    assert len({first[0], inner, second, await jail(), await jail()}) == 5


async def test_an_episode_whose_scripts_run_at_once_has_several_jails():
    source = "import os, time; print(os.readlink('/proc/self/ns/pid')); time.sleep(1)"
    with sandboxed():
        results = await asyncio.gather(*(run_python(source) for _ in range(3)))
    assert len({result.stdout for result in results}) == 3


async def test_jails_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(sandbox, "JAILS_KEPT", 1)
    with sandboxed(), sandboxed() as inner:
        await run_python("1")
        with sandboxed():
            await run_python("1")
            assert [owner is inner for owner, _ in sandbox._idle.values()] == [False]
        assert (await run_python("print('again')")).stdout == "again\n"


async def test_many_scripts_wait_for_a_place_and_their_time_does_not_run(monkeypatch):
    monkeypatch.setattr(sandbox, "SCRIPTS_AT_ONCE", 2)
    started = time.monotonic()
    results = await asyncio.gather(*(run_python("import time; time.sleep(0.2); print('done')") for _ in range(9)))
    assert [result.stdout for result in results] == ["done\n"] * 9
    # Where two run at once, they ran for at most twice the time that passed; waits counted, it would be near five times.
    assert sum(result.seconds for result in results) < 2.5 * (time.monotonic() - started)


async def test_a_jail_that_was_killed_is_replaced(kind):
    assert (await run_python("1")).ok
    running = asyncio.create_task(run_python("import time; time.sleep(3600)", timeout=3600))
    await asyncio.sleep(0.3)
    for jail in that_live():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
            jail.kill()
    result = await running
    assert (result.exit_code, result.timed_out) == (-9, False)
    assert "the script ended its jail" in result.stderr
    close_jails()
    assert (await run_python("print('again')")).stdout == "again\n"


async def test_a_caller_that_gives_up_ends_its_script(kind):
    close_jails()
    with sandboxed(kind):
        running = asyncio.create_task(run_python("import time; time.sleep(3600)", timeout=3600))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    close_jails()
    await wait_until(lambda: not that_live())


async def test_nothing_is_left_behind(kind, tmp_path, monkeypatch):
    close_jails()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with sandboxed(kind):
        await run_python("open('left', 'w').write('x')")
        await run_python("while True: pass", timeout=0.2)
    close_jails()
    await wait_until(lambda: not that_live() and not os.listdir(tmp_path))


def test_it_runs_on_several_event_loops(kind):
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

    await run_python("pass")
    source = "import time; time.sleep(0.3); print('done')"
    for limit in LIMITS:
        result, _ = await asyncio.gather(run_python(source, timeout=limit), stands_still(limit + 0.1))
        if not result.timed_out:
            break
    assert (result.stdout, result.timed_out, result.exit_code) == ("done\n", False, 0)


def test_a_forked_child_starts_jails_of_its_own():
    """Whoever forks (``multiprocessing`` on Linux) must not talk to its parent's jails."""
    assert asyncio.run(run_python("1")).ok
    child = os.fork()
    if child == 0:
        os._exit(0 if not sandbox._idle and sandbox._starter is None and not sandbox._ready else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- what is missing ---------------------------------------------------------------------------------------------------


def bwrap_that(tmp_path, monkeypatch, body: str) -> None:
    """Put a ``bwrap`` of our own before the real one."""
    file = tmp_path / "bwrap"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    close_jails()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("bwrap: No permissions to create new namespace, likely because the kernel", "forbids user namespaces"),
        ("bwrap: setting up uid map: Permission denied", "apparmor_restrict_unprivileged_userns"),
        ("bwrap: Unknown option --disable-userns", r"bubblewrap 0\.8 or later is needed"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "Can't mount proc"),
    ],
)
def test_a_machine_that_forbids_jails_is_told_with_what_to_do(tmp_path, monkeypatch, said, told):
    bwrap_that(tmp_path, monkeypatch, f'echo "{said}" >&2; exit 1')
    with pytest.raises(SandboxError, match=told) as refused:
        check_sandbox("bubblewrap")
    assert said in str(refused.value)
    assert "unsafe" in str(refused.value)
    close_jails()


def test_without_bubblewrap_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    close_jails()
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*rollout\.sandbox.*unsafe"):
        check_sandbox("bubblewrap")
    with pytest.raises(SandboxError, match="docker is not installed"):
        check_sandbox("docker")
    close_jails()


def test_without_libseccomp_the_message_says_what_to_install(monkeypatch):
    bubblewrap.call_filters.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "pyseccomp", None)
    close_jails()
    with pytest.raises(SandboxError, match=r"apt-get install libseccomp2.*pip install 'rollwright\[sandbox\]'"):
        check_sandbox("bubblewrap")
    close_jails()


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match="there is no sandbox 'chroot'"):
        check_sandbox("chroot")


async def test_a_python_in_tmp_runs_scripts_elsewhere(monkeypatch):
    """What is bound below /tmp cannot be cleaned away after a script."""
    paths = bubblewrap.python_paths()
    with tempfile.TemporaryDirectory(dir="/tmp") as environment:
        monkeypatch.setattr(bubblewrap, "python_paths", lambda: [*paths, environment])
        close_jails()
        with sandboxed():
            for _ in range(2):
                result = await run_python("import os; print(os.getcwd(), os.listdir())")
                assert result.stdout == "/scratch ['main.py']\n"
        close_jails()
