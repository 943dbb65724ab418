"""What task-style workflows need of a trainer: their tasksets as one dataset, and the workflow that runs their tasks."""

from __future__ import annotations

from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.data.mixture import TaskMixture, taskset_rows
from rollwright.workflows.task_runner import TaskRunner


def task_mixture(config: PPOConfig) -> TaskMixture:
    """The training tasksets, drawn from as one."""
    rows = [taskset_rows(taskset) for taskset in config.tasksets]
    return TaskMixture(config.tasksets, rows, config.train_dataset.batch_size, config.seed)


def evaluation_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """The rows of all evaluation tasksets; each says which taskset it is of."""
    return [{**row, "taskset": taskset.name} for taskset in config.eval_tasksets for row in taskset_rows(taskset)]


def training_runner(config: PPOConfig, tokenizer: Any, mixture: TaskMixture) -> TaskRunner:
    """Runs training tasks; every task's reward is told to the mixture's selectors.

    A task is sampled as often as its taskset's ``repeat_times`` says, else ``gconfig.n_samples``, else the taskset's
    ``rollout_args.n``.
    """
    return TaskRunner(
        config.tasksets,
        tokenizer,
        n_samples=config.gconfig.n_samples if config.gconfig.n_samples > 1 else None,
        model_path=config.actor.path,
        feedback=mixture.feedback,
    )


def evaluation_runner(config: PPOConfig, tokenizer: Any) -> TaskRunner:
    """Runs evaluation tasks: with their taskset's ``rollout_args``, or the evaluator's where the taskset sets none."""
    return TaskRunner(
        config.eval_tasksets, tokenizer, gconfig=config.evaluator.gconfig, is_eval=True, model_path=config.actor.path
    )
