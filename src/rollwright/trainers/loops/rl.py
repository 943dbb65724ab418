"""Reinforcement learning: sample a batch, compute advantages, take optimizer steps, publish the weights, repeat."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from rollwright.config.experiment import FinetuneSpec, PPOConfig
from rollwright.config.loading import config_to_dict
from rollwright.config.recipes import apply_recipe, uses_critic
from rollwright.config.rules import refuse_dicts
from rollwright.config.sections import TrainEngineConfig
from rollwright.data.loader import TaskLoader
from rollwright.data.selectors import TaskMixture
from rollwright.errors import ConfigError
from rollwright.experience.journal.records import Resumed
from rollwright.experience.journal.writing import Journal
from rollwright.experience.operators import GroupOperators
from rollwright.experience.trajectory import Trajectory
from rollwright.inference.backends.server_backend import servers_of
from rollwright.placement.task_services import TaskServices
from rollwright.rollout.engines import LocalRolloutEngine, RolloutEngine
from rollwright.tracking.learning_signs import LearningWatch
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.trainers.drawn_tasks import (
    evaluation_workflow,
    refuse_missing_chat_template,
    refuse_unusable_reward,
    task_loader,
    training_workflow,
)
from rollwright.trainers.loops.evaluation import evaluate
from rollwright.trainers.loops.loop import Part, StopSignal, Trainer
from rollwright.trainers.loops.reporting import EvaluationResult, StageRun, report_step
from rollwright.training.publish_and_audit import require_agreement

logger = getLogger("trainer")


class PolicyTrainer(Trainer):
    """Trains a policy on batches of samples, and publishes it. Subclasses define where batches come from and where weights go.

    Attributes:
        waiting: name of the phase in which the trainer waits for a batch.
        sampling_phases: phases of a step in which tokens are sampled. If samples may be stale, sampling continues while the policy trains.
    """

    waiting = "generate"

    @property
    def actor(self) -> Any:
        """The policy. With several processes, it is this process's shard, and every process must make the same calls."""
        return self.trained

    def __init__(self, config: PPOConfig, model: TrainEngineConfig, directory: RunDirectory) -> None:
        super().__init__(config, model, directory)
        self.learning = LearningWatch()
        is_asynchronous = config.rollout.max_head_offpolicyness > 0
        self.sampling_phases = (self.waiting, "train", "publish") if is_asynchronous else (self.waiting,)

    @abstractmethod
    def next_batch(self, stop: StopSignal) -> Trajectory | None:
        """Return the batch of the next step, or None if no more will come or a signal asks to stop."""

    def publish(self) -> None:
        """Publish the current weights to the engines."""
        self.ranks.call("publish")

    def save_final(self) -> Any:
        """See ``Trainer.save_final``; a critic that is a model of its own is written to ``critic/`` in the checkpoint."""
        path = super().save_final()
        if uses_critic(self.config.actor):
            self.ranks.save(path / "critic", self.tokenizer, call="save_critic")
        return path

    def samples_with_own_weights(self) -> bool:
        """Return whether tokens of the version just trained were sampled with this policy's weights.

        If so, the log-probabilities of engine and trainer must agree.
        """
        return True

    def ended_since_last_step(self) -> dict[str, float]:
        """Count how samples and groups of training tasks ended since the last step; empty if they are sampled by other processes."""
        return {}

    def make_step(self, run: StageRun, stop: StopSignal) -> float | None:
        """Take a batch, train on it, publish the weights."""
        with run.timer.phase(self.waiting):
            batch = self.next_batch(stop)
        if batch is None:
            return None
        batch = self.ranks.prepare(batch)
        with run.timer.phase("train"):
            stats = self.ranks.call("policy_step", batch)
        self.step += 1
        with run.timer.phase("publish"):
            every = self.config.rollout.weight_update_every_steps
            self.is_published = self.step % every == 0 or self.step == self.total_steps
            if self.is_published:
                self.publish()
            else:
                self.ranks.call("skip_publication")
        publication = self.actor.publication if self.is_published else None
        version, ended = self.actor.version, self.ended_since_last_step()
        reward = report_step(run, self.step, batch, stats, version, self.sampling_phases, publication, ended)
        self.learning.after_step(stats, reward)
        if self.samples_with_own_weights() and "logprob_difference/mean" in stats:
            rollout, differences = self.config.rollout, (stats["logprob_difference/mean"], stats["logprob_difference/max"])
            engine, dtypes = f"step {self.step}: the {rollout.backend} engine", (self.actor.compute_dtype, rollout.dtype)
            require_agreement(engine, self.actor.version - 1, *differences, rollout.logprob_tolerance, *dtypes)
        return reward


class PPOTrainer(PolicyTrainer):
    """Trains a policy on samples of a workflow.

    ::

        with PPOTrainer(config, train_rows, valid_rows) as trainer:
            trainer.train(workflow="rollwright.workflows.rlvr.RLVRWorkflow", workflow_kwargs={...})

    Args:
        config: the experiment.
        train_dataset: tasks as a sequence of dicts, or a mixture of tasksets.
        valid_dataset: held-out tasks for evaluation during training. If None, the policy is not evaluated.
        directory: directory of the run, claimed by the caller. If None, ``<fileroot>/<experiment_name>/<trial_name>`` is claimed.

    Raises:
        ConfigError: settings contradict each other or cannot be honoured.
        DataError: there are fewer tasks than one batch needs.
    """

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Sequence[dict[str, Any]] | TaskMixture,
        valid_dataset: Sequence[dict[str, Any]] | None = None,
        *,
        directory: RunDirectory | None = None,
    ) -> None:
        refuse_dicts(config)
        super().__init__(
            apply_recipe(config),
            config.actor,
            directory or RunDirectory(config.cluster.fileroot, config.experiment_name, config.trial_name),
        )
        refuse_missing_chat_template(config, self.tokenizer)
        refuse_unusable_reward(config, train_dataset)
        self._owns_directory = directory is None
        self.shares_weights = servers_of(config.rollout.backend) is None
        self.valid_dataset = list(valid_dataset or [])[: config.evaluator.limit]
        self.evaluates = bool(self.valid_dataset)
        dataset = config.train_dataset
        if isinstance(train_dataset, TaskMixture):
            self.loader: TaskLoader | TaskMixture = train_dataset
            size = len(train_dataset) * dataset.batch_size
        else:
            self.loader = task_loader(config, train_dataset)
            size = len(train_dataset)
        self.spec = FinetuneSpec(config.total_train_epochs, size, dataset.batch_size, config.total_train_steps)
        self._taken: deque[Trajectory] = deque()  # sampled batches, trained in later steps
        self._counted: dict[str, int] = {}  # ends of samples and groups that were reported

    # -- from start to end ---------------------------------------------------------------------------------------------

    def claim(self, opened: ExitStack) -> None:
        """Claim the directory unless the caller has done so."""
        if self._owns_directory:
            self.directory.claim(config_to_dict(self.config), self.config.recover.mode)
            opened.push(self._leave_directory)

    def open(self, opened: ExitStack) -> None:
        """Start the inference engine and connect the policy to it."""
        config = self.placement.serve_models(self.config, self.ranks, self.directory, opened)
        self.services = opened.enter_context(TaskServices(config, self.tokenizer, self.directory.logs))
        self.rollout: RolloutEngine = self.placement.rollout(config, self.ranks, self.tokenizer, self.directory)
        opened.callback(self.rollout.destroy)
        self.rollout.initialize()
        self.journal = self.rollout.journal
        self.actor.connect_engine(self.rollout)

    def _leave_directory(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.directory.finish()
        self.directory.release()

    def parts(self) -> dict[str, Part]:
        """Return the loader (order of tasks) and the rollout engine (finished and running samples)."""
        return {"loader": self.loader, "rollout": self.rollout}

    def begin(self, resumed: bool) -> None:
        """Publish the weights, and continue the episodes that were recorded before an interruption.

        Without ``rollout.canary``, a new run does not publish to an engine that shares the trainer's weights.
        """
        if self.config.rollout.canary:
            self.ranks.call("prove_publication")
            self.rollout.set_version(self.actor.version)
        elif resumed or self.rollout.sampler.local_model is None or self.ranks.model is None:
            self.ranks.call("republish")
            self.rollout.set_version(self.actor.version)
        self.rollout.executor.while_waiting = self._publish_again
        self.made_again = range(0)
        if self.directory.resumed and self.journal is not None:
            self._recall(self.journal)

    def _publish_again(self) -> None:
        """Publish the current weights again to servers that were started again: to prove them, or because nothing can be sampled else."""
        if self.rollout.sampler.lacks_weights:
            self.ranks.call("republish")
        if self.ranks.awaits_proof:
            self.ranks.call("prove_publication")

    def _recall(self, journal: Journal) -> None:
        """Continue the episodes that earlier processes of the run recorded."""
        executor, version = self.rollout.executor, self.actor.version
        past = executor.recall([journal.directory])
        for gap in past.lost:
            logger.warning("the journal in %s: %s; its samples of unfinished tasks are sampled again", journal.directory, gap)
        if self.step and self.step not in past.checkpoints:
            logger.warning(
                "the journal in %s does not have the recovery checkpoint of step %d: it is missing, empty or damaged. Samples after that "
                "step are sampled again; rollwright check %s lists what the run lacks",
                journal.directory,
                self.step,
                self.directory.path,
            )
        self.made_again = range(version + 1, past.newest_version + 1)
        journal.write(Resumed(self.step, version, executor.frontier, past.count, past.tokens, time.time()))

    def samples_with_own_weights(self) -> bool:
        """Return False for a version that was already trained before an interruption: its tokens may come from the earlier weights."""
        return self.actor.version - 1 not in self.made_again

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow: Any = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Train to the last step, or until a signal asks to stop.

        Args:
            workflow: class, instance, import string or registered name. If None, the workflow of the config or of its tasksets.
            workflow_kwargs: constructor arguments. If the workflow takes ``reward_fn``, ``gconfig`` or ``tokenizer`` and they are not
                given, they come from the config.
            eval_workflow: workflow for evaluation. If None, the training workflow.
            eval_workflow_kwargs: constructor arguments of the evaluation workflow. If None, those of training, with the evaluator's
                generation arguments.

        Returns:
            ``{"steps", "reward", "eval": {step: reward}, "seconds": {...}, "checkpoint": path}``.
        """
        config = self.config
        self._refuse_given("train", workflow, workflow_kwargs, eval_workflow, eval_workflow_kwargs)
        given = {
            "workflow": workflow,
            "workflow_kwargs": workflow_kwargs,
            "eval_workflow": eval_workflow,
            "eval_workflow_kwargs": eval_workflow_kwargs,
            "tasksets": None if workflow is None else [],
            "eval_tasksets": None if eval_workflow is None else [],
        }
        chosen = replace(config, **{key: value for key, value in given.items() if value is not None})
        self._workflow = training_workflow(chosen, self.tokenizer, self.loader, self.services)
        self._evaluated = evaluation_workflow(chosen, self.tokenizer, self.services)
        if self._evaluated[0] is None:
            self._evaluated = self._workflow, None
        self._operators = GroupOperators(config.store.operators) if config.store and config.store.operators else None
        return super().train()

    def _refuse_given(self, method: str, *given: Any) -> None:
        if not self.placement.runs_episodes_here and any(each is not None for each in given):
            raise ConfigError(
                f"{method}() was given a workflow or arguments of it, which workers on a cluster cannot be handed: name them in the config "
                "(workflow, workflow_kwargs, eval_workflow, eval_workflow_kwargs, evaluator.gconfig)."
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    def before_recover_visible(self) -> Callable[[], object] | None:
        """Return a function that writes the journal to disk together with this step's recovery checkpoint, or None without a journal."""
        journal = self.journal
        return None if journal is None else partial(journal.checkpoint, self.step, self.rollout.executor.frontier)

    def publish(self) -> None:
        """Publish the weights while sampling is paused, then release the slots of the trained batch."""
        self.rollout.pause()
        super().publish()
        self.rollout.resume()
        self.rollout.wake()
        self.rollout.set_version(self.actor.version)
        self._publish_again()  # a server that was started again meanwhile may have been given the weights

    def next_batch(self, stop: StopSignal) -> Trajectory:
        """Return the batch of the next step.

        An engine that shares the trainer's weights cannot sample between a step and the next publication, so the batches of all steps
        up to the publication are sampled before the first of them.
        """
        config = self.config
        every = config.rollout.weight_update_every_steps
        wanted = 1
        if isinstance(self.rollout, LocalRolloutEngine):
            wanted = min(every - self.step % every, self.total_steps - self.step)
        stop.then = self.rollout.executor.hurry
        if not self._taken:
            self._taken.extend(
                self.rollout.prepare_batch(
                    self.loader, workflow=self._workflow, should_accept_fn=self._operators, group_size=config.group_size
                )
                for _ in range(wanted)
            )
            self.rollout.rest()
        return self._taken.popleft()

    def ended_since_last_step(self) -> dict[str, float]:
        """See ``PolicyTrainer.ended_since_last_step``."""
        before, self._counted = self._counted, self.rollout.training_counts()
        return {name: float(count - before.get(name, 0)) for name, count in self._counted.items()}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluate(
        self, workflow: Any = None, workflow_kwargs: dict[str, Any] | None = None, gconfig: Any = None
    ) -> EvaluationResult:
        """Run the held-out tasks and average their rewards.

        Args:
            workflow: workflow to run. If None, the one that ``train`` evaluates with.
            workflow_kwargs: constructor arguments of ``workflow``.
            gconfig: generation arguments. If None, those of the evaluator.
        """
        self._refuse_given("evaluate", workflow, workflow_kwargs, gconfig)
        if workflow is None:
            workflow, workflow_kwargs = self._evaluated
        return evaluate(self.rollout, self.valid_dataset, workflow, workflow_kwargs, gconfig or self.config.evaluator.gconfig)
