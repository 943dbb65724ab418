"""Boxes: commands, files, limits, what programs reach, and what is left. For attacks: ``test_box_escapes``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rollwright.errors import RefusedFilesError, SandboxError
from rollwright.processes.box import BoxLimits, BoxSpec
from rollwright.processes.boxes import BOXES, make_box
from tests.conftest import usable_box

LIMITS = BoxLimits(memory_bytes=2**28, disk_bytes=32 * 2**20, processes=64, output_bytes=1000)
#: Node as scripts/make_client_envs.sh installs it.
NODE = Path(os.environ.get("ROLLWRIGHT_CLIENT_ENVS", Path(__file__).parents[3]), ".venv-clients-node").resolve()


@asynccontextmanager
async def started(name: str = "bubblewrap", **spec):
    """A box that is stopped at the end."""
    box = make_box(name, BoxSpec(**{"limits": LIMITS, **spec}))
    await box.start()
    try:
        yield box
    finally:
        await box.stop()


@pytest.fixture(params=["bubblewrap", "http", "docker", "podman"])
def kind(request) -> str:
    """Each kind of box that isolates."""
    return usable_box(request.param)


@pytest.fixture
async def box(kind):
    async with started(kind) as box:
        yield box


@pytest.fixture(params=["bubblewrap", "http", "docker", "podman", "unsafe"])
async def any_box(request):
    async with started(usable_box(request.param)) as box:
        yield box


async def shell(box, line: str, **options):
    return await box.exec(["sh", "-c", line], **{"timeout": 60, **options})


async def python(box, source: str, **options):
    return await box.exec(["python3", "-c", textwrap.dedent(source)], **{"timeout": 60, **options})


async def sleeping(box) -> int:
    """The number of processes ``sleep 3600`` in a box; not every image has pgrep."""
    names = r"import glob; print([open(p).read() for p in glob.glob('/proc/[0-9]*/cmdline')].count('sleep\0003600\0'))"
    return int((await python(box, names)).stdout)


def processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_output_input_exit_code_directory_and_environment(any_box):
    box = any_box
    result = await shell(box, "cat; pwd; echo $HOME $GIVEN; echo wrong >&2; exit 3", stdin="héllo\n", env={"GIVEN": "x"})
    assert (result.stdout, result.stderr, result.exit_code) == (
        f"héllo\n{box.workdir}\n{box.home} x\n",
        "wrong\n",
        3,
    )
    assert not result.ok
    assert (await shell(box, "pwd", cwd="/logs")).stdout.endswith("/logs\n")
    assert (await shell(box, "kill -TERM $$")).exit_code == -signal.SIGTERM
    assert (await box.exec(["nothing-there"], timeout=9)).exit_code == 127
    assert "/not/there: No such file" in (await shell(box, "pwd", cwd="/not/there")).stderr
    assert (await python(box, "import sys; print(len(sys.stdin.read()))", stdin="x" * 300_000)).stdout == "300000\n"
    assert (await shell(box, "exec <&-; sleep 0.1; echo done", stdin="x" * 300_000)).stdout == "done\n"
    with pytest.raises(SandboxError, match="list of words"):
        await box.exec("ls /", timeout=9)


async def test_secrets_of_the_environment_stay_outside(bubblewrap, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret-key")
    async with started(environment={"MINE": "1"}) as box:
        names = (await shell(box, "env | cut -d= -f1 | sort")).stdout.split()
    assert set(names) == {"HOME", "LANG", "MINE", "PATH", "PWD", "TMPDIR"}


async def test_commands_run_at_once_and_end_with_what_they_started(box):
    """A command's end ends its daemons, and no other command."""
    talk = await box.open(["cat"])
    other = asyncio.create_task(shell(box, "(setsid sleep 3600 &); until [ -e go ]; do sleep 0.05; done; echo done"))
    await asyncio.sleep(0.3)
    daemon = "(setsid sh -c 'while :; do echo x >> mark; sleep 0.05; done' &); sleep 0.3; wc -c < mark"
    assert int((await shell(box, daemon)).stdout) > 0
    before = (await shell(box, "cat mark")).stdout
    await asyncio.sleep(0.3)
    assert (await shell(box, "cat mark")).stdout == before
    assert await sleeping(box) == 1
    await shell(box, "touch go")
    assert (await other).stdout == "done\n"
    assert await sleeping(box) == 0
    await talk.write(b"still here\n")
    assert await talk.read() == b"still here\n"
    assert await talk.end() == 0
    assert await talk.read() == b""
    assert await talk.end() == 0


async def test_an_opened_process_that_does_not_end_is_killed(any_box):
    talk = await any_box.open(["sh", "-c", "trap '' TERM; echo $HOME; sleep 3600"], env={"HOME": "/logs"})
    assert await talk.read() == b"/logs\n"
    assert await talk.end() is None
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxError, match="has ended"):
        await talk.write(b"x" * 10_000_000)


async def test_a_caller_that_gives_up_ends_its_command(box):
    running = asyncio.create_task(shell(box, "sleep 3600", timeout=3600))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    deadline = time.monotonic() + 30
    while await sleeping(box):
        assert time.monotonic() < deadline


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_time_is_limited_and_everything_ends(box):
    result = await shell(box, "echo begun; (setsid sleep 3600 &); sleep 3600", timeout=1)
    assert (result.stdout, result.exit_code, result.excess) == ("begun\n", None, "time")
    assert await sleeping(box) == 0


async def test_memory_of_all_processes_is_limited(any_box):
    ok = await python(any_box, "x = bytearray(b'1') * 2**26; print(len(x))")
    assert ok.ok, ok
    source = "import os, time\nfor _ in range(2): os.fork()\nx = bytearray(b'1') * (100 * 2**20)\ntime.sleep(60)"
    result = await python(any_box, source)
    assert (result.exit_code, result.excess) == (None, f"more than {2**28} bytes of memory")


async def test_memory_counts_although_the_first_thread_has_ended(box):
    source = (
        "import ctypes, threading, time\n"
        "def fill():\n  time.sleep(0.1); x = bytearray(b'1') * (300 * 2**20); time.sleep(60)\n"
        "threading.Thread(target=fill).start(); ctypes.CDLL(None).pthread_exit(None)"
    )
    assert (await python(box, source)).excess == f"more than {2**28} bytes of memory"


async def test_memory_that_forks_share_counts_once(box):
    source = (  # the command ends with its first process, which waits for the others
        "import os, time\nx = bytearray(b'1') * (150 * 2**20)\nchildren = []\n"
        "for _ in range(2):\n  child = os.fork()\n  children = [*children, child] if child else []\n"
        "time.sleep(0.5)\nprint('shared', flush=True)\nfor child in children: os.waitpid(child, 0)"
    )
    result = await python(box, source)
    assert (result.stdout.splitlines(), result.excess) == (["shared"] * 4, ""), result


async def test_files_are_limited_together(box):
    one = await python(box, "with open('/work/f', 'wb', 0) as f:\n  while True: f.write(bytes(1 << 20))")
    assert "OSError" in one.stderr
    both = await python(box, "import time\nwith open('/logs/f', 'wb', 0) as f:\n  f.write(bytes(20 << 20)); time.sleep(60)")
    assert both.excess == f"more than {32 * 2**20} bytes of files"


async def test_processes_and_threads_are_limited(box):
    result = await python(
        box, "import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=[60]).start()"
    )
    assert result.excess == "more than 64 processes and threads"


async def test_output_is_cut(any_box):
    result = await python(any_box, "import sys; print('x' * 10**6); print('y' * 10**6, file=sys.stderr)")
    assert (result.ok, result.output_truncated) == (True, True)
    assert (result.stdout, result.stderr) == ("x" * 1000, "y" * 1000)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> Path:
    directory = tmp_path / "files"
    (directory / "inner" / "empty").mkdir(parents=True)
    (directory / "inner" / "größe 1").write_text("content")
    (directory / "run.sh").write_text("#!/bin/sh\necho ran")
    (directory / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("inner/größe 1")
    return directory


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): str(path.readlink())
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else "directory"
        for path in directory.rglob("*")
    }


async def test_files_go_in_and_come_out_as_they_were(any_box, files, tmp_path):
    box = any_box
    await box.upload(files, box.workdir)
    await box.upload(files / "run.sh", "/tests/new/test.sh")
    assert (await shell(box, "./run.sh; cat link")).stdout == "ran\ncontent"
    assert (await box.exec(["/tests/new/test.sh"], timeout=60)).stdout == "ran\n"
    await box.download("/work", tmp_path / "out")
    await box.download("/tests/new/test.sh", tmp_path / "below" / "test.sh")
    assert tree(tmp_path / "out") == tree(files)
    assert os.access(tmp_path / "below" / "test.sh", os.X_OK)
    with pytest.raises(SandboxError, match="exists"):
        await box.download("/work", tmp_path / "out")
    with pytest.raises(SandboxError, match="writable"):
        await box.upload(files, "/usr/new")
    with pytest.raises(RefusedFilesError, match=r"there is no /.*work/nothing"):
        await box.download("/work/nothing", tmp_path / "nothing")


HOSTILE = {
    "ln -s /etc/passwd evil": "evil is a link to /etc/passwd",
    "ln -s ../../../../etc/passwd evil": "leads out",
    "mkdir -p a/b; ln -s ../.. a/b/up; ln -s a/b/up/../x evil": "through another link",
    "ln -s inside evil; mkfifo pipe": "pipe is a device, a socket or a pipe",
    "truncate -s 10G sparse || dd if=/dev/null of=sparse bs=1 seek=33554431 && cp sparse two": "too large",
    'python3 -c \'import os\nfor _ in range(3000): os.mkdir("d" * 9); os.chdir("d" * 9)\'': "too long or leads elsewhere",
}


@pytest.mark.parametrize("line", HOSTILE)
async def test_what_is_hostile_is_not_copied_out(box, tmp_path, line):
    (tmp_path / "own").write_text("own")
    await shell(box, f"mkdir out; cd out; {line}")
    with pytest.raises(RefusedFilesError, match=HOSTILE[line]):
        await box.download("/work/out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


async def test_links_in_the_box_are_not_followed(box, files, tmp_path):
    await shell(box, "ln -s /logs away; mkdir d; ln -s /logs d/inner; ln -s /logs/target d/run.sh; echo kept > /logs/target")
    for source, target in ((files, "/work/away"), (files, "/work/d"), (files / "run.sh", "/work/away/f")):
        with pytest.raises(RefusedFilesError, match="is a link"):
            await box.upload(source, target)
    with pytest.raises(RefusedFilesError, match="symbolic link"):
        await box.download("/work/away", tmp_path / "out")
    await box.upload(files / "run.sh", "/work/d/run.sh")
    assert (await shell(box, "ls /logs; cat /logs/target")).stdout == "target\nkept\n"


async def test_links_of_a_task_folder_bring_no_file_of_this_machine_into_a_box(box, files):
    (files / "secret").symlink_to(Path(__file__))
    with pytest.raises(RefusedFilesError, match="secret is a link"):
        await box.upload(files, "/work")


async def test_readable_paths_can_be_read_not_changed_and_are_not_copied(kind, files, tmp_path):
    async with started(kind, readable={"/work/given": files, "/opt/given": files}) as box:
        result = await shell(box, "cat /opt/given/link given/link; echo x > given/run.sh; rm -r given; touch own")
        assert result.stdout == "content" * 2
        await box.download("/work", tmp_path / "out")
        await box.reset()
        assert (await shell(box, "ls /work; ls /work/given")).stdout.split() == ["given", "inner", "link", "run.sh"]
    assert tree(tmp_path / "out") == {"own": ""}
    assert (files / "run.sh").exists()


# -- what programs reach -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def echo_at(path: Path):
    """A service at a Unix socket that sends back what it gets, then the number of its bytes."""

    async def answer(reader, writer):
        total = 0
        while chunk := await reader.read(65536):
            total += len(chunk)
            writer.write(chunk)
            await writer.drain()
        writer.write(b"%d" % total)
        writer.close()

    async with await asyncio.start_unix_server(answer, path):
        os.chmod(path, 0o666)  # the user of a container is another one
        yield path


async def test_a_socket_is_offered_on_the_boxs_loopback_and_nothing_else_is_reached(kind, tmp_path):
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with echo_at(tmp_path / "echo.sock") as path, listener, started(kind, ports={8000: path}) as box:
        assert box.url(8000) == "http://127.0.0.1:8000"
        result = await python(
            box,
            f"""
            import socket, threading
            s = socket.create_connection(("localhost", 8000))
            got = []
            def read():
                while chunk := s.recv(65536): got.append(chunk)
            reader = threading.Thread(target=read); reader.start()
            s.sendall(b"x" * 5_000_000); s.shutdown(socket.SHUT_WR); reader.join()
            answer = b"".join(got)
            print(len(answer), answer[-9:])
            for address in (("127.0.0.1", {port}), ("127.0.0.1", 8001), ("1.1.1.1", 53), ("169.254.169.254", 80)):
                try: socket.create_connection(address, 2); print("reached", address)
                except OSError as error: pass
            """,
        )
        assert (result.stdout, result.stderr) == ("5000007 b'xx5000000'\n", "")
        with pytest.raises(SandboxError, match="no port 8001"):
            box.url(8001)


async def test_two_boxes_do_not_see_each_other(kind, tmp_path):
    async with echo_at(tmp_path / "a.sock") as path, started(kind, ports={8000: path}) as one, started(kind) as two:
        await shell(one, "echo mine > /work/f; echo mine > /tmp/f")
        talk = await one.open(["sleep", "3600"])
        seen = await shell(two, "ls /work /tmp /dev/shm; ls /run/rollwright/*.sock /run/rollwright/ports")
        assert seen.stdout.split() == ["/dev/shm:", "/tmp:", "/work:"]
        assert await sleeping(two) == 0
        reached = await python(two, "import socket; socket.create_connection(('127.0.0.1', 8000))")
        assert "ConnectionRefusedError" in reached.stderr
        await talk.end()


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_stop_leaves_nothing(bubblewrap, tmp_path):
    before = processes()
    box = make_box("bubblewrap", BoxSpec(limits=LIMITS))
    await box.start()
    running = asyncio.create_task(shell(box, "(setsid sleep 3600 &); sleep 3600", timeout=3600))
    await asyncio.sleep(0.3)
    begun = processes() - before
    assert len(begun) >= 5
    await box.stop()
    with pytest.raises(SandboxError, match="was stopped"):
        await running
    assert [each for each in begun if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    await box.stop()
    with pytest.raises(SandboxError, match="was stopped"):
        await shell(box, "true")


async def test_a_box_that_was_reset_is_new(box):
    talk = await box.open(["sleep", "3600"])
    await shell(
        box, "for d in /work /home/agent /tmp /logs /tests /dev/shm; do mkdir $d/a; echo x > $d/a/b; chmod 0 $d/a; done"
    )
    await box.reset()
    assert await talk.end() is None
    assert (await shell(box, "find /work /home/agent /tmp /logs /tests /dev/shm -mindepth 1")).stdout == ""
    assert await sleeping(box) == 0


def test_a_box_ends_with_a_process_that_is_killed(bubblewrap):
    code = """
        import asyncio
        from rollwright.processes.box import BoxSpec
        from rollwright.processes.boxes import make_box
        async def main():
            box = make_box("bubblewrap", BoxSpec())
            await box.start()
            await box.exec(["sleep", "3600"], timeout=3600)
        asyncio.run(main())
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(run.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert alive == []


# -- programs of Node --------------------------------------------------------------------------------------------------


async def test_node_starts_and_asks_the_front(bubblewrap, tmp_path):
    """Its JavaScript engine reserves more address space than any limit of it would leave."""
    if not (NODE / "node_modules/.bin/node").exists():
        pytest.skip("there is no Node: scripts/make_client_envs.sh installs one")

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    program = "fetch(process.env.URL).then(r => r.text()).then(t => console.log(t, process.version, require('os').userInfo().username))"
    async with (
        await asyncio.start_unix_server(answer, tmp_path / "front.sock"),
        started(
            ports={8000: tmp_path / "front.sock"}, readable={"/opt/node": NODE}, limits=BoxLimits(memory_bytes=2**29)
        ) as box,
    ):
        command = ["/opt/node/node_modules/.bin/node", "-e", program]
        result = await box.exec(command, timeout=60, env={"URL": box.url(8000)})
        assert result.stdout.startswith("hello v22."), result
        assert result.stdout.endswith(" agent\n")
        hungry = "const kept = []; setInterval(() => kept.push(Buffer.alloc(1 << 25, 1)), 1)"
        result = await box.exec([command[0], "-e", hungry], timeout=60)
        assert result.excess == f"more than {2**29} bytes of memory"


# -- what a spec may say -----------------------------------------------------------------------------------------------


def test_a_spec_that_cannot_be_is_refused_with_every_fault(tmp_path):
    spec = BoxSpec(writable=("/work", "/work/home", "relative"), readable={"/x": tmp_path / "none"}, ports={80: tmp_path})
    with pytest.raises(SandboxError) as refused:
        make_box("bubblewrap", spec)
    for fault in ("'/work/home' is", "'relative' is", "none (readable '/x') does not exist", "port 80", "is no Unix socket"):
        assert fault in str(refused.value)
    with pytest.raises(SandboxError, match="has no image"):
        make_box("bubblewrap", BoxSpec(image="debian"))
    with pytest.raises(SandboxError, match="box 'chroot' was not found"):
        make_box("chroot", BoxSpec())


def test_a_box_of_a_users_own():
    @BOXES.register("mine")
    class Mine:
        def __init__(self, spec):
            self.spec = spec

    try:
        assert make_box("mine", BoxSpec()).spec == BoxSpec()
    finally:
        del BOXES["mine"]


async def test_a_machine_without_namespaces_is_told(bubblewrap, tmp_path, monkeypatch):
    file = tmp_path / "bwrap"
    file.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="forbids user namespaces"):
        await make_box("bubblewrap", BoxSpec()).start()
