"""A whole experiment: the sections together, and what repeats said once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config.auxiliary import AuxiliaryModelConfig
from rollwright.config.bench import BenchConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import (
    ClusterConfig,
    DatasetConfig,
    EvaluatorConfig,
    PPOActorConfig,
    RecoverConfig,
    RolloutConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainEngineConfig,
)
from rollwright.config.servers import SGLangConfig, VLLMConfig
from rollwright.config.service import ServiceConfig
from rollwright.config.store import StoreConfig
from rollwright.config.tasksets import TasksetConfig


@dataclass
class FinetuneSpec:
    """How long a run is: what schedules are computed from."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    total_train_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the dataset."""
        return self.dataset_size // self.train_batch_size

    @property
    def total_steps(self) -> int:
        """Optimisation steps of the run: ``total_train_steps``, or epochs × steps of one."""
        return self.total_train_steps or self.total_train_epochs * self.steps_per_epoch


@dataclass
class BaseExperimentConfig:
    """What every run has."""

    experiment_name: str = field(
        default="experiment", metadata={"help": "Name of the experiment; paths and sinks derive from it."}
    )
    trial_name: str = field(default="trial", metadata={"help": "Name of this trial of the experiment."})
    seed: int = field(default=1, metadata={"help": "Seed of everything that is random."})
    deterministic: bool = field(
        default=False, metadata={"help": "The run repeats bit for bit on one machine (docs/determinism.md)."}
    )
    tokenizer_path: str = field(default="", metadata={"help": "Tokenizer directory or name; empty: the actor's path."})
    total_train_epochs: int = field(default=1, metadata={"help": "Passes over the training tasks.", "ge": 1})
    total_train_steps: int | None = field(
        default=None, metadata={"help": "Steps of the run; where set, epochs are not counted.", "ge": 1}
    )
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig | None = field(default=None)
    saver: SaverConfig = field(default_factory=SaverConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)


@dataclass
class PPOConfig(BaseExperimentConfig):
    """Reinforcement learning of a policy with a workflow."""

    mode: str = field(
        default="both",
        metadata={
            "help": "both: sample and train in one process; explore: sample into the store; train: train from the store; "
            "bench: evaluate checkpoints; serve: record an agent in use.",
            "choices": ["both", "explore", "train", "bench", "serve"],
        },
    )
    tasksets: list[TasksetConfig] = field(
        default_factory=list, metadata={"help": "Tasks of task-style workflows, in place of train_dataset and workflow."}
    )
    eval_tasksets: list[TasksetConfig] = field(
        default_factory=list, metadata={"help": "Held-out tasks of task-style workflows, in place of valid_dataset."}
    )
    store: StoreConfig | None = field(
        default=None,
        metadata={"help": "Experience store between explorer and trainer; modes explore, train and serve need it."},
    )
    auxiliary_models: list[AuxiliaryModelConfig] = field(
        default_factory=list,
        metadata={"help": "Models that are not trained; task-style workflows get an OpenAI client of each."},
    )
    bench: BenchConfig = field(default_factory=BenchConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    workflow: str | None = field(default=None, metadata={"help": "Import path or registered name of the workflow."})
    workflow_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the workflow's constructor."})
    eval_workflow: str | None = field(default=None, metadata={"help": "Workflow of evaluation; None: the same."})
    eval_workflow_kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Its arguments; None: the same, with the evaluator's gconfig."}
    )
    reward_fn: str | None = field(default=None, metadata={"help": "Import path or registered name of the reward function."})
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: TrainEngineConfig | None = field(
        default=None, metadata={"help": "Reference policy of the KL; None: the actor's first weights where kl_ctl > 0."}
    )
    critic: TrainEngineConfig | None = field(default=None, metadata={"help": "Value model. Not built yet: refused."})


@dataclass
class GRPOConfig(PPOConfig):
    """PPO without a critic: advantages are taken within the group of a task's samples."""


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised training on worked completions."""

    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="sft"))
    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    stop_accuracy: float | None = field(
        default=None,
        metadata={
            "help": "Stop when the workflow's mean reward on valid_dataset reaches this; checked every evaluator.every_steps.",
            "ge": 0.0,
            "le": 1.0,
        },
    )
    workflow: str | None = field(default=None, metadata={"help": "Workflow that scores the model on valid_dataset."})
    workflow_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the workflow's constructor."})
    reward_fn: str | None = field(default=None, metadata={"help": "Import path or registered name of the reward function."})
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class DPOConfig(SFTConfig):
    """Direct preference optimisation, on pairs of replies of which one is preferred."""

    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="preference"))
    ref: TrainEngineConfig | None = field(default=None, metadata={"help": "Reference policy; None: the model's first weights."})
    beta: float = field(default=0.1, metadata={"help": "Strength of the pull towards the reference.", "gt": 0.0})
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "Share of pairs taken to be the wrong way round (conservative DPO).", "ge": 0.0, "lt": 0.5},
    )
