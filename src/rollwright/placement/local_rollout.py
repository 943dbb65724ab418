"""Opens the inference engine that the config names, in this process or as servers on this machine. There is no silent fallback."""

from __future__ import annotations

import dataclasses
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from rollwright.config.experiment import PPOConfig
from rollwright.config.secrets import hidden_texts
from rollwright.config.sections import RolloutConfig, TrainEngineConfig
from rollwright.errors import ConfigError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends import BACKENDS
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.network import find_server_addresses
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.placement.gpus import first_gpu_of_servers
from rollwright.placement.local_servers import LocalServers
from rollwright.rollout.engines import LocalRolloutEngine, RemoteEngine, RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.layers import use_fast_layers
from rollwright.training.model import load_model, resolve_device, resolve_dtype

logger = getLogger("rollout")


def make_local_engine(config: Any, model: Any, tokenizer: Any) -> RolloutEngine:
    """The engine in this process that ``rollout.backend`` names; the built-in one if the backend has servers.

    Args:
        config: of the run.
        model: a live model, whose weights are shared, or a directory or name.
        tokenizer: the model's.
    """
    settings = {"seed": config.seed, "deterministic": config.deterministic}
    if config.rollout.backend == "builtin" or servers_of(config.rollout.backend) is not None:
        return LocalRolloutEngine(config.rollout, model, tokenizer, **settings)
    engine_class: Any = BACKENDS.get(config.rollout.backend)
    return RolloutEngine(config.rollout, client=engine_class(model, tokenizer), **settings)


def copy_to_sample(section: TrainEngineConfig) -> Any:
    """Load a whole model for an engine in this process, because the trained one is sharded; weights are published to it."""
    section = dataclasses.replace(section, gradient_checkpointing=False)
    model = load_model(section, dtype=resolve_dtype(section.dtype, resolve_device(section.device))).requires_grad_(False)
    parameter = next(model.parameters())
    if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
        use_fast_layers(model)  # as in the trained one
    return model


def make_rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """The engine that ``config.rollout.backend`` names.

    Servers that the config or the environment names are used. Otherwise servers are started on this machine; they are restarted if they
    are lost, and end with the engine. The engine writes the journal if ``config.journal`` enables it.

    Args:
        config: of the run.
        actor: trains the model: an actor, or ``TrainRanks``, whose ``model`` is None if it is sharded. None if nothing is trained in
            this process; then the model is that of ``actor.path``, and weights come as files.
        tokenizer: the model's.
        directory: of the run.

    Raises:
        ConfigError: there is no such backend, or its servers have no model to load.
    """
    engine = _rollout_engine(config, actor, tokenizer, directory)
    if config.journal.enabled:
        engine.journal = Journal(directory.journal, config.journal, hidden_texts(config))
    return engine


def _rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    rollout, source = config.rollout, config.actor
    backend = servers_of(rollout.backend)
    if backend is None:
        if actor is not None:
            model = actor.model if actor.model is not None else copy_to_sample(source)
        else:
            model = load_model(source) if source.init_from_scratch else source.path
        return make_local_engine(config, model, tokenizer)
    addresses = find_server_addresses(rollout.addresses) if backend.finds_servers else []
    servers: LocalServers | None = None
    if not addresses:
        rollout = with_key(rollout)
        servers = LocalServers(
            rollout,
            model_path=model_for_servers(config, actor, tokenizer, directory.path),
            logs=directory.logs,
            count=rollout.servers,
            tensor_parallel=rollout.tensor_parallel,
            base_gpu=first_gpu_of_servers(config, trains_here=actor is not None),
            threads=_engine_threads(config),
            weights_roots=() if rollout.weight_update_path is None else (rollout.weight_update_path,),
            deterministic=config.deterministic,
            sglang=config.sglang,
            vllm=config.vllm,
        )
        addresses = servers.addresses
    client = RemoteInferenceEngine(backend, rollout, addresses=addresses, servers_are_replaced=servers is not None)
    engine = RemoteEngine(config.rollout, client=client, seed=config.seed, deterministic=config.deterministic)
    if servers is not None:
        client.own(servers)
        engine.watch = servers.watch(rollout.setup_timeout, client.use_servers, engine.in_service)
    return engine


def with_key(rollout: RolloutConfig) -> RolloutConfig:
    """The section with the API key of its servers: the configured one, or a new one that is neither logged nor written to a file."""
    key = rollout.api_key or os.environ.get("ROLLWRIGHT_API_KEY") or secrets.token_urlsafe(24)
    return dataclasses.replace(rollout, api_key=key)


def model_for_servers(config: PPOConfig, trained: Any, tokenizer: Any, directory: Path) -> str:
    """Path of the model that the servers of a run load; random initial weights are saved to ``directory`` for them.

    Args:
        config: of the run.
        trained: saves the weights (``Ranks``); None if nothing is trained in this process.
        tokenizer: the model's.
        directory: of the run.

    Raises:
        ConfigError: the weights are random, and nothing is trained in this process.
    """
    if not config.actor.init_from_scratch:
        return config.actor.path
    if trained is None:
        raise ConfigError(
            f"actor.init_from_scratch leaves no weights that a {config.rollout.backend} server could load; make the model first "
            "(rollwright model new), or explore with rollout.backend=builtin."
        )
    path = str(directory / "engine_model")
    trained.save(path, tokenizer)
    return path


def _engine_threads(config: PPOConfig) -> int:
    """Threads of each server. Half of the cores generate and the others train, because threads of both on all cores would wait for each
    other."""
    cores = len(os.sched_getaffinity(0))
    generating = max(1, cores // 2)
    threads = max(1, generating // config.rollout.servers)
    if config.cluster.threads is None:
        training = max(1, cores - generating)
        torch.set_num_threads(training)
        logger.info("%d compute threads for each of %d servers and %d for training", threads, config.rollout.servers, training)
    return threads
