"""Shared parts of the terminal viewer's screens: escaped text, character curves, tables, and periodic reading."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import DataTable, Static
from textual.worker import Worker, WorkerState

from rollwright.errors import RollwrightError
from rollwright.tracking.readable import clipped, visible

_EVERY = 2.0  # seconds between two looks at the files
#: Errors that reading raises if a run's files are damaged or moved, or are not a run.
PROBLEMS = (RollwrightError, OSError, ValueError, sqlite3.Error)


def line(text: Any, limit: int = 300) -> Text:
    """Escape untrusted text and shorten it to one line."""
    return Text(visible(clipped(str(text), limit)).replace("\n", "↵").replace("\t", "⇥"), no_wrap=True)


def curve(points: Sequence[Sequence[float]], width: int, height: int) -> list[str]:
    """Draw a curve in braille characters; each has two columns and four rows of dots."""
    known = [(step, value) for step, value in points if math.isfinite(value)]
    rows = [[0] * width for _ in range(height)]
    if known:
        first, last = known[0][0], known[-1][0]
        low, high = min(value for _, value in known), max(value for _, value in known)

        def place(step: float, value: float) -> tuple[int, int]:
            across = (step - first) / (last - first) if last > first else 0.5
            up = (value - low) / (high - low) if high > low else 0.5
            return round(across * (2 * width - 1)), round((1 - up) * (4 * height - 1))

        before = place(*known[0])
        for point in known:
            x, y = place(*point)
            dots = max(abs(x - before[0]), abs(y - before[1]), 1)
            for dot in range(dots + 1):
                column = round(before[0] + (x - before[0]) * dot / dots)
                row = round(before[1] + (y - before[1]) * dot / dots)
                rows[row // 4][column // 2] |= (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)[row % 4 + 4 * (column % 2)]
            before = x, y
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in rows]


class Table(DataTable[Text]):
    """A table with one selected row."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("j", "cursor_down", "Next", key_display="j k"),
        Binding("k", "cursor_up", "Previous", show=False),
        Binding("home", "scroll_top", "First", show=False),
        Binding("end", "scroll_bottom", "Last", show=False),
    ]

    def __init__(self, *columns: str) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True)
        self.names = columns

    def on_mount(self) -> None:
        self.fill({})

    def fill(self, rows: Mapping[str, Sequence[Text | str]], first: str | None = None) -> None:
        """Replace the rows and keep the selection; if nothing is selected, select ``first``."""
        before = self.chosen or first
        shown = {key: [cell if isinstance(cell, Text) else line(cell) for cell in cells] for key, cells in rows.items()}
        self.clear(columns=True)
        for place, name in enumerate(self.names):
            head = Text(name, style="bold")
            # With a width, because Textual measures cells only when no message is waiting, which may be never on a busy machine.
            self.add_column(head, width=max(each.cell_len for each in (head, *(cells[place] for cells in shown.values()))))
        for key, cells in shown.items():
            self.add_row(*cells, key=key)
        if before is not None and before in rows:
            self.move_cursor(row=list(rows).index(before))

    @property
    def chosen(self) -> str | None:
        """Key of the selected row, or None if the table is empty."""
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value if self.row_count else None


class View(Screen[None]):
    """A screen that reads in a thread whenever its content may have changed, and draws in the event loop.

    Args:
        stamp: returns a value that changes with the content.
    """

    BINDINGS: ClassVar[list[Any]] = [Binding("escape", "up", "Up", show=False), ("u", "up", "Up")]
    is_followed = True
    _seen: Any = None

    def __init__(self, stamp: Callable[[], Any]) -> None:
        super().__init__()
        self.stamp = stamp

    def on_mount(self) -> None:
        """Read the content now, and look for changes periodically."""
        self.read_again()
        self.set_interval(_EVERY, self._look)

    def _look(self) -> None:
        if self.is_current and self.is_followed and self._stamp() != self._seen:
            self.read_again()

    def _stamp(self) -> Any:
        try:
            return self.stamp()
        except OSError:  # a file was moved meanwhile
            return None

    def read_again(self) -> None:
        """Read the content again."""
        self._seen = self._stamp()
        self.run_worker(self._read, thread=True, exclusive=True)

    def _read(self) -> Any:
        try:
            return self.read()
        except PROBLEMS as error:
            return error

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show the content, or why it cannot be read."""
        if event.state is not WorkerState.SUCCESS:
            return
        if isinstance(event.worker.result, Exception):
            self.head(f"! {event.worker.result}")
        else:
            self.show(event.worker.result)

    def read(self) -> Any:
        """Return the content; called in a thread."""
        raise NotImplementedError

    def show(self, found: Any) -> None:
        """Show the content."""
        raise NotImplementedError

    def head(self, *parts: Any) -> None:
        """Set the heading to the parts that are not empty."""
        self.query_one("#head", Static).update(Text(line(" · ".join(str(part) for part in parts if part)).plain))

    def action_up(self) -> None:
        """Go one level up, unless this is the first level."""
        if len(self.app.screen_stack) > 2:
            self.dismiss()
