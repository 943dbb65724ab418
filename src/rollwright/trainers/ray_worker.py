"""Creates the rollout worker in a worker process on a Ray cluster. ``placement.ray_rollout`` places the process.

A worker imports nothing of training, which would double the time until it runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rollwright.config.experiment import PPOConfig
from rollwright.config.secrets import hidden_texts
from rollwright.data.tokenizer import load_tokenizer
from rollwright.experience.journal.writing import Journal
from rollwright.inference.backends.server_backend import servers_of
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.weights.adapter import adapter_room
from rollwright.placement.task_services import TaskServices
from rollwright.placement.teachers import open_teachers
from rollwright.registry import PLUGINS
from rollwright.rollout.workers.worker import RolloutWorker
from rollwright.trainers.drawn_tasks import evaluating, evaluation_workflow, training_workflow


def open_worker(place: Any, config: PPOConfig, addresses: list[str], directory: str) -> RolloutWorker:
    """Make a worker that runs the workflows of training and of evaluation.

    Args:
        place: position of this process in the cluster (``placement.ray_host.Place``); not used.
        config: config of the run. ``rollout`` has the servers' API key, and each auxiliary model has the URL of its server.
        addresses: addresses of the servers.
        directory: directory of the run.
    """
    PLUGINS.load()
    rollout = config.rollout
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, config.actor.trust_remote_code)
    backend = servers_of(rollout.backend)
    assert backend is not None
    client = RemoteInferenceEngine(backend, rollout, addresses=addresses, only_asks=True, adapters=adapter_room(config))
    client.initialize()
    journal = None
    if config.journal.enabled:
        settings = dataclasses.replace(config.journal, keep=None)  # only the controller's journal removes old files
        journal = Journal(Path(directory) / "journal", settings, hidden_texts(config))
    services = TaskServices(config, tokenizer, Path(directory) / "logs")  # they have their own front, and end with the process
    held_out, kwargs = evaluation_workflow(config, tokenizer, services)
    return RolloutWorker(
        client,
        rollout,
        training_workflow(config, tokenizer, None, services),
        group_size=config.group_size,
        seed=config.seed,
        journal=journal,
        evaluation=None if held_out is None else evaluating(held_out, kwargs, config.evaluator.gconfig),
        teachers=open_teachers(config.teachers, config.actor.distillation, tokenizer, deterministic=config.deterministic),
    )
