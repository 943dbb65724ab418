"""Who computes on which GPU of this machine: the trainer's processes on the first, the servers of the run on the ones after."""

from __future__ import annotations

import os

import torch

from rollwright.config.experiment import PPOConfig, SFTConfig, section_of
from rollwright.errors import ConfigError
from rollwright.inference.backends import BACKENDS
from rollwright.inference.network import find_server_addresses
from rollwright.inference.weights.publication import RemoteClient
from rollwright.tracking.logging import getLogger
from rollwright.trainers.ranks import started_processes

logger = getLogger("rollout")


def refuse_too_few_gpus(config: PPOConfig | SFTConfig) -> None:
    """Refuse a run on this machine whose processes and servers want more GPUs than it has, before anything is loaded.

    A machine without a GPU is not asked: what needs one says so itself.

    Raises:
        ConfigError: with what each wants, how many there are, and the split that fits.
    """
    mode = config.mode if isinstance(config, PPOConfig) else "train"
    training = _training_processes(config) if mode in ("both", "train") else 0
    present = torch.cuda.device_count()
    if isinstance(config, PPOConfig) and mode != "train" and _starts_servers(config):
        first_gpu_of_servers(config, trains_here=mode == "both")
    elif 0 < present < training:
        raise ConfigError(
            f"{_processes(training)}, and this machine has {present}: set cluster.processes to {present}, or "
            f"{_section(config)}.device to cpu."
        )


def first_gpu_of_servers(config: PPOConfig, *, trains_here: bool) -> int:
    """The first GPU of the servers that are started here: the first after those of the trainer's processes, or ``rollout.first_gpu``.

    Raises:
        ConfigError: there are too few for all, or for the servers from ``rollout.first_gpu`` on.
    """
    rollout, present = config.rollout, torch.cuda.device_count()
    training = _training_processes(config) if trains_here else 0
    wanted = rollout.servers * rollout.tensor_parallel
    first = training if rollout.first_gpu is None else rollout.first_gpu
    if not present or not _needs_gpu(config):
        return first if rollout.first_gpu is not None else 0
    if first + wanted > present or training > present:
        train = f"{_processes(training)}, " if training else ""
        serve = f"rollout.servers={rollout.servers} with rollout.tensor_parallel={rollout.tensor_parallel} want {wanted}"
        begin = f" from rollout.first_gpu={first} on" if rollout.first_gpu is not None else ""
        raise ConfigError(f"{train}{serve}{begin}, and this machine has {present}: {_fitting(config, training, present)}.")
    logger.info(
        "the servers' GPUs are %d to %d of %d; %d processes train on the first", first, first + wanted - 1, present, training
    )
    return first


def _fitting(config: PPOConfig, training: int, present: int) -> str:
    """What to set, so that all have a GPU of their own."""
    rollout, least = config.rollout, 1 if training else 0
    size = min(rollout.tensor_parallel, present - least)
    remedies = ["sample in the trainer's process (rollout.backend: builtin)"] if training == 1 else []
    if size > 0:
        servers = min(rollout.servers, (present - least) // size)
        split = {"rollout.servers": servers, "rollout.tensor_parallel": size}
        if training:
            split = {"cluster.processes": min(training, present - servers * size), **split}
        remedies.insert(0, f"set {', '.join(f'{name}={value}' for name, value in split.items())}")
        if rollout.first_gpu is not None:
            remedies[0] += " and leave rollout.first_gpu out"
    if training and rollout.first_gpu is None and rollout.servers * rollout.tensor_parallel <= present and training <= present:
        remedies.append("let them share GPUs on purpose with rollout.first_gpu=0 (both have to fit into their memory)")
    return ", or ".join(remedies) or "start the servers on another machine and name them in rollout.addresses"


def _starts_servers(config: PPOConfig) -> bool:
    backend = BACKENDS.get(config.rollout.backend)
    if not issubclass(backend, RemoteClient):
        return False
    return not (backend.finds_servers and find_server_addresses(config.rollout.addresses))


def _needs_gpu(config: PPOConfig) -> bool:
    """True where each server of this run computes on GPUs of its own."""
    backend = BACKENDS.get(config.rollout.backend)
    on_cpu = {"vllm": config.vllm.device == "cpu", "sglang": config.sglang.implementation == "builtin"}
    return issubclass(backend, RemoteClient) and backend.needs_gpu and not on_cpu.get(config.rollout.backend, False)


def _training_processes(config: PPOConfig | SFTConfig) -> int:
    """Processes that train on GPUs of this machine."""
    if section_of(config).device == "cpu":
        return 0
    of_this_machine = os.environ.get("LOCAL_WORLD_SIZE")
    if of_this_machine is not None:
        return int(of_this_machine)
    return started_processes() if "WORLD_SIZE" in os.environ else config.cluster.processes


def _processes(count: int) -> str:
    return "the trainer's process wants 1 GPU" if count == 1 else f"the trainer's {count} processes want one GPU each"


def _section(config: PPOConfig | SFTConfig) -> str:
    return "actor" if isinstance(config, PPOConfig) else "model"
