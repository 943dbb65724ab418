"""The configs of whole stages, made of sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config import key, key_from
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.modes import AuxiliaryModelConfig, BenchConfig, ServiceConfig, StoreConfig
from rollwright.config.recipes import as_the_actor
from rollwright.config.sections import (
    ClusterConfig,
    CriticConfig,
    EvaluatorConfig,
    JournalConfig,
    PPOActorConfig,
    RecoverConfig,
    RolloutConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainEngineConfig,
)
from rollwright.config.servers import SGLangConfig, VLLMConfig
from rollwright.config.tasksets import DatasetConfig, TasksetConfig
from rollwright.config.teachers import DistillationConfig, TeacherConfig


@dataclass
class FinetuneSpec:
    """The length of a run, from which schedules are computed."""

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
        """Optimisation steps of the run: ``total_train_steps``, or epochs × steps per epoch."""
        return self.total_train_steps or self.total_train_epochs * self.steps_per_epoch


@dataclass
class RunConfig:
    """Keys of every stage that runs a model."""

    experiment_name: str = key("experiment", "Name of the experiment; paths and sinks derive from it.", public=True)
    trial_name: str = key("trial", "Name of this trial of the experiment.", public=True)
    seed: int = key(1, "Seed of everything that is random.")
    deterministic: bool = key(False, "Make the run repeatable bit for bit on one machine (docs/determinism.md).")
    tokenizer_path: str = key("", "Tokenizer directory or name; default: the model's path.", public=True)
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plugins: list[str] = key_from(
        list,
        "Python files, directories of such, or modules that register workflows, rewards, losses and so on; imported "
        "before the rest is validated. Paths are relative to the file that names them.",
    )


@dataclass
class EpisodesConfig:
    """The workflow that a stage runs, and the engine that it runs on."""

    workflow: str | None = key(None, "Import path or registered name of the workflow.")
    workflow_kwargs: dict[str, Any] = key_from(dict, "Arguments of the workflow's constructor.")
    reward_fn: str | None = key(None, "Import path or registered name of the reward function.")
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class BaseExperimentConfig(RunConfig):
    """Keys of every training run."""

    total_train_epochs: int = key(1, "Passes over the training tasks.", ge=1)
    total_train_steps: int | None = key(None, "Steps of the run; if set, it replaces total_train_epochs.", ge=1)
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    valid_dataset: DatasetConfig | None = field(default=None)
    saver: SaverConfig = field(default_factory=SaverConfig)
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)


@dataclass
class PPOConfig(EpisodesConfig, BaseExperimentConfig):
    """Reinforcement learning of a policy with a workflow."""

    mode: str = key(
        "both",
        "both: sample and train in one process; explore: sample into the store; train: train from the store; "
        "bench: evaluate checkpoints; serve: record an agent in use.",
        choices=["both", "explore", "train", "bench", "serve"],
    )
    tasksets: list[TasksetConfig] = key_from(list, "Tasks of task-style workflows, in place of train_dataset and workflow.")
    eval_tasksets: list[TasksetConfig] = key_from(list, "Held-out tasks of task-style workflows, in place of valid_dataset.")
    store: StoreConfig | None = key(
        None, "Experience store between explorer and trainer; modes explore, train and serve need it."
    )
    auxiliary_models: list[AuxiliaryModelConfig] = key_from(
        list, "Models that are not trained; task-style workflows get an OpenAI client of each."
    )
    teachers: list[TeacherConfig] = key_from(
        list, "Models whose log-probabilities the policy learns from (actor.distillation); several are chosen by task or mixed."
    )
    bench: BenchConfig = field(default_factory=BenchConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    eval_workflow: str | None = key(None, "Workflow of evaluation; default: the same.")
    eval_workflow_kwargs: dict[str, Any] | None = key(None, "Its arguments; default: the same, with the evaluator's gconfig.")
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    journal: JournalConfig = field(default_factory=JournalConfig)
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    ref: TrainEngineConfig | None = key(None, "Reference policy of the KL; default: the actor's first weights if kl_ctl > 0.")
    critic: CriticConfig | None = key(
        None, "Value model of adv_estimator gae (recipes ppo and vapo); default: one that begins as the actor."
    )

    @property
    def group_size(self) -> int:
        """Samples of each training task: the run's ``gconfig.n_samples``."""
        return self.gconfig.n_samples

    @property
    def critic_section(self) -> CriticConfig:
        """The ``critic`` section, or the one that stands for none."""
        return self.critic or CriticConfig(**as_the_actor(self.actor))


@dataclass
class GRPOConfig(PPOConfig):
    """PPO without a critic: advantages are taken within the group of a task's samples."""


@dataclass
class SFTConfig(EpisodesConfig, BaseExperimentConfig):
    """Supervised training on worked completions."""

    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="sft"))
    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    teachers: list[TeacherConfig] = key_from(list, "Models whose log-probabilities of the completions are learned, too.")
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    stop_accuracy: float | None = key(
        None,
        "Stop when the workflow's mean reward on valid_dataset reaches this; checked every evaluator.every_steps.",
        ge=0.0,
        le=1.0,
    )


@dataclass
class DPOConfig(SFTConfig):
    """Direct preference optimisation on pairs of a preferred and a rejected reply."""

    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="preference"))
    ref: TrainEngineConfig | None = key(None, "Reference policy; default: the model's first weights.")
    beta: float = key(0.1, "Strength of the pull towards the reference.", gt=0.0)
    label_smoothing: float = key(0.0, "Assumed share of pairs with swapped labels (conservative DPO).", ge=0.0, lt=0.5)


@dataclass
class EvalConfig(EpisodesConfig, RunConfig):
    """Evaluation of a model on a split: greedily, and by the mean of several samples."""

    path: str = key("", "Model directory, Hugging Face name, or URL of an endpoint of the OpenAI chat protocol.", public=True)
    served_model: str = key("", "Name of the model at the endpoint; default: the only one that it lists.", public=True)
    api_key: str | None = key(None, "Key for the endpoint. ${oc.env:NAME} keeps it out of the file.", secret=True)
    label: str = key("", "Name of the result in tables and summary.json; default: the stage's.")
    trust_remote_code: bool = key(False, "Run code that comes with a model. Off unless asked for.")
    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(split="test", shuffle=False, drop_last=False))
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    greedy: bool = key(True, "One greedy completion of each task.")
    samples: int = key(0, "Completions of each task at gconfig.temperature, whose mean is reported.", ge=0)
    pass_at: list[int] = key_from(lambda: [1, 2, 4, 8], "Values of k for pass@k; those above samples are left out.")
    pass_reward: float = key(1.0, "Minimum reward of a sample that passes.")
    journal: JournalConfig = field(default_factory=JournalConfig)


@dataclass
class NewVisionConfig:
    """Vision tower of a new model."""

    patch_size: int = key(14, "Side of an image patch, in pixels.", ge=2)
    merge_size: int = key(2, "Patches a side that become one token.", ge=1)
    layers: int = key(2, "Transformer blocks over patches.", ge=1)
    hidden_size: int = key(64, "Width of these blocks.", ge=8)
    heads: int = key(4, "Attention heads of these blocks.", ge=1)
    max_tokens: int = key(64, "Maximum number of tokens of an image; larger images are scaled down.", ge=1)


@dataclass
class NewBPEConfig:
    """A BPE tokenizer that is trained on the messages of a dataset."""

    tokens: int = key(512, "Vocabulary size, including 256 bytes and 6 special tokens.", ge=263)
    dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="sft"))


@dataclass
class NewModelConfig:
    """A model with random weights and a tokenizer, written in Hugging Face form."""

    path: str = key("", "Directory to write it to.", public=True)
    architecture: str = key("qwen3", "Transformer family.", choices=["qwen3", "qwen2", "llama", "qwen2_vl"])
    hidden_size: int = key(128, "Width of the residual stream.", ge=8)
    layers: int = key(4, "Transformer blocks.", ge=1)
    heads: int = key(4, "Attention heads.", ge=1)
    kv_heads: int | None = key(None, "Key-value heads; default: as many as heads.", ge=1)
    head_dim: int | None = key(None, "Size of a head; default: hidden_size / heads.", ge=2)
    intermediate_size: int | None = key(None, "Width of the feed-forward; default: three times hidden_size.", ge=8)
    tie_embeddings: bool = key(True, "Input and output embeddings are one matrix.")
    max_position_embeddings: int = key(512, "Longest sequence, in tokens.", ge=8)
    vocabulary_from: str = key("", "Tokenizer directory or name to copy; default: make a character tokenizer.", public=True)
    characters: str = key("", "Characters of the tokenizer; default: printable ASCII and newline.")
    pieces: list[str] = key_from(list, "Strings that are one token each, such as '<answer>' or syllables.")
    bpe: NewBPEConfig | None = key(None, "Train a byte-level BPE tokenizer, in place of one of characters.")
    vision: NewVisionConfig | None = key(None, "Vision tower of architecture qwen2_vl; default: a small one.")
    seed: int = key(1, "Seed of the weights.")


#: Config class of each kind of stage.
STAGE_CLASSES: dict[str, type] = {
    "model": NewModelConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rl": GRPOConfig,
    "eval": EvalConfig,
}


def section_of(config: Any) -> Any:
    """Return the section of the model that a config trains."""
    return config.actor if isinstance(config, PPOConfig) else config.model
