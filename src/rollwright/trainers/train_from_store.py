"""Training from the store: read a batch that explorers made, take a step, publish the weights, again.

What is drawn from the store becomes the trainer's own when a recover checkpoint is committed with it; a trainer that is
killed goes on from its newest checkpoint and draws again what was drawn after it, and nothing else.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from rollwright.config.experiment import PPOConfig
from rollwright.config.recipes import apply_recipe
from rollwright.data.tokenizer import load_tokenizer
from rollwright.experience.operators import joined_samples
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors, tensor_container_to
from rollwright.store import Batch, ExperienceStore, Sampling
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.checkpoints import save_step
from rollwright.trainers.drawn_tasks import count_tasks, training_tasks
from rollwright.trainers.published_weights import PublishedWeights
from rollwright.trainers.schedule import Schedule, is_publication
from rollwright.trainers.shared_run import open_run_store, run_length
from rollwright.trainers.stage_run import StageRun
from rollwright.trainers.step_report import check_agreement, report_step
from rollwright.trainers.stop_signal import StopSignal
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.checkpoint import RecoverCheckpoints

logger = getLogger("trainer")

#: Seconds between two messages that the trainer waits for experiences.
REMINDER_SECONDS = 60.0


class StoreTrainer:
    """The trainer of mode ``train``.

    Args:
        config: the experiment.
        directory: claimed for this process.
    """

    def __init__(self, config: PPOConfig, directory: RunDirectory) -> None:
        self.config = apply_recipe(config)
        self.directory = directory
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        size = 0 if config.total_train_steps is not None else count_tasks(training_tasks(config).source)
        self.spec = run_length(config, size)
        self.step = 0

    def __enter__(self) -> StoreTrainer:
        config = self.config
        assert config.store is not None
        torch.manual_seed(config.seed)
        with ExitStack() as opened:  # closes what it has where something fails here
            self.store = open_run_store(config)
            opened.callback(self.store.close)
            announced = self.store if isinstance(self.store, ExperienceStore) else None
            self.sampling = Sampling.from_config(config.store, config.seed)
            self.actor = FSDPPPOActor(config.actor)
            self.actor.initialize(None, self.spec)
            opened.callback(self.actor.destroy)
            self.withdrawn = range(0)  # versions that name other weights in some experiences
            self.actor.connect_engine(PublishedWeights(self.directory.path / "weights", announced))
            self.recover = RecoverCheckpoints(self.directory.recover, keep=config.recover.keep)
            self._begin()
            self.actor.republish()  # what explorers begin with
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()

    def _begin(self) -> None:
        """Become the store's trainer: at the newest checkpoint, or at the beginning."""
        if self.directory.resumed and self.recover.steps():
            self.step, state = self.recover.load()
            self.actor.load_state_dict(state["actor"])
            if isinstance(self.store, ExperienceStore):
                self.withdrawn = range(self.actor.version + 1, self.store.highest_version() + 1)
            undone = self.store.recover(self.recover.path(self.step).name)
            logger.info("resumed after step %d; %s uses of experiences are made again", self.step, undone or "no")
        else:
            self.store.recover(None)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train to the last step, until the experiences end, or until a signal asks to stop.

        Returns:
            ``{"steps", "reward", "seconds": {...}, "checkpoint": path}``.
        """
        config, total = self.config, self.spec.total_steps
        saving, recovering = (Schedule(section, self.spec.steps_per_epoch) for section in (config.saver, config.recover))
        reward = float("nan")
        with (
            StopSignal() as stop,
            StageRun(config, self.directory, total_steps=total, resume_step=self.step or None, tokenizer=self.tokenizer) as run,
        ):
            while self.step < total and stop.received is None:
                with run.timer.phase("wait"):
                    drawn = self._draw(stop)
                if drawn is None:
                    break
                batch = tensor_container_to(trajectory_of(drawn), self.actor.device)
                with run.timer.phase("train"):
                    self.actor.compute_advantages(batch)
                    stats = self.actor.ppo_update(batch)
                    self.actor.step_lr_scheduler()
                self.step += 1
                with run.timer.phase("publish"):
                    if is_publication(self.step, config.rollout.weight_update_every_steps, total):
                        self.actor.update_weights()
                    else:
                        self.actor.skip_publication()
                reward = report_step(run, self.step, batch, stats, self.actor.version, waiting="wait")
                if self._is_comparable(self.actor.version - 1):
                    check_agreement(config, self.actor, self.step, stats)
                with run.timer.phase("checkpoint"):
                    if saving.due(self.step):
                        save_step(self.actor, self.directory, self.step, self.tokenizer, config.saver.keep)
                    if recovering.due(self.step):
                        self._save_recover()
            if self.step and self.step not in self.recover.steps():
                self._save_recover()  # so that what was drawn stays drawn, also when the run is made longer
            if stop.received is not None and self.step < total:
                raise SystemExit(stop.exit_code)
            checkpoint = self.directory.checkpoints / "final"
            self.actor.save(checkpoint, self.tokenizer)
            run.plot(f"{config.experiment_name}: reward")
            return {"steps": self.step, "reward": reward, "seconds": run.timer.totals, "checkpoint": str(checkpoint)}

    def _draw(self, stop: StopSignal) -> Batch | None:
        """The next batch; None where no more will come, or a signal asks to stop."""
        config = self.config
        assert config.store is not None
        wanted: dict[str, Any] = {"groups": config.train_dataset.batch_size}
        if config.store.train_batch_size is not None:
            wanted = {"experiences": config.store.train_batch_size}
        wanted["cancelled"] = lambda: stop.received is not None
        if not isinstance(self.store, ExperienceStore):
            batch = self.store.sample(**wanted)
            if batch is None:
                logger.info("%s has no further batch; training ends after step %d", self.store.path, self.step)
            return batch
        oldest = self._oldest_version()
        while stop.received is None:
            if oldest is not None and (dropped := self.store.drop_older_than(oldest, sampling=self.sampling)):
                logger.info("%d groups were older than max_head_offpolicyness allows and are dropped", dropped)
            batch = self.store.sample(sampling=self.sampling, min_version=oldest, timeout=REMINDER_SECONDS, **wanted)
            if batch is not None:
                return batch
            status = self.store.status()
            if status.production_ended:
                logger.info("every task is finished; %d groups are left, less than a batch", status.unused_groups)
                return None
            if stop.received is None:
                logger.info(
                    "waiting for experiences: %d groups are ready and %d tasks run; is an explorer running?",
                    status.unused_groups,
                    status.claimed_tasks,
                )
        return None

    def _is_comparable(self, version: int) -> bool:
        """True where tokens of a version were sampled with the weights that had it here.

        A file's experiences may be of any model. What was sampled with versions that a restart took back is still trained, by
        the log-probabilities that it was sampled with, but says nothing about the engines.
        """
        return isinstance(self.store, ExperienceStore) and version not in self.withdrawn

    def _oldest_version(self) -> int | None:
        """The oldest version that may be trained; None where experiences are used again, whatever their age."""
        assert self.config.store is not None
        if self.config.store.uses != 1:
            return None
        return max(0, self.actor.version - self.config.rollout.max_head_offpolicyness)

    def _save_recover(self) -> None:
        name = self.recover.path(self.step).name
        self.recover.save(
            self.step,
            {"actor": self.actor.state_dict()},
            before_visible=lambda: self.store.commit(name, version=self.actor.version),
        )
        assert self.config.store is not None
        if not self.config.store.keep_used and isinstance(self.store, ExperienceStore):
            self.store.forget_used(sampling=self.sampling, keep_checkpoints=self.config.recover.keep)


def trajectory_of(batch: Batch) -> Trajectory:
    """A batch of the store in tensor form; a group's samples are told apart by ``eid.run``.

    Groups stand in the order of their tasks, whichever came first, so that minibatches do not go by arrival.
    """
    groups = []
    first_sample = 0
    in_order = sorted(batch, key=lambda group: (group.ordinal is None, group.ordinal or 0, group.id))
    for number, group in enumerate(in_order):
        samples: dict[Any, list[Any]] = {}
        for experience in group.experiences:
            samples.setdefault(experience.eid.run, []).append(experience)
        groups.append(joined_samples(list(samples.values()), number, first_sample))
        first_sample += len(samples)
    return concat_padded_tensors(groups)
