"""Process 1 of a box: starts commands, watches what they use together, ends them, and lets them reach Unix sockets on loopback ports.

It runs inside the box and uses only the standard library; ``server_box`` sends it there as text and talks with it over a Unix socket,
whose descriptor is the argument. A message to it is a length (4 bytes), JSON, and the descriptors that the JSON's ``op`` needs: those of a command's standard input, output
and error come from outside, so nothing that a program writes passes through this process. An answer is a line of JSON.

The first message has the settings: ``roots`` (writable directories), ``kept`` (paths below them that stay), ``limits`` (``BoxLimits``),
``ports`` (port -> path of the Unix socket) and ``filters`` (seccomp programs in base 16 that apply to commands). Then:

* ``run`` a ``command`` in ``cwd`` with ``env`` for at most ``seconds``, ``pack`` a ``path`` to standard output, ``unpack`` standard input to a
  ``path``. The answer comes when the command has ended with everything that it started: ``exit``, ``excess`` (a limit) and ``seconds``.
* ``kill`` the command ``of`` an earlier message.
* ``reset``: kill everything and empty the roots. The process of the command ``keep`` of an earlier message stays, without what it started.

Each command has a keeper: a fork of this process that becomes the parent of the command's orphans. A process without a living keeper is
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any

from rollwright.processes.box_files import RefusedFileError, pack, unpack
from rollwright.processes.box_ports import Forwarder
from rollwright.processes.inside import (
    IS_ALONE,
    ProcessUse,
    below,
    empty,
    end_as,
    files_in,
    first_excess,
    other_processes,
    proportional_memory,
    reaped,
    restrict,
    scheduling,
    set_dumpable,
    wake_descriptor,
)
from rollwright.processes.tree import adopt_orphans, die_with_parent

_LOOK_SECONDS = 0.1
_SWEEP_SECONDS = 2.0
_MOST_FILES = 100_000
_OPEN_FILES = 4096  # of each process
_FOREVER = 1e9


class RunningCommand:
    """A command and its limits."""

    def __init__(self, number: int, seconds: float | None) -> None:
        self.number, self.excess, self.started = number, "", time.monotonic()
        self.deadline = self.started + (_FOREVER if seconds is None else seconds)
        self.scheduling: tuple[Any, ...] | None = None  # of its process, when a reset kept it for the first time


class BoxServer:
    """See the module."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self._control, self._settings, self._limits = control, settings, settings["limits"]
        self._commands: dict[int, RunningCommand] = {}  # by process id of the keeper
        self._looked = 0.0
        self._ends = wake_descriptor()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._take)
        self._selector.register(self._ends, selectors.EVENT_READ, self._wake)
        ports = {port: Forwarder(self._selector, int(port), path) for port, path in settings["ports"].items()}
        self._tell(number=settings["number"], ports={port: forwarder.port for port, forwarder in ports.items()})

    def serve(self) -> None:
        """Serve until the other side is gone."""
        while True:
            for key, _ in self._selector.select(self._pause()):
                key.data()
            for keeper, status in reaped(os.WNOHANG).items():
                self._finish(keeper, status)
            self._look()

    def _pause(self) -> float | None:
        if not self._commands:
            return None
        next_deadline = min(command.deadline for command in self._commands.values()) - time.monotonic()
        return max(0.0, min(_LOOK_SECONDS, next_deadline))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ends, 65536)

    def _tell(self, **answer: Any) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, which the next message shows
            self._control.sendall(json.dumps(answer).encode() + b"\n")

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        request, descriptors = receive(self._control)
        if request is None:
            self._kill_all()
            os._exit(0)
        number = request["number"]
        try:
            if request["op"] == "kill":
                for command in [command for command in self._commands.values() if command.number == request["of"]]:
                    self._end(command, "stopped")
            elif request["op"] == "reset":
                self._reset(request.get("keep"))
                self._tell(number=number)
            else:
                self._start(request, descriptors)
        except (OSError, RecursionError) as error:
            self._tell(number=number, broken=str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        keeper = os.fork()
        if keeper == 0:
            try:
                end_as(self._keep(request, descriptors))
            finally:
                os._exit(127)
        self._commands[keeper] = RunningCommand(request["number"], request.get("seconds"))

    def _reset(self, kept: int | None) -> None:
        self._kill_all([] if kept is None else self._kept(kept))
        for root in self._settings["roots"]:
            empty(root, self._settings["kept"])

    def _kept(self, number: int) -> list[int]:
        """Return a command's keeper and process.

        Raises:
            OSError: it has ended, or a program has changed its process.
        """
        table = other_processes()
        for keeper, command in self._commands.items():
            if command.number == number and (started := [each for each, use in table.items() if use.parent == keeper]):
                process = min(started, key=lambda each: table[each].started)  # the others are orphans
                for each in (keeper, process):
                    os.kill(each, signal.SIGCONT)
                found = scheduling(process)
                command.scheduling = command.scheduling or found
                if command.scheduling != found:
                    raise OSError("a program changed the priority or the processors of the process that was to be kept")
                return [keeper, process]
        raise OSError("the process that was to be kept has ended")

    # -- the end of commands -------------------------------------------------------------------------------------------

    def _finish(self, keeper: int, status: int) -> None:
        if (command := self._commands.pop(keeper, None)) is None:
            return  # an orphan
        seconds = time.monotonic() - command.started
        self._sweep()
        code = None if command.excess else os.waitstatus_to_exitcode(status)
        self._tell(number=command.number, exit=code, excess=command.excess, seconds=seconds)

    def _end(self, command: RunningCommand, excess: str) -> None:
        command.excess = command.excess or excess
        self._kill([keeper for keeper, other in self._commands.items() if other is not command])

    def _kill_all(self, kept: Collection[int] = ()) -> None:
        """Kill everything in the box except some processes, and wait until it has ended.

        Raises:
            OSError: with processes to keep, others did not end.
        """
        for keeper, command in self._commands.items():
            command.excess = command.excess or ("" if keeper in kept else "stopped")
        deadline = time.monotonic() + _SWEEP_SECONDS
        self._kill([], kept)
        while self._commands.keys() - set(kept) or self._strays([], kept):
            if time.monotonic() > deadline:
                if kept:
                    raise OSError("programs that could not be killed")
                return
            time.sleep(0.001)
            self._kill([], kept)
            for keeper, status in reaped(os.WNOHANG).items():
                self._finish(keeper, status)

    def _kill(self, spared: list[int], kept: Collection[int] = ()) -> None:
        """Kill all processes of the box, except some keepers and what is below them, and some processes alone."""
        if IS_ALONE and not spared and not kept:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # in one step, so no fork escapes
            return
        for process in self._strays(spared, kept):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _strays(self, keepers: list[int], alone: Collection[int] = ()) -> list[int]:
        """Return the processes that are not below one of some keepers, nor among those ``alone``."""
        table = other_processes()
        kept = {*keepers, *below(table, keepers), *alone}
        own = table.keys() if IS_ALONE else below(table, [os.getpid()])
        return [process for process in own if process not in kept and not table[process].is_zombie]

    def _sweep(self) -> None:
        """Kill the processes that belong to no running command; if that takes too long, kill everything."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        spared = list(self._commands)
        self._kill(spared)
        while self._strays(spared):
            if time.monotonic() > deadline:
                for command in self._commands.values():
                    command.excess = command.excess or "killed with another command, whose processes could not be killed alone"
                spared, deadline = [], deadline + _SWEEP_SECONDS
            self._kill(spared)
            time.sleep(0.001)
            for keeper, status in reaped(os.WNOHANG).items():
                if keeper in self._commands:
                    self._finish(keeper, status)
                    spared = [keeper for keeper in spared if keeper in self._commands]

    # -- limits --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for command in list(self._commands.values()):
            if now > command.deadline:
                self._end(command, "time")
        if not self._commands or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        table = other_processes()
        owned = {keeper: [table[process] for process in below(table, [keeper])] for keeper in self._commands}
        self._look_at_processes(owned)
        self._look_at_memory(table, owned)
        if IS_ALONE:
            count, size = files_in(self._settings["roots"])
            measures = ((count, _MOST_FILES, "files"), (size, self._limits["disk_bytes"], "bytes of files"))
            if excess := first_excess(measures):
                for command in list(self._commands.values()):
                    self._end(command, excess)

    def _look_at_processes(self, owned: dict[int, list[ProcessUse]]) -> None:
        tasks = {keeper: sum(process.tasks for process in processes) for keeper, processes in owned.items()}
        if excess := first_excess([(sum(tasks.values()), self._limits["processes"], "processes and threads")]):
            self._end_largest(tasks, excess)

    def _look_at_memory(self, table: dict[int, ProcessUse], owned: dict[int, list[ProcessUse]]) -> None:
        most = self._limits["memory_bytes"]
        if sum(process.memory for processes in owned.values() for process in processes) <= most:
            return  # even though shared pages were counted several times
        memory = {keeper: sum(proportional_memory(each, table[each]) for each in below(table, [keeper])) for keeper in owned}
        if excess := first_excess([(sum(memory.values()), most, "bytes of memory")]):
            self._end_largest(memory, excess)

    def _end_largest(self, amounts: dict[int, int], excess: str) -> None:
        if command := self._commands.get(max(amounts, key=lambda keeper: amounts[keeper])):
            self._end(command, excess)

    # ------------------------------------------------------------------ in the keeper, a forked process

    def _keep(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start the command, wait until it ends, and return its status."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        adopt_orphans()
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
        os.closerange(3, 1 << 16)
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            try:
                os._exit(self._become(request, keeper))
            finally:
                os._exit(127)
        for standard in (0, 1, 2):
            os.close(standard)
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == process:
                return status

    def _become(self, request: dict[str, Any], keeper: int) -> int:
        """Run the command in this process. Returns the exit code if it could not be started or is done in this Python."""
        os.setsid()
        if not IS_ALONE:
            die_with_parent(keeper)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            if request["op"] == "unpack":
                unpack(sys.stdin.buffer, request["path"], self._limits["disk_bytes"])
            elif request["op"] == "pack":
                pack(request["path"], sys.stdout.buffer, self._limits["disk_bytes"], self._settings["kept"])
                sys.stdout.flush()
            else:
                self._execute(request)
        except (OSError, RefusedFileError, RecursionError) as error:
            why = (
                f"{request['command'][0]}: {error.strerror}" if request["op"] == "run" and isinstance(error, OSError) else error
            )
            print(why, file=sys.stderr, flush=True)
            return 127
        return 0

    def _execute(self, request: dict[str, Any]) -> None:
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: self._limits["disk_bytes"],
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_MSGQUEUE: 0,  # memory that outlives its process, and that nobody counts
        }
        if IS_ALONE:  # the kernel counts per user namespace; root is exempt
            limits[resource.RLIMIT_NPROC] = self._limits["processes"] + 8
        environment = {**os.environ, **request["env"]}
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            raise RefusedFileError(f"{request['cwd']}: {error.strerror}") from error
        restrict(limits, [bytes.fromhex(program) for program in self._settings["filters"]])
        os.execvpe(request["command"][0], request["command"], environment)


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive a message and its descriptors, or None if the other side is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(control, 4, 3, socket.MSG_CMSG_CLOEXEC)
        if not head:
            return None, []
        body = bytearray()
        size = int.from_bytes(head, "big")
        while len(body) < size:
            if not (part := control.recv(size - len(body))):
                return None, descriptors
            body += part
    except OSError:
        return None, []
    return json.loads(body), descriptors


def main() -> None:
    """Serve the other side of a socket until it is gone."""
    set_dumpable(False)
    if not IS_ALONE:
        adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives only signals that it handles
    control = socket.socket(fileno=int(sys.argv[1]))
    settings, _ = receive(control)
    if settings is not None:
        BoxServer(control, settings).serve()


if __name__ == "__main__":
    main()
