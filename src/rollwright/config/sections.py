"""The sections of an experiment: one dataclass for each noun that a YAML file configures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollwright.config import key, key_from
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.recipes import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, OPTIMIZERS, POLICY_LOSSES
from rollwright.config.servers import BACKENDS
from rollwright.config.teachers import DistillationConfig


@dataclass
class OptimizerConfig:
    """AdamW (or another) with warm-up and a schedule."""

    kind: str = key(
        "adamw",
        "adamw; adamw_8bit or adamw_4bit (moments in 8 or 4 bits; rollwright[optimizers]); a registered name; or an import "
        "path, such as torch.optim:Adafactor, called with lr and kwargs.",
        registry=OPTIMIZERS,
    )
    kwargs: dict[str, Any] = key_from(dict, "Further arguments of the optimizer.")
    lr: float = key(1e-5, "Peak learning rate.", gt=0.0)
    weight_decay: float = key(0.01, "Decoupled weight decay (not applied to norms and biases).", ge=0.0)
    beta1: float = key(0.9, "AdamW's first moment decay.", ge=0.0, lt=1.0)
    beta2: float = key(0.95, "AdamW's second moment decay.", ge=0.0, lt=1.0)
    eps: float = key(1e-8, "AdamW's epsilon.", gt=0.0)
    lr_scheduler_type: str = key("constant", "Schedule after warm-up.", choices=["constant", "linear", "cosine"])
    min_lr_ratio: float = key(0.0, "Final learning rate of linear and cosine, as a share of lr.", ge=0.0, le=1.0)
    warmup_steps_proportion: float = key(0.0, "Share of all steps in which lr grows from 0.", ge=0.0, le=1.0)
    gradient_clipping: float = key(1.0, "Largest global norm of the gradient.", gt=0.0)


@dataclass
class MicroBatchSpec:
    """How a batch is cut so that it fits in memory; the gradient does not depend on it."""

    max_tokens_per_mb: int = key(
        8192,
        "Maximum tokens of a micro-batch: distinct tokens if rows share prefixes, else padded ones. A longer row forms a micro-batch alone.",
        ge=1,
    )
    n_mbs: int = key(1, "Minimum number of micro-batches.", ge=1)


@dataclass
class NormConfig:
    """Centre and scale, over samples: a sample of four rows does not count four times."""

    mean_level: str | None = key(
        "group", "Over which samples the mean is taken; none disables centring.", choices=["group", "batch", "none"]
    )
    std_level: str | None = key(
        "group", "Over which samples the deviation is taken; none disables scaling.", choices=["group", "batch", "none"]
    )
    leave_one_out: bool = key(False, "The mean that a sample is compared with leaves it out (RLOO).")
    std_after_mean: bool = key(
        False, "The deviation is that of rewards less their mean (REINFORCE++-baseline), not of the rewards (Lite PPO)."
    )
    eps: float = key(1e-6, "Added to the deviation.", gt=0.0)


@dataclass
class LoraConfig:
    """A LoRA adapter that is trained instead of the model's own weights (docs/lora.md)."""

    rank: int = key(16, "Rank of the update of each adapted layer.", ge=1)
    alpha: float = key(32.0, "The update is scaled by alpha / rank (alpha / sqrt(rank) with use_rslora).", gt=0.0)
    targets: list[str] = key_from(
        list, "Names of the linear layers to adapt, such as q_proj. Default: all linear layers except the output head."
    )
    dropout: float = key(
        0.0,
        "Dropout of the adapter's inputs in optimizer steps of supervised fine-tuning; RL and DPO refuse it.",
        ge=0.0,
        lt=1.0,
    )
    use_rslora: bool = key(False, "Scale by alpha / sqrt(rank) (arXiv 2312.03732).")
    use_dora: bool = key(False, "Train each layer's magnitudes too (DoRA, arXiv 2402.09353).")


@dataclass
class TrainEngineConfig:
    """A model that is trained or scored."""

    path: str = key("", "Model directory or Hugging Face name.", public=True)
    init_from_scratch: bool = key(False, "Random weights from the configuration at path.")
    trust_remote_code: bool = key(False, "Run code that comes with a model. Off unless asked for.")
    dtype: str = key(
        "auto",
        "auto: bfloat16 compute on GPUs that support it, float32 elsewhere.",
        choices=["auto", "float32", "bfloat16", "float16"],
    )
    device: str = key("auto", "auto: cuda if available, else cpu.")
    attn_implementation: str = key(
        "sdpa", "Attention of the Hugging Face model.", choices=["sdpa", "eager", "flash_attention_2"]
    )
    share_prefixes: bool = key(True, "Compute tokens that rows have in common once (docs/shared-prefixes.md).")
    gradient_checkpointing: bool = key(False, "Recompute the activations of layers in the backward pass.")
    gradient_checkpointing_every: int = key(1, "With gradient_checkpointing: of every layer (1), every second (2), …", ge=1)
    compile_layers: bool = key(False, "Compile each layer (torch.compile; needs a C++ compiler on a CPU).")
    shard: str = key(
        "auto",
        "Shard weights, gradients and optimizer state over ranks (FSDP2). auto: with several ranks, and on one GPU unless an "
        "engine in this process samples with the same weights.",
        choices=["auto", "always", "never"],
    )
    shard_size: int | None = key(
        None, "Ranks that share one copy of the weights. Fewer than all ranks replicate copies (HSDP). Default: all.", ge=1
    )
    cpu_offload: bool = key(False, "Keep shards in host memory and run the optimizer there; for GPUs.")
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    optimizer: OptimizerConfig | None = key_from(OptimizerConfig, "None for a model that is only scored.")
    lora: LoraConfig | None = key(
        None, "Train a LoRA adapter and keep the model's weights frozen, in dtype. `{}` takes the defaults (docs/lora.md)."
    )
    max_bad_steps: int = key(3, "Steps in a row skipped for a non-finite loss or gradient before the run stops.", ge=1)
    logits_chunk_mib: int = key(
        256, "MiB of float32 logits in one chunk of the log-softmax; bounds memory for any vocabulary size.", ge=1
    )


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy and how it is optimised."""

    recipe: str = key("grpo", "Named recipe that sets the defaults of the keys below (see docs/algorithms.md).")
    policy_loss: str = key(
        "clip",
        "Loss of a token (docs/algorithms.md): a registered name or import path. clip is PPO's, set by the keys below.",
        registry=POLICY_LOSSES,
    )
    policy_loss_kwargs: dict[str, Any] = key_from(
        dict, "Arguments of a policy_loss other than clip, such as tau_positive of sapo."
    )
    ppo_n_minibatches: int = key(1, "Optimizer steps that a batch is divided into.", ge=1)
    eps_clip: float = key(0.2, "Lower clip of the ratio (and upper, unless eps_clip_higher).", gt=0.0)
    eps_clip_higher: float | None = key(None, "Upper clip of the ratio (DAPO's clip-higher).", gt=0.0)
    c_clip: float | None = key(None, "Dual clip for negative advantages; above 1.", gt=1.0)
    importance_level: str = key(
        "token",
        "Where ratios are taken: token, turn, sequence (geometric mean over its tokens, GSPO) or sequence_product.",
        choices=["token", "turn", "sequence", "sequence_product"],
    )
    loss_aggregation: str = key(
        "token",
        "Denominator of the loss: all tokens of the global batch, rows (mean of row means), or a constant (Dr. GRPO).",
        choices=["token", "row", "constant"],
    )
    loss_constant: float = key(1024.0, "Tokens that a row counts for if loss_aggregation is constant.", gt=0.0)
    adv_norm: NormConfig | None = key_from(NormConfig, "How rewards become advantages; None uses raw rewards.")
    adv_estimator: str = key(
        "normalised",
        "From rewards to advantages (docs/algorithms.md): a registered name or import path. normalised applies adv_norm; gae takes the "
        "values of the critic.",
        registry=ADVANTAGE_ESTIMATORS,
    )
    adv_estimator_kwargs: dict[str, Any] = key_from(
        dict, "Arguments of an adv_estimator other than normalised, such as gamma and lam of gae."
    )
    reward_scaling: float = key(1.0, "Rewards are multiplied by this after reward_bias is added.")
    reward_bias: float = key(0.0, "Added to every reward.")
    reward_clip: float | None = key(None, "Scaled rewards are clipped to ± this; default: no clipping.", gt=0.0)
    kl_ctl: float = key(
        0.0,
        "Weight of the KL to the reference in the loss or the reward (kl_in); above 0 loads the reference model.",
        ge=0.0,
    )
    kl_in: str = key(
        "loss",
        "Where the KL counts. loss: a term of the loss. reward: each trained token's KL at sampling is taken from its reward.",
        choices=["loss", "reward"],
    )
    kl_estimator: str = key("k3", "Schulman's k1, k2 or k3; or a registered name or import path.", registry=KL_ESTIMATORS)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    entropy_coef: float = key(0.0, "Weight of an entropy bonus.", ge=0.0)
    positive_nll_coef: float = key(
        0.0, "Weight of the mean negative log-likelihood of samples with a reward above 0 in the loss (VAPO).", ge=0.0
    )
    mask_truncated: bool = key(False, "Samples cut by a length limit do not train (DAPO's overlong filter).")
    recompute_logprob: bool = key(
        False,
        "Recompute log-probabilities with the trainer before the first step (prox_logp), also if the batch is on policy.",
    )
    use_decoupled_loss: bool = key(False, "Clip around prox_logp and weight by the behaviour policy (arXiv 2505.24298).")
    prox_logp_method: str = key(
        "recompute",
        "Where prox_logp comes from: a forward pass, or interpolated between behaviour and current by version.",
        choices=["recompute", "interpolate"],
    )
    behav_imp_weight_cap: float | None = key(5.0, "Cap of the behaviour importance weight.", gt=0.0)
    behav_imp_weight_mode: str = key(
        "mask",
        "Above the cap: mask the token, or clamp its weight (truncated importance sampling).",
        choices=["mask", "clamp"],
    )
    behav_imp_weight_level: str = key(
        "token",
        "Where the behaviour importance weight is taken: token, turn, sequence (geometric mean over its tokens) or "
        "sequence_product (product over its tokens).",
        choices=["token", "turn", "sequence", "sequence_product"],
    )


#: Keys of ``TrainEngineConfig`` that a critic with ``shared: true`` reads; it takes the others from the actor.
SHARED_CRITIC_KEYS = ("optimizer", "mb_spec", "max_bad_steps", "share_prefixes", "logits_chunk_mib")


@dataclass
class CriticConfig(TrainEngineConfig):
    """The value model of PPO, and how it is trained (docs/algorithms.md). A model of its own is computed as the actor unless it is set."""

    path: str = key("", "Model whose output layer a value head replaces; default: the actor's first weights.", public=True)
    shared: bool = key(
        False,
        "A value head on the actor's last hidden states in place of a model of its own. Only the head is trained by the value loss.",
    )
    ppo_n_minibatches: int = key(1, "Optimizer steps of the critic that a batch is divided into.", ge=1)
    eps_clip: float | None = key(
        0.5, "Largest change of a value in a step that lowers the loss, as an absolute value. None does not clip.", gt=0.0
    )
    warmup_steps: int = key(0, "First steps of the run, in which only the critic is trained.", ge=0)


@dataclass
class RolloutConfig:
    """The inference engine as the trainer sees it, and how samples are run."""

    backend: str = key(
        "builtin",
        "builtin: in the trainer's process, sharing its weights; builtin_process: in a process of its own; sglang, vllm: servers; "
        "or a registered name, or an import path such as my_package.my_module:MyClient (docs/servers.md).",
        registry=BACKENDS,
    )
    addresses: list[str] = key_from(
        list, "host:port of running servers. Default: from the environment; if none is named there, servers are started here."
    )
    servers: int = key(1, "Servers that are started here, unless addresses are given.", ge=1)
    tensor_parallel: int = key(1, "GPUs of each server that is started here.", ge=1)
    first_gpu: int | None = key(
        None,
        "First GPU of the servers that are started here. None uses the first one after the trainer's. 0 shares GPUs with the "
        "trainer.",
        ge=0,
    )
    colocate: bool = key(
        False,
        "Servers that are started here share the trainer's GPUs: they give their memory back while the model trains (docs/scale.md).",
    )
    api_key: str | None = key(None, "Bearer token for the servers. ${oc.env:NAME} keeps it out of the file.", secret=True)
    path: str = key("", "Model of an engine without a trainer; default: the actor's.", public=True)
    device: str = key("auto", "Device of the built-in engine.")
    dtype: str = key(
        "auto",
        "Type of the weights that the built-in engine samples with. In the trainer's process, a type other than that of the trained "
        "weights is a copy, updated by each publication. auto: the trainer's own tensors; on a GPU, a bfloat16 copy of float32 weights.",
        choices=["auto", "float32", "bfloat16", "float16"],
    )
    max_running_requests: int = key(256, "Sequences that the built-in engine decodes together.", ge=1)
    context_length: int | None = key(None, "Prompt and new tokens together; default: the model's.", ge=2)
    kv_cache_bytes: int | None = key(
        None,
        "Memory of the built-in engine's cache. Default: what max_running_requests and context_length need, at most a quarter of free memory.",
        ge=1,
    )
    prefix_cache: bool = key(True, "Keep the cache of finished requests, so that the next turn starts from it.")
    routing_replay: bool = key(
        False,
        "Record which experts of a mixture of experts each token is sent to in sampling, and send it to the same ones in training (R3; "
        "docs/scale.md).",
    )
    prompt_lookup_tokens: int = key(
        0,
        "Maximum number of tokens that a step of the built-in engine drafts from a request's earlier text and verifies, while that is "
        "faster (docs/engine.md). 0 disables it.",
        ge=0,
    )
    openai_front: bool = key(False, "Give task-style workflows OpenAI clients whose calls are recorded (docs/openai-front.md).")
    max_concurrent_samples: int = key(1024, "Maximum number of samples that run at once.", ge=1)
    max_head_offpolicyness: int = key(
        0, "Maximum number of versions between sampling and training; 0 is exactly synchronous.", ge=0
    )
    on_stale: str = key(
        "wait",
        "wait: delay a publication that would push a running group over the limit. drop: drop such groups and count them.",
        choices=["wait", "drop"],
    )
    on_weight_update: str = key(
        "recompute",
        "Requests that run when weights change: recompute their cache, keep the old cache, or wait until they finish.",
        choices=["recompute", "keep", "wait"],
    )
    sandbox: str = key(
        "bubblewrap",
        "Where Python that the model writes, and command-line agents, run: bubblewrap; docker or podman (docker:IMAGE for another "
        "image than python:3.12-slim); or unsafe, a plain process, only for code that you trust (docs/sandbox.md). Agents also run in "
        "a box of another machine, by its URL, or in one of your own, by its name or import path (docs/boxes.md).",
    )
    sample_timeout: float | None = key(3600.0, "Seconds that one sample may take. None disables the limit.", gt=0.0)
    max_sample_retries: int = key(1, "How often a failed sample is run again.", ge=0)
    max_failed_share: float = key(
        0.2, "Share of the last 64 samples that may fail (after retries) before the run stops.", ge=0.0, le=1.0
    )
    overflow_reward: float = key(
        0.0, "Reward of an agent's episode whose conversation outgrew the context; the episode counts as truncated."
    )
    check_trajectories: bool = key(True, "Check every trajectory against the data contract.")
    dynamic_filter: str | None = key(
        None, "no_variance: drop groups whose rewards are all equal, and refill the batch.", choices=["no_variance"]
    )
    over_sampling: float = key(0.0, "Share of extra groups started; the stragglers are cut when the batch is complete.", ge=0.0)
    request_timeout: float = key(3600.0, "Seconds that one request to a server may take.", gt=0.0)
    request_retries: int = key(3, "Retries of a request whose connection was reset before a response began.", ge=0)
    accept_shifted_logprobs: bool = key(
        False,
        "Send top-p, top-k and penalties to servers, whose log-probabilities then include them. Responses are flagged, and the "
        "trainer must recompute log-probabilities (actor.recompute_logprob).",
    )
    weight_update: str = key(
        "auto",
        "How weights reach servers: auto (shared memory if all servers are on this host), shared, disk (weight_update_path), "
        "or xccl (a distributed group).",
        choices=["auto", "shared", "disk", "xccl"],
    )
    weight_update_every_steps: int = key(
        1,
        "Training steps between two publications of weights. max_head_offpolicyness must be at least one less, which is the age of "
        "the last batch before the next publication.",
        ge=1,
    )
    weight_update_path: str | None = key(
        None, "Directory for weight_update: disk; trainer and servers must see it under the same path."
    )
    weight_update_timeout: float = key(
        600.0,
        "Seconds that a server may take to load published weights, to join a distributed group, or to receive one of its buckets.",
        gt=0.0,
    )
    weight_dtype: str = key(
        "auto",
        "Type in which weights are sent to an engine. auto: the type that the engine reports; otherwise bfloat16 if the trainer "
        "computes in it, else the weights' own type.",
        choices=["auto", "float32", "bfloat16", "float16"],
    )
    setup_timeout: float = key(
        300.0,
        "Seconds to wait until a server is healthy. For a server that the run starts, seconds without a line in its log.",
        gt=0.0,
    )
    canary: bool = key(
        True,
        "Before the first step, publish weights in which every tensor is changed, compare the engines' log-probabilities with the trainer's, "
        "and publish the true weights (docs/servers.md). false saves one publication.",
    )
    logprob_tolerance: float | None = key(
        None,
        "Largest mean difference of engine and trainer log-probabilities after a publication; default: 1e-3 in float32, 5e-2 in 16-bit types.",
        gt=0.0,
    )


@dataclass
class IntervalConfig:
    """How often something is done. None disables an interval."""

    every_steps: int | None = key(None, "Steps between two.", ge=1)
    every_epochs: int | None = key(None, "Epochs between two.", ge=1)
    every_seconds: float | None = key(None, "Seconds between two (refused in deterministic mode).", gt=0.0)


@dataclass
class SaverConfig(IntervalConfig):
    """Hugging Face checkpoints, loadable by any other tool; one is always written at the end."""

    keep: int | None = key(None, "Number of newest checkpoints to keep. Default: all.", ge=1)


@dataclass
class RecoverConfig(IntervalConfig):
    """Checkpoints to resume from: weights, optimizer, data position and random states."""

    mode: str = key(
        "auto",
        "auto: resume if the trial has a checkpoint, else start. resume: require a checkpoint. off: neither save nor resume.",
        choices=["auto", "resume", "off"],
    )
    keep: int = key(2, "Number of recovery checkpoints to keep. If the newest is damaged, the one before it is used.", ge=1)
    if_damaged: str = key(
        "stop",
        "What to do if every recovery checkpoint is damaged. stop: raise an error. begin_again: set them aside and restart from the "
        "initial weights; samples in the journal are trained on again instead of being sampled again.",
        choices=["stop", "begin_again"],
    )
    in_background: bool = key(
        False,
        "Continue training while a checkpoint is written; each rank holds a copy of its part meanwhile. A run that is killed during "
        "this time resumes from the checkpoint before.",
    )


@dataclass
class JournalConfig:
    """The record of running episodes: every model request, tool result and reward, in <run>/journal (docs/durable.md)."""

    enabled: bool = key(True, "Keep a journal.")
    fsync_seconds: float = key(
        1.0,
        "Maximum seconds between two flushes to the disk, which a power failure may lose. A killed process loses nothing.",
        gt=0.0,
    )
    rotate_mib: float = key(256.0, "Size above which a file is closed at the next episode or recovery checkpoint.", gt=0.0)
    on_divergence: str = key(
        "restart",
        "If a resumed episode sends a request that differs from its record. restart: start the episode over. fail: stop the run.",
        choices=["restart", "fail"],
    )
    keep: int | None = key(None, "Number of recovery checkpoints whose finished episodes are kept. Default: all.", ge=1)


@dataclass
class EvaluatorConfig(IntervalConfig):
    """Evaluation on valid_dataset, outside capacity and version accounting, with its own generation arguments."""

    gconfig: GenerationHyperparameters = field(  # max_new_tokens: the run's, unless it is set here; see apply_recipe
        default_factory=lambda: GenerationHyperparameters(greedy=True)
    )
    at_start: bool = key(False, "Also before the first step.")
    limit: int | None = key(None, "Evaluate only the first tasks.", ge=1)


@dataclass
class StatsLoggerConfig:
    """Sinks of metrics in addition to metrics.jsonl in the run directory."""

    sinks: list[str] = key_from(list, "tensorboard, wandb, trackio, mlflow, or a sink that a plugin registers in SINKS.")
    show: list[str] = key_from(list, "Further metrics from metrics.jsonl to show for each step, such as actor/entropy.")
    project: str | None = key(None, "Project name at the sink; default: experiment_name.")
    dump_rollouts: int = key(
        4, "Trajectories of each step or evaluation to write to rollouts/ in readable form; 0 writes none, -1 all.", ge=-1
    )
    display: str = key("auto", "auto: live on a terminal, plain lines elsewhere.", choices=["auto", "live", "plain", "none"])


@dataclass
class SlurmConfig:
    """The job that carries out a run (cluster.kind: slurm)."""

    partition: str | None = key(None, "Partition. Default: the cluster's.")
    account: str | None = key(None, "Account to charge. Default: the user's.")
    time: str | None = key(None, "Time limit as sbatch takes it, in quotes, such as '1-00:00:00'; default: the partition's.")
    end_early: int = key(
        120,
        "Seconds before the time limit at which the run is signalled to finish its step and save. 0 disables the signal.",
        ge=0,
        le=65535,
    )
    cpus_per_node: int | None = key(None, "CPUs of each node; default: the cluster's default.", ge=1)
    gpus_per_node: int | None = key(None, "GPUs of each node; default: none are requested.", ge=1)
    memory: str | None = key(None, "Memory of each node as sbatch takes it, such as 64G; default: the cluster's default.")
    arguments: list[str] = key_from(list, "Further options of sbatch, such as --qos=high.")
    setup: list[str] = key_from(list, "Lines of shell before the run, such as 'module load cuda'.")
    poll_seconds: float = key(5.0, "Seconds between two queries of the job's state.", gt=0.0)


@dataclass
class ClusterConfig:
    """Where processes run and where runs are kept."""

    kind: str = key(
        "local",
        "Where processes run; local: this machine; ray: a Ray cluster; slurm: `rollwright run` submits a job and follows it "
        "(docs/cluster.md).",
        choices=["local", "ray", "slurm"],
    )
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    processes: int = key(
        1,
        "Processes that train one model together, each with a part of it. `rollwright run` starts them if there are several (docs/cluster.md).",
        ge=1,
    )
    address: str = key(
        "",
        "ray: host:port of a running Ray cluster, or auto. Default: RAY_ADDRESS; if it is not set, a cluster is started on this machine for the run.",
    )
    nodes: int = key(1, "ray: number of nodes to wait for before anything starts. slurm: nodes of the job.", ge=1)
    workers: int = key(1, "ray: processes that run episodes.", ge=1)
    max_workers: int | None = key(
        None, "ray: maximum number of workers if the cluster has room, now or when nodes are added. Default: workers.", ge=1
    )
    max_servers: int | None = key(
        None, "ray: maximum number of inference servers, as max_workers. Default: rollout.servers.", ge=1
    )
    cpus_per_rank: float = key(1.0, "ray: CPUs of each training process.", ge=0.0)
    cpus_per_server: float = key(1.0, "ray: CPUs of each inference server.", ge=0.0)
    cpus_per_worker: float = key(1.0, "ray: CPUs of each process that runs episodes.", ge=0.0)
    gpus_per_rank: int | None = key(
        None,
        "ray: GPUs of each training process. Default: 1 if the cluster has GPUs and the model's device is not cpu.",
        ge=0,
    )
    gpus_per_server: int | None = key(
        None, "ray: GPUs of each inference server; default: rollout.tensor_parallel, or 0 for a backend that needs none.", ge=0
    )
    gpus_per_worker: int = key(0, "ray: GPUs of each process that runs episodes, for rewards that compute on a GPU.", ge=0)
    fileroot: str = key("runs", "Runs are kept in <fileroot>/<experiment_name>/<trial_name>.", public=True)
    threads: int | None = key(None, "Compute threads of this process; default: one for each core.", ge=1, le=1024)
