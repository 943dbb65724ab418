"""What task-style workflows need of a trainer: their tasksets as one dataset, and the workflow that runs their tasks."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.data.mixture import TaskMixture, taskset_rows
from rollwright.trainers.task_services import TaskServices
from rollwright.workflows.task_runner import TaskRunner


def task_mixture(config: PPOConfig) -> TaskMixture:
    """The training tasksets, drawn from as one."""
    rows = [taskset_rows(taskset) for taskset in config.tasksets]
    return TaskMixture(config.tasksets, rows, config.train_dataset.batch_size, config.seed)


def evaluation_rows(config: PPOConfig) -> list[dict[str, Any]]:
    """The rows of all evaluation tasksets; each says which taskset it is of."""
    return [{**row, "taskset": taskset.name} for taskset in config.eval_tasksets for row in taskset_rows(taskset)]


def training_runner(
    config: PPOConfig, tokenizer: Any, mixture: TaskMixture, services: TaskServices | None = None
) -> TaskRunner:
    """Runs training tasks; every task's reward is told to the mixture's selectors.

    A task is sampled as often as its taskset's ``group_size`` says, else the run's ``gconfig.n_samples``, else
    the taskset's; with the taskset's ``gconfig``, or the run's where it sets none.

    Args:
        config: the experiment.
        tokenizer: the policy's.
        mixture: the training tasksets.
        services: what runs beside the run; None: the runner has services of its own, which end with the process.
    """
    services = services or TaskServices(config, tokenizer)
    return TaskRunner(
        config.tasksets,
        tokenizer,
        gconfig=config.gconfig,
        n_samples=config.gconfig.n_samples if config.gconfig.n_samples > 1 else None,
        services=services,
        model_path=config.actor.path,
        feedback=mixture.feedback,
    )


def evaluation_runner(
    config: PPOConfig, tokenizer: Any, services: TaskServices | None = None, *, n_samples: int | None = None
) -> TaskRunner:
    """Runs evaluation tasks: with their taskset's ``gconfig``, or the evaluator's where the taskset sets none.

    Args:
        config: the experiment.
        tokenizer: the policy's.
        services: what tasks share; None: made here.
        n_samples: samples of each task, whatever its taskset says; None: as it says.
    """
    services = services or TaskServices(config, tokenizer)
    tasksets = config.eval_tasksets
    if n_samples is not None:
        tasksets = [dataclasses.replace(taskset, group_size=n_samples) for taskset in tasksets]
    return TaskRunner(
        tasksets,
        tokenizer,
        gconfig=config.evaluator.gconfig,
        is_eval=True,
        services=services,
        model_path=config.actor.path,
    )
