"""Starts inference servers, waits until they are healthy, writes their logs, and ends them on every exit path.

However this process ends, SIGKILL included, its servers and their children end within seconds, because each runs under a supervisor
(``processes.ends_with_parent``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

import httpx2

from rollwright.config.servers import BUILT_COMMANDS
from rollwright.errors import EngineError, LostProcessError, RollwrightError
from rollwright.inference.network import find_free_ports, is_loopback, server_url
from rollwright.inference.server_watch import ServerWatch
from rollwright.processes.ends_with_parent import supervised
from rollwright.processes.tree import descendants
from rollwright.tracking.logging import getLogger

logger = getLogger("Launcher")

_LOG_TAIL_BYTES = 2000
#: Number of ports to try if other processes take them before the server binds.
_PORTS_TRIED = 3


class ServerProcess:
    """A server's command, run under a supervisor that ends it with this process; its output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        address: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        shared: Path | None = None,
    ) -> None:
        """Args:
        command: command line of the server.
        address: ``host:port`` that it will listen on.
        log_path: file that its output is appended to.
        environment: additional environment variables.
        shared: a directory to remove if this process ends before the server.
        """
        self.command = list(command)
        self.address = address
        self.log_path = log_path
        self._process = supervised(self.command, log_path, environment, shared)

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status of the server, or None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """Return the end of the server's output."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError as error:
            return f"({error})"

    def wait_healthy(self, timeout: float) -> None:
        """Wait until ``/health`` answers, as long as the server writes to its log.

        Args:
            timeout: seconds without a new line after which the wait ends. Lines about ``/health``, which the checks cause, do not count.

        Raises:
            EngineError: the server ended, or its log stopped before it was healthy; the end of its log is quoted.
        """
        url = server_url(self.address) + "/health"
        deadline = time.monotonic() + timeout
        with httpx2.Client(timeout=5.0, trust_env=False) as client, _opened_at_end(self.log_path) as log:
            while True:
                if self.exit_status is not None:
                    raise self.error(f"ended with status {self.exit_status} before it was healthy")
                with contextlib.suppress(httpx2.TransportError):
                    if client.get(url).status_code == 200:
                        return
                if any(line.strip() and b"/health" not in line for line in log.readlines()):
                    deadline = time.monotonic() + timeout
                if time.monotonic() > deadline:
                    raise self.error(f"was not healthy, and logged nothing for {timeout:g} s (rollout.setup_timeout)")
                time.sleep(0.1)

    def error(self, what: str) -> EngineError:
        """Build an error that quotes the end of the server's log."""
        return EngineError(f"The server at {self.address} {what}. The end of {self.log_path}:\n{self.log_tail()}")

    def stop(self, timeout: float = 10.0) -> None:
        """End the server and everything that it started; returns when they are gone."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the command ends with its supervisor
            self._process.wait()

    @property
    def found_its_port_taken(self) -> bool:
        """True if the server has ended because another process was listening on its port."""
        return self.exit_status is not None and "address already in use" in self.log_tail().lower()


def ended_child(address: str) -> str | None:
    """Return the command that ``build_cmd`` built for an address, if a child of this process has ended since and none runs the command.

    Returns:
        The command as a shell line. None if a child runs it, no child has ended since, or no command was built for this address.
    """
    url = urlsplit(server_url(address))
    built = BUILT_COMMANDS.get(url.port or 0)
    if built is None or sys.platform != "linux" or not (is_loopback(server_url(address)) or url.hostname == built.host):
        return None
    begin = built.command.index("-m") - 1  # the interpreter; anything before it is replaced when the server starts
    has_ended = resource.getrusage(resource.RUSAGE_CHILDREN) != built.children  # a child that was waited for
    for child in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            state, *numbers = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state == "Z":
                has_ended |= int(numbers[18]) / os.sysconf("SC_CLK_TCK") >= built.built_at - 0.1
            elif not line or " ".join(built.command[begin:]) in line or line.lower().startswith(("sglang::", "vllm::")):
                return None  # it runs the command, or has only just started
    return shlex.join(built.command) if has_ended else None


#: Builds a command for ``(host, port, index)``.
CommandBuilder = Callable[[str, int, int], list[str]]


class Launcher:
    """Starts servers and ends them on ``close``, at the end of its ``with`` block, or with this process."""

    def __init__(self, logs: str | Path, *, host: str = "127.0.0.1") -> None:
        """Args:
        logs: directory for the servers' logs.
        host: interface that the servers bind.
        """
        self._logs = Path(logs)
        self._host = host
        self._lock = threading.Lock()
        self.servers: list[ServerProcess] = []
        self._starters: list[Callable[[int], ServerProcess]] = []  # starts each on a port
        self._end = weakref.finalize(self, _stop_all, self.servers)  # also if this process ends first
        self._is_watched = False
        self._failure: RollwrightError | None = None

    def start(
        self,
        build: CommandBuilder,
        count: int = 1,
        *,
        name: str = "server",
        environment: Mapping[str, str] | None = None,
        shared: Path | None = None,
    ) -> list[str]:
        """Start servers on free ports, without waiting for them to load.

        Args:
            build: returns the command for a host, a port and the server's index.
            count: number of servers.
            name: prefix of the log files, ``<name>-<index>.log``.
            environment: additional environment variables.
            shared: a directory for these servers only; it is removed if this process ends before them.

        Returns:
            Addresses of the servers, ``host:port``. ``wait_healthy`` returns the final addresses: if another process takes a port
            before the server binds it, the server is started on another port.
        """

        def start(index: int, port: int) -> ServerProcess:
            command, log_path = build(self._host, port, index), self._logs / f"{name}-{index}.log"
            server = ServerProcess(command, f"{self._host}:{port}", log_path, environment, shared)
            logger.info("started %s, log in %s: %s", server.address, log_path, " ".join(command))
            return server

        ports = find_free_ports(count)
        with self._lock:
            first = len(self.servers)
            for index, port in enumerate(ports, first):
                self._starters.append(functools.partial(start, index))
                self.servers.append(start(index, port))
            return [server.address for server in self.servers[first:]]

    def wait_healthy(self, timeout: float = 300.0) -> list[str]:
        """Wait until every server answers its health check.

        Args:
            timeout: seconds that a server may be silent in its log before it is healthy.

        Returns:
            Addresses of the servers.

        Raises:
            EngineError: a server ended or was too slow. All servers are then stopped.
        """
        try:
            for place in range(len(self.servers)):
                self._wait_healthy(place, timeout)
        except BaseException:
            self.close()
            raise
        return [server.address for server in self.servers]

    def _wait_healthy(self, place: int, timeout: float) -> None:
        for ports_left in reversed(range(_PORTS_TRIED)):
            server = self.server(place)
            try:
                return server.wait_healthy(timeout)
            except EngineError:
                if not ports_left or not server.found_its_port_taken:
                    raise
                logger.warning("The port of %s was taken by another process; the server is started on another.", server.address)
            self._replace(place)

    def server(self, place: int) -> ServerProcess:
        """Return the server with the index ``place``, counted from 0.

        Raises:
            LostProcessError: the servers were ended.
        """
        with self._lock:
            if not self._starters:
                raise LostProcessError("the servers have been ended")
            return self.servers[place]

    def _replace(self, place: int) -> None:
        """End a server and start another one in its place, on another port."""
        with self._lock:
            if self._starters:
                self.servers[place].stop()
                self.servers[place] = self._starters[place](find_free_ports(1)[0])

    def restart(self, place: int, timeout: float) -> None:
        """End a server, start it again on another port, and wait until it is healthy.

        Raises:
            EngineError: the new server ended, or logged nothing for ``timeout`` seconds before it was healthy.
            LostProcessError: the servers were ended.
        """
        self._replace(place)
        self._wait_healthy(place, timeout)

    def watch(
        self,
        timeout: float,
        changed: Callable[[list[str]], object] = lambda addresses: None,
        in_service: Callable[[], tuple[list[str], int]] | None = None,
        name: str = "server",
    ) -> ServerWatch:
        """Create a watch that restarts lost servers; the caller starts and closes the watch.

        Args:
            timeout: seconds that a server may take to restart.
            changed, in_service: see ``ServerWatch``.
            name: name of a server in messages, before its number.
        """
        self._is_watched = True
        processes = [RestartableServer(self, f"{name} {place}", place, timeout) for place in range(len(self.servers))]
        addresses = [server.address for server in self.servers]
        return ServerWatch(processes, addresses, changed=changed, in_service=in_service, failed=self._fail, timeout=timeout)

    def _fail(self, failure: RollwrightError) -> None:
        self._failure = failure

    def check(self, address: str | None = None) -> None:
        """Check that a server is running. A watched server that ended is an error only if every server was given up.

        Args:
            address: the server. None checks that at least one is running.

        Raises:
            EngineError: the server has ended, or all have; the end of the log is quoted.
            RolloutError: every server was given up; the message contains the last cause.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_watched:
            return
        ended = [server for server in self.servers if server.exit_status is not None]
        if one := next((server for server in ended if server.address == address), None):
            raise one.error(f"ended with status {one.exit_status}")
        if ended and len(ended) == len(self.servers):
            others = ", and no other is left" if len(ended) > 1 else ""
            raise ended[-1].error(f"ended with status {ended[-1].exit_status}{others}")

    def close(self) -> None:
        """End every server. Idempotent."""
        with self._lock:
            _stop_all(self.servers)
            self._starters.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RestartableServer:
    """Adapts a launcher's server to ``processes.supervisor.Process``, so that a supervisor can restart the server.

    Args:
        launcher: the launcher that started the server, which is healthy.
        name: name of the server in messages.
        place: index of the server in the launcher, counted from 0.
        timeout: seconds that a restart may take.
    """

    def __init__(self, launcher: Launcher, name: str, place: int, timeout: float) -> None:
        self.name = name
        self._launcher, self._place, self._timeout = launcher, place, timeout
        self.started = Future[None]()
        self.started.set_result(None)

    def wait_started(self, timeout: float) -> None:
        """See ``Process``."""
        self.started.result(timeout)

    def restart(self) -> None:
        """See ``Process``; returns when the server is healthy, or could not be restarted."""
        self.started = Future()
        try:
            self._launcher.restart(self._place, self._timeout)
        except EngineError as error:
            self.started.set_exception(error)
        else:
            self.started.set_result(None)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of this object at once and return its finished future; see ``Process``."""
        answer = Future[Any]()
        try:
            answer.set_result(getattr(self, method)(*arguments))
        except (EngineError, LostProcessError) as error:
            answer.set_exception(error)
        return answer

    def address(self) -> str:
        """Return ``host:port``."""
        return self._launcher.server(self._place).address

    def check(self) -> None:
        """Raise an ``EngineError`` if the server has ended."""
        server = self._launcher.server(self._place)
        if server.exit_status is not None:
            raise server.error(f"ended with status {server.exit_status}")


def _opened_at_end(path: Path) -> BinaryIO:
    file = path.open("rb")
    file.seek(0, os.SEEK_END)
    return file


def _stop_all(servers: list[ServerProcess]) -> None:
    threads = [threading.Thread(target=server.stop, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    servers.clear()
