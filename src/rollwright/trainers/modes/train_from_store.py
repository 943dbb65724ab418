"""Training from the store: the loop of ``PolicyTrainer`` with the store as the source of batches.

A recovery checkpoint commits what was drawn from the store. A trainer that was killed continues from its newest checkpoint, and draws
again only what was drawn after that checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.recipes import apply_recipe
from rollwright.errors import ConfigError
from rollwright.experience.operators import joined_samples
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.rollout.task_group import SAMPLE_BITS
from rollwright.store import BatchRequest, Sampling, StoredBatch
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.drawn_tasks import count_tasks, training_tasks
from rollwright.trainers.loops.loop import Part, StopSignal
from rollwright.trainers.loops.rl import PolicyTrainer
from rollwright.trainers.modes.published_weights import PublishedWeights
from rollwright.trainers.modes.shared_run import StoreStaleness, open_run_store, run_length

logger = getLogger("trainer")


class StoreTrainer(PolicyTrainer):
    """The trainer of mode ``train``.

    Args:
        config: the experiment.
        directory: run directory claimed for this process.
    """

    waiting = "wait"

    def __init__(self, config: PPOConfig, directory: RunDirectory) -> None:
        if config.recover.in_background:
            raise ConfigError(
                "recover.in_background is on, but a trainer from a store commits what it has drawn together with the checkpoint, and so "
                "waits for it: leave it off."
            )
        super().__init__(apply_recipe(config), config.actor, directory)
        self.sampling_phases = ("wait", "train", "publish")  # explorers sample all the time
        size = 0 if config.total_train_steps is not None else count_tasks(training_tasks(config).source)
        self.spec = run_length(config, size)

    def open(self, opened: ExitStack) -> None:
        """Open the store, and publish weights to explorers as files."""
        config = self.config
        self.store = open_run_store(config)
        opened.callback(self.store.close)
        self.sampling = Sampling.from_config(config.store, config.seed)
        self.staleness = StoreStaleness(config)
        self.actor.connect_engine(PublishedWeights(self.directory.path / "weights", self.store.announcements))

    def parts(self) -> dict[str, Part]:
        """Return no parts, because the store commits what was drawn."""
        return {}

    def begin(self, resumed: bool) -> None:
        """Take over the store as its only trainer, return it to the newest checkpoint or the beginning, and publish the current weights."""
        announced = self.store.announcements
        highest = announced.highest_version() if announced is not None and resumed else -1
        self.withdrawn = range(
            self.actor.version + 1, highest + 1
        )  # some experiences of these versions were sampled with other weights
        undone = self.store.recover(self.recover.path(self.step).name if resumed else None)
        if resumed:
            logger.info("resumed after step %d; %s uses of experiences are made again", self.step, undone or "no")
        self.ranks.call("republish")

    def next_batch(self, stop: StopSignal) -> Trajectory | None:
        """Return the next batch, or None if no more will come or a signal asks to stop."""
        config = self.config
        rows = config.store.train_batch_size
        groups = config.train_dataset.batch_size if rows is None else None
        request = BatchRequest(groups, rows, self.sampling, self.staleness.oldest(self.actor.version))
        batch = self.store.next_batch(request, cancelled=lambda: stop.received is not None)
        if batch is None and stop.received is None:
            logger.info("training ends after step %d", self.step)
        return None if batch is None else trajectory_of(batch)

    def samples_with_own_weights(self) -> bool:
        """Return True if tokens of the version just trained were sampled with this trainer's weights of that version.

        Experiences from a file may come from any model. Samples of versions that a restart withdrew are trained with their recorded
        log-probabilities, but prove nothing about the engines.
        """
        return self.store.announcements is not None and self.actor.version - 1 not in self.withdrawn

    def before_recover_visible(self) -> Callable[[], object]:
        """Return a function that commits what was drawn together with the checkpoint."""
        return partial(self.store.commit, self.recover.path(self.step).name, version=self.actor.version)

    def _save_recover(self) -> None:
        super()._save_recover()
        if not self.config.store.keep_used:
            self.store.forget_used(sampling=self.sampling, keep_checkpoints=self.config.recover.keep)


def trajectory_of(batch: StoredBatch) -> Trajectory:
    """Convert a batch of the store to tensors, with the store's group ids. Rows of a group with equal ``eid.run`` form one sample.

    Groups are in the order of their tasks, so that minibatches do not depend on the order of arrival.
    """
    groups = []
    in_order = sorted(batch, key=lambda group: (group.ordinal is None, group.ordinal or 0, group.id))
    for group in in_order:
        samples: dict[Any, list[Any]] = defaultdict(list)
        for experience in group.experiences:
            samples[experience.eid.run].append(experience)
        groups.append(joined_samples(list(samples.values()), group.id, group.id << SAMPLE_BITS))
    return concat_padded_tensors(groups)
