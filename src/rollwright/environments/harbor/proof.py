"""Proves a task: its reference solution must score 1, and an agent that does nothing must score less."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollwright.environments.harbor.folder import HarborOptions, TaskFolder
from rollwright.environments.harbor.images import refuse_needs
from rollwright.environments.harbor.task_box import TaskBox
from rollwright.environments.harbor.tasks import read_task_folder
from rollwright.errors import RollwrightError, SandboxError

FULL = 1.0
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class TaskProof:
    """Outcome of one task.

    Attributes:
        path: the folder.
        solved: score of the reference solution; None if there is none.
        idle: score of doing nothing; None if there is none.
        fault: what is wrong with the task; empty if it is proven.
        seconds: time of both episodes.
    """

    path: Path
    solved: float | None = None
    idle: float | None = None
    fault: str = ""
    seconds: float = 0.0


async def prove_all(paths: Sequence[Path], options: HarborOptions, sandbox: str, at_once: int) -> AsyncIterator[TaskProof]:
    """Yield the proof of each folder as soon as it is known.

    Args:
        paths: task folders.
        options: what a taskset would say about them.
        sandbox: kind of box, as in ``rollout.sandbox``.
        at_once: folders that are proven at the same time.
    """
    places = asyncio.Semaphore(at_once)

    async def prove_in_turn(path: Path) -> TaskProof:
        async with places:
            return await prove(path, options, sandbox)

    for proven in asyncio.as_completed([prove_in_turn(path) for path in paths]):
        yield await proven


async def prove(path: Path, options: HarborOptions, sandbox: str) -> TaskProof:
    """Carry out a task twice: with its reference solution, and without doing anything."""
    started = time.monotonic()
    scores: dict[str, float] = {}
    fault = ""
    try:
        folder = read_task_folder(path, options)
        refuse_needs(folder, sandbox)
    except RollwrightError as error:
        return TaskProof(path, fault=f"refused: {error}", seconds=time.monotonic() - started)
    for name, is_solved in (("solution", True), ("doing nothing", False)):
        try:
            scores[name] = await _score(folder, sandbox, is_solved=is_solved)
        except RollwrightError as error:
            fault = fault or f"{name}: {error}"
    solved, idle = scores.get("solution"), scores.get("doing nothing")
    if not fault and solved is not None and abs(solved - FULL) > _TOLERANCE:
        fault = f"the reference solution scores {solved:g}, not 1"
    if not fault and solved is not None and idle is not None and idle >= solved - _TOLERANCE:
        fault = f"doing nothing scores {idle:g}, as much as the reference solution"
    return TaskProof(path, solved, idle, fault, time.monotonic() - started)


async def _score(folder: TaskFolder, sandbox: str, *, is_solved: bool) -> float:
    async with TaskBox(folder, sandbox) as task:
        async for attempt in task.steps():
            if not is_solved:
                continue
            result = await task.run_solution(attempt)
            if result.exit_code is None:
                raise SandboxError(f"{attempt.step.solve} was ended by a limit: {result.excess or 'time'}.")
        return task.reward
