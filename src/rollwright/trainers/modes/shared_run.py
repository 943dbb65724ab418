"""A run of several processes: one store, and one directory with a subdirectory for each process.

::

    <fileroot>/<experiment>/<trial>/experiences.db   the store, unless store.url names another one
    <fileroot>/<experiment>/<trial>/trainer/         the trainer's run directory, with its checkpoints and published weights
    <fileroot>/<experiment>/<trial>/explorer-…/      one for each start of an explorer

Only one of the explorers evaluates each version.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.loading import config_to_dict
from rollwright.errors import ConfigError
from rollwright.rollout.scheduler import Staleness
from rollwright.tracking.run_directory import RunDirectory

if TYPE_CHECKING:  # a benchmark needs no store
    from rollwright.store import Announcement, ExperienceStore, FileStore

#: File in a service's directory that holds the service's addresses and key.
SERVICE_FILE = "service.json"

#: First part of the name of a process's directory, by mode. ``train`` and ``serve`` continue in an old directory; others make a new one.
DIRECTORIES = {"explore": "explorer", "train": "trainer", "bench": "bench", "serve": "service"}


def trial_path(config: PPOConfig) -> Path:
    """Return the directory that the processes of a run share."""
    return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name


def process_directories(config: PPOConfig, mode: str) -> list[RunDirectory]:
    """Return the run directories of all past and present processes of a mode, in the order of their start."""
    trial = trial_path(config)
    return [RunDirectory(trial.parent, trial.name, path.name) for path in sorted(trial.glob(f"{DIRECTORIES[mode]}-*"))]


def claim_part(config: PPOConfig) -> RunDirectory:
    """Claim a run directory for this process. A service takes over the directory of the newest service of this run that has ended."""
    trial, settings = trial_path(config), config_to_dict(config)
    trial.mkdir(parents=True, exist_ok=True)
    trial.chmod(0o700)
    if config.mode == "serve":
        for directory in reversed(process_directories(config, "serve")):
            if (directory.path / SERVICE_FILE).exists() and directory.take_up(settings):
                return directory
    if config.mode != "train":
        name = f"{DIRECTORIES[config.mode]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return RunDirectory(trial.parent, trial.name, name).claim(settings, "off")
    if config.recover.mode == "off":
        raise ConfigError(
            "recover.mode is off, but a trainer that restarts must know what it trained on: the store's cursor is committed with "
            "its checkpoints. Leave recover.mode at auto."
        )
    return RunDirectory(trial.parent, trial.name, DIRECTORIES["train"]).claim(settings, config.recover.mode)


def open_run_store(config: PPOConfig) -> ExperienceStore | FileStore:
    """Open the store that the processes of a run share."""
    from rollwright.store import open_store

    if config.store is None:
        raise ConfigError(f"mode {config.mode} needs a store; give a store section (store: {{}} is enough).")
    directory = trial_path(config)
    directory.mkdir(parents=True, exist_ok=True)
    return open_store(config.store, directory, run=f"{config.experiment_name}/{config.trial_name}")


def open_run_database(config: PPOConfig) -> ExperienceStore:
    """Open a run's store, which must be a database, for modes that claim tasks or store the samples of a group one by one."""
    if config.store is not None and config.store.type == "file":
        raise ConfigError(f"mode {config.mode} needs a database: set store.type to sql or queue, not file.")
    return cast("ExperienceStore", open_run_store(config))


def run_length(config: PPOConfig, dataset_size: int = 0) -> FinetuneSpec:
    """Return the length of the run, the same for all of its processes."""
    return FinetuneSpec(config.total_train_epochs, dataset_size, config.train_dataset.batch_size, config.total_train_steps)


class StoreStaleness:
    """The staleness rule for groups that pass through a store, the same for explorers and the trainer.

    Args:
        config: the experiment.

    Attributes:
        places: maximum number of groups, over all explorers, that are running, waiting or being trained on.
    """

    def __init__(self, config: PPOConfig) -> None:
        assert config.store is not None
        rollout = config.rollout
        self._rule = Staleness(rollout.max_head_offpolicyness, config.train_dataset.batch_size, rollout.over_sampling)
        self._limits_age = config.store.uses == 1  # experiences that are used several times may have any age
        self.places = int(self._rule.places)

    def oldest(self, version: int) -> int | None:
        """Return the oldest version whose tokens may be trained when ``version`` is published, or None if any age is allowed."""
        self._rule.publish(version)
        return max(0, self._rule.oldest) if self._limits_age else None


# -- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationTurns:
    """A file that an explorer locks while it evaluates, and that holds the version evaluated last."""

    path: Path  # the same for all explorers

    def last(self, newest: Announcement | None) -> int | None:
        """Return the last version that any explorer has evaluated, or None if there is none.

        A version that a restarted trainer withdrew does not count.

        Args:
            newest: announcement of the loaded weights. None if no weights have been loaded.
        """
        try:
            epoch, version = map(int, self.path.read_text(encoding="ascii").split())
        except (FileNotFoundError, ValueError):  # no evaluation yet, or the first one is running
            return None
        if newest is None or newest.epoch == epoch or version < newest.since:
            return version
        return newest.since - 1

    @contextmanager
    def taken(self, newest: Announcement | None) -> Iterator[bool]:
        """Yield True if this explorer evaluates the weights, and False if another one does or has done so.

        The weights count as evaluated when the block ends without an error.
        """
        epoch, version = (0, 0) if newest is None else (newest.epoch, newest.version)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            is_mine = self.last(newest) != version
            yield is_mine
            if is_mine:
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{epoch} {version}".encode(), 0)
        finally:
            os.close(handle)
