"""An evaluation: what a stage of kind ``eval`` is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import ClusterConfig, DatasetConfig, RolloutConfig, StatsLoggerConfig


@dataclass
class EvalConfig:
    """Scores of a model on a split: greedy, and the mean of several samples beside it."""

    experiment_name: str = field(default="experiment", metadata={"help": "Name of the experiment; paths derive from it."})
    trial_name: str = field(default="trial", metadata={"help": "Name of this trial of the experiment."})
    seed: int = field(default=1, metadata={"help": "Seed of everything that is random."})
    deterministic: bool = field(default=False, metadata={"help": "The evaluation repeats bit for bit on one machine."})
    path: str = field(default="", metadata={"help": "Model directory or Hugging Face name."})
    label: str = field(default="", metadata={"help": "Name of the result in tables and summary.json; empty: the stage's."})
    tokenizer_path: str = field(default="", metadata={"help": "Tokenizer directory or name; empty: the model's path."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with a model. Off unless asked for."})
    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(split="test", shuffle=False, drop_last=False))
    workflow: str | None = field(default=None, metadata={"help": "Import path or registered name of the workflow."})
    workflow_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the workflow's constructor."})
    reward_fn: str | None = field(default=None, metadata={"help": "Import path or registered name of the reward function."})
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    greedy: bool = field(default=True, metadata={"help": "One greedy completion of each task."})
    samples: int = field(
        default=0, metadata={"help": "Completions of each task at gconfig.temperature, whose mean is reported.", "ge": 0}
    )
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
