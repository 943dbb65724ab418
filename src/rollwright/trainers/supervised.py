"""Training on rows that are there already, without sampling: the loop that completions and preferences share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from rollwright.config.experiment import FinetuneSpec, SFTConfig
from rollwright.data.loader import TaskLoader
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.checkpoints import save_step
from rollwright.trainers.evaluation import evaluate
from rollwright.trainers.rollout_backend import make_local_engine
from rollwright.trainers.schedule import Schedule
from rollwright.trainers.stage_run import StageRun
from rollwright.trainers.stop_signal import StopSignal
from rollwright.trainers.workflow_arguments import with_defaults
from rollwright.training.checkpoint import RecoverCheckpoints
from rollwright.training.engine import TrainEngine
from rollwright.training.publish import SharedWeights

logger = getLogger("trainer")


class SupervisedTrainer(ABC):
    """Trains a model on rows, to the end or until a workflow's mean reward on ``valid_dataset`` is high enough.

    A subclass says what a batch is and what an update of it does.

    Args:
        config: the experiment.
        train_dataset: the rows.
        valid_dataset: tasks that stop the training; a split of their own.
        directory: where the run writes; claimed by the caller.
    """

    model: TrainEngine

    def __init__(
        self,
        config: SFTConfig,
        train_dataset: Sequence[dict[str, Any]],
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        directory: RunDirectory,
    ) -> None:
        if config.stop_accuracy is not None and not (valid_dataset and config.workflow and config.evaluator.every_steps):
            raise ConfigError("stop_accuracy needs valid_dataset, workflow and evaluator.every_steps to be set as well.")
        self.config = config
        self.valid_dataset = list(valid_dataset or [])[: config.evaluator.limit]
        self.directory = directory
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.model.path, config.model.trust_remote_code)
        dataset = config.train_dataset
        self.loader = TaskLoader(
            train_dataset, dataset.batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, seed=config.seed
        )
        self.spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), dataset.batch_size, config.total_train_steps)
        self.step = 0

    @abstractmethod
    def make_engine(self) -> TrainEngine:
        """The engine that is trained; not initialised yet."""

    @abstractmethod
    def make_batch(self, rows: Sequence[dict[str, Any]]) -> Trajectory:
        """Rows in tensor form."""

    @abstractmethod
    def update(self, batch: Trajectory) -> dict[str, float]:
        """One optimizer step; returns metrics, ``loss`` among them."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Any:
        torch.manual_seed(self.config.seed)
        with ExitStack() as opened:  # closes what it has where something fails here
            self.model = self.make_engine()
            self.model.initialize(None, self.spec)
            opened.callback(self.model.destroy)
            self.rollout = None
            if self.config.workflow and self.valid_dataset:  # nothing is sampled where nothing is evaluated
                self.rollout = make_local_engine(self.config, self.model, self.tokenizer)
                opened.callback(self.rollout.destroy)
                self.rollout.initialize()
                self.weights = SharedWeights(self.rollout)
            self.recover = RecoverCheckpoints(self.directory.recover, keep=self.config.recover.keep)
            if self.directory.resumed and self.recover.steps():
                self.step, state = self.recover.load()
                self.model.load_state_dict(state["model"])
                self.loader.load_state_dict(state["loader"])
                logger.info("resumed %s after step %d", self.directory.path, self.step)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Run to the end, or to ``stop_accuracy``.

        Returns:
            ``{"steps", "loss", "eval": {step: accuracy}, "seconds": {...}, "checkpoint": path}``.
        """
        config = self.config
        total = self.spec.total_steps
        saving, recovering, evaluating = (
            Schedule(section, self.spec.steps_per_epoch) for section in (config.saver, config.recover, config.evaluator)
        )
        evaluations: dict[int, float] = {}
        loss = float("nan")
        with (
            StopSignal() as stop,
            StageRun(
                config,
                self.directory,
                total_steps=total,
                resume_step=self.step or None,
                tokenizer=self.tokenizer,
                value_name="loss",
            ) as run,
        ):
            while self.step < total and stop.received is None:
                with run.timer.phase("train"):
                    batch = self.make_batch(self.loader.draw())
                    if self.rollout is not None:
                        self.weights.before_first_step()
                    stats = self.update(tensor_container_to(batch, self.model.device))
                    self.model.step_lr_scheduler()
                self.step += 1
                loss = stats["loss"]
                seconds = run.timer.export()
                speed = float(batch["attention_mask"].sum()) / seconds["train"]
                metrics = {"loss": loss, "tokens_per_second/train": speed, **{f"model/{k}": v for k, v in stats.items()}}
                run.log(self.step, metrics)
                run.display.step(self.step, loss, train_tokens_per_second=speed, seconds=seconds)
                with run.timer.phase("checkpoint"):
                    if saving.due(self.step):
                        save_step(self.model, self.directory, self.step, self.tokenizer, config.saver.keep)
                    if config.recover.mode != "off" and (recovering.due(self.step) or stop.received is not None):
                        self._save_recover()
                if self.rollout is not None and (evaluating.due(self.step) or self.step == total):
                    with run.timer.phase("eval"):
                        evaluations[self.step] = self._accuracy()
                    run.log(self.step, {"eval/reward": evaluations[self.step]})
                    run.display.evaluation(self.step, evaluations[self.step])
                    if config.stop_accuracy is not None and evaluations[self.step] >= config.stop_accuracy:
                        break
            if stop.received is not None:
                raise SystemExit(stop.exit_code)
            checkpoint = self.directory.checkpoints / "final"
            self.model.save(checkpoint, self.tokenizer)
            return {
                "steps": self.step,
                "loss": loss,
                "eval": evaluations,
                "seconds": run.timer.totals,
                "checkpoint": str(checkpoint),
            }

    def _save_recover(self) -> None:
        self.recover.save(self.step, {"model": self.model.state_dict(), "loader": self.loader.state_dict()})

    def _accuracy(self) -> float:
        assert self.rollout is not None
        self.model.version += 1
        self.weights.publish(self.model, self.model.version)
        gconfig = self.config.evaluator.gconfig
        defaults = {"reward_fn": self.config.reward_fn, "gconfig": gconfig, "tokenizer": self.tokenizer}
        kwargs = with_defaults(self.config.workflow, self.config.workflow_kwargs, defaults)
        return evaluate(self.rollout, self.valid_dataset, self.config.workflow, kwargs, gconfig).reward
