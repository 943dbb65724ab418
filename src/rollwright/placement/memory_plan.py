"""How much memory each process of a run takes on its GPU, computed from the shape of the model before anything starts.

The formulas are those of docs/scale.md. Weights, gradients, optimizer state and caches are counted exactly; activations and gathered layers
are estimates for one micro-batch of ``mb_spec.max_tokens_per_mb`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from rollwright.config.experiment import PPOConfig
from rollwright.data.rows import unreachable_hub
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import servers_of

GB = 1e9
_COMPUTE = 2  # bytes of a number in bfloat16
_MASTER = 4  # bytes of a number in float32
#: Bytes that an optimizer keeps of a parameter; AdamW has two moments in float32.
_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.1, "adamw_4bit": 1.1, "sgd": 0.0}
#: Share of a GPU's memory that a server takes unless it is told otherwise: SGLang's usual choice, and vLLM's default.
_SERVER_SHARE = {"sglang": 0.88, "vllm": 0.92}
#: Share of a GPU's memory that a trainer may plan with; the rest is CUDA's context, NCCL's buffers and fragmentation.
_TRAINER_SHARE = 0.9
#: Gigabytes a second of each way to publish, which nobody has measured for this machine.
ASSUMED_RATES = {"xccl (NCCL, one node)": 20.0, "shared memory": 4.0, "a disk": 1.0}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        parameters: number of all, tied ones once.
        largest: elements of the largest tensor.
        root: parameters outside the layers.
        layer: parameters of the largest layer.
        layers, hidden: number and width of the layers.
        linear: ``(inputs, outputs)`` of every linear layer below the layers, which an adapter would have.
        kept: bytes that the backward pass keeps of one token in one layer without checkpointing, in bfloat16.
        cache: bytes of keys and values of one token in all layers, in bfloat16.
    """

    parameters: int
    largest: int
    root: int
    layer: int
    layers: int
    hidden: int
    linear: tuple[tuple[int, int], ...]
    kept: int
    cache: int


def shape_of(model: str) -> ModelShape:
    """Find the sizes of a model; its weights are neither needed nor loaded.

    Args:
        model: directory, ``config.json``, name on the Hugging Face Hub, or a type with settings that differ from its defaults, such as
            ``llama:hidden_size=8192,num_hidden_layers=80``.

    Raises:
        ConfigError: there is no such model, or it has no list of layers.
    """
    config = _config_of(model).get_text_config()
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    count = config.num_hidden_layers
    lists = [module for module in made.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise ConfigError(f"--model {model}: {type(made).__name__} has no list of {count} layers, which a plan counts.")
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in lists[0]]
    total = sum(parameter.numel() for parameter in made.parameters())
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return ModelShape(
        parameters=total,
        largest=max(parameter.numel() for parameter in made.parameters()),
        root=total - sum(sizes),
        layer=max(sizes),
        layers=count,
        hidden=config.hidden_size,
        linear=tuple((each.in_features, each.out_features) for each in lists[0].modules() if isinstance(each, nn.Linear)),
        kept=_kept(config, heads * width, groups * width),
        cache=2 * groups * width * _COMPUTE * count,
    )


def _config_of(model: str) -> Any:
    kind, _, settings = model.partition(":")
    if settings and not Path(model).exists():
        try:
            given = {name.strip(): int(value) for name, _, value in (each.partition("=") for each in settings.split(","))}
            return transformers.AutoConfig.for_model(kind, **given)
        except ValueError as error:
            raise ConfigError(
                f"--model {model}: {error}. Write a type of transformers and whole numbers, such as "
                "llama:hidden_size=8192,num_hidden_layers=80."
            ) from None
    unreachable = "" if Path(model).exists() else unreachable_hub()
    try:
        return transformers.AutoConfig.from_pretrained(model, local_files_only=bool(unreachable))
    except (OSError, ValueError) as error:
        cause = f"{unreachable}, and its cache has none" if unreachable else str(error).splitlines()[0]
        raise ConfigError(
            f"--model {model}: no config can be read ({cause}). Name a directory with a config.json, a model of the "
            "Hugging Face Hub, or a shape such as llama:hidden_size=8192,num_hidden_layers=80."
        ) from None


def _kept(config: Any, queries: int, keys: int) -> int:
    """Return the bytes of a token that a layer keeps: two norms and their float32 inputs, attention with its inputs and outputs, and a gated
    multilayer perceptron (four tensors of its width). Attention is fused: no matrix of scores is kept."""
    hidden = config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None)
    inner = config.intermediate_size
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    return 2 * (8 * hidden + 4 * queries + 4 * keys + 4 * inner)


# ------------------------------------------------------------------ one process


#: What stays of ``rank_memory`` between two updates.
_RESIDENT = ("base, frozen", "weights, gradients and optimizer state", "reference")


def rank_memory(config: PPOConfig, shape: ModelShape) -> dict[str, float]:
    """Return the bytes that a rank takes on its GPU during an update, by what they are for."""
    actor, processes = config.actor, config.cluster.processes
    samples_here = config.rollout.backend == "builtin"
    ranks = 1 if samples_here else actor.shard_size or processes
    moments = _MOMENTS.get(actor.optimizer.kind if actor.optimizer else "sgd", _MOMENTS["adamw"])
    tokens = max(actor.mb_spec.max_tokens_per_mb, longest_row(config))
    if actor.lora is not None:
        trained, base = adapter_parameters(shape, actor.lora.rank), _COMPUTE * shape.parameters / ranks
    else:
        trained, base = shape.parameters, 0.0
    found = {
        "base, frozen": base,
        "weights, gradients and optimizer state": (2 * _MASTER + moments) * trained / ranks,
        "reference": _COMPUTE * shape.parameters / ranks if actor.kl_ctl and actor.lora is None else 0.0,
    }
    if ranks > 1:
        gathered = _COMPUTE * (2 * shape.layer + shape.root)
        found["gathered layers, embedding and head"] = gathered
        if actor.lora is None:
            found["their gradients"] = _COMPUTE * (shape.layer + shape.root)
    elif actor.lora is None:
        found["weights in bfloat16"] = _COMPUTE * shape.parameters
    found |= {name: tokens * amount for name, amount in _activations(config, shape).items()}
    found["logits"] = 3 * actor.logits_chunk_mib * 2**20
    return {name: amount for name, amount in found.items() if amount}


def _activations(config: PPOConfig, shape: ModelShape) -> dict[str, float]:
    """Return the bytes of activations for each token of a micro-batch."""
    actor = config.actor
    if not actor.gradient_checkpointing:
        return {"activations kept": shape.kept * shape.layers}
    every = actor.gradient_checkpointing_every
    kept = _COMPUTE * shape.hidden * -(-shape.layers // every)
    return {"activations kept": kept, "activations of recomputed layers": shape.kept * every}


def longest_row(config: PPOConfig) -> int:
    """Return the most tokens that a row is known to reach: ``rollout.context_length``, or those of one answer."""
    return config.rollout.context_length or config.gconfig.max_new_tokens


def trainable_tokens(config: PPOConfig, shape: ModelShape, gpu: float) -> int:
    """Return how many tokens of one micro-batch, and so of one row, a rank has memory for. A row is never split over ranks."""
    of_token = _activations(config, shape)
    rest = sum(amount for name, amount in rank_memory(config, shape).items() if name not in of_token)
    return max(0, int((_TRAINER_SHARE * gpu - rest) / sum(of_token.values())))


def resident_memory(config: PPOConfig, shape: ModelShape) -> float:
    """Return the bytes that a rank takes on its GPU between two updates, while servers sample."""
    return sum(amount for name, amount in rank_memory(config, shape).items() if name in _RESIDENT)


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return the number of parameters of a LoRA adapter on all linear layers."""
    return sum(rank * (inputs + outputs) for inputs, outputs in shape.linear)


def published_bytes(config: PPOConfig, shape: ModelShape) -> float:
    """Return the bytes of one publication to each server."""
    if config.actor.lora is not None:
        return _MASTER * adapter_parameters(shape, config.actor.lora.rank)
    return _COMPUTE * shape.parameters


def server_memory(config: PPOConfig, shape: ModelShape, gpu: float) -> tuple[float, float, float]:
    """Return the bytes of weights on each GPU of a server, the bytes it reserves there in all, and how many tokens its cache holds.

    Args:
        config: config of the run.
        shape: of the model.
        gpu: bytes of a GPU.
    """
    size = config.rollout.tensor_parallel
    share = {"sglang": config.sglang.mem_fraction_static, "vllm": config.vllm.gpu_memory_utilization}
    reserved = (share.get(config.rollout.backend) or _SERVER_SHARE.get(config.rollout.backend, 0.9)) * gpu
    weights = _COMPUTE * shape.parameters / size
    return weights, reserved, max(0.0, (reserved - weights) * size / shape.cache)


# ------------------------------------------------------------------ a whole run


@dataclass(frozen=True)
class Plan:
    """A run on a node: what each GPU holds.

    Attributes:
        config: config of the run.
        gpus: by GPU, the processes and their bytes.
        tokens: that the cache of one server holds.
        faults: why it does not fit, in sentences; empty if it does.
    """

    config: PPOConfig
    gpus: tuple[tuple[tuple[str, float], ...], ...]
    tokens: float
    faults: tuple[str, ...]


def plan_of(config: PPOConfig, shape: ModelShape, count: int, gpu: float) -> Plan:
    """Place the processes of a run on the GPUs of a node.

    Args:
        config: config of the run.
        shape: of its model.
        count: GPUs of the node.
        gpu: bytes of each.
    """
    rollout, ranks = config.rollout, config.cluster.processes
    backend = servers_of(rollout.backend)
    has_servers = backend is not None and backend.needs_gpu
    trainer = sum(rank_memory(config, shape).values())
    held: list[list[tuple[str, float]]] = [[] for _ in range(count)]
    faults: list[str] = []
    first = (ranks if rollout.first_gpu is None else rollout.first_gpu) if has_servers and not rollout.colocate else 0
    of_rank = resident_memory(config, shape) if rollout.colocate else trainer  # beside a server that has its memory
    wanted = max(ranks, first + rollout.servers * rollout.tensor_parallel * has_servers)
    if wanted > count:
        faults.append(
            f"{wanted} GPUs are needed, and there are {count}: lower cluster.processes, rollout.servers or rollout.tensor_parallel"
        )
    for rank in range(min(ranks, count)):
        held[rank].append((f"rank {rank}", of_rank))
    tokens = 0.0
    if has_servers:
        weights, reserved, tokens = server_memory(config, shape, gpu)
        for server in range(rollout.servers):
            for part in range(rollout.tensor_parallel):
                if (number := first + server * rollout.tensor_parallel + part) < count:
                    held[number].append((f"server {server}", reserved))
        if weights >= reserved:
            faults.append(
                f"a server has {reserved / GB:.1f} GB of each GPU and its weights take {weights / GB:.1f}: raise rollout.tensor_parallel"
            )
        if 0 < tokens < longest_row(config):
            faults.append(
                f"the cache of a server holds {tokens:,.0f} tokens, and a row may have {longest_row(config):,}: raise rollout.tensor_parallel, "
                "or lower rollout.context_length"
            )
    fitting = trainable_tokens(config, shape, gpu)
    if 0 < fitting < longest_row(config):
        advice = (
            "gradient_checkpointing" if not config.actor.gradient_checkpointing else "more ranks for the weights, adamw_8bit"
        )
        faults.append(
            f"a row may have {longest_row(config):,} tokens, and a rank has memory for {fitting:,} beside its weights. A row is trained by one "
            f"rank (there is no context parallelism): lower rollout.context_length or gconfig.max_new_tokens, or use {advice}"
        )
    elif trainer > _TRAINER_SHARE * gpu:
        faults.append(
            f"a rank takes {trainer / GB:.1f} GB of {gpu / GB:.0f}: more ranks, gradient_checkpointing, adamw_8bit, an adapter (actor.lora), "
            "or a lower mb_spec.max_tokens_per_mb"
        )
    elif any(sum(amount for _, amount in each) > gpu for each in held):
        faults.append(
            "trainer and server do not fit into one GPU together: give the server a GPU of its own, lower its share, or let them take turns "
            "(rollout.colocate)"
        )
    return Plan(config, tuple(map(tuple, held)), tokens, tuple(faults))


def splits(config: PPOConfig, shape: ModelShape, count: int, gpu: float) -> Iterator[Plan]:
    """Plan every division of a node's GPUs between trainer and servers, with the smallest servers whose weights take half of their GPUs.

    Args:
        config: config of the run; its numbers of ranks and servers and its ``tensor_parallel`` are replaced.
        shape: of its model.
        count: GPUs of the node.
        gpu: bytes of each.
    """
    size = next((each for each in (1, 2, 4, 8) if _COMPUTE * shape.parameters / each <= gpu / 2), 8)
    for servers in range(1, (count - 1) // size + 1):
        ranks = count - servers * size
        cluster = replace(config.cluster, processes=ranks)
        rollout = replace(config.rollout, servers=servers, tensor_parallel=size, first_gpu=None)
        yield plan_of(replace(config, cluster=cluster, rollout=rollout), shape, count, gpu)


def described(plan: Plan, shape: ModelShape, gpu: float) -> list[str]:
    """Describe a plan in lines: the parts of a rank, what each GPU holds, and how long a publication takes.

    Args:
        plan: of the run.
        shape: of its model.
        gpu: bytes of a GPU.
    """
    parts = rank_memory(plan.config, shape)
    lines = ["a rank during an update, in GB:", *(f"  {amount / GB:7.2f}  {name}" for name, amount in parts.items())]
    lines += [f"  {sum(parts.values()) / GB:7.2f}  of {gpu / GB:.4g}"]
    lines.append(f"a rank can train rows of up to {trainable_tokens(plan.config, shape, gpu):,} tokens")
    lines.append("on each GPU while servers sample:" if plan.config.rollout.colocate else "on each GPU:")
    for number, held in enumerate(plan.gpus):
        processes = ", ".join(f"{name} ({amount / GB:.1f} GB)" for name, amount in held)
        lines.append(f"  GPU {number}: {processes or 'nothing'}")
    if plan.tokens:
        size = published_bytes(plan.config, shape)
        ways = ", ".join(f"{size / GB / rate:.2g} s by {name} at {rate:g} GB/s" for name, rate in ASSUMED_RATES.items())
        lines += [
            f"the cache of a server holds {plan.tokens:,.0f} tokens",
            f"a publication sends {size / GB:.2f} GB to each server: {ways} (assumed rates)",
        ]
    return [*lines, *(f"does not fit: {fault}" for fault in plan.faults)]
