"""Parts of an episode that run at the same time: all of them come to their end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from rollwright.experience.trajectory import Trajectory, concat_padded_tensors

T = TypeVar("T")


async def side_by_side(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and give their results in order.

    Where one raises, or the caller is cancelled, the others are cancelled and waited for: ``asyncio.gather`` alone would leave
    them asking the engine for a sample that has failed already.

    Raises:
        Exception: whatever the first part to fail raised.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)


async def one_group(episodes: Iterable[Coroutine[Any, Any, Trajectory | None]]) -> Trajectory | None:
    """The rows of a task's episodes, run at once; None where one of them was rejected: a group is whole or not at all."""
    rows = await side_by_side(episodes)
    accepted = [row for row in rows if row is not None]
    return concat_padded_tensors(accepted) if len(accepted) == len(rows) else None
