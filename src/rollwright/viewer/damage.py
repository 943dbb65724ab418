"""What is damaged, cut off or missing in the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rollwright.atomic import read_json
from rollwright.tracking.run_directory import MARKER
from rollwright.viewer.curves import Curves
from rollwright.viewer.index import Index
from rollwright.viewer.samples import Samples


class RunFiles(Protocol):
    """What is asked of a ``Run``; see there."""

    path: Path
    curves: Curves
    config_problem: str

    @property
    def root(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def results(self) -> dict[str, Any]: ...
    @property
    def state(self) -> str: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def has_journal(self) -> bool: ...
    @cached_property
    def index(self) -> Index: ...
    @property
    def samples(self) -> Samples: ...


def missing_parts(run: RunFiles) -> list[dict[str, Any]]:
    """List damaged, truncated or missing parts of the run's files, including the journal; empty if all are intact.

    Returns:
        For each part: its ``file`` (relative to the run's directory), its bytes ``begin`` to ``end`` and the ``steps`` before and after
        it (if known), and a ``message`` with all of these.
    """
    found = [_lacks(run, run.curves.path, each) for each in run.curves.missing()]
    last, known = max((step for step, _ in run.curves.times), default=0), _last_known_step(run)
    if known and not run.curves.path.exists():
        found.append(_lacks(run, run.curves.path, "it is missing: there are no curves"))
    elif known and not run.curves.path.stat().st_size:
        found.append(_lacks(run, run.curves.path, "it is empty: there are no curves"))
    elif known > last:
        said = f"it ends with step {last}, but the run reached step {known}"
        found.append(_lacks(run, run.curves.path, said, steps=(last + 1, known)))
    for root in dict.fromkeys((run.root, run.path)):
        for name in (MARKER, "stages.json"):
            problem = _problem_of(root / name)
            if name == MARKER and root == run.root and not (root / name).exists():
                problem = "it is missing: the run cannot be resumed"
            if problem:
                found.append(_lacks(run, root / name, problem))
    _ = run.config
    if not (run.path / "config.yaml").exists() and run.curves.times and has_checksums(run):
        found.append(_lacks(run, run.path / "config.yaml", "it is gone"))
    elif run.config_problem:
        found.append(_lacks(run, run.path / "config.yaml", run.config_problem))
    return [*found, *_missing_in_journal(run)]


def _missing_in_journal(run: RunFiles) -> list[dict[str, Any]]:
    """List damaged bytes, truncated ends and missing files with their steps, and steps missing from the journal or the metrics."""
    journal = run.path / "journal"
    if not journal.is_dir():
        kept = run.config.get("journal.enabled") and run.config.get("mode", "both") in ("both", "explore", "serve")
        is_expected = kept and "gconfig.n_samples" in run.config and run.curves.times  # else it failed before its first sample
        return [_lacks(run, journal, "it is missing: the samples are unknown")] if is_expected else []
    if not run.has_journal:
        return [_lacks(run, journal, "it is empty: its samples are unknown")]
    found = []
    for gap in run.index.missing(is_running=run.is_running, is_finished=run.state == "finished"):
        said = str(gap).partition(": " if gap.note else ", ")[2]
        found.append(_lacks(run, gap.path, said, gap.begin, gap.end, gap.steps))
    return [*found, *_unlike(run)]


def _unlike(run: RunFiles) -> list[dict[str, Any]]:
    """List the steps that only the journal or only the metrics have; both should have every step."""
    if run.is_running or not run.index.progress()["is_complete"]:
        return []
    indexed = {row["step"] for row in run.samples.steps()}
    logged = {step for step, _ in run.curves.points("reward")}
    found = []
    if lost := sorted(indexed - logged):
        found.append(_lacks(run, run.curves.path, f"it lacks {_steps(lost)}, which the journal has", steps=(lost[0], lost[-1])))
    if indexed and (
        lost := sorted(step for step in logged - indexed if step > min(indexed))
    ):  # journal.keep removes the first steps
        said = f"it lacks the end of {_steps(lost)}, which metrics.jsonl has"
        found.append(_lacks(run, run.path / "journal", said, steps=(lost[0], lost[-1])))
    return found


def has_checksums(run: RunFiles) -> bool:
    """Return True if the run wrote checksums; version 0.1.0 did not."""
    marker = run.root / MARKER
    return marker.exists() and '"checksum"' in marker.read_text(encoding="utf-8", errors="replace")


def _last_known_step(run: RunFiles) -> int:
    """Return the last step according to the recovery checkpoints and the stage's results, or 0."""
    made = [int(path.name.rpartition("_")[2]) for path in run.path.glob("recover/step_*") if path.name[5:].isdecimal()]
    steps = run.results.get("steps")
    return max([*made, steps if isinstance(steps, int) else 0], default=0)


def _lacks(
    run: RunFiles,
    path: Path,
    message: str,
    begin: int | None = None,
    end: int | None = None,
    steps: Sequence[int | None] = (None, None),
) -> dict[str, Any]:
    name = path.relative_to(run.root).as_posix() if path.is_relative_to(run.root) else path.name
    return {"file": name, "begin": begin, "end": end, "steps": list(steps), "message": f"{name}: {message}"}


def _problem_of(path: Path) -> str | None:
    """Return why a JSON file cannot be read, or None if it can be read or does not exist."""
    try:
        read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error}), so it is not shown"
    return None


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
