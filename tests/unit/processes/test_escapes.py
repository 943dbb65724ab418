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

from rollwright.processes.sandbox import SandboxLimits, SandboxResult, close_jails, run_python, sandboxed

REFUSED = ("PermissionError", "Operation not permitted", "Read-only file system", "No such file", "FileNotFoundError")
#: ``call("name", …)`` makes a system call that Python has no function for; it raises where the kernel refuses.
CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
is_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")


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


async def refused(source: str, **limits) -> None:
    """Assert that a script fails because it may not, or because what it wants is not there."""
    result = await script(source, **limits)
    assert not result.ok, result
    assert any(word in result.stderr for word in REFUSED), result


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def treasure(tmp_path) -> Path:
    file = tmp_path / "own" / "treasure"
    file.parent.mkdir()
    file.write_text("gold")
    return file


async def test_files_outside_are_not_there(treasure):
    for source in (
        f"open({str(treasure)!r})",
        f"open({str(treasure)!r}, 'a')",
        f"import os; os.remove({str(treasure)!r})",
        f"import os; os.chdir({str(treasure.parent)!r})",
        f"import os; os.rename({str(treasure)!r}, 'mine')",
        f"import os; os.truncate({str(treasure)!r}, 0)",
        f"import sqlite3; sqlite3.connect('file:{treasure}?mode=ro', uri=True).execute('select * from sqlite_master')",
        f"import sqlite3; sqlite3.connect(':memory:').execute(\"attach database '{treasure.parent}/new' as a\")",
        f"import ctypes; assert ctypes.CDLL(None).unlink({os.fsencode(treasure)!r}) == 0, 'Operation not permitted'",
        "open('/etc/shadow')",
        "open('/etc/passwd')",
        "open('/root/.bashrc')",
        f"open({__file__!r})",
        "import rollwright",
    ):
        result = await script(source)
        assert not result.ok, source
        assert treasure.read_text() == "gold"
    assert [path.name for path in treasure.parent.iterdir()] == ["treasure"]


async def test_what_is_there_cannot_be_written():
    result = await script("""
        import os, sys
        for directory in ("/", "/usr", "/usr/lib", "/dev", "/proc", "/proc/self", "/proc/sys/kernel", "/etc", os.path.dirname(os.__file__)):
            try: open(directory + "/new", "w"); print("wrote", directory)
            except OSError: pass
        for file in (os.__file__, sys.executable, "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/mem", "/proc/1/mem"):
            for use in (lambda: open(file, "r+b"), lambda: os.chmod(file, 0o777), lambda: os.remove(file), lambda: os.utime(file)):
                try: use(); print("changed", file)
                except OSError: pass
    """)
    assert (result.stdout, result.stderr) == ("", "")


async def test_every_place_that_can_be_written_is_bounded():
    """Disk fill: of the working directory, of shared memory, and of wherever else a file can be made."""
    result = await script(
        """
        import os
        written = 0
        for top in {os.getcwd(), "/tmp", "/dev/shm", "/dev", "/", "/proc", "/dev/pts", "/run", "/var/tmp", "/home", "/usr/tmp"}:
            for number in range(200):
                try:
                    with open(f"{top}/fill{number}", "wb", 0) as file:
                        while True: written += file.write(bytes(1 << 20))
                except OSError as error:
                    if error.errno != 27: break  # the file is full: the next one
        print(written)
        """,
        disk_bytes=32 * 2**20,
    )
    assert result.ok, result
    assert 32 * 2**20 <= int(result.stdout) <= 50 * 2**20


async def test_files_without_content_are_bounded_too():
    result = await script("for n in range(10**7): open(str(n), 'w').close()", timeout=120)
    assert "sandbox: more than 10000 files" in result.stderr


async def test_links_lead_nowhere(treasure):
    await refused(f"import os; os.symlink({str(treasure)!r}, 'link'); open('link')")
    await refused(f"import os; os.link({str(treasure)!r}, 'link')")
    await refused(f"import os; os.symlink({str(treasure.parent)!r}, 'd'); os.listdir('d')")
    # Left for whoever cleans up: links out of the jail, a loop, and a directory that is deeper than a recursion goes.
    await script(
        "import os; os.symlink('/usr', 'usr'); os.symlink('.', 'loop'); os.mkdir('locked'); open('locked/f', 'w'); os.chmod('locked', 0)"
    )
    await script("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')")
    assert treasure.read_text() == "gold"


async def test_the_root_is_the_root():
    await refused("import os; os.chroot('/tmp')")
    result = await script("""
        import os
        os.chdir("/")
        for _ in range(50): os.chdir("..")
        print(sorted(os.listdir()))
        print(os.path.exists("/proc/1/root/etc/passwd"), os.path.exists("/proc/self/cwd/etc/passwd"))
    """)
    names, escaped = result.stdout.splitlines()
    assert not {"etc/passwd", "home", "var", "sys", "boot", "opt"} & set(eval(names))  # noqa: S307 - of names
    assert escaped == "False False"


async def test_no_device_but_the_harmless_ones():
    await refused("import os, stat; os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))")
    await refused("import os, stat; os.mknod('mem', 0o600 | stat.S_IFCHR, os.makedev(1, 1)); open('mem', 'rb').read(1)")
    result = await script("import os; print(sorted(os.listdir('/dev')))")
    assert {"kvm", "mem", "sda", "vda", "fuse", "net", "loop0"}.isdisjoint(eval(result.stdout))  # noqa: S307 - of names


# -- what the machine tells ---------------------------------------------------------------------------------------------


async def test_the_environment_and_other_processes_are_not_seen(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret-key")
    close_jails()
    result = await script("""
        import glob, os
        print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
        for path in glob.glob("/proc/[0-9]*/*") + ["/proc/keys", "/proc/kmsg", "/proc/kcore"]:
            try: content = open(path, "rb").read(1 << 20)
            except OSError: continue
            if b"secret-key" in content: print("found", path)
        print(os.environ.get("MY_API_KEY"), os.uname().nodename, os.getuid())
    """)
    assert result.stdout == "[1, 2]\nNone sandbox 65534\n"


async def test_the_descriptors_and_memory_of_the_server_are_out_of_reach():
    await refused("import os; os.readlink('/proc/1/fd/0')")
    await refused("open('/proc/1/environ', 'rb').read()")
    await refused("open('/proc/1/mem', 'rb')")
    await refused("import os; os.readlink('/proc/1/exe')")


# -- the network -------------------------------------------------------------------------------------------------------


async def test_no_network_in_any_family():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for address in (f"('127.0.0.1', {port})", f"('localhost', {port})", "('1.1.1.1', 53)", "('169.254.169.254', 80)"):
            result = await script(f"import socket; socket.create_connection({address}, 2)")
            assert any(word in result.stderr for word in ("refused", "unreachable", "gaierror")), result
    for family in ("AF_NETLINK, socket.SOCK_RAW", "AF_PACKET, socket.SOCK_RAW", "AF_VSOCK", "AF_ALG, socket.SOCK_SEQPACKET"):
        await refused(f"import socket; socket.socket(socket.{family})")
    await refused("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)")
    await refused("import socket; s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock')")


# -- processes ---------------------------------------------------------------------------------------------------------


async def test_a_fork_bomb():
    await refused("import os\nwhile True: os.fork()")
    result = await script("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", processes=10, timeout=30)
    assert not result.ok
    assert result.timed_out or "sandbox: more than" in result.stderr


@is_x86
async def test_a_bomb_of_threads_that_python_does_not_know():
    """They share a stack, so no limit of memory stops them."""
    result = await script(
        CALLS
        + """
stack = ctypes.create_string_buffer(1 << 16)
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\xb8\\x22\\x00\\x00\\x00\\x0f\\x05\\xeb\\xf7")  # pause() for ever
entry = ctypes.addressof(ctypes.c_char.from_buffer(code))
top = (ctypes.addressof(stack) + (1 << 16) - 64) & ~15
ctypes.c_void_p.from_address(top).value = entry
clone = libc.clone
clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
import time
while True:
    if clone(entry, top, 0x10F00, None) < 0: time.sleep(0.01)
""",
        timeout=30,
    )
    assert not result.ok, result
    assert result.timed_out or "sandbox: more than 256 threads" in result.stderr, result


SURVIVOR = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for stream in (0, 1, 2): os.close(stream)
            while True:
                open('mark', 'a').write('x')
                time.sleep(0.01)
        os._exit(0)
    time.sleep(0.2)
"""


async def test_no_survivor():
    """A double fork in a session of its own outlives the script that started it, not the call."""
    assert (await script(SURVIVOR, processes=8)).ok
    result = await script(
        "import os, time; time.sleep(0.3); print(os.listdir('.'), len([n for n in os.listdir('/proc') if n.isdigit()]))"
    )
    assert result.stdout == "['main.py'] 2\n"


async def test_processes_of_its_own_that_fork_away_from_being_killed():
    source = "import os, time\nfor _ in range(2): os.fork()\nwhile True:\n    if os.fork(): os._exit(0)"
    await script(source, processes=16, timeout=1.0)
    result = await script("import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))")
    assert result.stdout == "2\n"


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
        result = await script(f"""
            import os, signal
            for target in (os.getppid(), 1, {os.getpid()}, {victim.pid}):
                for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGCHLD):
                    for send in (os.kill, os.killpg):
                        try: send(target, number)
                        except OSError: pass
            for group in range(2, 70000):
                if group == os.getpid(): continue
                for send in (os.kill, os.killpg):
                    try: send(group, 15)
                    except OSError: pass
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try: os.kill(-1, 15)
            except ProcessLookupError: print("alive")
        """)
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
    source = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(os.urandom(1)) * (100 * 2**20)\ntime.sleep(30)"
    result = await script(source, memory_bytes=2**28, processes=8)
    assert f"sandbox: more than {2**28} bytes of memory" in result.stderr


@is_x86
async def test_memory_that_no_limit_counts():
    await refused("import os; os.memfd_create('x')")
    await refused(CALLS + "call(29, 0, 1 << 30, 0o1600)")  # shmget
    await refused(CALLS + "call(68, 1, 0o1600)")  # msgget
    await refused(CALLS + "call(447, 0)")  # memfd_secret


async def test_floods_of_output_in_every_way():
    flood = "import os\nwhile True:\n    os.write({}, b'x' * 65536)"
    for stream in (1, 2):
        result = await script(flood.format(stream), timeout=1.0, output_bytes=1000)
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
    result = await script("""
        import os, struct
        body = b'{"exit": 0, "seconds": 0, "excess": "", "cut": false, "out": 6}' + bytes([10]) + b"forged"
        for descriptor in range(64):
            try: os.write(descriptor, struct.pack(">Q", len(body)) + body)
            except OSError: pass
        os._exit(3)
    """)
    assert result.exit_code == 3
    for path in ("/proc/1/fd/0", "/proc/1/fd/1"):
        await refused(f"open({path!r}, 'wb')")


# -- the kernel --------------------------------------------------------------------------------------------------------


@is_x86
async def test_calls_that_lead_out_are_refused():
    for number, arguments in {
        101: "16, 1, 0, 0",  # ptrace: attach to the server
        310: "1, 0, 0, 0, 0, 0",  # process_vm_readv
        272: "0x10000000",  # unshare: a user namespace
        308: "0, 0",  # setns
        165: "0, 0, 0, 0, 0",  # mount
        155: "0, 0",  # pivot_root
        321: "0, 0, 0",  # bpf
        425: "8, 0",  # io_uring_setup
        323: "0",  # userfaultfd
        250: "0, 0, 0",  # keyctl
        304: "0, 0, 0",  # open_by_handle_at
        438: "0, 0, 0",  # pidfd_getfd
        135: "0xFFFFFFFF",  # personality
        56: "0x10000011, 0, 0, 0, 0",  # clone: a user namespace
    }.items():
        result = await script(CALLS + f"call({number}, {arguments})", processes=4)
        assert "[Errno 1] Operation not permitted" in result.stderr, (number, result)
    assert "[Errno 38]" in (await script(CALLS + "call(435, 0, 0)")).stderr  # clone3, whose flags no filter sees
    for path in ("/proc/self/ns/user", "/proc/1/ns/mnt"):
        await refused(CALLS + f"call(308, os.open({path!r}, 0), 0)", processes=4)


async def test_no_capability_and_no_new_privilege():
    status = (await script("print(open('/proc/self/status').read())")).stdout
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(values[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert values["NoNewPrivs"] == "1"
    assert values["Seccomp"] == "2"


async def test_limits_cannot_be_raised_nor_the_server_harmed():
    result = await script("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert "not allowed to raise maximum limit" in result.stderr
    for kind in ("NOFILE", "AS", "CPU", "FSIZE", "NPROC"):
        await refused(f"import resource; resource.prlimit(1, resource.RLIMIT_{kind}, (0, 0))")


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
