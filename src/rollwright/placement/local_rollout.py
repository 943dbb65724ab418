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
from rollwright.inference.weights.adapter import adapter_room
from rollwright.placement.gpus import first_gpu_of_servers
from rollwright.placement.local_servers import LocalServers
from rollwright.placement.teachers import open_teachers
from rollwright.processes.pool import processor_count
from rollwright.rollout.engines import LocalRolloutEngine, RemoteEngine, RolloutEngine
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory
from rollwright.training.layers import use_fast_layers
from rollwright.training.model import load_model, resolve_device, resolve_dtype

logger = getLogger("rollout")


def make_local_engine(config: Any, model: Any, tokenizer: Any) -> RolloutEngine:
    """Open an engine in this process: the one that ``rollout.backend`` names, or the built-in engine if that backend has servers.

    Args:
        config: the run's config.
        model: a loaded model, whose weights are shared, or a model's directory or name.
        tokenizer: the model's tokenizer.
    """
    settings = {"seed": config.seed, "deterministic": config.deterministic}
    if config.rollout.backend == "builtin" or servers_of(config.rollout.backend) is not None:
        is_live = not isinstance(model, (str, Path))  # its trainer publishes the adapter, if it has one
        return LocalRolloutEngine(config.rollout, model, tokenizer, base_only=is_live, **settings)
    engine_class: Any = BACKENDS.get(config.rollout.backend)
    return RolloutEngine(config.rollout, client=engine_class(model, tokenizer), **settings)


def copy_to_sample(section: TrainEngineConfig) -> Any:
    """Load an unsharded model for an engine in this process, for use if the trained model is sharded. Weights are published to it."""
    section = dataclasses.replace(section, gradient_checkpointing=False, lora=None)
    model = load_model(section, dtype=resolve_dtype(section.dtype, resolve_device(section.device))).requires_grad_(False)
    parameter = next(model.parameters())
    if parameter.device.type == "cpu" and parameter.dtype == torch.float32:
        use_fast_layers(model)  # as in the trained one
    return model


def make_rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    """Open the engine that ``config.rollout.backend`` names.

    If the backend has servers, the servers that the config or the environment names are used. If neither names any, servers are started
    on this machine; they are restarted if they are lost, and end with the engine. The engine writes the journal if ``config.journal``
    enables it.

    Args:
        config: the run's config.
        actor: what trains the model in this process: an actor, or ``TrainRanks``, whose ``model`` is None if the model is sharded. If
            nothing is trained in this process, None; the model is then loaded from ``actor.path``, and weights arrive as files.
        tokenizer: the model's tokenizer.
        directory: the run's directory.

    Raises:
        ConfigError: there is no such backend, or its servers have no model to load.
    """
    engine = _rollout_engine(config, actor, tokenizer, directory)
    engine.teachers = open_teachers(config.teachers, config.actor.distillation, tokenizer, deterministic=config.deterministic)
    if config.journal.enabled:
        engine.journal = Journal(directory.journal, config.journal, hidden_texts(config))
    return engine


def _rollout_engine(config: PPOConfig, actor: Any, tokenizer: Any, directory: RunDirectory) -> RolloutEngine:
    rollout, source, room = config.rollout, config.actor, adapter_room(config)
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
            adapters=room,
            sglang=config.sglang,
            vllm=config.vllm,
        )
        addresses = servers.addresses
    client = RemoteInferenceEngine(
        backend, rollout, addresses=addresses, servers_are_replaced=servers is not None, adapters=room
    )
    engine = RemoteEngine(config.rollout, client=client, seed=config.seed, deterministic=config.deterministic)
    if servers is not None:
        client.own(servers)
        engine.watch = servers.watch(rollout.setup_timeout, client.use_servers, engine.in_service)
    return engine


def with_key(rollout: RolloutConfig) -> RolloutConfig:
    """Return the section with an API key for its servers: the configured key, or a new one that is not logged."""
    key = rollout.api_key or os.environ.get("ROLLWRIGHT_API_KEY") or secrets.token_urlsafe(24)
    return dataclasses.replace(rollout, api_key=key)


def model_for_servers(config: PPOConfig, trained: Any, tokenizer: Any, directory: Path) -> str:
    """Return the path of the model that a run's servers load. Random initial weights are first saved below ``directory``.

    Args:
        config: the run's config.
        trained: ``Ranks`` that can save the weights; None if nothing is trained in this process.
        tokenizer: the model's tokenizer.
        directory: the run's directory.

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
    """Return the number of threads for each server, and set torch's threads in this process if ``cluster.threads`` does not.

    Half of the cores generate and the other half train; if both used all cores, their threads would wait for each other.
    """
    cores = processor_count()
    generating = max(1, cores // 2)
    threads = max(1, generating // config.rollout.servers)
    if config.cluster.threads is None:
        training = max(1, cores - generating)
        torch.set_num_threads(training)
        logger.info("%d compute threads for each of %d servers and %d for training", threads, config.rollout.servers, training)
    return threads
