"""The sandbox's other end: a process in which Python has started already, and which forks itself for each script.

It runs without anything of the environment that scripts must not see. A forked process takes rights away from itself before it
runs a line of the user's code: kernel limits bound memory, file sizes, open files and time of the processor; audit hooks refuse
what those cannot express: sockets, other processes, signals to processes outside of the script's own session, and writing
outside of the working directory. Standard library only.

On the control socket each message is one byte and one descriptor, the script's own socket. On that comes the request, a JSON
object with the descriptors of standard input, output and error; the answers are the lines ``begun`` and ``exit CODE``, or
``refused REASON``. Whoever closes the script's socket, or writes to it, ends the script and what is left of its session; whoever
closes the control socket ends everything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from rollwright.processes.tree import die_with_parent, kill_tree

_LONGEST_REQUEST = 65536
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
_SIGNAL_EVENTS = ("os.kill", "os.killpg")
_NETWORK_EVENTS = (
    "socket.__new__",
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
)
_WITH_DIRECTORY = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown")
_CHANGING_EVENTS = (*_WITH_DIRECTORY, "os.truncate")
_SPECIAL_FILES = ("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Serve on the control socket whose descriptor is the first argument; the second says whether there is a network."""
    control, network = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if not network:
        with contextlib.suppress(OSError):
            _leave_network()
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollwright"]:
        del sys.modules[name]  # scripts find none of ours
    gc.freeze()  # what is there now is shared with all scripts, as long as no collection touches it
    _run(ForkServer(control).next_script())


class ForkServer:
    """The loop that waits for requests and for the ends of scripts.

    Args:
        control: where requests come from.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._sockets: dict[int, socket.socket] = {}  # process id to the script's socket
        self._ends, self._wake = socket.socketpair()
        self._ends.setblocking(False)
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ends, selectors.EVENT_READ, self._reap)

    def next_script(self) -> dict[str, Any]:
        """Serve until the control socket is closed. **Returns only in a forked process**, with the script's settings."""
        while True:
            for key, _ in self._selector.select():
                settings = key.data()
                if settings is not None:
                    return settings

    def _accept(self) -> dict[str, Any] | None:
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            for process in list(self._sockets):
                _kill(process)
            sys.exit(0)
        own = socket.socket(fileno=descriptors[0])
        request, streams, _, _ = socket.recv_fds(own, _LONGEST_REQUEST, 3)
        if len(streams) < 3:
            own.close()  # whoever asked is gone
            return None
        try:
            process = os.fork()
        except OSError as error:
            _tell(own, f"refused {error}")
            own.close()
            process = -1
        if process == 0:
            own.close()
            self._become_script(streams)
            return json.loads(request)
        for stream in streams:
            os.close(stream)
        if process > 0:
            self._sockets[process] = own
            self._selector.register(own, selectors.EVENT_READ, lambda: _kill(process))
            _tell(own, "begun")
        return None

    def _become_script(self, streams: list[int]) -> None:
        """In the forked process: keep nothing of the server's, and only the script's streams."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (self._selector, self._control, self._ends, self._wake, *self._sockets.values()):
            held.close()
        os.setsid()
        die_with_parent()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
            os.close(stream)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ends.recv(4096):
                pass
        while self._sockets:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            kill_tree(process)  # what it started and left behind
            own = self._sockets.pop(process)
            self._selector.unregister(own)
            _tell(own, f"exit {os.waitstatus_to_exitcode(status)}")
            own.close()


def _kill(process: int) -> None:
    """End a script and its session, where they have not ended."""
    kill_tree(process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)  # in the moment after the fork, it leads no group yet


def _tell(own: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        own.send(f"{line}\n".encode())


# ------------------------------------------------------------------ in the forked process


def _set_kernel_limits(settings: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: settings["cpu_seconds"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: settings["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_AS: settings["memory_bytes"],
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


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


def _is_own(process: int) -> bool:
    """True for a process (or, where 0 or below, a group) of the script's session."""
    if process in (0, os.getpid()):
        return True
    try:
        return process != -1 and os.getsid(abs(process)) == os.getsid(0)
    except ProcessLookupError:
        return True  # there is none: the call will say so


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
        elif event in _NETWORK_EVENTS and not settings["network"]:
            # Event loops wake themselves up through pairs of local sockets.
            if event != "socket.__new__" or arguments[1] != socket.AF_UNIX:
                raise PermissionError("sandbox: the network is not allowed")
        elif event in _PROCESS_EVENTS:
            children[0] -= 1
            if children[0] < 0:
                raise PermissionError(f"sandbox: no more than {settings['processes']} processes may be started")
        elif event in _SIGNAL_EVENTS and not _is_own(arguments[0]):
            raise PermissionError("sandbox: signals to other processes are not allowed")

    sys.addaudithook(hook)


def _run(settings: dict[str, Any]) -> NoReturn:
    """Take rights away, run ``main.py`` of the directory that the settings name, and end the process."""
    directory = settings["directory"]
    os.chdir(directory)
    os.environ.update(HOME=directory, TMPDIR=directory)
    with open("main.py", encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    _set_kernel_limits(settings)
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    _install_hooks(settings)
    code = _exit_code(lambda: exec(compile(source, "main.py", "exec"), module.__dict__))
    os._exit(_exit_code(lambda: _finish(module)) or code)


def _exit_code(body: Callable[[], None]) -> int:
    """Run something and say how a script that ends so exits; tracebacks begin in the script."""
    try:
        body()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # of the script: SystemExit was taken above
        traceback.print_exception(type(error), error, _below(error.__traceback__))
        return 1
    return 0


def _below(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _finish(module: types.ModuleType) -> None:
    """What an interpreter does at its end and a script can see.

    The rest of it, taking apart all that the fork server had loaded, would cost more than most scripts.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name in reversed(list(module.__dict__)):
        module.__dict__.pop(name)  # destructors run, files are written
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()
