"""Reinforcement learning: sample, compare within groups, take a step, publish the weights, again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.recipes import apply_recipe
from rollwright.data.loader import TaskLoader
from rollwright.data.mixture import TaskMixture
from rollwright.data.tokenizer import load_tokenizer
from rollwright.errors import ConfigError
from rollwright.experience.operators import GroupOperators
from rollwright.experience.trajectory import Trajectory, tensor_container_to
from rollwright.rollout.engines import LocalRolloutEngine, RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.checkpoints import save_step
from rollwright.trainers.evaluation import EvaluationResult, evaluate
from rollwright.trainers.rollout_backend import make_rollout_engine
from rollwright.trainers.schedule import Schedule, is_publication
from rollwright.trainers.stage_run import StageRun
from rollwright.trainers.step_report import check_agreement, report_step
from rollwright.trainers.stop_signal import StopSignal
from rollwright.trainers.workflow_arguments import with_defaults
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.checkpoint import RecoverCheckpoints
from rollwright.workflows.registry import resolve_workflow

logger = getLogger("trainer")


class PPOTrainer:
    """Trains a policy with a workflow; with a :class:`GRPOConfig` there is no critic.

    ::

        with PPOTrainer(config, train_rows, valid_rows) as trainer:
            trainer.train(workflow="rollwright.workflows.rlvr.RLVRWorkflow", workflow_kwargs={...})

    Args:
        config: the experiment.
        train_dataset: tasks, a sequence of dicts, or tasksets drawn from as one.
        valid_dataset: held-out tasks for evaluation on the way; None: no evaluation.
        directory: where the run writes; None: ``<fileroot>/<experiment_name>/<trial_name>``, claimed here.

    Raises:
        ConfigError: a combination of settings that cannot be honoured.
        DataError: fewer tasks than one batch.
    """

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Sequence[dict[str, Any]] | TaskMixture,
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        directory: RunDirectory | None = None,
    ) -> None:
        self.config = apply_recipe(config)
        self.valid_dataset = list(valid_dataset or [])[: config.evaluator.limit]
        self.tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
        dataset = config.train_dataset
        if isinstance(train_dataset, TaskMixture):
            self.loader: TaskLoader | TaskMixture = train_dataset
            size = len(train_dataset) * dataset.batch_size
        else:
            self.loader = TaskLoader(
                train_dataset, dataset.batch_size, shuffle=dataset.shuffle, drop_last=dataset.drop_last, seed=config.seed
            )
            size = len(train_dataset)
        self.spec = FinetuneSpec(config.total_train_epochs, size, dataset.batch_size, config.total_train_steps)
        self._owns_directory = directory is None
        self.directory = directory or RunDirectory(config.cluster.fileroot, config.experiment_name, config.trial_name)
        self.step = 0
        self._taken: deque[Trajectory] = deque()  # batches that wait for their step

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> PPOTrainer:
        config = self.config
        with ExitStack() as opened:  # closes what it has where something fails here
            if self._owns_directory:
                from rollwright.config.loading import config_to_dict

                self.directory.claim(config_to_dict(config), config.recover.mode)
                opened.callback(self.directory.release)
            torch.manual_seed(config.seed)
            self.actor = FSDPPPOActor(config.actor)
            if config.ref is not None:  # otherwise the actor keeps a copy of its first weights where kl_ctl > 0
                self.actor.load_reference(config.ref)
            self.actor.initialize(None, self.spec)
            opened.callback(self.actor.destroy)
            self.rollout: RolloutEngine = make_rollout_engine(config, self.actor, self.tokenizer, self.directory)
            opened.callback(self.rollout.destroy)
            self.rollout.initialize()
            self.actor.connect_engine(self.rollout)
            self.recover = RecoverCheckpoints(self.directory.recover, keep=config.recover.keep)
            if self.directory.resumed and self.recover.steps():
                self._resume()
            elif config.rollout.backend != "builtin":
                self.actor.republish()  # servers hold the actor's weights from the first token on, and are compared with it
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._opened:
            if self._owns_directory and kind is None:
                self.directory.finish()

    def _resume(self) -> None:
        self.step, state = self.recover.load()
        self.actor.load_state_dict(state["actor"])
        self.loader.load_state_dict(state["loader"])
        self.rollout.load_state_dict(state["rollout"])
        self.actor.republish()
        logger.info("resumed %s after step %d", self.directory.path, self.step)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow: Any = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run the loop to its end, or until a signal asks to stop.

        Args:
            workflow: class, instance, import string or registered name; None: the config's.
            workflow_kwargs: constructor arguments; ``reward_fn``, ``gconfig`` and ``tokenizer`` are filled in from the config
                where the workflow takes them and they are left out.
            eval_workflow: workflow of evaluation; None: the same.
            eval_workflow_kwargs: its arguments; None: the same, with the evaluator's generation arguments.

        Returns:
            ``{"steps", "reward", "eval": {step: reward}, "seconds": {...}, "checkpoint": path}``.
        """
        config = self.config
        workflow = workflow or config.workflow
        if workflow is None:
            raise ConfigError("no workflow: set `workflow:` in the config, or pass one to PPOTrainer.train().")
        kwargs = self._arguments(workflow, workflow_kwargs if workflow_kwargs is not None else config.workflow_kwargs)
        trained = resolve_workflow(workflow, kwargs)
        evaluated, evaluated_kwargs = self._evaluation_workflow(workflow, kwargs, eval_workflow, eval_workflow_kwargs)

        operators = GroupOperators(config.store.operators) if config.store is not None and config.store.operators else None
        total = self.spec.total_steps
        saving, recovering, evaluating = (
            Schedule(section, self.spec.steps_per_epoch) for section in (config.saver, config.recover, config.evaluator)
        )
        evaluations: dict[int, float] = {}
        reward = float("nan")
        published = True
        with (
            StopSignal() as stop,
            StageRun(config, self.directory, total_steps=total, resume_step=self.step or None, tokenizer=self.tokenizer) as run,
        ):
            if config.evaluator.at_start and self.step == 0:
                evaluations[0] = self._evaluate(run, evaluated, evaluated_kwargs)
            while self.step < total and (stop.received is None or not published):
                with run.timer.phase("generate"):
                    batch = tensor_container_to(self._next_batch(trained, operators), self.actor.device)
                with run.timer.phase("train"):
                    self.actor.compute_advantages(batch)
                    stats = self.actor.ppo_update(batch)
                    self.actor.step_lr_scheduler()
                self.step += 1
                published = is_publication(self.step, config.rollout.weight_update_every_steps, total)
                with run.timer.phase("publish"):
                    self._publish(published)
                reward = report_step(run, self.step, batch, stats, self.actor.version)
                check_agreement(config, self.actor, self.step, stats)
                if self.valid_dataset and (evaluating.due_by_now(self.step, published) or self.step == total):
                    evaluations[self.step] = self._evaluate(run, evaluated, evaluated_kwargs)
                with run.timer.phase("checkpoint"):
                    if saving.due(self.step):
                        save_step(self.actor, self.directory, self.step, self.tokenizer, config.saver.keep)
                    due = recovering.due_by_now(self.step, published) or (published and stop.received is not None)
                    if config.recover.mode != "off" and due:
                        self._save_recover()
            if stop.received is not None and self.step < total:
                raise SystemExit(stop.exit_code)
            checkpoint = self.save(self.directory.checkpoints / "final")
            run.plot(f"{config.experiment_name}: reward and held-out {run.display.evaluation_label}")
            return {
                "steps": self.step,
                "reward": reward,
                "eval": evaluations,
                "seconds": run.timer.totals,
                "checkpoint": str(checkpoint),
            }

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def _next_batch(self, workflow: Any, operators: GroupOperators | None) -> Trajectory:
        """The batch of the next step.

        An engine that shares the trainer's weights cannot sample between a step and the next publication: it is asked for the
        batches of all steps up to there before the first of them.
        """
        config = self.config
        every = config.rollout.weight_update_every_steps
        wanted = 1
        if isinstance(self.rollout, LocalRolloutEngine):
            wanted = min(every - self.step % every, self.spec.total_steps - self.step)
        if not self._taken:
            self._taken.extend(
                self.rollout.prepare_batch(
                    self.loader, workflow=workflow, should_accept_fn=operators, group_size=config.gconfig.n_samples
                )
                for _ in range(wanted)
            )
        return self._taken.popleft()

    def _publish(self, is_due: bool) -> None:
        if not is_due:
            self.actor.skip_publication()
            return
        self.rollout.pause()
        self.actor.update_weights()
        self.rollout.resume()
        self.rollout.set_version(self.actor.version)

    def save(self, path: Any) -> Any:
        """Write weights and tokenizer in Hugging Face form; returns the path."""
        self.actor.save(path, self.tokenizer)
        return path

    def evaluate(self, workflow: Any, workflow_kwargs: dict[str, Any], gconfig: Any = None) -> EvaluationResult:
        """Average reward on the held-out tasks."""
        return evaluate(self.rollout, self.valid_dataset, workflow, workflow_kwargs, gconfig or self.config.evaluator.gconfig)

    def _evaluate(self, run: StageRun, workflow: Any, kwargs: dict[str, Any]) -> float:
        with run.timer.phase("eval"):
            result = self.evaluate(workflow, kwargs)
        reported = run.tracker.get("eval").export(reset=True)
        run.log(self.step, {**reported, **{f"eval/{name}": value for name, value in result.as_metrics().items()}})
        run.display.evaluation(self.step, result.reward, result.measure)
        run.dumper.dump(self.step, result.trajectory, name="eval")
        return result.reward

    def _save_recover(self) -> None:
        self.recover.save(
            self.step,
            {
                "actor": self.actor.state_dict(),
                "loader": self.loader.state_dict(),
                "rollout": self.rollout.state_dict(),
            },
        )

    # -- workflows -----------------------------------------------------------------------------------------------------

    def _arguments(self, workflow: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            "reward_fn": self.config.reward_fn,
            "gconfig": self.config.gconfig.new(n_samples=1),
            "tokenizer": self.tokenizer,
        }
        return with_defaults(workflow, kwargs, defaults)

    def _evaluation_workflow(
        self, workflow: Any, kwargs: dict[str, Any], eval_workflow: Any, eval_kwargs: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        config = self.config
        chosen = eval_workflow or config.eval_workflow or workflow
        given = eval_kwargs if eval_kwargs is not None else config.eval_workflow_kwargs
        return chosen, self._arguments(chosen, given) if given is not None else kwargs
