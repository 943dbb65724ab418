"""``rollwright check``: verify that a run's files are intact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from rollwright.errors import CheckpointError, ConfigError, RollwrightError


def check(
    run: Annotated[Path, typer.Argument(help="The directory of the run, or of a stage of it.")],
) -> None:
    """Check the files of a run, and list what is missing: bytes, lines, steps.

    Checks run.json, stages.json, config.yaml, metrics.jsonl, the journal, recovery checkpoints and the experience store. Exits with 1 if
    something is missing or damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is not a directory: give that of a run, such as runs/quickstart/trial.")
    lacks = 0
    for what, problems in _looked_at(run):
        lacks += len(problems)
        for line in problems:
            typer.echo(f"missing  {line}")
        if not problems:
            typer.echo(f"whole    {what}")
    if lacks:
        typer.echo(f"missing or damaged in {run}: {lacks}")
        raise typer.Exit(1)


def _looked_at(run: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a description of each part of the run, with its problems."""
    from rollwright.viewer.run import Run
    from rollwright.viewer.runs import parts_below

    parts = list(parts_below(run))
    if not parts:
        raise ConfigError(f"{run} is not a run: neither metrics.jsonl nor a journal is in it or below it.")
    for path in parts:
        with Run(path) as part:
            problems, said = _of_files(part)
        yield said, problems
        for checkpoint in sorted(path.glob("recover/[!.]*")):
            yield f"{checkpoint.relative_to(run)}", _of_checkpoint(checkpoint, run)
    for store in sorted(run.glob("**/experiences.db")):
        yield f"{store.relative_to(run)}", _of_store(store)


def _of_files(part: Any) -> tuple[list[str], str]:
    try:
        while not part.refresh()["is_complete"]:
            pass
        problems = [each["message"] for each in part.missing()]
    except (RollwrightError, OSError) as error:
        return [str(error)], str(part.path)
    progress, steps = part.progress(), part.steps()
    last = f", steps to {steps[-1]['step']}" if steps else ""
    return problems, f"{part.path}: {progress['samples']:,} samples{last}"


def _of_checkpoint(checkpoint: Path, run: Path) -> list[str]:
    from rollwright.training.recovery_checkpoint import check_state  # loads torch

    try:
        check_state(checkpoint)
    except CheckpointError as error:
        return [f"{checkpoint.relative_to(run)}: {error}"]
    return []


def _of_store(store: Path) -> list[str]:
    from rollwright.store import ExperienceStore

    try:
        with ExperienceStore(f"sqlite:///{store}", create=False) as opened:
            return opened.damaged()
    except RollwrightError as error:
        return [str(error)]
