"""The sections of an experiment: one dataclass for each noun that a YAML file configures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.recipes import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from rollwright.config.servers import BACKENDS


def _help(text: str, **limits: Any) -> dict[str, Any]:
    return {"help": text, **limits}


@dataclass
class OptimizerConfig:
    """AdamW with warm-up and a schedule."""

    lr: float = field(default=1e-5, metadata=_help("Peak learning rate.", gt=0.0))
    weight_decay: float = field(
        default=0.01, metadata=_help("Decoupled weight decay (not applied to norms and biases).", ge=0.0)
    )
    beta1: float = field(default=0.9, metadata=_help("AdamW's first moment decay.", ge=0.0, lt=1.0))
    beta2: float = field(default=0.95, metadata=_help("AdamW's second moment decay.", ge=0.0, lt=1.0))
    eps: float = field(default=1e-8, metadata=_help("AdamW's epsilon.", gt=0.0))
    lr_scheduler_type: str = field(
        default="constant", metadata=_help("Schedule after warm-up.", choices=["constant", "linear", "cosine"])
    )
    min_lr_ratio: float = field(default=0.0, metadata=_help("Where linear and cosine end, as a share of lr.", ge=0.0, le=1.0))
    warmup_steps_proportion: float = field(
        default=0.0, metadata=_help("Share of all steps in which lr grows from 0.", ge=0.0, le=1.0)
    )
    gradient_clipping: float = field(default=1.0, metadata=_help("Largest global norm of the gradient.", gt=0.0))


@dataclass
class MicroBatchSpec:
    """How a batch is cut so that it fits in memory; the gradient does not depend on it."""

    max_tokens_per_mb: int = field(
        default=8192, metadata=_help("Padded tokens of one micro-batch at most (one longer row is allowed alone).", ge=1)
    )
    n_mbs: int = field(default=1, metadata=_help("At least so many micro-batches.", ge=1))


@dataclass
class NormConfig:
    """Centre and scale, over samples: a sample of four rows does not count four times."""

    mean_level: str | None = field(
        default="group", metadata=_help("Over what the mean is taken; none: not centred.", choices=["group", "batch", "none"])
    )
    std_level: str | None = field(
        default="group",
        metadata=_help("Over what the deviation is taken; none: not scaled.", choices=["group", "batch", "none"]),
    )
    leave_one_out: bool = field(default=False, metadata=_help("The mean that a sample is compared with leaves it out (RLOO)."))
    eps: float = field(default=1e-6, metadata=_help("Added to the deviation.", gt=0.0))


@dataclass
class TrainEngineConfig:
    """A model that is trained or scored."""

    path: str = field(default="", metadata=_help("Model directory or Hugging Face name."))
    init_from_scratch: bool = field(default=False, metadata=_help("Random weights from the configuration at path."))
    trust_remote_code: bool = field(default=False, metadata=_help("Run code that comes with a model. Off unless asked for."))
    dtype: str = field(
        default="auto",
        metadata=_help(
            "auto: bfloat16 compute where the hardware has it (GPU), float32 elsewhere.",
            choices=["auto", "float32", "bfloat16", "float16"],
        ),
    )
    device: str = field(default="auto", metadata=_help("auto: cuda where there is one, else cpu."))
    attn_implementation: str = field(
        default="sdpa", metadata=_help("Attention of the Hugging Face model.", choices=["sdpa", "eager", "flash_attention_2"])
    )
    gradient_checkpointing: bool = field(default=False, metadata=_help("Recompute activations in the backward pass."))
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    optimizer: OptimizerConfig | None = field(
        default_factory=OptimizerConfig, metadata=_help("None for a model that is only scored.")
    )
    max_bad_steps: int = field(
        default=3, metadata=_help("Steps in a row skipped for a non-finite loss or gradient before the run stops.", ge=1)
    )
    logits_chunk_tokens: int = field(
        default=4096,
        metadata=_help("Tokens whose log-softmax is computed at a time; bounds memory at large vocabularies.", ge=16),
    )


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy and how it is optimised."""

    recipe: str = field(
        default="grpo", metadata=_help("Named recipe that sets the defaults of the keys below (see docs/algorithms.md).")
    )
    policy_loss: str = field(
        default="clip",
        metadata=_help(
            "The loss of a token (docs/algorithms.md): a registered name or import path; clip: PPO's, by the keys below.",
            registry=POLICY_LOSSES,
        ),
    )
    policy_loss_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Arguments of a policy_loss other than clip, such as tau_positive of sapo.")
    )
    ppo_n_minibatches: int = field(default=1, metadata=_help("Optimizer steps that a batch is divided into.", ge=1))
    eps_clip: float = field(default=0.2, metadata=_help("Lower clip of the ratio (and upper, unless eps_clip_higher).", gt=0.0))
    eps_clip_higher: float | None = field(default=None, metadata=_help("Upper clip of the ratio (DAPO's clip-higher).", gt=0.0))
    c_clip: float | None = field(default=None, metadata=_help("Dual clip for negative advantages; above 1.", gt=1.0))
    importance_level: str = field(
        default="token",
        metadata=_help("Where ratios are taken: token, turn or sequence (GSPO).", choices=["token", "turn", "sequence"]),
    )
    loss_aggregation: str = field(
        default="token",
        metadata=_help(
            "Denominator of the loss: all tokens of the global batch, rows (mean of row means), or a constant (Dr. GRPO).",
            choices=["token", "row", "constant"],
        ),
    )
    loss_constant: float = field(
        default=1024.0, metadata=_help("Tokens a row counts for where loss_aggregation is constant.", gt=0.0)
    )
    adv_norm: NormConfig | None = field(
        default_factory=NormConfig, metadata=_help("How rewards become advantages; None: raw rewards.")
    )
    adv_estimator: str = field(
        default="normalised",
        metadata=_help(
            "From rewards to advantages (docs/algorithms.md): a registered name or import path; normalised: as adv_norm says.",
            registry=ADVANTAGE_ESTIMATORS,
        ),
    )
    adv_estimator_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata=_help("Arguments of an adv_estimator other than normalised.")
    )
    reward_scaling: float = field(default=1.0, metadata=_help("Rewards are multiplied by this after reward_bias is added."))
    reward_bias: float = field(default=0.0, metadata=_help("Added to every reward."))
    reward_clip: float = field(default=20.0, metadata=_help("Scaled rewards are clipped to ± this.", gt=0.0))
    kl_ctl: float = field(
        default=0.0, metadata=_help("Weight of the KL to the reference in the loss; above 0 loads the reference model.", ge=0.0)
    )
    kl_estimator: str = field(
        default="k3", metadata=_help("Schulman's k1, k2 or k3; or a registered name or import path.", registry=KL_ESTIMATORS)
    )
    entropy_coef: float = field(default=0.0, metadata=_help("Weight of an entropy bonus.", ge=0.0))
    mask_truncated: bool = field(
        default=False, metadata=_help("Samples cut by a length limit do not train (DAPO's overlong filter).")
    )
    recompute_logprob: bool = field(
        default=False,
        metadata=_help(
            "Recompute log-probabilities with the trainer before the first step (prox_logp), also where the batch is on policy."
        ),
    )
    use_decoupled_loss: bool = field(
        default=False, metadata=_help("Clip around prox_logp and weight by the behaviour policy (AReaL, arXiv 2505.24298).")
    )
    prox_logp_method: str = field(
        default="recompute",
        metadata=_help(
            "Where prox_logp comes from: a forward pass, or interpolated between behaviour and current by version.",
            choices=["recompute", "interpolate"],
        ),
    )
    behav_imp_weight_cap: float | None = field(default=5.0, metadata=_help("Cap of the behaviour importance weight.", gt=0.0))
    behav_imp_weight_mode: str = field(
        default="mask",
        metadata=_help(
            "Over the cap: the token is masked, or its weight clamped (truncated importance sampling).",
            choices=["mask", "clamp"],
        ),
    )
    behav_imp_weight_level: str = field(
        default="token",
        metadata=_help("Where the behaviour importance weight is taken.", choices=["token", "turn", "sequence"]),
    )


@dataclass
class RolloutConfig:
    """The inference engine as the trainer sees it, and how samples are run."""

    backend: str = field(
        default="builtin",
        metadata=_help(
            "builtin: in the trainer's process, sharing its weights; builtin_process: in a process of its own; sglang, vllm: servers; "
            "or a registered name, or an import path such as my_package.my_module:MyClient (docs/servers.md).",
            registry=BACKENDS,
        ),
    )
    addresses: list[str] = field(
        default_factory=list,
        metadata=_help("host:port of servers that run already; empty: from the environment, else started here."),
    )
    servers: int = field(default=1, metadata=_help("Servers that are started here, where none run already.", ge=1))
    tensor_parallel: int = field(default=1, metadata=_help("GPUs of each server that is started here.", ge=1))
    first_gpu: int | None = field(
        default=None,
        metadata=_help(
            "The first GPU of the servers that are started here; None: the first after those of the trainer's processes, where this "
            "host has enough, else GPU 0, shared with the trainer.",
            ge=0,
        ),
    )
    api_key: str | None = field(
        default=None, metadata=_help("Bearer token for the servers. ${oc.env:NAME} keeps it out of the file.")
    )
    path: str = field(default="", metadata=_help("Model of an engine that runs alone; empty: the actor's."))
    device: str = field(default="auto", metadata=_help("Device of the built-in engine."))
    dtype: str = field(
        default="auto",
        metadata=_help("Compute type of the built-in engine.", choices=["auto", "float32", "bfloat16", "float16"]),
    )
    max_running_requests: int = field(default=256, metadata=_help("Sequences that the built-in engine decodes together.", ge=1))
    context_length: int | None = field(default=None, metadata=_help("Prompt and new tokens together; None: the model's.", ge=2))
    kv_cache_bytes: int | None = field(
        default=None,
        metadata=_help(
            "Memory of the built-in engine's cache; None: what max_running_requests and context_length need, at most a quarter of free memory.",
            ge=1,
        ),
    )
    prefix_cache: bool = field(
        default=True, metadata=_help("Keep the cache of finished requests so that the next turn starts from it.")
    )
    openai_front: bool = field(
        default=False,
        metadata=_help("Give task-style workflows OpenAI clients whose calls are recorded (docs/openai-front.md)."),
    )
    max_concurrent_samples: int = field(default=1024, metadata=_help("Samples that run at once.", ge=1))
    max_head_offpolicyness: int = field(
        default=0, metadata=_help("Most versions between sampling and training; 0 is exactly synchronous.", ge=0)
    )
    on_stale: str = field(
        default="wait",
        metadata=_help(
            "wait: no publication that would push a living group over the limit; drop: such groups are dropped and counted.",
            choices=["wait", "drop"],
        ),
    )
    on_weight_update: str = field(
        default="recompute",
        metadata=_help(
            "Requests that run when weights change: go on with the cache recomputed, keep the old cache, or are waited for.",
            choices=["recompute", "keep", "wait"],
        ),
    )
    sample_timeout: float | None = field(
        default=3600.0, metadata=_help("Seconds that one sample may take; None: no limit.", gt=0.0)
    )
    max_sample_retries: int = field(default=1, metadata=_help("Times a failed sample is run again.", ge=0))
    max_failed_share: float = field(
        default=0.2,
        metadata=_help("Share of the last 64 samples that may fail (after retries) before the run stops.", ge=0.0, le=1.0),
    )
    check_trajectories: bool = field(default=True, metadata=_help("Check every trajectory against the data contract."))
    dynamic_filter: str | None = field(
        default=None,
        metadata=_help(
            "no_variance: groups whose rewards are all equal are dropped and the batch is refilled.", choices=["no_variance"]
        ),
    )
    over_sampling: float = field(
        default=0.0, metadata=_help("Share of extra groups started; the stragglers are cut when the batch is complete.", ge=0.0)
    )
    request_timeout: float = field(default=3600.0, metadata=_help("Seconds that one request to a server may take.", gt=0.0))
    request_retries: int = field(default=3, metadata=_help("Tries again for a connection reset before a response began.", ge=0))
    accept_shifted_logprobs: bool = field(
        default=False,
        metadata=_help(
            "Ask servers for top-p, top-k or penalties although they then give log-probabilities after them; responses are "
            "flagged and the trainer has to recompute (actor.recompute_logprob)."
        ),
    )
    weight_update: str = field(
        default="auto",
        metadata=_help(
            "How weights reach servers: auto (shared memory where all are on this host), shared, disk (weight_update_path), xccl "
            "(a distributed group).",
            choices=["auto", "shared", "disk", "xccl"],
        ),
    )
    weight_update_every_steps: int = field(
        default=1,
        metadata=_help(
            "Training steps between two publications of weights; max_head_offpolicyness is at least one less, the age of the last "
            "batch that is trained before the next publication.",
            ge=1,
        ),
    )
    weight_update_path: str | None = field(
        default=None, metadata=_help("Directory of weight_update: disk, which trainer and servers see under one name.")
    )
    setup_timeout: float = field(default=300.0, metadata=_help("Seconds that initialize waits for a server's health.", gt=0.0))
    logprob_tolerance: float | None = field(
        default=None,
        metadata=_help(
            "Largest mean difference of engine and trainer log-probabilities after a publication; None: 1e-3 in float32, 5e-2 in 16-bit types.",
            gt=0.0,
        ),
    )


@dataclass
class IntervalConfig:
    """Something that is done every so often; None is never."""

    every_steps: int | None = field(default=None, metadata=_help("Steps between two.", ge=1))
    every_epochs: int | None = field(default=None, metadata=_help("Epochs between two.", ge=1))
    every_seconds: float | None = field(
        default=None, metadata=_help("Seconds between two (refused in deterministic mode).", gt=0.0)
    )


@dataclass
class SaverConfig(IntervalConfig):
    """Hugging Face checkpoints, loadable by any other tool; one is always written at the end."""

    keep: int | None = field(default=None, metadata=_help("Keep only the newest so many.", ge=1))


@dataclass
class RecoverConfig(IntervalConfig):
    """Everything that is needed to go on after a stop: weights, optimizer, data position, random states."""

    mode: str = field(
        default="auto",
        metadata=_help(
            "auto: resume where the trial has a checkpoint, else start; resume: it must have one; off: neither saved nor resumed.",
            choices=["auto", "resume", "off"],
        ),
    )
    keep: int = field(default=2, metadata=_help("Recover checkpoints kept.", ge=1))


@dataclass
class EvaluatorConfig(IntervalConfig):
    """Evaluation on valid_dataset, outside capacity and version accounting, with its own generation arguments."""

    gconfig: GenerationHyperparameters = field(default_factory=lambda: GenerationHyperparameters(greedy=True))
    at_start: bool = field(default=False, metadata=_help("Also before the first step."))
    limit: int | None = field(default=None, metadata=_help("Only the first so many tasks.", ge=1))


@dataclass
class StatsLoggerConfig:
    """Where metrics go besides metrics.jsonl in the run directory."""

    sinks: list[str] = field(
        default_factory=list, metadata=_help("tensorboard, wandb, trackio, or a sink that a plugin registers in SINKS.")
    )
    show: list[str] = field(
        default_factory=list,
        metadata=_help("Further metrics of metrics.jsonl that each step's display shows, such as actor/entropy."),
    )
    project: str | None = field(default=None, metadata=_help("Project name at the sink; None: experiment_name."))
    dump_rollouts: int = field(
        default=4,
        metadata=_help("Trajectories of each step or evaluation written readable to rollouts/; 0: none; -1: all.", ge=-1),
    )
    display: str = field(
        default="auto",
        metadata=_help("auto: live on a terminal, plain lines elsewhere.", choices=["auto", "live", "plain", "none"]),
    )


@dataclass
class ClusterConfig:
    """Where processes run and where runs are kept."""

    fileroot: str = field(default="runs", metadata=_help("Runs are kept in <fileroot>/<experiment_name>/<trial_name>."))
    threads: int | None = field(default=None, metadata=_help("Compute threads of this process; None: one for each core.", ge=1))
