"""Jails: where Python that a model wrote runs, and the sandboxes that make them.

A jail is a process that answers requests to run a script (``jail_server``), and what the sandbox puts around it. ``Bubblewrap``
gives it namespaces of its own, a file system that holds Python and nothing else, no capability and a filter of system calls;
``Container`` is docker or podman; ``PlainProcess`` is nothing but a process, for code that is trusted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rollwright.errors import ConfigError, SandboxError
from rollwright.processes.tree import kill_tree

#: All that scripts see of the environment: what Python and numerical libraries need, no keys, no proxies.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_START_SECONDS = 60.0
_GRACE_SECONDS = 10.0  # for an answer after the script's time, which the jail itself keeps
_HEAD_BYTES = 65536
_SHARED_BYTES = 16 * 2**20  # of /dev/shm
_INSTEAD = "or set rollout.sandbox to docker, podman, or unsafe (a plain process: only for code that you trust)"
#: What only attacks and administrators call; Python, its libraries and their threads do not.
_REFUSED_CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("mount_setattr", "unshare", "setns", "name_to_handle_at", "open_by_handle_at", "quotactl", "quotactl_fd"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init"),
    *("add_key", "request_key", "keyctl", "personality", "modify_ldt", "iopl", "ioperm", "vhangup", "acct", "syslog"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    *("sethostname", "setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "lookup_dcookie"),
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open"),  # memory that no limit counts
)
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NS, CGROUP, UTS, IPC, USER, PID, NET
_CLONE_THREAD = 0x10000


@dataclass(frozen=True)
class SandboxLimits:
    """What the code may use. The defaults suit tool calls and unit tests of small functions."""

    memory_bytes: int = 512 * 2**20  # address space of each process
    file_bytes: int = 16 * 2**20  # each file that it writes
    disk_bytes: int = 64 * 2**20  # all files that it writes, which are held in memory
    open_files: int = 64
    processes: int = 0  # that it may have running besides itself; threads are free
    network: bool = False
    output_bytes: int = 2**20  # kept of standard output and of standard error; the rest is thrown away


@dataclass(frozen=True)
class SandboxResult:
    """What came of a run."""

    stdout: str
    stderr: str
    exit_code: int | None  # None where it was killed for time
    timed_out: bool
    seconds: float
    output_truncated: bool = False

    @property
    def ok(self) -> bool:
        """True where the code ran to its end without an error."""
        return self.exit_code == 0 and not self.timed_out


class Sandbox(Protocol):
    """What makes jails."""

    def start(self, limits: SandboxLimits) -> Jail:
        """Begin to start a jail, without waiting for it.

        Raises:
            SandboxError: this machine lacks what the sandbox needs; the message says what to install or to set.
        """
        ...


class Jail:
    """One jail: it runs scripts one after another and leaves nothing of one to the next.

    Args:
        command: starts ``jail_server`` in its surroundings.
        limits: of each script.
        roots: directories that scripts may write to, as the jail sees them; the first is the working directory.
        filters: programs of system calls that scripts are put under.
        pass_fds: descriptors that the command needs.
        environment: of the command.
        patience: seconds that the command gets to end by itself, when its input has ended, before it is killed.
        explain: what a failed start means, by what the command said.
        clean: what is left to do when the jail has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: SandboxLimits,
        roots: Sequence[str],
        *,
        filters: Sequence[bytes] = (),
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] = _ENVIRONMENT,
        patience: float = 0.0,
        explain: Callable[[str], str] = str,
        clean: Callable[[], Any] | None = None,
    ) -> None:
        self._settings = {"roots": list(roots), "filters": [program.hex() for program in filters]}
        self._patience = patience
        self._limits, self._explain, self._clean = limits, explain, clean
        self._closing = threading.Lock()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=environment,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
        except OSError as error:
            self._socket.close()
            raise _no_process(error) from error

    @property
    def is_alive(self) -> bool:
        """Whether it can run another script."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the jail's Python runs.

        Raises:
            SandboxError: it does not; the message says why.
        """
        try:
            self._answer(_START_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            said = self._process.stderr.read().decode("utf-8", "replace").strip()  # type: ignore[union-attr]
            self.close()
            reason = self._explain(said) if said else f"it said nothing for {_START_SECONDS:g} s"
            raise SandboxError(f"the sandbox does not start: {reason}") from error

    def run(self, source: str, stdin: str, timeout: float) -> SandboxResult:
        """Run a script; blocks. A jail that the script took down, or broke, is closed.

        Raises:
            SandboxError: the jail cannot start a process.
        """
        limits = {**asdict(self._limits), "seconds": timeout}
        request = json.dumps({**self._settings, "limits": limits, "source": source, "stdin": stdin})
        started = time.monotonic()
        try:
            self._socket.settimeout(timeout + _GRACE_SECONDS)
            self._socket.sendall(request.encode() + b"\n")
            answer = self._answer(timeout + _GRACE_SECONDS)
            if "broken" in answer:
                self.close()
            if "exit" not in answer:
                raise _no_process(answer["broken"])
            timed_out = answer["excess"] == "time"
            return SandboxResult(
                stdout=str(answer["out"]),
                stderr=str(answer["err"]) + (f"sandbox: {answer['excess']}\n" if answer["excess"] and not timed_out else ""),
                exit_code=None if timed_out else int(answer["exit"]),
                timed_out=timed_out,
                seconds=float(answer["seconds"]),
                output_truncated=bool(answer["cut"]),
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            self.close()
            timed_out = isinstance(error, TimeoutError)
            said = "" if timed_out else "sandbox: the script ended its jail\n"
            return SandboxResult("", said, None if timed_out else -signal.SIGKILL, timed_out, time.monotonic() - started)

    def kill(self) -> None:
        """End the jail and all that is in it, without waiting. Any thread may call this, at any time."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # who waits for an answer hears of it
        if self.is_alive and not self._patience:
            kill_tree(self._process.pid)

    def close(self) -> None:
        """End the jail and all that is in it. Idempotent."""
        self.kill()
        with self._closing:
            try:
                self._process.wait(self._patience or None)
            except subprocess.TimeoutExpired:
                kill_tree(self._process.pid)
                self._process.wait()
            self._socket.close()
            self._process.stderr.close()  # type: ignore[union-attr]
            clean, self._clean = self._clean, None
        if clean is not None:
            clean()

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line. What comes from a jail is not trusted: its size and its time are bounded."""
        deadline, line = time.monotonic() + seconds, bytearray()
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._socket.recv(1 << 20)
            if not part:
                raise EOFError("the jail has ended")
            line += part
            if len(line) > 12 * self._limits.output_bytes + _HEAD_BYTES:  # JSON escapes a character by six bytes
                raise ValueError("an answer without an end")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("no answer")
        return answer


def _no_process(reason: object) -> SandboxError:
    return SandboxError(f"the sandbox cannot start a process: {reason}; is the machine out of processes or memory?")


class Bubblewrap:
    """Namespaces of its own by ``bwrap``: what is not bound is not there."""

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError(
                "bubblewrap, which contains Python that a model writes, is not installed: install it (Debian and Ubuntu: apt-get "
                f"install bubblewrap; Fedora: dnf install bubblewrap), {_INSTEAD}."
            )
        whole, no_processes = _filters()
        reads, writes = os.pipe()
        with open(reads, "rb") as theirs:
            os.write(writes, whole)
            os.close(writes)
            command = [program, *_surroundings(limits), "--seccomp", str(theirs.fileno()), "--", *_server(sys.executable)]
            return Jail(
                command,
                limits,
                [_scratch(), "/dev/shm"],
                filters=[] if limits.processes else [no_processes],
                pass_fds=[theirs.fileno()],
                explain=_why_bubblewrap_fails,
            )


class Container:
    """A container of docker or podman, in an image that has Python and is there already.

    Args:
        program: ``docker`` or ``podman``.
        image: its name.
    """

    def __init__(self, program: str, image: str) -> None:
        self.program, self.image = program, image or "python:3.12-slim"

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        program = shutil.which(self.program)
        if program is None:
            raise SandboxError(f"{self.program} is not installed: install it, or set rollout.sandbox to bubblewrap.")
        name = f"rollwright-{uuid.uuid4().hex[:12]}"
        memory = f"{(limits.processes + 1) * limits.memory_bytes + limits.disk_bytes + 2**26}"
        command = [
            *(program, "run", "--rm", "--interactive", "--pull=never", f"--name={name}", "--read-only", "--user=65534:65534"),
            *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--ipc=private", "--pids-limit=256", "--workdir=/tmp"),
            *(f"--network={'bridge' if limits.network else 'none'}", f"--memory={memory}", f"--memory-swap={memory}"),
            *(f"--shm-size={_SHARED_BYTES}", f"--tmpfs=/tmp:size={limits.disk_bytes},mode=1777"),
            *(f"--env={key}={value}" for key, value in _ENVIRONMENT.items() if key != "PATH"),
            *(["--read-only-tmpfs=false"] if self.program == "podman" else []),  # it would add places to write to
            *(self.image, *_server("python3")),
        ]
        remove = functools.partial(subprocess.run, [program, "rm", "--force", name], capture_output=True)
        return Jail(
            command,
            limits,
            ["/tmp", "/dev/shm"],
            filters=_filters()[: 1 if limits.processes else 2],
            patience=_GRACE_SECONDS,  # a client that is killed while it starts a container leaves it running
            environment=os.environ,  # where its daemon and its images are; scripts get what --env says
            explain=lambda said: f"{self.program} says {said!r}; does '{self.program} run --rm {self.image} python3 -V' work?",
            clean=remove,
        )


class PlainProcess:
    """No sandbox: a process with limits on its own time, memory and files, and a temporary directory that it may leave."""

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        directory = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        return Jail(_server(sys.executable), limits, [directory.name], clean=directory.cleanup)


def make_sandbox(name: str) -> Sandbox:
    """The sandbox that ``rollout.sandbox`` names.

    Raises:
        ConfigError: there is none of that name.
    """
    kind, _, image = name.partition(":")
    if kind in ("docker", "podman"):
        return Container(kind, image)
    if name in ("bubblewrap", "unsafe"):
        return Bubblewrap() if name == "bubblewrap" else PlainProcess()
    raise ConfigError(
        f"there is no sandbox {name!r}; it is bubblewrap, docker or podman (docker:IMAGE for another image than python:3.12-slim), "
        "or unsafe."
    )


@functools.cache
def _server(python: str) -> list[str]:
    return [python, "-I", "-c", Path(__file__).with_name("jail_server.py").read_text(encoding="utf-8")]


def _surroundings(limits: SandboxLimits) -> list[str]:
    """The options of ``bwrap``: all that the jail can see, and what it must not do."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--clearenv", "--die-with-parent"]
    options += ["--new-session", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    for name, value in _ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += ["--ro-bind", "/usr", "/usr"]
    for link in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(link):
            options += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            options += ["--ro-bind", link, link]
    wanted = [*_python_paths(), "/etc/ld.so.cache", "/etc/alternatives"]
    if limits.network:
        options += ["--share-net"]
        wanted += ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates"]
    options += ["--proc", "/proc"]
    for path in _unreadable_by_others():
        options += ["--ro-bind", "/dev/null", path]
    options += ["--dev", "/dev", "--size", str(_SHARED_BYTES), "--tmpfs", "/dev/shm"]
    options += ["--size", str(limits.disk_bytes), "--tmpfs", _scratch()]
    for path in wanted:
        options += ["--ro-bind-try", path, path]
    for place in ("/proc", "/dev", "/"):  # what bwrap mounts has no limit of size
        options += ["--remount-ro", place]
    return [*options, "--chdir", _scratch()]


def _scratch() -> str:
    """Where scripts run and write: ``/tmp``, unless this Python is there, as what is bound there could not be cleaned away."""
    return "/scratch" if any(path.startswith("/tmp/") for path in _python_paths()) else "/tmp"


def _python_paths() -> list[str]:
    """What this Python needs besides ``/usr``: its executable, its libraries and its packages."""
    found = [sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib"]
    return found + [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _unreadable_by_others() -> list[str]:
    """Files of the kernel's that only root can read: who runs this as root would lend them to scripts."""
    paths = [path for path in Path("/proc").iterdir() if path.is_file() and not path.is_symlink()]
    return [str(path) for path in paths if not path.stat().st_mode & stat.S_IROTH]


@functools.cache
def _filters() -> tuple[bytes, bytes]:
    """Two compiled filters of system calls: that of a jail, and that which takes processes away from a script.

    Raises:
        SandboxError: libseccomp is not there.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxError(
            f"the sandbox needs libseccomp ({error}): install it (Debian and Ubuntu: apt-get install libseccomp2; Fedora: dnf install "
            f"libseccomp) and its Python package (pip install pyseccomp), {_INSTEAD}."
        ) from error
    refuse, unknown = pyseccomp.ERRNO(1), pyseccomp.ERRNO(38)  # EPERM; ENOSYS: the C library then takes the older call

    def compiled(*rules: tuple[Any, ...]) -> bytes:
        made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for action, call, *arguments in rules:
            with contextlib.suppress(OSError):  # a call that this kind of processor does not have
                made.add_rule(action, call, *arguments)
        with tempfile.TemporaryFile() as file:
            made.export_bpf(file)
            file.seek(0)
            return file.read()

    def flag(bit: int, value: int) -> Any:
        return pyseccomp.Arg(0, pyseccomp.MASKED_EQ, bit, value)

    jail = [(refuse, call) for call in _REFUSED_CALLS]
    jail += [(unknown, "clone3"), (refuse, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, 0x5412))]  # TIOCSTI
    jail += [(refuse, "clone", flag(1 << bit, 1 << bit)) for bit in range(32) if _NEW_NAMESPACES >> bit & 1]
    jail += [(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))]  # limits of the server
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    jail += [(refuse, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family)) for family in range(64) if family not in families]
    jail += [(refuse, "socket", pyseccomp.Arg(0, pyseccomp.GE, 64))]
    no_processes = [(refuse, call) for call in ("fork", "vfork", "execve", "execveat")]
    no_processes += [(unknown, "clone3"), (refuse, "clone", flag(_CLONE_THREAD, 0))]
    return compiled(*jail), compiled(*no_processes)


def _why_bubblewrap_fails(said: str) -> str:
    if "No permissions to create new namespace" in said or "setting up uid map" in said:
        return (
            f"this machine or container forbids user namespaces ({said!r}). Allow them (sysctl kernel.unprivileged_userns_clone=1; "
            "on Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0; docker run --security-opt seccomp=unconfined), "
            f"{_INSTEAD}."
        )
    if "Unknown option" in said:
        return f"bubblewrap 0.8 or later is needed ({said!r}): install that, {_INSTEAD}."
    return f"bubblewrap says {said!r}; repair that, {_INSTEAD}."
