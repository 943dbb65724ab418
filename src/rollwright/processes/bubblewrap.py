"""The bubblewrap sandbox: separate namespaces, a file system that contains only Python, and system call filters."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollwright.errors import SandboxError
from rollwright.processes.jail_server import MOST_TASKS
from rollwright.processes.jails import ENVIRONMENT, INSTEAD, SHARED_BYTES, Jail, SandboxLimits, server_command
from rollwright.processes.pids_limit import pids_limited

#: System calls that attackers and administrators use, but Python, its libraries and their threads do not.
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
#: Certificates of authorities, and not the private keys beside them.
CERTIFICATES = (
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates",
)
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWTIME, NS, CGROUP, UTS, IPC, USER, PID, NET
_CLONE_THREAD = 0x10000


class Bubblewrap:
    """A sandbox that ``bwrap`` isolates by namespaces; only bound paths exist inside."""

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        bwrap = program()
        whole, no_processes = call_filters()
        with open_pipe(whole) as theirs:
            command, clean = pids_limited(
                [bwrap, *_surroundings(limits), "--seccomp", str(theirs), "--", *server_command(sys.executable)], MOST_TASKS
            )
            return Jail(
                command,
                limits,
                [_scratch(), "/dev/shm"],
                filters=[] if limits.processes else [no_processes],
                pass_fds=[theirs],
                explain=why_bubblewrap_fails,
                clean=clean,
            )


def program() -> str:
    """Return the path of ``bwrap``.

    Raises:
        SandboxError: it is not installed.
    """
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "bubblewrap, which contains programs that a model writes, is not installed: install it (Debian and Ubuntu: apt-get "
            f"install bubblewrap; Fedora: dnf install bubblewrap), {INSTEAD}."
        )
    return found


@contextlib.contextmanager
def open_pipe(content: bytes) -> Iterator[int]:
    """Yield a descriptor that ``bwrap`` reads some bytes from; a pipe holds at least 64 KiB."""
    reads, writes = os.pipe()
    with open(reads, "rb") as theirs:
        os.write(writes, content)
        os.close(writes)
        yield theirs.fileno()


def _surroundings(limits: SandboxLimits) -> list[str]:
    """Return the options of ``bwrap`` that define what the jail can see and do."""
    return [
        *isolation("sandbox", 65534, ENVIRONMENT),
        *system(limits.network, SHARED_BYTES),
        *sized(_scratch(), limits.disk_bytes),
        *readable({path: path for path in [*python_paths(), *system_files(limits.network)]}),
        *closed(),
        *("--chdir", _scratch()),
    ]


# -- options, for jails and for boxes ----------------------------------------------------------------------------------


def isolation(hostname: str, user: int, environment: Mapping[str, str]) -> list[str]:
    """Return options for separate namespaces without capabilities, in which the command is process 1."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--clearenv", "--die-with-parent"]
    options += ["--new-session", "--as-pid-1", "--uid", str(user), "--gid", str(user), "--hostname", hostname]
    for name, value in environment.items():
        options += ["--setenv", name, value]
    return options


def system(network: bool, shared_bytes: int) -> list[str]:
    """Return options for the read-only system: programs, libraries, ``/proc`` and harmless devices.

    Args:
        network: share the machine's network.
        shared_bytes: size of ``/dev/shm``.
    """
    options = ["--share-net"] if network else []
    options += ["--ro-bind", "/usr", "/usr"]
    for link in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(link):
            options += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            options += ["--ro-bind", link, link]
    options += ["--proc", "/proc"]
    for path in _unreadable_by_others():
        options += ["--ro-bind", "/dev/null", path]
    return [*options, "--dev", "/dev", *sized("/dev/shm", shared_bytes)]


def system_files(network: bool) -> list[str]:
    """Return the files of ``/etc`` that programs need. Keys, which root could read, are not among them."""
    files = ["/etc/ld.so.cache", "/etc/alternatives"]
    if network:
        files += ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", *CERTIFICATES]
    return files


def readable(paths: Mapping[str, str | Path]) -> list[str]:
    """Return options that bind existing files and directories (path inside -> path outside) so that they cannot be written."""
    return [word for inside, outside in paths.items() for word in ("--ro-bind-try", str(outside), inside)]


def sized(directory: str, size: int) -> list[str]:
    """Return options for an empty directory in memory that holds at most ``size`` bytes."""
    return ["--size", str(size), "--tmpfs", directory]


def closed() -> list[str]:
    """Return options, the last ones, that forbid writing to bwrap's own mounts, which have no size limit."""
    return [word for place in ("/proc", "/dev", "/") for word in ("--remount-ro", place)]


def _scratch() -> str:
    """Return the scripts' working directory: ``/tmp``, unless this Python is below it, because bound paths cannot be removed."""
    return "/scratch" if any(path.startswith("/tmp/") for path in python_paths()) else "/tmp"


def python_paths() -> list[str]:
    """Return the paths of this Python's executable, libraries and packages, which may be outside ``/usr``."""
    found = [sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib"]
    return found + [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def _unreadable_by_others() -> list[str]:
    """Return the files in ``/proc`` that only root can read; if this process ran as root, scripts could read them, too."""
    paths = [path for path in Path("/proc").iterdir() if path.is_file() and not path.is_symlink()]
    return [str(path) for path in paths if not path.stat().st_mode & stat.S_IROTH]


@functools.cache
def call_filters() -> tuple[bytes, bytes]:
    """Compile two seccomp filters: one for the jail, and one that prevents scripts from starting processes.

    Raises:
        SandboxError: libseccomp is missing.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxError(
            f"the sandbox needs libseccomp ({error}): install it (Debian and Ubuntu: apt-get install libseccomp2; Fedora: dnf install "
            f"libseccomp) and its Python package (pip install 'rollwright[sandbox]'), {INSTEAD}."
        ) from error
    refuse, unknown = pyseccomp.ERRNO(1), pyseccomp.ERRNO(38)  # EPERM; ENOSYS makes the C library use the older call

    def compiled(*rules: tuple[Any, ...]) -> bytes:
        made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for action, call, *arguments in rules:
            with contextlib.suppress(OSError):  # this processor architecture does not have the call
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
    jail += [(refuse, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))]  # protects the server's limits
    families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    jail += [(refuse, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family)) for family in range(64) if family not in families]
    jail += [(refuse, "socket", pyseccomp.Arg(0, pyseccomp.GE, 64))]
    no_processes = [(refuse, call) for call in ("fork", "vfork", "execve", "execveat")]
    no_processes += [(unknown, "clone3"), (refuse, "clone", flag(_CLONE_THREAD, 0))]
    return compiled(*jail), compiled(*no_processes)


def why_bubblewrap_fails(said: str) -> str:
    if "No permissions to create new namespace" in said or "setting up uid map" in said:
        return (
            f"this machine or container forbids user namespaces ({said!r}). Allow them (sysctl kernel.unprivileged_userns_clone=1; "
            "on Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0; docker run --security-opt seccomp=unconfined), "
            f"{INSTEAD}."
        )
    if "Unknown option" in said:
        return f"bubblewrap 0.8 or later is needed ({said!r}): install that, {INSTEAD}."
    return f"bubblewrap says {said!r}; repair that, {INSTEAD}."
