"""Rules about servers that share the trainer's GPUs: they have no memory, and cannot sample, while the model trains."""

from __future__ import annotations

from collections.abc import Callable

from rollwright.config.experiment import PPOConfig
from rollwright.config.faults import Rule, refuse

_KEY = "rollout.colocate"


def _refuse(when: Callable[[PPOConfig], object], message: str) -> Rule:
    return refuse(PPOConfig, _KEY, lambda config: config.rollout.colocate and when(config), message)


COLOCATION_RULES = (
    _refuse(
        lambda config: config.rollout.backend == "builtin",
        "is true, but the built-in engine computes in the trainer's process and shares its memory; take it out, or set rollout.backend to "
        "sglang or vllm",
    ),
    _refuse(
        lambda config: config.rollout.addresses,
        "is true, but rollout.addresses names servers that run already; only servers that are started here are placed on the trainer's GPUs",
    ),
    _refuse(
        lambda config: config.rollout.first_gpu is not None,
        "is true, which places the servers from GPU 0 on; take rollout.first_gpu out",
    ),
    _refuse(
        lambda config: config.rollout.max_head_offpolicyness > 0 or config.rollout.weight_update_every_steps > 1,
        "is true, and servers without memory cannot sample while the model trains: set rollout.max_head_offpolicyness to 0 and "
        "rollout.weight_update_every_steps to 1, or give the servers GPUs of their own",
    ),
    _refuse(
        lambda config: config.rollout.weight_update == "xccl",
        "is true, and a process group cannot have trainer and server on one GPU: set rollout.weight_update to auto, shared or disk",
    ),
    _refuse(
        lambda config: config.mode != "both" or config.cluster.kind == "ray",
        "is true, but trainer and servers share GPUs only where one `rollwright run` starts both on one machine (mode: both, cluster.kind: local or slurm)",
    ),
    _refuse(
        lambda config: config.rollout.backend == "vllm" and config.vllm.device == "cpu",
        "is true, but vLLM's CPU build cannot sleep; take it out",
    ),
)
