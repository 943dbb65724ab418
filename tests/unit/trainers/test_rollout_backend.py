"""Where a run's servers are started, and with what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollwright.config.experiment import PPOConfig
from rollwright.config.sections import PPOActorConfig, RolloutConfig
from rollwright.errors import ConfigError
from rollwright.inference.engine import InferenceEngine
from rollwright.trainers import rollout_backend

PRESENT = 8


@pytest.fixture
def started(monkeypatch):
    """The arguments that servers would be started with."""
    arguments = {}

    def record(*_, **settings):
        arguments.update(settings)
        return SimpleNamespace(addresses=["127.0.0.1:1"], close=lambda: None)

    monkeypatch.setattr(rollout_backend, "LocalServers", record)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: PRESENT)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLLWRIGHT_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS"):
        monkeypatch.delenv(name, raising=False)
    return arguments


def start(actor, tmp_path, **rollout) -> None:
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend="vllm", **rollout))
    directory = SimpleNamespace(logs=tmp_path, path=tmp_path, journal=tmp_path / "journal")
    rollout_backend.make_rollout_engine(config, actor, None, directory).destroy()


def test_servers_get_the_gpus_after_the_trainers_and_the_directory_of_its_weights(started, tmp_path):
    start(object(), tmp_path, servers=3, tensor_parallel=2, weight_update="disk", weight_update_path="/weights")
    assert (started["count"], started["tensor_parallel"], started["base_gpu"]) == (3, 2, 1)
    assert started["weights_roots"] == ("/weights",)


@pytest.mark.parametrize(
    ("trains_here", "processes", "servers", "given", "first"),
    [
        (True, 2, 6, None, 2),
        (True, 2, 7, None, 0),  # they have to share
        (False, 2, 6, None, 0),  # the trainer is elsewhere
        (True, 2, 2, 5, 5),
    ],
)
def test_the_first_gpu(started, tmp_path, monkeypatch, trains_here, processes, servers, given, first):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    start(object() if trains_here else None, tmp_path, servers=servers, first_gpu=given)
    assert started["base_gpu"] == first


class Own(InferenceEngine):
    """An engine of a user's that computes in this process."""

    agenerate = get_version = set_version = pause = resume = abort = None  # type: ignore[assignment]

    def __init__(self, model, tokenizer):
        self.given = model, tokenizer


def test_an_engine_of_the_users_own_is_made_of_model_and_tokenizer(tmp_path):
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend=f"{__name__}:Own"))
    directory = SimpleNamespace(journal=tmp_path / "journal")
    rollout = rollout_backend.make_rollout_engine(config, SimpleNamespace(model="live"), "tokenizer", directory)
    assert rollout.journal.directory == directory.journal
    assert isinstance(rollout.sampler, Own)
    assert rollout.sampler.given == ("live", "tokenizer")


def test_a_backend_that_nobody_registered_is_an_error_that_names_the_nearest():
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend="sglan"))
    with pytest.raises(ConfigError, match=r"inference backend 'sglan' was not found. Did you mean 'sglang'\?"):
        rollout_backend.make_rollout_engine(config, None, None, None)
