"""Results of a run: ``summary.json``, and the tables that a run prints at its end."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from rollwright.atomic import write_json
from rollwright.tracking.logging import console, output_is_terminal
from rollwright.tracking.run_directory import RunDirectory


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_summary(path: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write ``summary.json`` atomically and return its path.

    Tensors, arrays and paths become plain values; numbers that are not finite become null.
    """
    return write_json(path, _plain(summary))


def print_stage(title: str | None, plan: str) -> None:
    """Print the heading of a stage, unless the title is None, and what the stage will do."""
    terminal = console()
    if title is not None:
        terminal.print()
        terminal.rule(f"[bold]{escape(title)}[/bold]", align="left", style="dim")
    terminal.print(plan, style="dim", highlight=False, markup=False, soft_wrap=not output_is_terminal())


def measures_of(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean rewards among the scores of an evaluation: ``greedy``, ``mean@k``, and those of roles."""
    return {name: value for name, value in scores.items() if name.startswith(("greedy", "mean@"))}


def in_one_line(scores: Mapping[str, Any]) -> str:
    """Format the scores of an evaluation, each with its 95 % interval over tasks: ``greedy 0.982 [0.970, 0.990], pass@8 …``."""
    names = [*measures_of(scores), *(name for name in scores if name.startswith("pass@"))]
    limits = scores.get("intervals", {})
    shown = {name: " [{:.3f}, {:.3f}]".format(*limits[name]) if name in limits else "" for name in names}
    return ", ".join(f"{name} {scores[name]:.3f}{shown[name]}" for name in names)


def print_summary(summary: Mapping[str, Any], directory: RunDirectory) -> None:
    """Print sample completions, the scores of the evaluations, and the paths of the results."""
    terminal = console()
    measures = {label: measures_of(scores) for label, scores in summary["eval"].items()}
    if summary["completions"]:
        terminal.print(sample_completions(summary["completions"]))
    if {"before", "after"} <= set(measures):
        before, after = (measures.pop(label) for label in ("before", "after"))
        terminal.print(before_after_table(before, after, title="tasks never seen in training"))
    if measures:
        columns = list(dict.fromkeys(name for scores in measures.values() for name in scores))
        table = Table("model", *columns, title="evaluation")
        for label, scores in measures.items():
            table.add_row(label, *(f"{scores[name]:.3f}" if name in scores else "" for name in columns))
        terminal.print(table)
    terminal.print("[bold]where to look[/]")
    for name, text in _places(summary["stages"], directory):
        terminal.print(f"[dim]{name:<15}[/]  {escape(text)}", soft_wrap=True, highlight=False)  # unwrapped, to be copied


def _places(stages: Mapping[str, Any], directory: RunDirectory) -> list[tuple[str, str]]:
    """Return names and paths of a run's results."""
    policies = {name: result for name, result in stages.items() if result["kind"] == "rl"}
    trained = [result["checkpoint"] for result in policies.values() if "checkpoint" in result]
    dumps = sorted({file.parent for file in directory.path.glob("**/rollouts/*.txt")})
    found = {
        "run directory": [directory.path],
        "summary": [directory.summary_file],
        "reward curve": sorted(directory.path.glob("**/reward.png")),
        "samples to read": [path for path in dumps if path.parent.name in policies] or dumps[-1:],
        "checkpoint": trained,
    }
    lines = [("see it all", f"{_command()} view {directory.path}")]
    lines += [(name, str(path)) for name, paths in found.items() for path in paths]
    return lines + ([("", "for transformers.AutoModelForCausalLM.from_pretrained")] if trained else [])


def _command() -> str:
    """Return the ``rollwright`` command to print; the path by which it was called if it is not on PATH."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "rollwright" and shutil.which("rollwright") is None else "rollwright"


def checkpoint_table(benchmarks: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    """Build a table with one line per checkpoint and taskset; each taskset's best value of a column is bold.

    Args:
        benchmarks: label of each checkpoint, and its scores by taskset.
    """
    _, first = benchmarks[0]
    names = [name for name in next(iter(first.values())) if "@" in name]
    label = Column("checkpoint", overflow="fold")  # truncated paths would look alike
    table = Table(label, "tasks", *names, title="benchmark")
    for taskset in first:
        best = {name: max(scores[taskset][name] for _, scores in benchmarks) for name in names}
        for checkpoint, by_taskset in benchmarks:
            scores = by_taskset[taskset]
            cells = (f"[bold]{scores[n]:.3f}[/bold]" if scores[n] == best[n] else f"{scores[n]:.3f}" for n in names)
            table.add_row(checkpoint, f"{taskset} ({scores['tasks']:.0f})", *cells)
    return table


def before_after_table(before: Mapping[str, float], after: Mapping[str, float], title: str | None = None) -> Table:
    """Build a table of measures before and after training, with the change in colour.

    A measure that is missing before or after is shown as a dash there.
    """
    columns = ["", *(Column(heading, justify="right") for heading in ("before", "after", "change"))]
    table = Table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 3, 0, 0),
    )
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        change = Text("–", style="dim")
        if old is not None and new is not None:
            change = Text(f"{new - old:+.3f}", style="green" if new > old else "red" if new < old else "dim")
        table.add_row(name, _number(old), Text(_number(new), style="bold"), change)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def sample_completions(samples: Sequence[Mapping[str, Any]], limit: int = 4, max_characters: int = 300) -> RenderableType:
    """Render the first ``limit`` samples: mappings with ``prompt``, ``completion``, ``reward`` and optionally ``answer``.

    Strings longer than ``max_characters`` are shortened in the middle, with a note.
    """
    parts: list[RenderableType] = []
    for sample in samples[:limit]:
        reward = float(sample["reward"])
        head = Text.assemble(("✓ " if reward > 0 else "✗ ", "green" if reward > 0 else "red"), (f"reward {reward:g}", "bold"))
        if sample.get("answer") is not None:
            head.append(f"   answer {sample['answer']}", style="dim")
        body = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        body.add_row("asked", Text(_shorten(str(sample["prompt"]), max_characters)))
        body.add_row("said", Text(_shorten(str(sample["completion"]), max_characters)))
        parts += [head, Padding(body, (0, 0, 1, 2))]
    return Group(*parts)


def _shorten(text: str, limit: int) -> str:
    text = text.strip()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … [{len(text) - 2 * half} characters] … {text[-half:]}"
