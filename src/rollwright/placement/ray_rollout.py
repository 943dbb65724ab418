"""What samples for a run on a cluster: servers and workers in processes of their own, and the engine that holds both."""

from __future__ import annotations

import dataclasses
import os
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
from rollwright.inference.backends import BACKENDS
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.launcher import Launcher
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.server_watch import ServerWatch
from rollwright.placement.local_servers import LocalServers
from rollwright.placement.ray_ranks import RayRanks
from rollwright.placement.task_services import PlacedModelConfig, serve
from rollwright.processes.supervisor import Process, wait_running
from rollwright.rollout.distributed import DistributedRolloutEngine
from rollwright.rollout.workers import RolloutWorkers
from rollwright.tracking.logging import getLogger
from rollwright.tracking.run_directory import RunDirectory

logger = getLogger("rollout")

#: What the process of a server may take until it starts the server.
_BEGIN_SECONDS = 120.0
#: Name of the file that has the address of an auxiliary model's server.
_ADDRESS = "address"


def make_placed_rollout(
    config: PPOConfig, ranks: RayRanks, tokenizer: Any, directory: RunDirectory
) -> DistributedRolloutEngine:
    """Place the servers and the workers of a run, and connect to them.

    Args:
        config: of the run.
        ranks: train the model; their cluster is used.
        tokenizer: the model's.
        directory: of the run, which all nodes see: weights that are published by disk are below it.

    Raises:
        ConfigError: the backend has no servers that could be started.
    """
    backend = BACKENDS.get(config.rollout.backend)
    if not issubclass(backend, ServerBackend):
        raise ConfigError(f"rollout.backend {config.rollout.backend!r} has no servers to start; see docs/cluster.md.")
    rollout, path = config.rollout, directory.path.absolute()
    # Made for this run alone, and never written: it is neither in the config of the run nor on a command line.
    key = rollout.api_key or os.environ.get("ROLLWRIGHT_API_KEY") or secrets.token_urlsafe(24)
    rollout = dataclasses.replace(rollout, api_key=key)
    if rollout.weight_update == "auto":  # memory is not shared by nodes
        (path / "weights").mkdir(exist_ok=True)
        rollout = dataclasses.replace(rollout, weight_update="disk", weight_update_path=str(path / "weights"))
    model_path = config.actor.path
    if config.actor.init_from_scratch:  # random weights, which exist nowhere yet
        model_path = str(path / "engine_model")
        ranks.save(model_path, tokenizer)
    of_server, of_worker = ranks.demands["server"], ranks.demands["worker"]

    def place_server(index: int) -> Process:
        return ranks.cluster.process(
            f"server {index}",
            "rollwright.placement.ray_rollout:PlacedServer",
            lambda: (config, rollout, model_path, str(directory.logs.absolute() / f"server-{index}")),
            cpus=of_server.cpus,
            gpus=of_server.gpus,
            is_spare=index >= of_server.count,
        )

    servers = [place_server(index) for index in range(of_server.count)]
    # One that does not get healthy says so itself.
    addresses = [wait_running(server, rollout.setup_timeout + _BEGIN_SECONDS, "address") for server in servers]
    client = RemoteInferenceEngine(backend, rollout, addresses=addresses, servers_are_replaced=True)
    told = dataclasses.replace(config, rollout=rollout)

    def place_worker(index: int) -> Process:
        return ranks.cluster.process(
            f"worker {index}",
            "rollwright.trainers.ray_worker:open_worker",
            lambda: (told, list(addresses), str(path)),
            cpus=of_worker.cpus,
            gpus=of_worker.gpus,
            concurrency=rollout.max_concurrent_samples + 16,
            is_spare=index >= of_worker.count,
        )

    workers = [place_worker(index) for index in range(of_worker.count)]
    engine = DistributedRolloutEngine(
        rollout,
        client,
        RolloutWorkers(
            workers,
            rollout.setup_timeout,
            rollout.request_timeout,
            directory.journal if config.journal.enabled else None,
        ),
        publisher=ranks.holders,
        seed=config.seed,
    )

    def changed(present: list[str]) -> None:
        addresses[:] = present
        client.use_servers(present)
        ranks.use_servers(present)

    engine.watch = ServerWatch(
        servers,
        addresses,
        changed=changed,
        in_service=engine.in_service,
        serve=engine.pool.use_servers,
        failed=engine.pool.fail,
        timeout=rollout.setup_timeout,
    )
    most_servers, most_workers = config.cluster.max_servers or 0, config.cluster.max_workers or 0
    engine.grow = lambda: (
        [place_server(index) for index in range(of_server.count, most_servers)],
        [place_worker(index) for index in range(of_worker.count, most_workers)],
    )
    if config.journal.enabled:  # what becomes of groups; episodes are in the journals of the workers, beside it
        engine.journal = Journal(directory.journal, config.journal, hidden_texts(config))
    return engine


def with_placed_models(config: PPOConfig, ranks: RayRanks, directory: RunDirectory, opened: ExitStack) -> PPOConfig:
    """The config with a server of each auxiliary model that has none, placed on the cluster.

    Args:
        config: of the run.
        ranks: train the model; their cluster is used.
        directory: of the run.
        opened: until it is closed, a server that is lost is started again.
    """
    if not any(model.model_path for model in config.auxiliary_models):
        return config
    demand, key = ranks.demands["auxiliary"], secrets.token_urlsafe(24)
    places = [number for number, model in enumerate(config.auxiliary_models) if model.model_path]
    logs = [str(directory.logs.absolute() / f"auxiliary-{index}") for index in range(len(places))]
    processes = [
        ranks.cluster.process(
            f"auxiliary {index}",
            "rollwright.placement.ray_rollout:PlacedModel",
            lambda index=index, number=number: (
                config.auxiliary_models[number],
                int(demand.cpus),
                logs[index],
                key,
            ),
            cpus=demand.cpus,
            gpus=demand.gpus,
        )
        for index, number in enumerate(places)
    ]
    models, timeout = (
        list(config.auxiliary_models),
        max(model.setup_timeout for model in config.auxiliary_models) + _BEGIN_SECONDS,
    )
    addresses = [wait_running(process, timeout, "address") for process in processes]
    for number, address, log in zip(places, addresses, logs, strict=True):
        model = models[number]
        placed = {"model_path": "", "base_url": f"http://{address}/v1", "api_key": key, "model": model.model_path}
        models[number] = PlacedModelConfig(**{**vars(model), **placed}, address_file=str(Path(log, _ADDRESS)))
    watch = ServerWatch(
        processes,
        addresses,
        changed=lambda present: None,  # each writes its address down for those that ask it
        failed=lambda error: logger.error("%s Episodes that ask an auxiliary model fail.", error),
        timeout=timeout,
    )
    watch.start()
    opened.callback(watch.close)
    return dataclasses.replace(config, auxiliary_models=models)


class PlacedModel:
    """A server of a model that is not trained, in a process of its own, ended with that process.

    Args:
        where: it was placed (``placement.ray_host.Place``).
        model: its section.
        threads: where the section sets none.
        logs: directory of its log, and of the file that has its address.
        key: that requests carry.
    """

    def __init__(self, where: Any, model: AuxiliaryModelConfig, threads: int, logs: str, key: str) -> None:
        self._launcher = Launcher(logs, host=where.address)
        serve([model], self._launcher, max(1, threads), key)
        write_text(Path(logs, _ADDRESS), self.address())

    def address(self) -> str:
        """``host:port``."""
        return self._launcher.servers[0].address

    def check(self) -> None:
        """Raise where the server has ended."""
        self._launcher.check()


class PlacedServer:
    """An inference server in a process of its own, ended with that process.

    Args:
        where: it was placed (``placement.ray_host.Place``).
        config: of the run.
        rollout: its section, with the key that requests carry.
        model_path: of the model.
        logs: directory of its log.
    """

    def __init__(self, where: Any, config: PPOConfig, rollout: RolloutConfig, model_path: str, logs: str) -> None:
        roots = () if rollout.weight_update_path is None else (rollout.weight_update_path,)
        self._servers = LocalServers(
            rollout,
            model_path=model_path,
            logs=logs,
            tensor_parallel=rollout.tensor_parallel,
            threads=max(1, int(config.cluster.cpus_per_server)),
            weights_roots=roots,
            host=where.address,
            sglang=config.sglang,
            vllm=config.vllm,
        )

    def address(self) -> str:
        """``host:port``."""
        return self._servers.addresses[0]

    def check(self) -> None:
        """Raise where the server has ended."""
        self._servers.check()
