"""Servers that give their memory back while the model trains on their GPUs, in the order that SGLang and vLLM need."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from fake_sglang import FakeSGLang, connected
from server_parts import served, tiny_engine
from test_vllm_client import FakeVLLM
from test_vllm_client import connected as connected_to_vllm

from rollwright.config.experiment import PPOConfig
from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.loading import build_config
from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import SGLangConfig, VLLMConfig
from rollwright.config.source import Document
from rollwright.errors import ConfigError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta

WEIGHTS = {"lm_head.weight": torch.zeros(2, 2)}
MODEL = {"sglang": SGLangConfig(model_path="tiny"), "vllm": VLLMConfig(model_path="tiny")}


def take_turns(client, tmp_path) -> None:
    """What a step does: the servers rest while the model trains, and take its weights."""
    client.pause()
    client.rest()
    client.update_weights(WeightUpdateMeta.from_disk(tmp_path), weights=WeightStream.of(WEIGHTS), version=1)
    client.resume()


def test_sglang_has_its_weights_before_they_are_loaded_and_its_cache_before_it_goes_on(tmp_path):
    fake = FakeSGLang()
    with connected(fake, colocate=True) as client:
        fake.calls.clear()
        take_turns(client, tmp_path)
        client.pause()  # nothing is given back: the next update restores nothing
        client.resume()
    order = [call for call in fake.calls if call != "update_weight_version"]
    assert order == [
        "pause_generation",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "resume_memory_occupation",
        "continue_generation",
        "pause_generation",
        "continue_generation",
    ]
    assert fake.bodies["release_memory_occupation"] == [{"tags": ["kv_cache", "weights"]}]
    assert fake.bodies["resume_memory_occupation"] == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]


def test_a_server_that_missed_the_wake_gets_its_memory_when_it_comes_back():
    fake = FakeSGLang()
    with connected(fake, colocate=True) as client:
        (server,) = client.servers.router.servers
        client.pause()
        client.rest()
        client.servers.router.take_out(server, "it does not answer")
        client.resume()
        fake.calls.clear()
        client.weights.bring_back(server)
    assert fake.calls == ["resume_memory_occupation", "continue_generation"]
    assert fake.bodies["resume_memory_occupation"] == [{"tags": ["weights", "kv_cache"]}]


def test_a_server_that_has_not_answered_yet_is_given_a_digest():
    backend = SGLangBackend(RolloutConfig(), type("Servers", (), {"ask": None})())
    assert backend.checks_digest(type("Server", (), {"address": "unknown"})())


def test_vllm_sleeps_without_its_weights_and_wakes_in_two_parts(tmp_path):
    fake = FakeVLLM()
    for path in ("sleep", "wake_up"):
        fake.app.post(f"/{path}")(fake.control)
    with connected_to_vllm(fake, colocate=True) as client:
        fake.calls.clear()
        take_turns(client, tmp_path)
    calls = [(path, query) for path, query, _ in fake.calls]
    first = calls.index(("sleep", "level=2"))
    assert calls[0][0] == "pause"
    assert calls[first + 1 : first + 3] == [("wake_up", "tags=weights"), ("collective_rpc", "")]
    assert calls[-2:] == [("wake_up", "tags=kv_cache"), ("resume", "")]


def test_weights_below_adapters_are_kept():
    asked = []
    sglang, vllm = (kind(RolloutConfig(), type("Servers", (), {"ask": lambda self, *given: asked.append(given[2:])})()) for kind in
                    (SGLangBackend, VLLMBackend))  # fmt: skip
    server = type("Server", (), {"address": "here"})()
    sglang.facts["here"] = type("Facts", (), {"is_builtin": False})()
    for backend in (sglang, vllm):
        backend.release_memory(server, keep_weights=True)
        backend.restore_memory(server, ["weights", "kv_cache"], kept_weights=True)
    assert asked == [
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("/sleep?level=1",),
        ("/wake_up?tags=weights&tags=kv_cache",),
    ]


@pytest.mark.parametrize(("backend", "option"), [("sglang", "--enable-memory-saver"), ("vllm", "--enable-sleep-mode")])
def test_servers_are_started_so_that_they_can_rest(backend, option):
    for colocate in (True, False):
        rollout = RolloutConfig(backend=backend, colocate=colocate)
        kind = {"sglang": SGLangBackend, "vllm": VLLMBackend}[backend]
        launch = ServerLaunch("127.0.0.1", 30000, rollout, "tiny", sections=MODEL)
        assert (option in kind.command(launch)) is colocate


def sampled(engine, **settings):
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 8, "greedy": True, "ignore_eos": True, **settings})
    return asyncio.run(engine.agenerate(ModelRequest(input_ids=[1, 2, 3], gconfig=gconfig)))


def test_the_built_in_engine_frees_its_cache_and_computes_the_same_afterwards():
    with tiny_engine() as engine:
        before = sampled(engine)
        engine.pause()
        engine.release_memory()
        assert engine._runner.cache.flat.numel() == 0
        engine.resume()
        after = sampled(engine)
    assert (after.output_tokens, after.output_logprobs) == (before.output_tokens, before.output_logprobs)


def test_memory_that_running_requests_need_is_not_released_and_they_go_on(monkeypatch):
    engine = tiny_engine()
    step = engine._stepper.step
    monkeypatch.setattr(engine._stepper, "step", lambda finished: [time.sleep(0.02), step(finished)])
    with served(create_application(engine, ServerSettings())) as address, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sampled, engine, max_new_tokens=100)
        while not engine.stats()["running"]:
            time.sleep(0.001)
        refused = httpx.post(f"http://{address}/release_memory_occupation", json={}, timeout=60)
        assert refused.is_error
        assert "1 requests run: end them first" in refused.text
        assert len(answer.result(60).output_tokens) == 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.backend=builtin"], "shares its memory"),
        (["rollout.backend=sglang", "rollout.addresses=[127.0.0.1:1]"], "names servers that run already"),
        (["rollout.backend=sglang", "rollout.first_gpu=1"], "take rollout.first_gpu out"),
        (["rollout.backend=sglang", "rollout.max_head_offpolicyness=1"], "cannot sample while the model trains"),
        (["rollout.backend=sglang", "rollout.weight_update=xccl"], "set rollout.weight_update to auto"),
        (["rollout.backend=vllm", "vllm.device=cpu"], "CPU build cannot sleep"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=f"(?s)rollout.colocate.*{message}"):
        build_config(Document({}), ["rollout.colocate=true", *overrides], PPOConfig)
