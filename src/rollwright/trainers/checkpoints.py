"""Checkpoints on the way, in Hugging Face form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollwright.inference.weights.files import keep_newest
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.engine import TrainEngine


def save_step(engine: TrainEngine, directory: RunDirectory, step: int, tokenizer: Any, keep: int | None) -> Path:
    """Write the weights after a step; returns where.

    Args:
        engine: whose weights.
        directory: of the run.
        step: steps that were made.
        tokenizer: saved beside the weights.
        keep: the newest checkpoints to keep, this one among them; None: all.
    """
    path = directory.checkpoints / f"step-{step:06d}"
    engine.save(path, tokenizer)
    if keep is not None:
        keep_newest(directory.checkpoints, "step-", keep)
    return path
