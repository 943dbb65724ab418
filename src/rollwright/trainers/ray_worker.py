"""What runs in the process of a worker on a Ray cluster (``placement.ray_rollout`` places it)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.secrets import hidden_texts
from rollwright.data.tokenizer import load_tokenizer
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends import BACKENDS
from rollwright.inference.backends.server_backend import ServerBackend
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.placement.task_services import TaskServices
from rollwright.registry import PLUGINS
from rollwright.rollout.workers.worker import RolloutWorker
from rollwright.trainers.drawn_tasks import evaluation_workflow, training_workflow
from rollwright.trainers.loops.evaluation import evaluating


def open_worker(where: Any, config: PPOConfig, addresses: list[str], directory: str) -> RolloutWorker:
    """A worker that runs the config's workflow, or its tasksets, and those of held-out tasks, with the servers at these addresses.

    Args:
        where: it was placed (``placement.ray_host.Place``); not used.
        config: of the run; its ``rollout`` has the key that requests carry, and each auxiliary model the URL of its server.
        addresses: of the servers.
        directory: of the run.
    """
    PLUGINS.load()
    rollout = config.rollout
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
    backend = BACKENDS.get(rollout.backend)
    assert issubclass(backend, ServerBackend)
    client = RemoteInferenceEngine(backend, rollout, addresses=addresses, only_asks=True)
    client.initialize()
    journal = None
    if config.journal.enabled:  # old files are removed by the controller's alone
        kept = dataclasses.replace(config.journal, keep=None)
        journal = Journal(Path(directory) / "journal", kept, hidden_texts(config))
    services = TaskServices(config, tokenizer, Path(directory) / "logs")  # a front of its own; it ends with the process
    trained, (held_out, kwargs) = (
        training_workflow(config, tokenizer, None, services),
        evaluation_workflow(config, tokenizer, services),
    )
    return RolloutWorker(
        client,
        rollout,
        trained,
        group_size=config.group_size,
        seed=config.seed,
        journal=journal,
        evaluation=None if held_out is None else evaluating(held_out, kwargs, config.evaluator.gconfig),
    )
