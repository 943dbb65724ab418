"""A progress bar for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rollwright.tracking import logging

_shown: list[str] = []  # a terminal has room for one bar: those inside another show nothing


@contextmanager
def progress_bar(total: int, description: str, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A bar that is advanced by the function it gives; any thread may call it.

    Args:
        total: steps of the whole.
        description: what is done.
        show: None: on a terminal and in a notebook, nowhere else.
    """
    console = logging.console()
    if show is None:
        show = logging.output_is_terminal() or console.is_jupyter
    if not show or _shown:
        yield lambda steps: None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    _shown.append(description)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda steps: progress.advance(task, steps)
    finally:
        _shown.pop()
