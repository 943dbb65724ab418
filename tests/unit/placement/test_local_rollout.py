"""Where a run's servers are started, and with what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rollwright.config.experiment import PPOConfig, SFTConfig
from rollwright.config.sections import ClusterConfig, PPOActorConfig, RolloutConfig, TrainEngineConfig
from rollwright.config.servers import VLLMConfig
from rollwright.errors import ConfigError
from rollwright.inference.engine import InferenceEngine
from rollwright.placement import local_rollout
from rollwright.placement.gpus import refuse_too_few_gpus

PRESENT = 8


@pytest.fixture
def started(monkeypatch):
    """The arguments that servers would be started with."""
    arguments = {}

    def record(*_, **settings):
        arguments.update(settings)
        watch = SimpleNamespace(start=lambda: None, close=lambda: None)
        return SimpleNamespace(addresses=["127.0.0.1:1"], close=lambda: None, watch=lambda *_: watch)

    monkeypatch.setattr(local_rollout, "LocalServers", record)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: PRESENT)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLLWRIGHT_LLM_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS"):
        monkeypatch.delenv(name, raising=False)
    return arguments


def start(actor, tmp_path, **rollout) -> None:
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend="vllm", **rollout))
    directory = SimpleNamespace(logs=tmp_path, path=tmp_path, journal=tmp_path / "journal")
    local_rollout.make_rollout_engine(config, actor, None, directory).destroy()


def test_servers_get_the_gpus_after_the_trainers_and_the_directory_of_its_weights(started, tmp_path):
    start(object(), tmp_path, servers=3, tensor_parallel=2, weight_update="disk", weight_update_path="/weights")
    assert (started["count"], started["tensor_parallel"], started["base_gpu"]) == (3, 2, 1)
    assert started["weights_roots"] == ("/weights",)


@pytest.mark.parametrize(
    ("trains_here", "processes", "servers", "given", "first"),
    [
        (True, 2, 6, None, 2),
        (False, 2, 6, None, 0),  # the trainer is elsewhere
        (True, 2, 2, 5, 5),
    ],
)
def test_the_first_gpu(started, tmp_path, monkeypatch, trains_here, processes, servers, given, first):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    start(object() if trains_here else None, tmp_path, servers=servers, first_gpu=given)
    assert started["base_gpu"] == first


def test_servers_that_take_turns_with_the_trainer_have_its_gpus(started, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    start(object(), tmp_path, servers=1, colocate=True)
    assert started["base_gpu"] == 0


@pytest.mark.parametrize(
    ("present", "processes", "rollout", "message"),
    [
        (8, 2, {"servers": 7}, r"2 processes want one GPU each, rollout\.servers=7 .* want 7, and this machine has 8: set "
                              r"cluster\.processes=1, rollout\.servers=7, rollout\.tensor_parallel=1, or share"),
        (4, 4, {"servers": 2}, r"set cluster\.processes=2, rollout\.servers=2, rollout\.tensor_parallel=1"),
        (4, 1, {"tensor_parallel": 4}, r"process wants 1 GPU, .*=4 want 4, and .* has 4: set cluster\.processes=1, rollout\.servers=1, "
                                       r"rollout\.tensor_parallel=3"),
        (1, 1, {}, r"has 1: sample in the trainer's process \(rollout\.backend: builtin\), or .*rollout\.colocate=true"),
        (2, 0, {"servers": 3}, r"^rollout\.servers=3 .* want 3, and this machine has 2: set rollout\.servers=2"),
        (4, 1, {"servers": 2, "first_gpu": 3}, r"from rollout\.first_gpu=3 on, .*rollout\.servers=2.* and leave rollout\.first_gpu out"),
        (2, 4, {"servers": 1}, r"set cluster\.processes=1, rollout\.servers=1, rollout\.tensor_parallel=1\.$"),
    ],
)  # fmt: skip
def test_more_gpus_than_there_are_is_refused_with_the_split_that_fits(
    started, tmp_path, monkeypatch, present, processes, rollout, message
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with pytest.raises(ConfigError, match=message):
        start(object() if processes else None, tmp_path, **rollout)
    assert not started


def test_a_run_is_refused_before_anything_is_loaded(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = {"cluster": ClusterConfig(processes=4)}
    with pytest.raises(
        ConfigError, match=r"4 processes want one GPU each, and this machine has 2: set cluster\.processes to 2"
    ):
        refuse_too_few_gpus(SFTConfig(model=TrainEngineConfig(path="m"), **ranks))
    refuse_too_few_gpus(SFTConfig(model=TrainEngineConfig(path="m", device="cpu"), **ranks))
    model = {"actor": PPOActorConfig(path="m")}
    with pytest.raises(ConfigError, match=r"set cluster\.processes=1, rollout\.servers=1"):
        refuse_too_few_gpus(PPOConfig(rollout=RolloutConfig(backend="vllm", servers=2), **model))
    with pytest.raises(ConfigError, match=r"cluster\.processes to 2"):
        refuse_too_few_gpus(PPOConfig(**model, **ranks))
    refuse_too_few_gpus(PPOConfig(mode="explore", rollout=RolloutConfig(backend="vllm", servers=2), **model, **ranks))
    refuse_too_few_gpus(PPOConfig(rollout=RolloutConfig(backend="vllm", addresses=["10.0.0.1:1"]), **model))
    refuse_too_few_gpus(PPOConfig(rollout=RolloutConfig(backend="builtin_process", servers=2), **model))
    refuse_too_few_gpus(PPOConfig(rollout=RolloutConfig(backend="vllm", servers=2), vllm=VLLMConfig(device="cpu"), **model))


def test_a_machine_without_gpus_goes_on(started, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    start(object(), tmp_path, servers=3)
    assert started["base_gpu"] == 0
    refuse_too_few_gpus(PPOConfig(actor=PPOActorConfig(path="m"), cluster=ClusterConfig(processes=4)))


class Own(InferenceEngine):
    """An engine of a user's that computes in this process."""

    agenerate = get_version = set_version = pause = resume = abort = None  # type: ignore[assignment]

    def __init__(self, model, tokenizer):
        self.given = model, tokenizer


def test_an_engine_of_the_users_own_is_made_of_model_and_tokenizer(tmp_path):
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend=f"{__name__}:Own"))
    directory = SimpleNamespace(journal=tmp_path / "journal")
    rollout = local_rollout.make_rollout_engine(config, SimpleNamespace(model="live"), "tokenizer", directory)
    assert rollout.journal.directory == directory.journal
    assert isinstance(rollout.sampler, Own)
    assert rollout.sampler.given == ("live", "tokenizer")


def test_a_backend_that_nobody_registered_is_an_error_that_names_the_nearest():
    config = PPOConfig(actor=PPOActorConfig(path="m"), rollout=RolloutConfig(backend="sglan"))
    with pytest.raises(ConfigError, match=r"inference backend 'sglan' was not found. Did you mean 'sglang'\?"):
        local_rollout.make_rollout_engine(config, None, None, None)
