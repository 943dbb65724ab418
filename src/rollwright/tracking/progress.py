"""The progress display of a run: live on a terminal; otherwise a plain line every ten steps or 30 seconds, whichever comes first.

It shows only values that it receives; ``metrics.jsonl`` also has all of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from rollwright.errors import ConfigError
from rollwright.tracking import logging
from rollwright.tracking.metrics import PhaseTimer
from rollwright.tracking.readable import sparkline, stopwatch

_PHASE_COLOURS = {
    "generate": "dodger_blue2",
    "reward": "gold3",
    "train": "green3",
    "publish": "magenta",
    "eval": "dark_orange",
    "checkpoint": "turquoise4",
}
#: Steps and seconds between plain lines, whichever comes first.
LINE_STEPS, LINE_SECONDS = 10, 30.0
_OTHER_COLOURS = ("deep_pink4", "slate_blue1", "khaki3", "grey62")


class ProgressDisplay:
    """Shows the progress of a run.

    Args:
        title: shown in the frame, usually ``<experiment>/<trial>``.
        mode: ``auto`` (live on a terminal, plain elsewhere), ``live``, ``plain`` or ``none``.
        value_name: name of the main curve: ``reward``, or ``loss`` for supervised training.
        start_step: number of steps done before a resume.
        timer: provides the phase that is shown while a step runs.
        console: console of the live display; the process's console if None.
        stream: receives plain lines; stdout if None.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "rollwright",
        mode: str = "auto",
        value_name: str = "reward",
        start_step: int = 0,
        timer: PhaseTimer | None = None,
        console: Console | None = None,
        stream: TextIO | None = None,
    ) -> None:
        if mode not in ("auto", "live", "plain", "none"):
            raise ConfigError(f"stats_logger.display is {mode!r}: choose from auto, live, plain, none.")
        self.mode = ("live" if logging.output_is_terminal() else "plain") if mode == "auto" else mode
        self._total = total_steps
        self._title = title
        self._value_name = value_name
        self._start_step = self._step = start_step
        self._timer = timer
        self._console = console
        self._stream = stream
        self._lock = threading.RLock()
        self._values: list[float] = []
        self._evaluations: list[tuple[int, float]] = []
        self._facts: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._began = self._step_began = time.monotonic()
        self._lines: dict[str, tuple[int, float]] = {}  # kind -> step and time of the last plain line
        self._since_line: list[tuple[float, float, Mapping[str, float]]] = []  # value, seconds and phases of each step
        self._end = ""  # why the run ends before its planned last step
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:
        self._began = self._step_began = time.monotonic()
        if self.mode == "live":
            self._live = Live(
                get_renderable=self._render,
                console=self._console or logging.console(),
                refresh_per_second=8,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(
        self,
        step: int,
        value: float,
        *,
        generate_tokens_per_second: float | None = None,
        train_tokens_per_second: float | None = None,
        staleness: float | None = None,
        seconds: Mapping[str, float] | None = None,
        facts: Mapping[str, float | str] | None = None,
    ) -> None:
        """Report the end of a step.

        Args:
            step: number of steps done, counted from 1.
            value: mean reward of the step (or loss).
            staleness: mean number of versions between sampling and training.
            seconds: duration of each phase in this step.
            facts: other numbers to show, such as ``{"length": 31.2}``.
        """
        with self._lock:
            now = time.monotonic()
            step_seconds, self._step_began = now - self._step_began, now
            self._step = step
            self._values.append(float(value))
            speeds = {"generate": generate_tokens_per_second, "train": train_tokens_per_second}
            shown = {name: f"{speed:,.0f} tok/s" for name, speed in speeds.items() if speed is not None}
            if staleness is not None:
                shown["staleness"] = f"{staleness:.2f}".rstrip("0").rstrip(".")
            shown |= {name: fact if isinstance(fact, str) else f"{fact:.4g}" for name, fact in (facts or {}).items()}
            self._facts = shown
            for name, spent in (seconds or {}).items():
                self._seconds[name] = self._seconds.get(name, 0.0) + spent
        if self.mode == "plain":
            self._since_line.append((float(value), step_seconds, seconds or {}))
            if self._line_is_due("step", step):
                self._print_steps(step, shown, now)
        elif self._live is not None:
            self._live.refresh()

    def evaluation(self, step: int, value: float) -> None:
        """Report the mean reward of an evaluation after ``step`` steps (0 before the first)."""
        with self._lock:
            self._evaluations.append((step, float(value)))
            self._step_began = time.monotonic()
        if self.mode == "plain" and self._line_is_due("evaluation", step):
            self._print(f"eval after step {step}/{self._total} | reward {value:.3f}")

    def done(self, reason: str) -> None:
        """Report that the run ends before its planned last step."""
        with self._lock:
            self._end = reason
        if self.mode == "plain":
            if self._since_line:
                self._print_steps(self._step, self._facts, time.monotonic())
            self._print(f"done after step {self._step}/{self._total}: {reason}")

    def _line_is_due(self, kind: str, step: int) -> bool:
        """Return True if the report after ``step`` steps is due; those of the first and last step always are."""
        now = time.monotonic()
        last_step, last_time = self._lines.get(kind, (-LINE_STEPS, now))
        due = step // LINE_STEPS > last_step // LINE_STEPS or now - last_time >= LINE_SECONDS or step >= self._total
        if due:
            self._lines[kind] = (step, now)
        return due

    def _print_steps(self, step: int, facts: Mapping[str, str], now: float) -> None:
        """Print one line, with the mean value and seconds of the steps since the last line."""
        values, durations, phases = zip(*self._since_line, strict=True)
        self._since_line.clear()
        count = len(values)
        times = {name: sum(spent.get(name, 0.0) for spent in phases) / count for spent in phases for name in spent}
        parts = [f"step {step}/{self._total}", f"{self._value_name} {sum(values) / count:.3f}"]
        parts += [f"{name} {fact}" for name, fact in facts.items()]
        named = " ".join(f"{name} {spent:.1f}s" for name, spent in times.items() if spent >= 0.05)
        parts.append(f"{sum(durations) / count:.1f}s a step" + (f" ({named})" if named else ""))
        eta = self._eta()
        left = "" if eta is None else f", left {stopwatch(eta)}"
        self._print(" | ".join([*parts, f"elapsed {stopwatch(now - self._began)}{left}"]))

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)

    def _eta(self) -> float | None:
        done = self._step - self._start_step
        if done <= 0:
            return None
        return (self._step_began - self._began) / done * (self._total - self._step)

    def _render(self) -> RenderableType:
        with self._lock:
            width = min((self._console or logging.console()).width, 100) - 4
            rows = Table.grid(Column(style="dim", no_wrap=True), Column(), padding=(0, 2))
            rows.add_row("step", self._render_steps(width - 12))
            rows.add_row(self._value_name, self._render_curve(width - 12))
            if self._evaluations:
                rows.add_row("held out", self._render_evaluations())
            if self._facts:
                facts = Text()
                for index, (name, fact) in enumerate(self._facts.items()):
                    facts.append("   " if index else "").append(f"{name} ", style="dim").append(fact, style="bold")
                rows.add_row("speed" if "generate" in self._facts else "facts", facts)
            if self._seconds:
                rows.add_row("time", self._render_seconds(width - 12))
            rows.add_row("now", self._render_activity())
            return Panel(rows, title=f"[bold]{self._title}", title_align="left", border_style="dim", width=width + 4)

    def _render_steps(self, width: int) -> RenderableType:
        elapsed = time.monotonic() - self._began
        eta = self._eta()
        left = None if eta is None else max(0.0, eta - (time.monotonic() - self._step_began))
        numbers = f"{self._step}/{self._total}"
        is_done = self._end or self._step >= self._total
        clock = stopwatch(elapsed) + ("" if left is None or is_done else f"  {stopwatch(left)} left")
        grid = Table.grid(Column(no_wrap=True), Column(), Column(no_wrap=True), padding=(0, 2))
        bar = ProgressBar(total=max(1, self._total), completed=self._step, width=max(10, width - len(numbers) - len(clock) - 4))
        grid.add_row(Text(numbers, style="bold"), bar, Text(clock, style="cyan"))
        return grid

    def _render_curve(self, width: int) -> Text:
        if not self._values:
            return Text("–", style="dim")
        text = Text(f"{self._values[-1]:.3f}  ", style="bold")
        text.append(
            sparkline(self._values, min(48, max(8, width - 24))), style="green" if self._value_name == "reward" else "yellow"
        )
        return text.append(f"  from {self._values[0]:.3f}", style="dim")

    def _render_evaluations(self) -> Text:
        text = Text()
        shown = self._evaluations if len(self._evaluations) <= 5 else [self._evaluations[0], *self._evaluations[-4:]]
        for index, (step, value) in enumerate(shown):
            if index:
                text.append(" … " if index == 1 and len(shown) < len(self._evaluations) else " → ", style="dim")
            text.append(f"{value:.3f}", style="bold" if index == len(shown) - 1 else "")
            text.append(f" @{step}", style="dim")
        return text

    def _render_seconds(self, width: int) -> RenderableType:
        total = sum(self._seconds.values())
        if total <= 0:
            return Text("–", style="dim")
        bar, legend = Text(), Text()
        cells = max(10, width)
        order = sorted(
            self._seconds, key=lambda name: (list(_PHASE_COLOURS).index(name) if name in _PHASE_COLOURS else 99, name)
        )
        others = [name for name in order if name not in _PHASE_COLOURS]
        reached = drawn = 0.0
        for name in order:
            colour = _PHASE_COLOURS.get(name) or _OTHER_COLOURS[others.index(name) % len(_OTHER_COLOURS)]
            reached += self._seconds[name] / total * cells
            length = round(reached) - round(drawn)
            drawn = reached
            bar.append("█" * length, style=colour)
            share = self._seconds[name] / total
            if share >= 0.005:
                legend.append("■ ", style=colour).append(f"{name} {share:.0%}   ", style="dim")
        return Group(bar, legend)

    def _render_activity(self) -> RenderableType:
        if self._end or self._step >= self._total:
            return Text(f"done: {self._end}" if self._end else "done", style="bold green")
        if self._live is None:
            return Text("stopped", style="yellow")
        phase = self._timer.current if self._timer is not None else None
        since = time.monotonic() - self._step_began
        self._spinner.update(
            text=Text.assemble(phase or "working", (f"  step {min(self._step + 1, self._total)}, {since:.0f}s", "dim"))
        )
        return self._spinner


_shown: list[str] = []  # only one bar fits on a terminal, so nested bars are not shown


class _CountedProgress(Progress):
    """Progress bars that query the number of finished steps whenever they are drawn."""

    count: Callable[[], float] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.count is not None:
            for task in self.tasks:
                self.update(task.id, completed=self.count())
        yield from super().get_renderables()


@contextmanager
def progress_bar(
    total: int, description: str, show: bool | None = None, count: Callable[[], float] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar of ``total`` steps and yield a function that advances it, from any thread.

    Args:
        total: number of steps.
        description: text before the bar.
        show: whether to show the bar. If None, it is shown on a terminal and in a notebook.
        count: returns the number of finished steps; use it instead of the yielded function.
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
        progress = _CountedProgress(*columns, console=console, transient=True)
        progress.count = count
        with progress:
            task = progress.add_task(description, total=total)
            yield lambda steps: progress.advance(task, steps)
    finally:
        _shown.pop()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would disturb a run's own display."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
