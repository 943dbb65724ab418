"""Sampling on a Ray cluster: inference servers and workers in separate processes, and the rollout engine that uses them."""

from __future__ import annotations

import dataclasses
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollwright.atomic import write_text
from rollwright.config.experiment import PPOConfig
from rollwright.config.modes import AuxiliaryModelConfig
from rollwright.config.secrets import hidden_texts
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.launcher import Launcher, RestartableServer
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.server_watch import ServerWatch
from rollwright.inference.weights.adapter import adapter_room
from rollwright.placement.local_rollout import model_for_servers, with_key
from rollwright.placement.local_servers import LocalServers
from rollwright.placement.ray_ranks import RayRanks
from rollwright.placement.task_services import MovingModelConfig, serve
from rollwright.processes.supervisor import Process, wait_running
from rollwright.rollout.workers.episode_leases import DistributedRolloutEngine, RolloutWorkers
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory

logger = getLogger("rollout")

#: Longest time between the placement of a server's process and the start of the server.
_BEGIN_SECONDS = 120.0
#: File with the address of an auxiliary model's server.
_ADDRESS = "address"


def make_ray_rollout(config: PPOConfig, ranks: RayRanks, tokenizer: Any, directory: RunDirectory) -> DistributedRolloutEngine:
    """Place the servers and workers of a run, and connect to them.

    Args:
        config: the run's config.
        ranks: ranks that train the model; servers and workers are placed on the same cluster.
        tokenizer: the model's tokenizer.
        directory: the run's directory. All nodes must see it, because weights that are published as files are written there.

    Raises:
        ConfigError: the backend has no servers to start.
    """
    backend = servers_of(config.rollout.backend)
    if backend is None:
        raise ConfigError(f"rollout.backend {config.rollout.backend!r} has no servers to start; see docs/cluster.md.")
    rollout, path = with_key(config.rollout), directory.path.absolute()
    if rollout.weight_update == "auto":  # nodes share no memory
        (path / "weights").mkdir(exist_ok=True)
        rollout = dataclasses.replace(rollout, weight_update="disk", weight_update_path=str(path / "weights"))
    model_path = model_for_servers(config, ranks, tokenizer, path)
    of_server, of_worker = ranks.demands["server"], ranks.demands["worker"]

    def place_server(index: int) -> Process:
        logs = str(directory.logs.absolute() / f"server-{index}")
        return ranks.cluster.process(
            f"server {index}",
            "rollwright.placement.ray_rollout:start_server",
            lambda: (config, rollout, model_path, logs),
            cpus=of_server.cpus,
            gpus=of_server.gpus,
            is_spare=index >= of_server.count,
            output=logs,
        )

    servers = [place_server(index) for index in range(of_server.count)]
    # Longer than setup_timeout, so that a server which is not healthy in time reports that itself.
    addresses = [wait_running(server, rollout.setup_timeout + _BEGIN_SECONDS, "address") for server in servers]
    room = adapter_room(config)
    client = RemoteInferenceEngine(backend, rollout, addresses=addresses, servers_are_replaced=True, adapters=room)
    of_workers = dataclasses.replace(config, rollout=rollout)

    def place_worker(index: int) -> Process:
        return ranks.cluster.process(
            f"worker {index}",
            "rollwright.trainers.ray_worker:open_worker",
            lambda: (of_workers, list(addresses), str(path)),
            cpus=of_worker.cpus,
            gpus=of_worker.gpus,
            concurrency=rollout.max_concurrent_samples + 16,
            is_spare=index >= of_worker.count,
        )

    journal = directory.journal if config.journal.enabled else None
    workers = [place_worker(index) for index in range(of_worker.count)]
    pool = RolloutWorkers(workers, rollout.setup_timeout, rollout.request_timeout, journal)
    engine = DistributedRolloutEngine(rollout, client, pool, publisher=ranks.holders, seed=config.seed)

    def use_servers(running: list[str]) -> None:
        addresses[:] = running
        client.use_servers(running)
        ranks.use_servers(running)

    engine.watch = ServerWatch(
        servers,
        addresses,
        changed=use_servers,
        in_service=engine.in_service,
        serve=pool.use_servers,
        failed=pool.fail,
        timeout=rollout.setup_timeout,
    )
    most_servers, most_workers = config.cluster.max_servers or 0, config.cluster.max_workers or 0
    engine.grow = lambda: (
        [place_server(index) for index in range(of_server.count, most_servers)],
        [place_worker(index) for index in range(of_worker.count, most_workers)],
    )
    if journal is not None:  # records how groups end; each worker records its episodes in a journal of its own
        engine.journal = Journal(journal, config.journal, hidden_texts(config))
    return engine


def serve_auxiliary_models(config: PPOConfig, ranks: RayRanks, directory: RunDirectory, opened: ExitStack) -> PPOConfig:
    """Place a server on the cluster for each auxiliary model that has none.

    Args:
        config: the run's config.
        ranks: ranks that train the model; the servers are placed on the same cluster.
        directory: the run's directory.
        opened: lost servers are restarted until this is closed.

    Returns:
        The config with the servers' addresses.
    """
    models = list(config.auxiliary_models)
    served = [number for number, model in enumerate(models) if model.model_path]
    if not served:
        return config
    demand, key = ranks.demands["auxiliary"], secrets.token_urlsafe(24)
    logs = [str(directory.logs.absolute() / f"auxiliary-{index}") for index in range(len(served))]
    processes = [
        ranks.cluster.process(
            f"auxiliary {index}",
            "rollwright.placement.ray_rollout:start_auxiliary_server",
            lambda index=index, number=number: (config.auxiliary_models[number], int(demand.cpus), logs[index], key),
            cpus=demand.cpus,
            gpus=demand.gpus,
            output=logs[index],
        )
        for index, number in enumerate(served)
    ]
    timeout = max(model.setup_timeout for model in models) + _BEGIN_SECONDS
    addresses = [wait_running(process, timeout, "address") for process in processes]
    for number, address, log in zip(served, addresses, logs, strict=True):
        model = models[number]
        of_server = {"model_path": "", "base_url": f"http://{address}/v1", "api_key": key, "model": model.model_path}
        models[number] = MovingModelConfig(**{**vars(model), **of_server}, address_file=str(Path(log, _ADDRESS)))
    watch = ServerWatch(
        processes,
        addresses,
        changed=lambda running: None,  # clients read the address file of their server
        failed=lambda error: logger.error("%s Episodes that ask an auxiliary model fail.", error),
        timeout=timeout,
    )
    watch.start()
    opened.callback(watch.close)
    return dataclasses.replace(config, auxiliary_models=models)


# -- in the servers' processes, which end with the servers ------------------------------------------------------------------


def start_server(place: Any, config: PPOConfig, rollout: RolloutConfig, model_path: str, logs: str) -> RestartableServer:
    """Start an inference server of the policy.

    Args:
        place: this process's ``placement.ray_host.Place``.
        config: the run's config.
        rollout: the ``rollout`` section, with the API key.
        model_path: path of the model.
        logs: directory for the server's log.
    """
    launcher = LocalServers(
        rollout,
        model_path=model_path,
        logs=logs,
        tensor_parallel=rollout.tensor_parallel,
        threads=max(1, int(config.cluster.cpus_per_server)),
        weights_roots=() if rollout.weight_update_path is None else (rollout.weight_update_path,),
        host=place.address,
        adapters=adapter_room(config),
        sglang=config.sglang,
        vllm=config.vllm,
    )
    return RestartableServer(launcher, "server", 0, rollout.setup_timeout)


def start_auxiliary_server(place: Any, model: AuxiliaryModelConfig, threads: int, logs: str, key: str) -> RestartableServer:
    """Start a server of a model that is not trained.

    Args:
        place: this process's ``placement.ray_host.Place``.
        model: the model's section.
        threads: compute threads if the section sets none.
        logs: directory for the server's log and the file with its address.
        key: the API key.
    """
    launcher = Launcher(logs, host=place.address)
    serve([model], launcher, max(1, threads), key)
    server = RestartableServer(launcher, "auxiliary", 0, model.setup_timeout)
    write_text(Path(logs, _ADDRESS), server.address())
    return server
