"""What every benchmark prints and writes: rows, ratios measured in one run, and the machine that they were measured on."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """What it ran on, and how busy that was before the benchmark began."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), None)
    found = {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": None if memory is None else round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        import torch
    except ModuleNotFoundError:
        return found
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


class Report:
    """Rows and ratios of one benchmark."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.machine = machine()
        self.results: list[dict[str, Any]] = []
        self.ratios: dict[str, float] = {}

    def row(self, **values: Any) -> None:
        """Add a line of the table: names to text or numbers."""
        self.results.append(values)

    def ratio(self, name: str, value: float) -> None:
        """Add ``"<peer>/<size>"`` -> ours divided by theirs, both from this run."""
        self.ratios[name] = value

    def finish(self, json_path: Path | None = None) -> None:
        """Print the table and, where a path is given, write everything to it."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
        table = Table(title=self.name)
        columns = list(dict.fromkeys(key for result in self.results for key in result))
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for result in self.results:
            table.add_row(*(_cell(result.get(column)) for column in columns))
        console.print(table)
        for name, value in self.ratios.items():
            console.print(f"{name}: {value:.3g}x")
        console.print(f"on {self.machine['processor']}, {self.machine['cores']} cores, load {self.machine['load_1m']}")
        if json_path is not None:
            content = {"machine": self.machine, "results": self.results, "ratios": self.ratios}
            Path(json_path).write_text(json.dumps(content, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
