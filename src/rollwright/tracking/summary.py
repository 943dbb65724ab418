"""Results of a run: ``summary.json``, the table of before and after, and sample completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollwright.atomic import write_json


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


def before_after_table(before: Mapping[str, float], after: Mapping[str, float], title: str | None = None) -> Table:
    """A table of measures before and after training, with the change in colour.

    A measure that only one of the two has is shown with a dash in the other column.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
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
    """Render the first ``limit`` samples: mappings with ``prompt``, ``completion``, ``reward`` and perhaps ``answer``.

    Texts longer than ``max_characters`` are shortened in the middle, with a note.
    """
    parts: list[RenderableType] = []
    for sample in samples[:limit]:
        reward = float(sample["reward"])
        head = Text.assemble(("✓ " if reward > 0 else "✗ ", "green" if reward > 0 else "red"), (f"reward {reward:g}", "bold"))
        if sample.get("answer") is not None:
            head.append(f"   answer {sample['answer']}", style="dim")
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", no_wrap=True)
        body.add_column(overflow="fold")
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
