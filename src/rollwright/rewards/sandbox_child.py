"""What runs in the sandboxed process before the user's code: it takes rights away, then runs ``main.py``.

Standard library only; started with ``python -I``. Kernel limits bound memory, file sizes, open files and processes; audit
hooks refuse what those cannot express: sockets, other processes and writing outside of the working directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback
from typing import Any

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_PROCESS_EVENTS = (
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
)
_NETWORK_EVENTS = (
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
)
_CHANGING_EVENTS = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
)
_WITH_DIRECTORY = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown")
_SPECIAL_FILES = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _set_kernel_limits(settings: dict[str, Any]) -> None:
    _limit(resource.RLIMIT_CPU, settings["cpu_seconds"])
    _limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, settings["open_files"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, settings["memory_bytes"])


def _leave_network() -> None:
    """A network namespace with nothing in it, where the kernel lets us; the audit hook stands either way."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET) != 0:
        libc.unshare(_NEW_USER | _NEW_NET)


def _inside(path: Any, root: str, directory: Any = -1) -> bool:
    """True where a path, relative to an open directory or to the working directory, is below ``root``."""
    if isinstance(path, int):
        return True  # a descriptor that is open already
    name = os.fsdecode(path)
    if isinstance(directory, int) and directory >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), name)
    real = os.path.realpath(name)
    return real == root or real.startswith(root + os.sep) or real in _SPECIAL_FILES


def _install_hooks(settings: dict[str, Any]) -> None:
    root = os.path.realpath(os.getcwd())
    children = [settings["processes"]]

    import _socket as socket  # now: a hook that imports would be called for its own imports

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
            # An open directory would let later calls name files relative to it, which this event does not show.
            if (writes or (not isinstance(path, int) and os.path.isdir(path))) and not _inside(path, root):
                raise PermissionError(f"sandbox: writing outside of the working directory is not allowed: {path!r}")
        elif event in _CHANGING_EVENTS:
            first = 1 if event == "os.symlink" else 0  # what a link says is free; where it leads is seen when it is used
            paths = [part for part in arguments[first:2] if isinstance(part, str | bytes | os.PathLike)]
            directories = (
                [part for part in arguments if isinstance(part, int)][-len(paths) :] if event in _WITH_DIRECTORY else []
            )
            directories += [-1] * (len(paths) - len(directories))
            if not all(_inside(path, root, directory) for path, directory in zip(paths, directories, strict=True)):
                raise PermissionError(f"sandbox: {event} outside of the working directory is not allowed")
        elif event == "socket.__new__" and not settings["network"]:
            if arguments[1] != socket.AF_UNIX:  # event loops wake themselves up through pairs of local sockets
                raise PermissionError("sandbox: the network is not allowed")
        elif event in _NETWORK_EVENTS and not settings["network"]:
            raise PermissionError("sandbox: the network is not allowed")
        elif event in _PROCESS_EVENTS:
            children[0] -= 1
            if children[0] < 0:
                raise PermissionError(f"sandbox: no more than {settings['processes']} processes may be started")

    sys.addaudithook(hook)


def main() -> None:
    """Take rights away and run ``main.py`` of the working directory."""
    settings = json.loads(sys.argv[1])
    with open("main.py", encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    if not settings["network"]:
        with contextlib.suppress(OSError):
            _leave_network()
    _set_kernel_limits(settings)
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    _install_hooks(settings)
    names = {"__name__": "__main__", "__file__": "main.py", "__builtins__": __builtins__}
    try:
        exec(compile(source, "main.py", "exec"), names)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
        sys.stdout.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
