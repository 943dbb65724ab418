"""Attempts to leave a sandbox, as Python scripts: those of ``test_escapes`` (jails) and of ``test_box_escapes`` (boxes).

Each attack says how its script ends where it is contained. What differs between jails and boxes is in the tests.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

is_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
#: Errors of a script that may not do something, or for which it is not there.
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


class Outcome(Protocol):
    """What jails and boxes say of a script that has ended."""

    stdout: str
    stderr: str

    @property
    def ok(self) -> bool: ...


@dataclass
class Attack:
    """A script, and how it ends if it is contained.

    Attributes:
        source: the script.
        errors: words of which its error has one; empty if it succeeds.
        says: its output, if it succeeds.
    """

    source: str
    errors: Sequence[str] = REFUSED
    says: str = ""

    def __post_init__(self) -> None:
        self.source = textwrap.dedent(self.source)

    def check(self, result: Outcome) -> None:
        """Assert that the script ended as it should."""
        if self.errors:
            assert not result.ok, (self.source, result)
            assert any(word in result.stderr for word in self.errors), (self.source, result)
        else:
            assert (result.stdout, result.stderr) == (self.says, ""), (self.source, result)


def contained(source: str, says: str = "") -> Attack:
    """Return a script that succeeds, and says only what is harmless."""
    return Attack(source, errors=(), says=says)


# -- files -------------------------------------------------------------------------------------------------------------


def on_files_outside(treasure: Path) -> list[Attack]:
    """Return attempts to reach a file of this machine, whose directory has nothing else."""
    return [
        Attack(source, (*REFUSED, "unable to open database"))
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
            "open('/root/.bashrc')",
            f"open({__file__!r})",
        )
    ]


def by_links(treasure: Path) -> list[Attack]:
    """Return attempts to reach a file by links, and links that whoever cleans up may follow."""
    return [
        Attack(f"import os; os.symlink({str(treasure)!r}, 'link'); open('link')"),
        Attack(f"import os; os.link({str(treasure)!r}, 'hard')"),
        Attack(f"import os; os.symlink({str(treasure.parent)!r}, 'd'); os.listdir('d')"),
        contained(
            "import os; os.symlink('/usr', 'usr'); os.symlink('.', 'loop'); os.mkdir('locked'); open('locked/f', 'w'); "
            "os.chmod('locked', 0)"
        ),
        contained("import os; os.mkdir('deep'); os.chdir('deep')\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"),
    ]


def on_the_root(treasure: Path) -> list[Attack]:
    """Return attempts to leave the root directory."""
    return [
        Attack("import os; os.chroot('/tmp')"),
        contained(f"""
            import os
            os.chdir("/")
            for _ in range(50): os.chdir("..")
            for way in ("", "/proc/1/root", "/proc/self/cwd", "/proc/self/root", "/proc/1/cwd"):
                if os.path.exists(way + {str(treasure)!r}): print("found by", way)
        """),
    ]


ON_READ_ONLY_FILES = contained("""
    import os, sys
    for directory in ("/", "/usr", "/usr/lib", "/dev", "/proc", "/proc/self", "/proc/sys/kernel", "/etc", "/run", "/sys", os.path.dirname(os.__file__)):
        try: open(directory + "/new", "w"); print("wrote", directory)
        except OSError: pass
    for file in (os.__file__, sys.executable, "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem"):
        for use in (lambda: open(file, "r+b"), lambda: os.chmod(file, 0o777), lambda: os.remove(file), lambda: os.utime(file)):
            try: use(); print("changed", file)
            except OSError: pass
""")
#: Fills every place that can be written, and prints the number of bytes.
DISK_FILL = textwrap.dedent("""
    import os
    written = 0
    for top in {os.getcwd(), "/tmp", "/dev/shm", "/dev", "/dev/mqueue", "/", "/proc", "/dev/pts", "/run", "/var/tmp", "/home", "/usr/tmp"}:
        for number in range(200):
            try:
                with open(f"{top}/fill{number}", "wb", 0) as file:
                    while True: written += file.write(bytes(1 << 20))
            except OSError as error:
                if error.errno != 27: break  # the file is full: the next one
    print(written)
""")
EMPTY_FILES = "for n in range(10**7): open(str(n), 'w').close()"
ON_DEVICES = [
    Attack("import os, stat; os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))"),
    Attack("import os, stat; os.mknod('mem', 0o600 | stat.S_IFCHR, os.makedev(1, 1)); open('mem', 'rb').read(1)"),
    contained(
        "import os; print({'kvm', 'mem', 'sda', 'vda', 'fuse', 'net', 'loop0'} & set(os.listdir('/dev')))", says="set()\n"
    ),
]

# -- what the machine tells --------------------------------------------------------------------------------------------

#: Looks for the value of ``MY_API_KEY``, which is ``secret-key`` outside, without having these words in its own memory.
ON_SECRETS = contained(
    """
    import glob, os
    secret = b"-".join([b"secret", b"key"])
    for path in glob.glob("/proc/[0-9]*/*") + ["/proc/keys", "/proc/kmsg", "/proc/kcore"]:
        try: content = open(path, "rb").read(1 << 20)
        except OSError: continue
        if secret in content: print("found", path)
    print(os.environ.get("MY_API_KEY"))
    """,
    says="None\n",
)
ON_THE_SERVER = [
    Attack("import os; os.readlink('/proc/1/fd/0')"),
    Attack("open('/proc/1/environ', 'rb').read()"),
    Attack("open('/proc/1/mem', 'rb')"),
    Attack("import os; os.readlink('/proc/1/exe')"),
    Attack("open('/proc/1/fd/0', 'wb')"),
    Attack("open('/proc/1/fd/1', 'wb')"),
    *(
        Attack(f"import resource; resource.prlimit(1, resource.RLIMIT_{kind}, (0, 0))")
        for kind in ("NOFILE", "AS", "CPU", "FSIZE", "NPROC")
    ),
    Attack(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))", ("not allowed to raise maximum limit",)
    ),
]
#: Sends answers to whatever may be the server's channel: one of a jail, and one of a box.
FORGERY = textwrap.dedent("""
    import os, struct
    jail = b'{"exit": 0, "seconds": 0, "excess": "", "cut": false, "out": 6}' + bytes([10]) + b"forged"
    box = b"".join(b'{"number": %d, "exit": 0, "excess": "", "seconds": 0}\\n' % number for number in range(100))
    for descriptor in range(3, 64):
        try: os.write(descriptor, struct.pack(">Q", len(jail)) + jail + b"\\n" + box)
        except OSError: pass
    os._exit(3)
""")

# -- the network -------------------------------------------------------------------------------------------------------


def on_the_network(port: int) -> list[Attack]:
    """Return attempts to reach a port of this machine, and everything else."""
    unreached = ("refused", "unreachable", "gaierror")
    families = ("AF_NETLINK, socket.SOCK_RAW", "AF_PACKET, socket.SOCK_RAW", "AF_VSOCK", "AF_ALG, socket.SOCK_SEQPACKET")
    return [
        *(
            Attack(f"import socket; socket.create_connection({address}, 2)", unreached)
            for address in (f"('127.0.0.1', {port})", f"('localhost', {port})", "('1.1.1.1', 53)", "('169.254.169.254', 80)")
        ),
        *(Attack(f"import socket; socket.socket(socket.{family})") for family in families),
        Attack("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
        Attack("import socket; s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock')"),
    ]


# -- processes and signals: run the bombs only where the kernel limits the number of processes --------------------------

FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
#: Threads that Python does not know. They share a stack, so no limit of memory stops them.
THREAD_BOMB = (
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
"""
)
#: Processes that end as soon as they have forked, so that none lives long enough to be killed.
RUNAWAYS = "import os, time\nfor _ in range(2): os.fork()\nwhile True:\n    if os.fork(): os._exit(0)"
#: A double fork in a session of its own, which outlives the script.
SURVIVOR = textwrap.dedent("""
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
""")
COUNT_PROCESSES = "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))"


def signals_to(victims: Sequence[int]) -> str:
    """Return a script that sends signals to processes of this machine, and to everything else, and says at the end that it lives."""
    return textwrap.dedent(f"""
        import os, signal
        for target in (os.getppid(), 1, {", ".join(map(str, victims))}):
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


# -- memory and output -------------------------------------------------------------------------------------------------

#: Four processes that use 100 MiB each.
MEMORY_OF_FOUR = "import os, time\nfor _ in range(2): os.fork()\nx = bytearray(os.urandom(1)) * (100 * 2**20)\ntime.sleep(30)"
UNCOUNTED_MEMORY = [
    Attack("import os; os.memfd_create('x')"),
    Attack(CALLS + "call(29, 0, 1 << 30, 0o1600)"),  # shmget
    Attack(CALLS + "call(68, 1, 0o1600)"),  # msgget
    Attack(CALLS + "call(447, 0)"),  # memfd_secret
    Attack("open('/dev/mqueue/queue', 'w')", (*REFUSED, "Too many open files")),
]


def flood(stream: int) -> str:
    """Return a script that writes to an output for ever."""
    return f"import os\nwhile True:\n    os.write({stream}, b'x' * 65536)"


# -- the kernel --------------------------------------------------------------------------------------------------------

REFUSED_CALLS = [
    *(
        Attack(CALLS + f"call({number}, {arguments})", ("[Errno 1] Operation not permitted",))
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
        }.items()
    ),
    Attack(CALLS + "call(435, 0, 0)", ("[Errno 38]",)),  # clone3, whose flags no filter sees
    *(
        Attack(CALLS + f"call(308, os.open({path!r}, 0), 0)")  # setns
        for path in ("/proc/self/ns/user", "/proc/1/ns/mnt")
    ),
]
#: Prints the union of its sets of capabilities, whether it can gain privileges, and the mode of its filter of system calls.
PRIVILEGES = contained(
    """
    values = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    print({int(values["Cap" + kind], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}, values["NoNewPrivs"], values["Seccomp"])
    """,
    says="{0} 1 2\n",
)
