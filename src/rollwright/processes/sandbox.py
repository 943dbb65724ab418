"""Runs Python code written by a model in a jail (``jails``) that limits time, memory, disk, processes and network.

A jail belongs to one episode and runs its scripts one after another. Jails are started in advance, and their Python forks for each
script, so a call costs little more than the script itself. Files and processes that a script leaves behind are removed before the next
script starts.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from weakref import WeakKeyDictionary

from rollwright.errors import ConfigError, SandboxError
from rollwright.processes.bubblewrap import Bubblewrap
from rollwright.processes.containers import CONTAINERS, Container
from rollwright.processes.jails import Jail, Sandbox, SandboxLimits, SandboxResult, server_command

__all__ = ["SandboxLimits", "SandboxResult", "check_sandbox", "run_python", "sandbox_name", "sandboxed"]

DEFAULT_SANDBOX = "bubblewrap"
#: Number of scripts that run at once per event loop. Others wait, which does not count against their time limit.
SCRIPTS_AT_ONCE = 4 * (os.cpu_count() or 1)
#: Number of idle jails that all episodes together keep between scripts; the jail that has been idle longest is closed first.
JAILS_KEPT = 2 * SCRIPTS_AT_ONCE
_AHEAD = 2  # jails of each kind that are started in advance
_KINDS_AHEAD = 8  # kinds (sandbox and limits) that have jails started in advance; jails of other kinds start on demand


async def run_python(
    source: str,
    stdin: str = "",
    timeout: float = 10.0,
    memory_bytes: int | None = None,
    *,
    limits: SandboxLimits | None = None,
) -> SandboxResult:
    """Run ``source`` as a script in an empty directory, in the current episode's sandbox and jail.

    Args:
        source: Python source.
        stdin: the script's standard input.
        timeout: seconds of wall-clock time after which the script and its descendants are killed.
        memory_bytes: address space limit, which overrides that of ``limits``.
        limits: all other limits. None uses the defaults.

    Returns:
        Output, exit code, and whether the script timed out. A script that fails raises no error here; its traceback is in ``stderr``.

    Raises:
        SandboxError: a limit is out of range, the sandbox is missing, or no process can be started.
    """
    limits = limits or SandboxLimits()
    if memory_bytes is not None:
        limits = replace(limits, memory_bytes=memory_bytes)
    if timeout <= 0 or limits.memory_bytes < 2**26:
        raise SandboxError(
            f"run_python: timeout is {timeout} s and memory {limits.memory_bytes} bytes; allow more than 0 s and 64 MiB."
        )
    async with _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(SCRIPTS_AT_ONCE)):
        with contextlib.nullcontext(episode) if (episode := _episode.get()) else sandboxed() as episode:
            future: Future[SandboxResult] = Future()
            future.set_running_or_notify_cancel()  # cancelling the caller ends the jail instead of this future
            used: list[Jail] = []
            has_given_up = threading.Event()

            def run() -> None:  # runs in a thread, so that a slow event loop delays neither the script nor its end
                try:
                    with _jail(episode, limits) as jail:
                        used.append(jail)
                        if has_given_up.is_set():
                            jail.kill()
                        result = jail.run(source, stdin, timeout)
                    future.set_result(result)
                except BaseException as error:  # the awaiting call raises it
                    future.set_exception(error)

            threading.Thread(target=run, name="sandbox", daemon=True).start()
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                has_given_up.set()
                for jail in used:
                    jail.kill()
                raise


class PlainProcess:
    """No sandbox: a process that limits its time, memory and file sizes, but can access files outside its temporary directory."""

    def start(self, limits: SandboxLimits) -> Jail:
        """See :class:`Sandbox`."""
        directory = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True)
        return Jail(server_command(sys.executable), limits, [directory.name], clean=directory.cleanup)


def make_sandbox(name: str) -> Sandbox:
    """Return the sandbox for a name, as in ``rollout.sandbox``.

    Raises:
        ConfigError: there is no sandbox of that name.
    """
    kind, _, image = name.partition(":")
    if kind in CONTAINERS:
        return Container(kind, image)
    if name in ("bubblewrap", "unsafe"):
        return Bubblewrap() if name == "bubblewrap" else PlainProcess()
    raise ConfigError(
        f"there is no sandbox {name!r}; it is bubblewrap, docker or podman (docker:IMAGE for another image than python:3.12-slim), "
        "or unsafe. The URL of a service of boxes and boxes of your own are for agents' programs, not for Python tools (docs/boxes.md)."
    )


def check_sandbox(name: str) -> None:
    """Start a jail, so that missing requirements are reported before the first script.

    Raises:
        ConfigError: there is no sandbox of that name.
        SandboxError: the jail cannot start; the message says what to install, or which setting to choose.
    """
    _started(name, SandboxLimits()).close()


class _Episode:
    """One episode, as the owner of its jails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False


def sandbox_name() -> str:
    """Return the name of the current episode's sandbox, or ``bubblewrap`` outside of episodes."""
    episode = _episode.get()
    return episode.name if episode else DEFAULT_SANDBOX


@contextlib.contextmanager
def sandboxed(name: str | None = None) -> Iterator[_Episode]:
    """Give scripts that run inside this block separate jails, which are closed at the end of the block.

    Args:
        name: name of the sandbox, as in ``rollout.sandbox``. None uses the sandbox of the enclosing block, or bubblewrap.
    """
    episode = _Episode(name or sandbox_name())
    token = _episode.set(episode)
    try:
        yield episode
    finally:
        _episode.reset(token)
        with _lock:
            episode.is_over = True
            left = [jail for jail, (owner, _) in _idle.items() if owner is episode]
            for jail in left:
                del _idle[jail]
        if left:  # ending a jail takes milliseconds and must not block the event loop
            threading.Thread(target=lambda: [jail.close() for jail in left], name="sandbox-end", daemon=True).start()


@contextlib.contextmanager
def _jail(episode: _Episode, limits: SandboxLimits) -> Iterator[Jail]:
    """Yield an idle jail of the episode, or a new one, and keep it for the episode's next script. Blocks."""
    with _lock:
        jail = next((jail for jail, use in _idle.items() if use == (episode, limits)), None)
        if jail is not None:
            del _idle[jail]
    if jail is None or not jail.is_alive:
        jail = _started(episode.name, limits)
    given_up = None
    try:
        yield jail
    finally:
        with _lock:
            if episode.is_over or not jail.is_alive:
                given_up = jail
            else:
                _idle[jail] = (episode, limits)
                if len(_idle) > JAILS_KEPT:
                    del _idle[given_up := next(iter(_idle))]
        if given_up is not None:
            given_up.close()


class _Ready(queue.SimpleQueue):
    """Free jails of one kind, or the errors of starts that failed."""

    takers = 0  # number of threads that wait for a jail


def _started(name: str, limits: SandboxLimits) -> Jail:
    """Return a jail that is ready to run scripts, and have another one started to replace it.

    Raises:
        SandboxError: no jail can be started.
    """
    global _starter
    sandbox = make_sandbox(name)
    with _lock:
        if _starter is None:  # runs until the process ends, because a jail ends with the thread that started it
            _starter = threading.Thread(target=_start_jails, args=[_wanted], name="sandbox-start", daemon=True)
            _starter.start()
        ahead = _AHEAD if len(_ready) < _KINDS_AHEAD and (name, limits) not in _ready else 0
        ready = _ready.setdefault((name, limits), _Ready())
        ready.takers += 1
    for _ in range(1 + ahead):
        _wanted.put((sandbox, limits, ready))
    jail = ready.get()
    with _lock:
        ready.takers -= 1
    _close_unwanted(ready)
    if isinstance(jail, Exception):
        raise jail
    jail.wait_ready()
    return jail


def _start_jails(wanted: queue.SimpleQueue) -> None:
    while True:
        sandbox, limits, ready = wanted.get()
        try:
            ready.put(sandbox.start(limits))
        except Exception as error:  # raised by the thread that takes the jail
            ready.put(error)
        _close_unwanted(ready)


def _close_unwanted(ready: _Ready) -> None:
    """Close the free jails of a kind that ``close_jails`` has dropped, unless a thread still waits for one of them."""
    jails: list[Jail] = []
    with _lock:
        if ready.takers or any(ready is kind for kind in _ready.values()):
            return
        with contextlib.suppress(queue.Empty):
            while True:
                jails += [jail] if isinstance(jail := ready.get_nowait(), Jail) else []
    for jail in jails:
        jail.close()


@atexit.register
def close_jails() -> None:
    """Close all idle and free jails; the next script starts new ones."""
    with _lock:
        jails, kinds = list(_idle), list(_ready.values())
        _idle.clear()
        _ready.clear()
    for ready in kinds:
        _close_unwanted(ready)
    for jail in jails:
        jail.close()


def _begin() -> None:
    """Set up this module's state, at import and again in a forked child, which must not use its parent's jails."""
    global _lock, _idle, _ready, _wanted, _starter, _places
    _lock = threading.Lock()
    _idle = {}  # jails that wait for their episode's next script, in the order in which they became idle
    _ready = {}  # free jails of each kind
    _wanted, _starter = queue.SimpleQueue(), None
    _places = WeakKeyDictionary()


_lock: threading.Lock
_idle: dict[Jail, tuple[_Episode, SandboxLimits]]
_ready: dict[tuple[str, SandboxLimits], _Ready]
_wanted: queue.SimpleQueue
_starter: threading.Thread | None
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
_episode: ContextVar[_Episode | None] = ContextVar("sandbox_episode", default=None)
_begin()
os.register_at_fork(after_in_child=_begin)
