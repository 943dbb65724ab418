"""Which inference engine a run samples from: a choice of the config, logged, never a silent fallback."""

from __future__ import annotations

import os
from typing import Any

import torch

from rollwright.cluster.local import LocalServers
from rollwright.config.experiment import PPOConfig
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.backends.vllm import VLLMClient
from rollwright.inference.network import find_server_addresses
from rollwright.rollout.engines import LocalRolloutEngine, RemoteSGLangEngine, RemoteVLLMEngine, RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.model import load_model

logger = getLogger("rollout")


def make_local_engine(config: Any, actor: Any, tokenizer: Any) -> LocalRolloutEngine:
    """The built-in engine in this process, sharing the weights of ``actor``."""
    return LocalRolloutEngine(
        config.rollout, model=actor.model, tokenizer=tokenizer, seed=config.seed, deterministic=config.deterministic
    )


def make_engine_alone(config: Any, tokenizer: Any) -> LocalRolloutEngine:
    """The built-in engine over the model at ``config.path``."""
    return LocalRolloutEngine(
        config.rollout, model=config.path, tokenizer=tokenizer, seed=config.seed, deterministic=config.deterministic
    )


def make_explorer_engine(config: PPOConfig, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """The engine of an explorer, over the model at ``actor.path``: weights come to it as files."""
    logger.info("sampling from the %s engine", config.rollout.backend)
    if config.rollout.backend == "builtin":
        model = load_model(config.actor) if config.actor.init_from_scratch else config.actor.path
        return LocalRolloutEngine(
            config.rollout, model=model, tokenizer=tokenizer, seed=config.seed, deterministic=config.deterministic
        )
    if config.actor.init_from_scratch and not find_server_addresses(config.rollout.addresses):
        raise ConfigError(
            f"actor.init_from_scratch leaves no weights that a {config.rollout.backend} server could load; make the model first "
            "(rollwright model new), or explore with rollout.backend=builtin."
        )
    return _make_server_engine(config, None, tokenizer, directory)


def make_rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """The engine that ``config.rollout.backend`` names."""
    logger.info("sampling with the %s engine", config.rollout.backend)
    if config.rollout.backend == "builtin":
        return make_local_engine(config, actor, tokenizer)
    return _make_server_engine(config, actor, tokenizer, directory)


def _make_server_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """Servers that run already, by config or environment; else servers started here, which end with the engine."""
    rollout = config.rollout
    addresses = [] if rollout.backend == "builtin_process" else find_server_addresses(rollout.addresses)
    servers: LocalServers | None = None
    if not addresses:
        servers = LocalServers(
            rollout,
            model_path=_served_model(config, actor, tokenizer, directory),
            logs=directory.logs,
            sglang=config.sglang,
            vllm=config.vllm,
            count=rollout.servers,
            tensor_parallel=rollout.tensor_parallel,
            base_gpu=_first_gpu(rollout, trains_here=actor is not None),
            threads=_engine_threads(config),
            weights_roots=() if rollout.weight_update_path is None else (rollout.weight_update_path,),
        )
        addresses = servers.addresses
    client = (VLLMClient if rollout.backend == "vllm" else SGLangClient)(rollout, addresses=addresses)
    if servers is not None:
        client.own(servers)
    engine_class = RemoteVLLMEngine if rollout.backend == "vllm" else RemoteSGLangEngine
    return engine_class(rollout, client=client, seed=config.seed, deterministic=config.deterministic)


def _first_gpu(rollout: RolloutConfig, trains_here: bool) -> int:
    """The servers' own GPUs come after those of the trainer's processes on this host."""
    if rollout.first_gpu is not None:
        return rollout.first_gpu
    training = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) if trains_here else 0
    present, needed = torch.cuda.device_count(), rollout.servers * rollout.tensor_parallel
    first = training if training + needed <= present else 0
    if present and rollout.backend != "builtin_process":
        logger.info(
            "the servers' GPUs are %d to %d of %d; %d processes train on the first",
            first,
            first + needed - 1,
            present,
            training,
        )
    return first


def _served_model(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> str:
    """The directory that servers load: the actor's, or its random weights where those exist nowhere yet."""
    if not config.actor.init_from_scratch:
        return config.actor.path
    path = directory.path / "engine_model"
    actor.save(path, tokenizer)
    return str(path)


def _engine_threads(config: PPOConfig) -> int:
    """Threads of each server. Half of the cores are for generation, and the rest for training: threads of both on all cores would
    wait for each other."""
    cores = len(os.sched_getaffinity(0))
    generating = max(1, cores // 2)
    threads = max(1, generating // config.rollout.servers)
    if config.cluster.threads is None:
        torch.set_num_threads(max(1, cores - generating))
        logger.info(
            "%d compute threads for each of %d servers and %d for training",
            threads,
            config.rollout.servers,
            max(1, cores - generating),
        )
    return threads
