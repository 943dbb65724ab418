"""The viewer on a terminal: the list of runs, the curves and samples of a run, and one sample token by token.

It shows the same content as the pages, with the same words and keys. Text from a model is never interpreted: it is not parsed as
markup, and invisible characters are replaced, so no escape sequence reaches the terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.widgets import Footer, Static

from rollwright.tracking.readable import clock, number, share, sparkline, visible
from rollwright.viewer.run import Run
from rollwright.viewer.runs import Runs
from rollwright.viewer.terminal_parts import PROBLEMS, Table, View, curve, line
from rollwright.viewer.terminal_samples import SamplesView


def show(places: Sequence[str | Path]) -> None:
    """Show the runs below directories on this terminal until the user quits."""
    Viewer(places).run()


class RunsView(View):
    """The list of the runs below the directories."""

    def __init__(self, runs: Runs) -> None:
        super().__init__(time.monotonic)  # differs each time, so the list is always read again
        self.runs = runs
        self.is_first = True

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Table("run", "state", "step", "reward", "held out", "curve", "written")
        yield Footer()

    def read(self) -> Any:
        return self.runs.list()

    def show(self, found: Any) -> None:
        self.head(f"{len(found)} {'run' if len(found) == 1 else 'runs'} below {', '.join(map(str, self.runs.roots))}")
        rows: dict[str, list[Any]] = {}
        for info in found:
            step = f"{info['last_step']}" + (f"/{info['total_steps']}" if info["total_steps"] else "")
            values = number(info["reward"]), number(info["eval"]), sparkline(info["sparkline"], 16), clock(info["updated"])
            rows[info["id"]] = [line(info["id"]), info["state"], step, *values]
        self.query_one(Table).fill(rows)
        if self.is_first and len(found) == 1:
            self.open(found[0]["id"])
        self.is_first = False

    def open(self, name: str) -> None:
        """Show a run."""
        try:
            run = self.runs.get(name)
        except PROBLEMS as error:
            self.notify(visible(str(error)), severity="error", markup=False)
            return
        run.follow()
        self.app.push_screen(RunView(run))

    def on_data_table_row_selected(self) -> None:
        if name := self.query_one(Table).chosen:
            self.open(name)


class Plot(Static):
    """The curve of a run, redrawn when its size changes."""

    def on_resize(self) -> None:
        if isinstance(self.screen, RunView):
            self.screen.draw()


class RunView(View):
    """Diagnosis and curves of a run, with a selected step."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("left", "point(-1)", "Step", priority=True, key_display="←→"),
        Binding("right", "point(1)", "Next step", show=False, priority=True),
        Binding("enter", "samples(True)", "Its samples", priority=True),
        ("s", "samples", "All samples"),
        Binding("slash", "samples(False, True)", "Search", key_display="/"),
    ]
    step: int | None = None  # the selected step; the last one if None
    found: dict[str, Any] | None = None

    def __init__(self, run: Run) -> None:
        super().__init__(lambda: run.stamp)
        self.watched = run

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="signs", markup=False)
        with Horizontal():
            yield Table("last", "metric")
            yield Plot(id="curve", markup=False)
        yield Footer()

    def read(self) -> Any:
        run = self.watched
        found = {"info": run.info(), "signs": run.diagnosis(), "curves": run.metrics(), "progress": run.progress()}
        return {**found, "missing": [each["message"] for each in run.missing()]}

    def show(self, found: Any) -> None:
        self.found, info, progress = found, found["info"], found["progress"]
        of = f" of {info['total_steps']}" if info["total_steps"] else ""
        read = f"{progress['samples']:,} samples"
        read += "" if progress["is_complete"] else f" ({share(progress['bytes'] / max(1, progress['of_bytes']))} read)"
        self.head(info["name"], info["state"], f"step {info['last_step']}{of}", f"reward {number(info['reward'])}", read)
        more = len(found["missing"]) - 3
        missing = [f"✗ missing: {message}" for message in found["missing"][:3]]
        missing += [f"✗ and {more} more: rollwright check lists them all"] if more > 0 else []
        signs = [*missing, *(f"{'!' if sign['level'] == 'bad' else '▸'} {sign['message']}" for sign in found["signs"][:3])]
        self.query_one("#signs", Static).update(Text(visible("\n".join(signs))))
        names = [name for group in found["curves"]["groups"].values() for name in group]
        curves = {name: points for name in names if (points := found["curves"]["series"][name])}
        rows = {name: [number(points[-1][1]), name] for name, points in curves.items()}
        self.query_one(Table).fill(rows, info["curve"])
        self.draw()

    def draw(self) -> None:
        plot, name = self.query_one("#curve", Static), self.query_one(Table).chosen
        if self.found is None or name is None:
            plot.update("no metrics yet")
            return
        points = [point for point in self.found["curves"]["series"].get(name, []) if point[1] is not None]
        values = [value for _, value in points if math.isfinite(value)]
        width, height = max(10, plot.size.width - 2), max(3, plot.size.height - 6)
        text = line(name)
        text.stylize("bold")
        if values:
            text.append(f"\n\n{number(max(values))}\n", "dim")
            text.append("\n".join(curve(points, width, height)), "bold cyan")
            text.append(f"\n{number(min(values))}", "dim")
            first, last = points[0][0], points[-1][0]
            at = min(points, key=lambda point: abs(point[0] - (last if self.step is None else self.step)))
            column = round((at[0] - first) / (last - first) * (width - 1)) if last > first else width // 2
            label = f"step {at[0]:.0f}: {number(at[1])}"
            text.append("\n" + " " * column + "▲\n" + " " * max(0, min(column, width - len(label))) + label, "bold")
        plot.update(text)

    def on_data_table_row_highlighted(self) -> None:
        self.draw()

    def action_point(self, by: int) -> None:
        """Select the previous or next step."""
        steps = self._steps()
        if steps:
            place = steps.index(self.step) if self.step in steps else len(steps) - 1
            place = max(0, min(len(steps) - 1, place + by))
            self.step = steps[place] if place < len(steps) - 1 else None
            self.draw()

    def _steps(self) -> list[int]:
        name = self.query_one(Table).chosen
        return [int(step) for step, _ in (self.found["curves"]["series"].get(name, []) if self.found and name else [])]

    def action_samples(self, of_step: bool = False, typing: bool = False) -> None:
        """Show the samples of the selected step, or of all steps."""
        step = self.step if self.step is not None else max(self._steps(), default=None)
        asked = f"step={step}" if of_step and step is not None else ""
        self.app.push_screen(SamplesView(self.watched, asked, typing=typing))


class Viewer(App[None]):
    """The application, which shows the runs below directories."""

    CSS = """
    #head { height: auto; max-height: 2; text-style: bold; background: $panel; padding: 0 1; }
    #signs { height: auto; max-height: 6; padding: 0 1; color: $text-warning; }
    #overlays, #facts { height: auto; max-height: 4; padding: 0 1; }
    #facts { border-top: solid $panel; height: 4; }
    #curve { width: 1fr; height: 1fr; padding: 0 1; }
    RunView Table { width: 40%; max-width: 52; height: 1fr; }
    Table { height: 1fr; }
    TokenView { height: 1fr; overflow-y: scroll; overflow-x: hidden; padding: 0 1; }
    #chat { height: 1fr; padding: 0 1; }
    """
    TITLE = "rollwright view"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        ("q", "quit", "Quit"),
        Binding("t", "turn_light", "Light or dark", show=False),
        Binding("question_mark", "help", "Keys", key_display="?"),
    ]

    def __init__(self, places: Sequence[str | Path]) -> None:
        super().__init__()
        self.runs = Runs(places)

    def on_mount(self) -> None:
        """Start at the list of runs, which opens the run if there is only one."""
        self.push_screen(RunsView(self.runs))

    def on_unmount(self) -> None:
        self.runs.close()

    def action_turn_light(self) -> None:
        self.theme = "textual-light" if self.theme != "textual-light" else "textual-dark"

    def action_help(self) -> None:
        """Show or hide all keys."""
        if self.screen.query("HelpPanel"):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()
