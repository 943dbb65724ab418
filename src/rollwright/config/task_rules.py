"""Rules about the tasks of a run: a dataset or tasksets, which of their keys are read, and the models beside them."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

from rollwright.config.experiment import PPOConfig, RunConfig
from rollwright.config.faults import refuse, refuse_set
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.tasksets import TasksetConfig


def _draws_tasksets(config: PPOConfig) -> bool:
    return bool(config.tasksets) and config.mode in ("both", "explore")


#: Keys of runs without tasksets, and what a taskset has in their place.
_IN_A_TASKSET = {
    "reward_fn": "its own reward_fn",
    "workflow_kwargs": "its own workflow_args",
    "eval_workflow": "eval_tasksets with a workflow",
    "eval_workflow_kwargs": "eval_tasksets with workflow_args",
}

_DATASET_OR_TASKSETS = (
    refuse_set(
        PPOConfig,
        ["train_dataset.path"],
        lambda config: config.tasksets,
        "is given beside tasksets, which take its place; keep one",
    ),
    refuse_set(
        PPOConfig,
        ["workflow"],
        lambda config: config.tasksets,
        "is given beside tasksets, which name their workflows; keep one",
    ),
    refuse(
        PPOConfig,
        "eval_tasksets",
        lambda config: config.eval_tasksets and not config.tasksets and config.mode in ("both", "explore"),
        "are evaluated where tasksets are trained on; give valid_dataset (and eval_workflow) here",
    ),
    refuse(
        PPOConfig,
        "valid_dataset",
        lambda config: config.valid_dataset is not None and _draws_tasksets(config),
        "is not evaluated beside tasksets; give eval_tasksets",
    ),
    *(
        refuse(
            PPOConfig,
            key,
            lambda config, key=key: getattr(config, key) and _draws_tasksets(config),
            f"is not read beside tasksets; a taskset has {instead}",
        )
        for key, instead in _IN_A_TASKSET.items()
    ),
    refuse(
        PPOConfig,
        "eval_workflow_kwargs",
        lambda config: config.eval_workflow_kwargs is not None and config.eval_workflow is None and config.workflow is None,
        "are given for no workflow; name eval_workflow or workflow",
    ),
)

#: Keys of a section that is a dataset or a taskset, by where they are not read.
_ONLY_IN = {
    place: [each.name for each in fields(TasksetConfig) if each.metadata.get("read_in") == place]
    for place in ("datasets", "tasksets")
}
_DATASETS, _TASKSETS = ("train_dataset", "valid_dataset", "dataset"), ("tasksets.*", "eval_tasksets.*")

_READ_ELSEWHERE = (
    refuse_set(
        RunConfig,
        [f"{section}.{name}" for section in _DATASETS for name in _ONLY_IN["tasksets"] if name != "name"],
        lambda config: True,
        "is read in tasksets, not in a dataset, which takes it from the run's own keys; take it out",
    ),
    refuse_set(
        RunConfig,
        [f"{section}.name" for section in _DATASETS],
        lambda config: True,
        "is a taskset's name in metrics; the subset of a Hugging Face dataset is called subset",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.{name}" for section in _TASKSETS for name in _ONLY_IN["datasets"]],
        lambda config: True,
        "is read in train_dataset and valid_dataset, not in a taskset; take it out",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.format.{key}" for section in _TASKSETS for key in ("chosen_key", "rejected_key")],
        lambda config: True,
        "is not read by task-style workflows: pairs of replies are trained on by a stage of kind dpo",
    ),
    refuse_set(
        PPOConfig,
        [f"{section}.format.image_key" for section in _TASKSETS],
        lambda config: True,
        "is not read by task-style workflows: a workflow finds its images in task.raw_task; or use train_dataset and vision_rlvr",
    ),
)


def _all_tasksets_set(config: PPOConfig, name: str) -> bool:
    """Whether no task is sampled with an argument of the run's ``gconfig``, because every taskset has another value."""
    own, value = [taskset.gconfig for taskset in config.tasksets], getattr(config.gconfig, name)
    return bool(own) and all(each is not None and getattr(each, name) != value for each in own)


RULES = (
    *_DATASET_OR_TASKSETS,
    *_READ_ELSEWHERE,
    *(
        refuse_set(
            PPOConfig,
            [f"gconfig.{each.name}"],
            partial(_all_tasksets_set, name=each.name),
            "is {value}, but every taskset has a gconfig of its own, which takes its place; set it there",
        )
        for each in fields(GenerationHyperparameters)
        if each.name != "n_samples"
    ),
    refuse(
        AuxiliaryModelConfig,
        "",
        lambda model: bool(model.model_path) == bool(model.base_url),
        lambda model: (
            f"has {'both' if model.model_path else 'neither'} of model_path (a model to serve) and base_url (a server that "
            "runs); give one"
        ),
    ),
)
