"""Rules about the tasks of a run: a dataset or tasksets, what of them is read, and the models that serve their workflows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.tasksets import FormatConfig, keys_read_elsewhere

#: Whether the rule is broken, the key as ``section.key``, the message.
Rule = tuple[Any, str, str]


#: Keys of runs without tasksets, and what a taskset has in their place.
_IN_A_TASKSET = {
    "reward_fn": "its own reward_fn",
    "workflow_kwargs": "its own workflow_args",
    "eval_workflow": "eval_tasksets with a workflow",
    "eval_workflow_kwargs": "eval_tasksets with workflow_args",
}


def tasks(config: PPOConfig) -> list[Rule]:
    """A run has train_dataset and a workflow, or tasksets: keys of the one way that the other does not read."""
    tasksets, draws = bool(config.tasksets), config.mode in ("both", "explore")
    return [
        (
            tasksets and config.train_dataset.path,
            "train_dataset.path",
            "is given beside tasksets, which take its place; keep one",
        ),
        (tasksets and config.workflow, "workflow", "is given beside tasksets, which name their workflows; keep one"),
        (
            draws and config.eval_tasksets and not tasksets,
            "eval_tasksets",
            "are evaluated where tasksets are trained on; give valid_dataset (and eval_workflow) here",
        ),
        (
            draws and tasksets and config.valid_dataset is not None,
            "valid_dataset",
            "is not evaluated beside tasksets; give eval_tasksets",
        ),
        *(
            (draws and tasksets and getattr(config, key), key, f"is not read beside tasksets; a taskset has {instead}")
            for key, instead in _IN_A_TASKSET.items()
        ),
        (
            config.eval_workflow_kwargs is not None and config.eval_workflow is None and config.workflow is None,
            "eval_workflow_kwargs",
            "are given for no workflow; name eval_workflow or workflow",
        ),
    ]


def generation_of_tasks(config: PPOConfig) -> list[Rule]:
    """Generation arguments of the run that no task is sampled with, since all tasksets have their own."""
    plain, own = GenerationHyperparameters(), [taskset.gconfig for taskset in config.tasksets]
    changed = {
        field.name: value
        for field in fields(plain)
        if (value := getattr(config.gconfig, field.name)) != getattr(plain, field.name) and field.name != "n_samples"
    }
    return [
        (
            own and all(each is not None and getattr(each, name) != value for each in own),
            f"gconfig.{name}",
            f"is {value}, but every taskset has a gconfig of its own, which takes its place; set it there",
        )
        for name, value in changed.items()
    ]


#: Keys of a format that say nothing to a task-style workflow, and what to do.
_UNREAD_BY_TASKS = {
    "chosen_key": "pairs of replies are trained on by a stage of kind dpo",
    "rejected_key": "pairs of replies are trained on by a stage of kind dpo",
    "image_key": "a workflow finds its images in task.raw_task; or use train_dataset and vision_rlvr",
}


def taskset_columns(config: PPOConfig) -> list[Rule]:
    plain = FormatConfig()
    tasksets = [
        (f"{name}.{index}", taskset)
        for name in ("tasksets", "eval_tasksets")
        for index, taskset in enumerate(getattr(config, name))
    ]
    return [
        *(
            (True, f"{place}.{key}", message)
            for place, each in tasksets
            for key, message in keys_read_elsewhere(each, "tasksets")
        ),
        *(
            (
                getattr(each.columns, key) != getattr(plain, key),
                f"{place}.format.{key}",
                f"is not read by task-style workflows: {remedy}",
            )
            for place, each in tasksets
            for key, remedy in _UNREAD_BY_TASKS.items()
        ),
    ]


def auxiliary_models(config: PPOConfig) -> list[Rule]:
    return [
        (
            bool(each.model_path) == bool(each.base_url),
            f"auxiliary_models.{index}",
            f"has {'both' if each.model_path else 'neither'} of model_path (a model to serve) and base_url (a server that runs); "
            "give one",
        )
        for index, each in enumerate(config.auxiliary_models)
    ]
