"""Which directories are runs, stages of runs, or processes of runs, and what their ``run.json`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rollwright.atomic import read_json
from rollwright.errors import DataError
from rollwright.experience.journal.reading import journal_files
from rollwright.tracking.run_directory import MARKER


def find_part(path: Path) -> Path:
    """Return ``path`` if it is a run, stage or process itself, or else its only stage or process that trained on samples.

    If there are none or several, the only one with a journal, or else the only one with metrics, is returned.

    Raises:
        DataError: there is no candidate, or there are several.
    """
    if not path.is_dir():
        raise DataError(f"{path} is no directory: give that of a run, such as runs/quickstart/trial.")
    if is_part(path):
        return path
    parts = [child for child in sorted(path.iterdir()) if child.is_dir() and is_part(child)]
    journaled = [part for part in parts if journal_files(part / "journal")]
    trained = [part for part in journaled if (part / "metrics.jsonl").exists()]
    measured = [part for part in parts if (part / "metrics.jsonl").exists()]
    for some in (trained, journaled, measured, parts):
        if len(some) == 1:
            return some[0]
    if not parts:
        raise DataError(f"{path} is no run: it has neither metrics.jsonl nor a journal.")
    raise DataError(f"{path} has several stages or processes: give one of {', '.join(map(str, journaled or parts))}.")


def root_of(path: Path) -> Path:
    """Return the directory of the whole run that a stage or process belongs to; ``path`` itself if it is one alone."""
    return path if (path / MARKER).exists() or not (path.parent / MARKER).exists() else path.parent


def is_part(path: Path) -> bool:
    """Return True if a directory holds metrics or episodes of a run, stage or process, or is a stage that failed before it wrote any."""
    if (path / "metrics.jsonl").exists() or journal_files(path / "journal"):
        return True
    return (path / "config.yaml").exists() and any((place / MARKER).exists() for place in (path, path.parent))


def read_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; empty if the file is missing, damaged or being written."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def stages_of(marker: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the configs of a run's stages, from its ``run.json``."""
    return (marker.get("config") or {}).get("stages") or []


def unix_time(text: Any) -> float | None:
    """Convert a time of ``run.json`` to a Unix time; None if it is not one."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
