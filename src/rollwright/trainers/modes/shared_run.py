"""A run of several processes: one store, one directory with one inside of it for each process, and what passes between them.

::

    <fileroot>/<experiment>/<trial>/experiences.db   the store, where store.url names no other
    <fileroot>/<experiment>/<trial>/trainer/         the trainer's run directory, with its checkpoints and published weights
    <fileroot>/<experiment>/<trial>/explorer-…/      one for each start of an explorer

Weights go from the trainer to explorers as directories that are announced in the store. Of several explorers one evaluates.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.loading import config_to_dict
from rollwright.errors import ConfigError, WeightUpdateError
from rollwright.inference.engine import InferenceEngine, WeightReceiver
from rollwright.inference.weights.files import (
    MANIFEST,
    content_digest,
    keep_newest,
    read_weights,
    remove_later,
    write_weights,
)
from rollwright.rollout.engines import RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.logprobs import TokenScorer
from rollwright.training.publish_and_audit import NEW_TOKENS_IN_PROCESS, audit, probe_request

if TYPE_CHECKING:  # a benchmark needs no store
    from rollwright.store import Announcement, ExperienceStore, FileStore
    from rollwright.store.announcements import Announcements

logger = getLogger("weights")

#: In the directory of a service: where it is, and its key.
SERVICE_FILE = "service.json"

#: Modes whose process is one of several of its run; ``train`` and ``serve`` go on where they ended, the others begin anew.
PARTS = {"explore": "explorer", "train": "trainer", "bench": "bench", "serve": "service"}


def trial_path(config: PPOConfig) -> Path:
    """The directory that the processes of a run share."""
    return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name


def claim_part(config: PPOConfig) -> RunDirectory:
    """Claim the run directory of this process."""
    trial = trial_path(config)
    trial.mkdir(parents=True, exist_ok=True)
    trial.chmod(0o700)
    if config.mode == "serve" and (left := _left_service(config, trial)) is not None:
        return left
    if config.mode != "train":
        name = f"{PARTS[config.mode]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        return RunDirectory(trial.parent, trial.name, name).claim(config_to_dict(config), "off")
    if config.recover.mode == "off":
        raise ConfigError(
            "recover.mode is off, but a trainer that restarts must know what it trained on: the store's cursor is committed with "
            "its checkpoints. Leave recover.mode at auto."
        )
    return RunDirectory(trial.parent, trial.name, PARTS["train"]).claim(config_to_dict(config), config.recover.mode)


def _left_service(config: PPOConfig, trial: Path) -> RunDirectory | None:
    """The directory of the service that ended last, whose open runs go on; None where there is none, or it is at work."""
    for path in sorted(trial.glob(f"{PARTS['serve']}-*"), reverse=True):
        directory = RunDirectory(trial.parent, trial.name, path.name)
        if (path / SERVICE_FILE).exists() and directory.take_up(config_to_dict(config)):
            return directory
    return None


def open_run_store(config: PPOConfig) -> ExperienceStore | FileStore:
    """The store that this run's processes share."""
    from rollwright.store import open_store

    if config.store is None:
        raise ConfigError(f"mode {config.mode} needs a store; give a store section (store: {{}} is enough).")
    directory = trial_path(config)
    directory.mkdir(parents=True, exist_ok=True)
    return open_store(config.store, directory, run=f"{config.experiment_name}/{config.trial_name}")


def open_run_database(config: PPOConfig) -> ExperienceStore:
    """The store of this run, for modes that claim tasks or store the samples of a group one by one."""
    if config.store is not None and config.store.type == "file":
        raise ConfigError(f"mode {config.mode} needs a database: set store.type to sql or queue, not file.")
    return cast("ExperienceStore", open_run_store(config))


def run_length(config: PPOConfig, dataset_size: int = 0) -> FinetuneSpec:
    """How long the run is, the same for each of its processes."""
    return FinetuneSpec(config.total_train_epochs, dataset_size, config.train_dataset.batch_size, config.total_train_steps)


# -- weights ---------------------------------------------------------------------------------------------------------

ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds before weights are looked for again; doubled each time


class PublishedWeights(WeightReceiver):
    """Takes the place of an actor's inference engine: what is published is written to ``directory/v…`` and announced.

    Args:
        directory: which the explorers see under the same name.
        announcements: where versions are announced. None writes nothing, because nobody samples.
        keep: versions kept; an explorer that reads one while it is removed reads the newest instead.
    """

    def __init__(self, directory: Path, announcements: Announcements | None, keep: int = 3) -> None:
        self.directory = directory.absolute()
        self.announcements = announcements
        self.keep = keep

    def update_weights(
        self,
        meta: Any = None,
        *,
        version: int,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        config: Any = None,
    ) -> None:
        """Write and announce weights; on return every explorer that looks finds them.

        Later versions are what a trainer left behind that is gone: they are removed, lest they be kept in the place of these.
        """
        if self.announcements is None:
            return
        remove_later(self.directory, "v", version)
        path = self.directory / f"v{version:06d}"
        write_weights(path, weights, version, config=config)
        self.announcements.publish(str(path), version)
        keep_newest(self.directory, "v", self.keep)


def read_published(newest: Announcement) -> dict[str, Tensor]:
    """The weights that were announced, bit for bit.

    Raises:
        WeightUpdateError: they are gone, damaged, or not those that the trainer wrote as this version.
    """
    weights = dict(read_weights(newest.path))
    try:
        manifest = json.loads((Path(newest.path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"{newest.path} does not say what it holds ({error}); publish the weights again.") from error
    if manifest["version"] != newest.version:
        raise WeightUpdateError(f"{newest.path} holds version {manifest['version']}, not {newest.version}.")
    if content_digest(weights.items()) != manifest["digest"]:
        raise WeightUpdateError(
            f"The weights in {newest.path} are not those that the trainer wrote there: they were damaged or changed. Check the disk."
        )
    return weights


def newest_weights(store: ExperienceStore, loaded: Announcement | None) -> tuple[Announcement, dict[str, Tensor]] | None:
    """The announcement and the weights that are newest; None where they are those that are loaded, or there are none.

    What is removed or replaced while it is read (a newer version came, a trainer began again) is looked for again.

    Raises:
        WeightUpdateError: they cannot be read, again and again.
    """
    pauses = [FIRST_PAUSE * 2**attempt for attempt in range(ATTEMPTS - 1)]
    while (newest := store.announcements.newest()) is not None and not newest.names_weights_of(loaded):
        try:
            return newest, read_published(newest)
        except WeightUpdateError as error:
            if not pauses:
                raise
            logger.info("version %d could not be read (%s); looking again", newest.version, error)
            time.sleep(pauses.pop(0))
    return None


class TrainerFollower:
    """Keeps an engine at the weights that the trainer announced last.

    Args:
        rollout: the engine.
        store: where weights are announced.
        tolerance: see :func:`give_weights`.
        before_going_back: called before the engine goes back to earlier weights; ends the requests that run. None: they are
            finished with the weights that they began with, and later requests get the earlier weights.

    Attributes:
        loaded: announcement of the loaded weights. None before the first one.
    """

    def __init__(
        self,
        rollout: RolloutEngine,
        store: ExperienceStore,
        tolerance: float | None,
        before_going_back: Callable[[], object] | None = None,
    ) -> None:
        self._rollout = rollout
        self._store = store
        self._tolerance = tolerance
        self._before_going_back = before_going_back
        self.loaded: Announcement | None = None

    @property
    def version(self) -> int:
        """Version that the next token is sampled with."""
        return 0 if self.loaded is None else self.loaded.version

    def follow(self) -> bool:
        """Load the weights that were announced last, even between the tokens of a request. Returns False if they are loaded.

        A trainer that went back to an earlier version is followed at once. (Servers end the requests that run.)
        """
        found = newest_weights(self._store, self.loaded)
        if found is None:
            return False
        newest, weights = found
        if newest.takes_back(self.loaded):
            logger.warning("the trainer went back behind version %d, and is at %d", self.version, newest.version)
            if self._before_going_back is not None:
                self._before_going_back()
        if newest.version < self._rollout.get_version():
            self._rollout.client.go_back(newest.version, finish=self._before_going_back is None)
        give_weights(self._rollout, weights, newest.version, self._tolerance)
        logger.info("version %d samples now", newest.version)
        self.loaded = newest
        return True


def give_weights(rollout: InferenceEngine, weights: Mapping[str, Tensor], version: int, tolerance: float | None) -> None:
    """Have an engine sample with published weights from the next token on, and see that it does.

    An engine in this process samples a probe, whose log-probabilities are compared with those of its model's plain forward pass:
    their mean difference is at most ``tolerance`` (None: what the weights' type allows). What servers sample is compared by the
    trainer, batch by batch.

    Raises:
        WeightUpdateError: the engine does not compute with them; it stays paused.
    """
    rollout.pause()
    rollout.update_weights(version=version, weights=weights)
    if (model := rollout.sampler.local_model) is not None:
        answers = rollout.sampler.probe(probe_request(model, NEW_TOKENS_IN_PROCESS)) or {}
        dtype = next(model.parameters()).dtype
        audit(answers, lambda ids_BL, temperature: _plain_logprobs(model, ids_BL, temperature), version, tolerance, dtype)
    rollout.resume()


@torch.no_grad()
def _plain_logprobs(model: torch.nn.Module, ids_BL: Tensor, temperature: float) -> Tensor:
    """Log-probabilities ``[B, L]`` of tokens by the model's own forward pass."""
    ids_BL = ids_BL.to(next(model.parameters()).device)
    wanted_BL = torch.ones_like(ids_BL, dtype=torch.bool)
    wanted_BL[:, 0] = False
    temperature_B = torch.full((len(ids_BL),), temperature, device=ids_BL.device)
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(wanted_BL), "temperature": temperature_B}
    logprobs_BL, _ = TokenScorer(model)(batch, wanted_BL)
    return logprobs_BL


# -- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationTurns:
    """A file that explorers lock while they evaluate; it says what was evaluated last."""

    path: Path  # the same for all explorers

    def last(self, newest: Announcement | None) -> int | None:
        """The last version that was evaluated, by whichever explorer; None where there was none.

        ``newest`` announced the weights that are loaded. A version that a restarted trainer took back does not count.
        """
        try:
            epoch, version = map(int, self.path.read_text(encoding="ascii").split())
        except (FileNotFoundError, ValueError):  # nobody evaluated, or the first one is at it
            return None
        if newest is None or newest.epoch == epoch or version < newest.since:
            return version
        return newest.since - 1

    @contextmanager
    def taken(self, newest: Announcement | None) -> Iterator[bool]:
        """True where this explorer is to evaluate the weights, which then count as evaluated when the block ends without an error.

        False where another one is at it, or was.
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
