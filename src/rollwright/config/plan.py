"""Describes what the stages of a run do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollwright.config.experiment import DPOConfig, EvalConfig, NewModelConfig, PPOConfig, SFTConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.loading import Stage, dump_yaml
from rollwright.config.recipes import uses_critic
from rollwright.config.tasksets import DatasetConfig
from rollwright.config.teachers import TeacherConfig
from rollwright.registry import import_path


def resolved_yaml(stages: Sequence[Stage]) -> str:
    """Return the stages with every key and its value, as YAML that loads to the same stages."""
    return dump_yaml({"stages": [stage.to_dict() for stage in stages]}).rstrip()


def run_directory_of(stages: Sequence[Stage]) -> Path:
    """Return ``<fileroot>/<experiment>/<trial>`` of the first stage that has these keys, or else the parent of its path."""
    for config in (stage.config for stage in stages):
        if hasattr(config, "experiment_name"):
            return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
    return Path(stages[0].config.path).parent


def describe(stages: Sequence[Stage]) -> str:
    """Describe each stage in a numbered line, and say where the run writes."""
    processes = max((stage.config.cluster.processes for stage in stages if hasattr(stage.config, "cluster")), default=1)
    on_ray = any(stage.config.cluster.kind == "ray" for stage in stages if hasattr(stage.config, "cluster"))
    several = f", each in {processes} processes of this machine where it trains," if processes > 1 and not on_ray else ""
    head = f"\nThis would run {len(stages)} stage{'s' if len(stages) > 1 else ''}{several} in {run_directory_of(stages)}:"
    lines = [f"  {number}. {stage.name}: {in_words(stage)}" for number, stage in enumerate(stages, 1)]
    return "\n".join([head, *lines])


def in_words(stage: Stage) -> str:
    """Describe a stage: ``train MODEL on the completions of DATASET, 400 steps``."""
    return (
        f"{_WORDS[stage.kind](stage.config)}{_kl(stage)}{_critic(stage.config)}{_memory(stage.config)}{_teachers(stage.config)}"
    )


def _critic(config: Any) -> str:
    """Describe the critic of a policy, and what it holds in memory."""
    if not isinstance(config, PPOConfig) or not uses_critic(config.actor) or config.mode in ("explore", "bench"):
        return ""
    critic = config.critic_section
    if critic.shared:
        return ". The critic is a value head on the actor's model: in memory, one vector and its optimizer state"
    return (
        f". The critic is a model of its own, which begins as {critic.path or config.actor.path}: in memory, its weights, gradients and "
        "optimizer state beside the actor's"
    )


def _memory(config: Any) -> str:
    """Describe what a training stage with an adapter holds in memory."""
    model = getattr(config, "actor", None) or getattr(config, "model", None)
    if model is None or (lora := getattr(model, "lora", None)) is None:
        return ""
    layers = ", ".join(lora.targets) or "all linear layers except the output head"
    held = "in bfloat16 on GPUs that support it and float32 elsewhere" if model.dtype == "auto" else f"in {model.dtype}"
    kind = "DoRA" if lora.use_dora else "LoRA"
    return (
        f". Trains a {kind} adapter of rank {lora.rank} on {layers}. In memory: the base, frozen {held} (once: the reference is the base "
        "with the adapter off); the adapter, its gradients and its optimizer state, in float32"
    )


def _teachers(config: Any) -> str:
    """Describe the teachers, and which of them this process holds in memory."""
    teachers: list[TeacherConfig] = getattr(config, "teachers", [])
    if not teachers:
        return ""
    loss = config.actor.distillation if hasattr(config, "actor") else config.distillation
    alone = "" if loss.reward_weight else ", rewards do not train" if hasattr(config, "actor") else ", without the likelihood"
    weights = f", {loss.weight:g} × {loss.loss}{alone}"
    return f". Taught by {' and '.join(_teacher(each) for each in teachers)}{weights}"


def _teacher(teacher: TeacherConfig) -> str:
    if teacher.policy:
        return f"{teacher.name}, which is the policy with more context"
    if teacher.addresses:
        return f"{teacher.name} at {', '.join(teacher.addresses)}"
    size = sum(file.stat().st_size for file in Path(teacher.path).expanduser().glob("*.safetensors"))
    held = f"{size / 2**20:,.0f} MiB of weights" if size else "its weights"
    return f"{teacher.name} ({teacher.path}; this process holds {held} and a cache of its own)"


def _kl(stage: Stage) -> str:
    """Describe how the KL to the reference is used, because ``kl_ctl`` has another meaning in ported files."""
    actor = getattr(stage.config, "actor", None)
    if actor is None or actor.kl_ctl == 0:
        return ""
    is_translated = ("actor", "kl_ctl") in stage.origins.document.written
    note = "" if is_translated else import_path("rollwright.compat:KL_NOTE", "note")
    if actor.kl_in == "reward":
        weak = (
            ", whose gradient vanishes near the reference (k1 has that of the KL)" if actor.kl_estimator in ("k2", "k3") else ""
        )
        return f". KL to the reference: taken from the reward of each token, {actor.kl_ctl:g} × {actor.kl_estimator}{weak}"
    return f". KL to the reference: a term of the loss, {actor.kl_ctl:g} × {actor.kl_estimator}{note}"


def _new_model(config: NewModelConfig) -> str:
    tokenizer = f"the tokenizer of {config.vocabulary_from}" if config.vocabulary_from else "a character tokenizer"
    if config.bpe is not None:
        tokenizer = f"a BPE tokenizer of {config.bpe.tokens} tokens, trained on {_rows(config.bpe.dataset)}"
    return (
        f"make a {config.architecture} model with random weights ({config.layers} layers of width {config.hidden_size}) and "
        f"{tokenizer}; write both to {config.path}"
    )


def _supervised(config: SFTConfig) -> str:
    until = ""
    if config.stop_accuracy is not None:
        until = f", until the mean reward on {_rows(config.valid_dataset)} reaches {config.stop_accuracy:g}"
    what = "preferences" if isinstance(config, DPOConfig) else "completions"
    return f"train {config.model.path} on the {what} of {_rows(config.train_dataset)}, {_length(config)}{until}"


def _rl(config: PPOConfig) -> str:
    dataset = config.train_dataset
    if config.mode != "both":
        return f"run in mode {config.mode} with {config.actor.path}"
    work = f"{_class(config.workflow)} on {_rows(dataset)}"
    if config.tasksets:
        work = "the workflows of " + ", ".join(taskset.path or taskset.name for taskset in config.tasksets)
    evaluation = f"; evaluate on {_rows(config.valid_dataset)}" if config.valid_dataset else ""
    return (
        f"train {config.actor.path} with {work}, {dataset.batch_size} tasks × {config.group_size} "
        f"samples a step ({_sampling_of_tasks(config)}) from the {config.rollout.backend} engine, {_length(config)}{evaluation}"
    )


def _eval(config: EvalConfig) -> str:
    ways = ["greedily"] if config.greedy else []
    ways += [f"{config.samples} times a task ({_sampling(config.gconfig)})"] if config.samples else []
    return f"evaluate {config.path} with {_class(config.workflow)} on {_rows(config.dataset)}, {' and '.join(ways) or 'not at all'}"


def _class(workflow: str | None) -> str:
    """Return a workflow as written in the config, but only the class name of a built-in one."""
    return workflow.rpartition(".")[2] if workflow and workflow.startswith("rollwright.") else str(workflow)


def _rows(dataset: DatasetConfig | None) -> str:
    if dataset is None:
        return "no dataset"
    return f"{dataset.path} ({dataset.split}{f', first {dataset.limit} rows' if dataset.limit else ''})"


def _length(config: Any) -> str:
    if config.total_train_steps is not None:
        return f"{config.total_train_steps} steps"
    return f"{config.total_train_epochs} epoch{'s' if config.total_train_epochs > 1 else ''}"


def _sampling_of_tasks(config: PPOConfig) -> str:
    """Describe how tasks are sampled, by taskset if their arguments differ."""
    own = {taskset.name: _sampling(taskset.gconfig or config.gconfig) for taskset in config.tasksets}
    if len(set(own.values())) > 1:
        return "; ".join(f"{name}: {sampling}" for name, sampling in own.items())
    return next(iter(own.values()), _sampling(config.gconfig))


def _sampling(gconfig: GenerationHyperparameters) -> str:
    return f"temperature {gconfig.effective_temperature:g}, at most {gconfig.max_new_tokens} tokens"


_WORDS = {"model": _new_model, "sft": _supervised, "dpo": _supervised, "rl": _rl, "eval": _eval}
