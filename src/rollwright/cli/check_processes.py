"""Runs checks of a machine one after another, each in a process of its own, so that a crash or a hang of one is its result.

A check is a function that is called in a new process with a ``CheckPlace`` and returns figures. What it starts ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rollwright.atomic import write_json
from rollwright.processes.child import program
from rollwright.processes.ends_with_parent import supervised

_TAIL_BYTES = 1500  # of a log, in a result
_SLOWER_CPU = 3.0  # limits without a GPU
_END_SECONDS = 20.0  # for the processes of a check to end


@dataclass(frozen=True)
class CheckPlace:
    """Where a check runs, and with what.

    Attributes:
        directory: an empty directory for what the check writes.
        device: ``cuda`` or ``cpu``.
        gpus: number of GPUs.
        is_short: run the smallest form that still shows something.
        pythons: interpreter of each kind of server that is installed (``vllm``, ``sglang``).
        versions: version of each of these servers.
        checkout: root of the repository, if the package is in a checkout.
    """

    directory: str = ""
    device: str = "cpu"
    gpus: int = 0
    is_short: bool = False
    pythons: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    checkout: str | None = None


@dataclass(frozen=True)
class MachineCheck:
    """A line of a table of checks.

    Attributes:
        name: unique name.
        shows: what is known when it has passed.
        function: a module's function; called with a ``CheckPlace`` and ``arguments``, it returns figures or raises.
        arguments: plain data.
        needs: names of requirements; a check without one of them is skipped.
        seconds: time limit on a GPU; three times as long on a CPU.
        in_short: whether the check is part of the short form.
    """

    name: str
    shows: str
    function: Callable[..., dict[str, Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seconds: float = 300.0
    in_short: bool = False


@dataclass(frozen=True)
class CheckOutcome:
    """What came of a check. ``why`` is the reason of a failure or of a check that was skipped."""

    name: str
    shows: str
    state: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def run_checks(
    checks: Sequence[MachineCheck],
    place: CheckPlace,
    missing: Callable[[str, CheckPlace], str],
    *,
    total_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[CheckOutcome]:
    """Run checks in their order and yield each outcome as soon as it is known.

    Args:
        checks: the checks.
        place: their place; ``directory`` receives a directory for each check.
        missing: returns why this machine lacks a requirement, or "" if it has it.
        total_seconds: a check that would begin later is skipped, and one that runs then is ended.
        environment: additional environment variables.
    """
    deadline = time.monotonic() + total_seconds
    for check in checks:
        reasons = [reason for need in check.needs if (reason := missing(need, place))]
        left = deadline - time.monotonic()
        if reasons:
            yield CheckOutcome(check.name, check.shows, "skipped", why="; ".join(reasons))
        elif left <= 0:
            yield CheckOutcome(check.name, check.shows, "skipped", why=f"no time was left of {total_seconds / 60:g} minutes")
        else:
            limit = check.seconds * (1.0 if place.gpus else _SLOWER_CPU)
            yield _run(check, place, min(limit, left), environment)


def _run(check: MachineCheck, place: CheckPlace, limit: float, environment: Mapping[str, str] | None) -> CheckOutcome:
    directory = Path(place.directory) / check.name.replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    task, answer, log = directory / "check.json", directory / "result.json", directory / "log"
    for left_behind in (answer, log):
        left_behind.unlink(missing_ok=True)
    described = {
        "function": f"{check.function.__module__}:{check.function.__qualname__}",
        "arguments": check.arguments,
        "place": asdict(replace(place, directory=str(directory))),
    }
    write_json(task, described)
    began = time.monotonic()
    process = supervised(program(__name__, "-P", str(task), str(answer)), log, environment)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    seconds = round(time.monotonic() - began, 1)
    found = json.loads(answer.read_text()) if answer.exists() else {}
    if status == 0 and "figures" in found:
        return CheckOutcome(check.name, check.shows, "passed", seconds, found["figures"])
    why = found.get("failure") or (f"it was ended after {limit:.0f} s" if status is None else f"it ended with {_named(status)}")
    return CheckOutcome(check.name, check.shows, "failed", seconds, why=f"{why}\n{_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a check and everything that it started."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _named(status: int) -> str:
    with contextlib.suppress(ValueError):
        if status > 128:
            return f"signal {signal.Signals(status - 128).name}"
    return f"exit status {status}"


def _tail(log: Path) -> str:
    content = log.read_bytes() if log.exists() else b""
    return f"The end of {log}:\n{content[-_TAIL_BYTES:].decode(errors='replace').strip()}"


def main() -> int:
    """Run one check; called in its process. Arguments: the file that describes it, and the file for the result."""
    task, answer = (Path(argument) for argument in sys.argv[1:3])
    described = json.loads(task.read_text())
    module, _, name = described["function"].partition(":")
    try:
        function = attrgetter(name)(importlib.import_module(module))
        figures = function(CheckPlace(**described["place"]), **described["arguments"])
    except Exception as error:  # whatever a check raises is its result
        traceback.print_exc()
        write_json(answer, {"failure": f"{type(error).__name__}: {error}"})
        return 1
    write_json(answer, {"figures": figures})
    return 0
