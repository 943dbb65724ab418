"""A run of several processes: one store, one directory, and a directory inside of it for each process.

::

    <fileroot>/<experiment>/<trial>/experiences.db   the store, where store.url names no other
    <fileroot>/<experiment>/<trial>/trainer/         the trainer's run directory, with its checkpoints and published weights
    <fileroot>/<experiment>/<trial>/explorer-…/      one for each start of an explorer
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.loading import config_to_dict
from rollwright.errors import ConfigError
from rollwright.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from rollwright.store import ExperienceStore, FileStore

#: Modes whose process is one of several of its run; a finished ``train`` may be gone on with, the others begin anew.
PARTS = {"explore": "explorer", "train": "trainer", "bench": "bench", "serve": "service"}


def trial_path(config: PPOConfig) -> Path:
    """The directory that the processes of a run share."""
    return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name


def part_directory(config: PPOConfig) -> RunDirectory:
    """The run directory of this process; not claimed yet."""
    name = PARTS[config.mode]
    if config.mode != "train":
        name += time.strftime("-%Y%m%d-%H%M%S-") + str(os.getpid())
    return RunDirectory(Path(config.cluster.fileroot) / config.experiment_name, config.trial_name, name)


def claim_part(config: PPOConfig) -> RunDirectory:
    """Claim the run directory of this process."""
    mode = config.recover.mode if config.mode == "train" else "off"
    if config.mode == "train" and mode == "off":
        raise ConfigError(
            "recover.mode is off, but a trainer that restarts must know what it trained on: the store's cursor is committed with "
            "its checkpoints. Leave recover.mode at auto."
        )
    return part_directory(config).claim(config_to_dict(config), mode)


def open_run_store(config: PPOConfig) -> ExperienceStore | FileStore:
    """The store that this run's processes share."""
    from rollwright.store import open_store

    if config.store is None:
        raise ConfigError(f"mode {config.mode} needs a store; give a store section (store: {{}} is enough).")
    directory = trial_path(config)
    directory.mkdir(parents=True, exist_ok=True)
    return open_store(config.store, directory, run=f"{config.experiment_name}/{config.trial_name}")


def run_length(config: PPOConfig, dataset_size: int = 0) -> FinetuneSpec:
    """How long the run is, the same for each of its processes."""
    return FinetuneSpec(config.total_train_epochs, dataset_size, config.train_dataset.batch_size, config.total_train_steps)
