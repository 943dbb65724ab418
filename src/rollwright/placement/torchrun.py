"""Starts and ends the ranks of a run on this machine, with torchrun's elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rollwright.errors import ConfigError
from rollwright.processes.pool import processor_count
from rollwright.processes.tree import AGENT, children

#: After one process has failed, seconds for the others to end by themselves.
GRACE_SECONDS = 10
#: Maximum number of ranks per processor. More are probably a typing error: each rank is a Python process with torch and needs about 0.5 GB.
RANKS_PER_PROCESSOR = 8


def started_processes() -> int:
    """Return the number of ranks that torchrun started, including this process, or 1 without torchrun."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.isdigit():
        raise ConfigError(f"WORLD_SIZE is {world!r} in the environment, and torchrun sets a number: unset it.")
    return int(world)


def start_ranks(arguments: Sequence[str], processes: int) -> int:
    """Run ``rollwright`` in several processes, which find each other through the environment, and wait until all have ended.

    SIGINT and SIGTERM are passed on: rank 0 finishes its step and saves, and the other ranks end with it. A second signal ends all ranks
    immediately. If one process fails or is killed, the others are ended.

    Args:
        arguments: arguments of the command.
        processes: number of ranks.

    Returns:
        The exit status: 0, the status of the lowest rank that failed, or 128 plus the number of a signal.

    Raises:
        ConfigError: there are far more processes than processors.
    """
    available = processor_count()
    if processes > available * RANKS_PER_PROCESSOR:
        raise ConfigError(
            f"cluster.processes is {processes}, and this machine has {available} processors: take as many processes as GPUs or processors."
        )
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    logging.disable(logging.ERROR)  # the agent repeats at length what a process has reported
    with tempfile.TemporaryDirectory(prefix="rollwright-ranks-") as logs, signals_to(_pass_on) as signals:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"{AGENT}{os.getpid()}",
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGHUP,SIGQUIT",
            shutdown_timeout=GRACE_SECONDS,
        )
        try:
            launch_agent(config, sys.executable, ["-P", "-m", "rollwright", *arguments])
        except ChildFailedError as error:
            return _status(error.failures, signals)
    return 128 + signals[0] if signals else 0


def _status(failures: dict[int, Any], signals: Sequence[int]) -> int:
    """Return the run's exit status, and report a killed rank, which could not do so itself. Ranks that the agent ended do not count."""
    if signals:
        return 128 + signals[0]
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    said = [code for code in codes.values() if code > 0]
    if said and not killed:
        return said[0]
    rank = (killed or list(codes))[0]
    name = signal.Signals(-codes[rank]).name
    print(f"error: rank {rank} of the training (process {failures[rank].pid}) was ended by {name}", file=sys.stderr)
    return 128 - codes[rank]


def _pass_on(received: Sequence[int]) -> None:
    """Pass the first signal on to the child processes; at the second one, kill them."""
    started = children(os.getpid())
    if not started:  # none has started, or this kernel does not list children: the agent ends them
        raise KeyboardInterrupt
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, received[-1] if len(received) == 1 else signal.SIGKILL)


@contextmanager
def signals_to(handle: Callable[[Sequence[int]], object]) -> Iterator[Sequence[int]]:
    """Collect SIGINT and SIGTERM inside the context.

    Args:
        handle: called in the main thread after each signal, with the signals so far.

    Yields:
        The signals so far.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handle(received)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
