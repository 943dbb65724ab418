"""Calls to several servers at once, from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rollwright.errors import EngineError
from rollwright.inference.router import Server

Result = TypeVar("Result")


class FanOut:
    """A thread for each server.

    Args:
        name: of the threads.
        servers: how many.
    """

    def __init__(self, name: str, servers: int) -> None:
        self._threads = ThreadPoolExecutor(max(4, servers), thread_name_prefix=name)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin one call."""
        return self._threads.submit(function, *arguments)

    def each(self, action: Callable[[Server], Result], servers: Iterable[Server]) -> list[Result]:
        """``action`` on all servers at once; the first failure is raised after all are done."""
        futures = [self.submit(action, server) for server in servers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def settled(
        self, action: Callable[[Server], Result], servers: Iterable[Server]
    ) -> tuple[list[tuple[Server, Result]], list[tuple[Server, EngineError]]]:
        """``action`` on all servers at once: what those gave that did it, and why the others did not."""
        done: list[tuple[Server, Result]] = []
        failed: list[tuple[Server, EngineError]] = []
        for server, future in [(server, self.submit(action, server)) for server in servers]:
            error = future.exception()
            if error is None:
                done.append((server, future.result()))
            elif isinstance(error, EngineError):
                failed.append((server, error))
            else:
                raise error
        return done, failed

    def close(self) -> None:
        """End the threads; calls that were not begun are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
