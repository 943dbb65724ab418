"""The Ray actor of every process that a run places. The process imports this module first, so it imports little itself."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pkgutil
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import ray

from rollwright.neighbours import NEIGHBOURS
from rollwright.tracking.logging import attach_file, getLogger

logger = getLogger("ray")


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        address: address by which other nodes reach its node.
        gpus: indices of its GPUs on the node, as Ray numbers them.
    """

    address: str
    gpus: tuple[int, ...]


class Host:
    """Holds a process's object and answers calls to it. Failures are returned as values, so that no exception is pickled."""

    def __init__(self, log_path: str, environment: dict[str, str], paths: list[str], neighbours: dict[str, str]) -> None:
        os.environ.update(environment)
        sys.path += [path for path in paths if path not in sys.path]
        NEIGHBOURS.adopt(neighbours)
        with contextlib.suppress(OSError):
            os.chdir(paths[0])
        attach_file(log_path)
        logger.info("this is process %d", os.getpid())
        self._object: Any = None

    async def place(self) -> tuple[Any, Any]:
        gpus = tuple(sorted(int(number) for number in ray.get_gpu_ids()))
        own = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
        return Place(address, gpus), None

    async def start(self, path: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        async def make() -> None:
            (place, _) = await self.place()
            self._object = await asyncio.to_thread(lambda: pkgutil.resolve_name(path)(place, *arguments))

        return await _answered(make())

    async def call(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        async def make() -> Any:
            function = getattr(self._object, method)
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await asyncio.to_thread(function, *arguments)

        return await _answered(make())


async def _answered(work: Any) -> tuple[Any, Any]:
    try:
        return await work, None
    except Exception as error:  # any: the caller reports it
        return None, (type(error).__name__, str(error), "".join(traceback.format_exception(error)))
