"""This machine: starts the processes that train together, by torchrun's elastic agent, and ends them together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rollwright.errors import ConfigError
from rollwright.processes.tree import AGENT, children

#: Seconds that the other processes have to end by themselves when one has failed.
GRACE_SECONDS = 10
#: Ranks that one processor may have. More is a typing error: each is a Python with torch, of some 0.5 GB.
RANKS_PER_PROCESSOR = 8


def started_processes() -> int:
    """Number of processes that torchrun started to train together, this one included; 1 without torchrun."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.isdigit():
        raise ConfigError(f"WORLD_SIZE is {world!r} in the environment, and torchrun sets a number: unset it.")
    return int(world)


def start_ranks(arguments: Sequence[str], processes: int) -> int:
    """Run ``rollwright`` in several processes that find each other by their environment, until all have ended.

    SIGINT and SIGTERM are passed on: the first process finishes its step and saves, and the others end with it. A second one ends all
    at once. Where one process fails, or is killed, the others are ended.

    Args:
        arguments: of the command.
        processes: how many.

    Returns:
        The exit status: 0, that of the first process or else of the one that failed first, or 128 and the number of a signal.

    Raises:
        ConfigError: there are far more processes than processors.
    """
    available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if processes > available * RANKS_PER_PROCESSOR:
        raise ConfigError(
            f"cluster.processes is {processes}, and this machine has {available} processors: take as many processes as GPUs or processors."
        )
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    logging.disable(logging.ERROR)  # the agent repeats at length what a process has said
    with tempfile.TemporaryDirectory(prefix="rollwright-ranks-") as logs, _passed_on() as signals:
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
    """The exit status of the run. A process that was killed could not say so itself; those that the agent ended have nothing to say."""
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


@contextmanager
def _passed_on() -> Iterator[list[int]]:
    """Signals that came meanwhile, each passed on to the processes of this one."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        started = children(os.getpid())
        if not started:  # none has begun, or this kernel does not list them: the agent ends what there is
            raise KeyboardInterrupt
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, number if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
