"""The sandbox's fork server: a process in which Python has started already, and which forks itself for each script.

Standard library only; started with ``python -I``, without anything of the environment that scripts must not see. A script
costs a fork instead of an interpreter's start, and is as much a process of its own as before: it takes its rights away from
itself (``sandbox_child``) before it runs a line of the user's code.

What is said over the sockets: on the control socket each message is one byte and one descriptor, the script's own socket.
On that stands the request, a JSON object with the descriptors of standard input, output and error; what comes back are the
lines ``begun`` and ``exit CODE``, or ``refused REASON``. Whoever closes the script's socket, or writes to it, ends the script
and what is left of its session; whoever closes the control socket ends everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_LONGEST_REQUEST = 65536


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
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
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
            _kill(process)  # what it started and left behind
            own = self._sockets.pop(process)
            self._selector.unregister(own)
            _tell(own, f"exit {os.waitstatus_to_exitcode(status)}")
            own.close()


def _kill(process: int) -> None:
    """End a script and its session, where they have not ended."""
    for kill in (os.killpg, os.kill):  # the group is not there yet in the moment after the fork
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)


def _tell(own: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        own.send(f"{line}\n".encode())


def _load_child() -> Any:
    """The module beside this one: an isolated interpreter's path does not lead there, and must not, for scripts."""
    specification = importlib.util.spec_from_file_location("sandbox_child", Path(__file__).with_name("sandbox_child.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def main() -> None:
    """Serve on the control socket whose descriptor is the first argument; the second says whether there is a network."""
    child = _load_child()
    if sys.argv[2] == "no-network":
        with contextlib.suppress(OSError):
            child.leave_network()
    gc.freeze()  # what is there now is shared with all scripts, as long as no collection touches it
    settings = ForkServer(socket.socket(fileno=int(sys.argv[1]))).next_script()
    child.run(settings)


if __name__ == "__main__":
    main()
