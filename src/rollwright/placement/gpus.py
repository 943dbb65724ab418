"""Assigns this machine's GPUs: the first ones to the trainer's processes, the next ones to the run's servers."""

from __future__ import annotations

import os

import torch

from rollwright.config.experiment import PPOConfig, SFTConfig, section_of
from rollwright.errors import ConfigError
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.network import find_server_addresses
from rollwright.placement.torchrun import started_processes
from rollwright.tracking.logging import getLogger

logger = getLogger("rollout")


def refuse_too_few_gpus(config: PPOConfig | SFTConfig) -> None:
    """Raise an error, before anything is loaded, if the run's processes and servers need more GPUs than this machine has.

    Machines without a GPU are not checked, because components that need one raise their own errors.

    Raises:
        ConfigError: there are too few GPUs; the message lists the demands, the number of GPUs, and settings that fit.
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
    """Return the first GPU of the servers started on this machine: ``rollout.first_gpu``, by default the one after the trainer's GPUs.

    Raises:
        ConfigError: there are too few GPUs for the trainer, or for the servers from their first GPU on.
    """
    rollout, present = config.rollout, torch.cuda.device_count()
    training = _training_processes(config) if trains_here else 0
    wanted = rollout.servers * rollout.tensor_parallel
    first = training if rollout.first_gpu is None else rollout.first_gpu
    if rollout.colocate:
        first = 0
    if not present or not _needs_gpu(config):
        return first if rollout.first_gpu is not None else 0
    if first + wanted > present or training > present:
        train = f"{_processes(training)}, " if training else ""
        serve = f"rollout.servers={rollout.servers} with rollout.tensor_parallel={rollout.tensor_parallel} want {wanted}"
        begin = f" from rollout.first_gpu={first} on" if rollout.first_gpu is not None else ""
        raise ConfigError(f"{train}{serve}{begin}, and this machine has {present}: {_fitting(config, training, present)}.")
    logger.info(
        "the servers use GPUs %d to %d of %d; %d processes train on the first ones",
        first,
        first + wanted - 1,
        present,
        training,
    )
    return first


def _fitting(config: PPOConfig, training: int, present: int) -> str:
    """Suggest settings that fit the GPUs of this machine."""
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
        remedies.append("share GPUs by turns with rollout.colocate=true (docs/scale.md)")
    return ", or ".join(remedies) or "start the servers on another machine and name them in rollout.addresses"


def _starts_servers(config: PPOConfig) -> bool:
    backend = servers_of(config.rollout.backend)
    return backend is not None and not (backend.finds_servers and find_server_addresses(config.rollout.addresses))


def _needs_gpu(config: PPOConfig) -> bool:
    """Return True if each server of this run needs its own GPUs."""
    backend = servers_of(config.rollout.backend)
    on_cpu = {"vllm": config.vllm.device == "cpu", "sglang": config.sglang.implementation == "builtin"}
    return backend is not None and backend.needs_gpu and not on_cpu.get(config.rollout.backend, False)


def _training_processes(config: PPOConfig | SFTConfig) -> int:
    """Return the number of processes that train on GPUs of this machine."""
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
