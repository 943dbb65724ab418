"""Experts of sampling from servers: in SGLang's and vLLM's shapes, from ``serve-model`` over HTTP, and never in silence without them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io

import httpx
import numpy as np
import pytest
import torch
import transformers
from fake_sglang import FakeSGLang, ask, connected
from server_parts import served
from test_vllm_client import FakeVLLM
from test_vllm_client import ask as ask_vllm
from test_vllm_client import connected as connected_to_vllm

from rollwright import GenerationHyperparameters, ModelRequest, RolloutConfig
from rollwright.config.experiment import PPOConfig
from rollwright.config.rules import faults_of
from rollwright.errors import EngineError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.backends.sglang import BuiltinServersBackend, SGLangBackend, SGLangClient
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings

LAYERS, TOP_K = 3, 2
#: A prompt of 2 and an answer of 3 tokens: 4 tokens have been computed.
EXPERTS = np.arange(4 * LAYERS * TOP_K).reshape(4, LAYERS, TOP_K)


def int32_text(experts):
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def npy_text(experts):
    buffer = io.BytesIO()
    np.save(buffer, experts, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def sglang(routed):
    fake = FakeSGLang()
    fake.info["enable_return_routed_experts"] = True

    def answer(body):
        found = fake.default_answer(body)
        found["meta_info"] |= {} if routed is None else {"routed_experts": routed}
        return found

    fake.answer = answer
    return fake


def test_sglangs_experts_are_asked_for_and_read():
    fake = sglang(int32_text(EXPERTS))
    with connected(fake, routing_replay=True) as client:
        assert client.records_experts
        response = ask(client)
    assert fake.bodies["generate"][0]["return_routed_experts"] is True
    assert response.routed_experts.dtype == np.uint8
    assert np.array_equal(response.routed_experts, EXPERTS.reshape(4, -1) + 1)
    with connected(plain := sglang(None)) as client:
        assert ask(client).routed_experts is None
    assert "return_routed_experts" not in plain.bodies["generate"][0]


def test_many_experts_take_two_bytes():
    with connected(sglang(int32_text(EXPERTS + 240)), routing_replay=True) as client:
        routed = ask(client).routed_experts
    assert routed.dtype == np.int16
    assert routed.max() == EXPERTS.max() + 241


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (None, "has no routed_experts: start it with --enable-return-routed-experts"),
        (int32_text(EXPERTS.ravel()[:-2]), "not the same number for each of 4 tokens"),
        ([[1, 2]], "not in the form of sglang's /generate"),
    ],
)
def test_an_answer_of_sglang_without_a_whole_record_is_an_error(routed, said):
    with connected(sglang(routed), routing_replay=True) as client, pytest.raises(EngineError, match=said):
        ask(client)


def test_a_sglang_server_that_was_not_started_to_return_them_is_refused_at_once():
    fake = FakeSGLang()
    said = "does not return the experts of its tokens: start it with --enable-return-routed-experts"
    with pytest.raises(EngineError, match=said), connected(fake, routing_replay=True):
        pass
    assert "generate" not in fake.bodies


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_vllms_experts_are_read(dtype):
    fake = FakeVLLM()
    fake.change = lambda choice: choice.update(routed_experts=npy_text(EXPERTS[:3].astype(dtype)))
    with connected_to_vllm(fake, routing_replay=True) as client:
        assert np.array_equal(ask_vllm(client).routed_experts, EXPERTS[:3].reshape(3, -1) + 1)
    with connected_to_vllm(fake) as client:
        assert ask_vllm(client).routed_experts is None


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (None, "has no routed_experts: start it with --enable-return-routed-experts, which vLLM has"),
        (npy_text(EXPERTS), r"routed_experts is \[4, 3, 2\] int64, not \[3, layers, top_k\]"),
        ("%", "not in the form of vllm's"),
    ],
)
def test_an_answer_of_vllm_without_a_whole_record_is_an_error(routed, said):
    fake = FakeVLLM()
    fake.change = lambda choice: choice.update(routed_experts=routed)
    with connected_to_vllm(fake, routing_replay=True) as client, pytest.raises(EngineError, match=said):
        ask_vllm(client)


def test_servers_of_the_run_are_started_to_return_them():
    config = RolloutConfig(routing_replay=True)
    launch = ServerLaunch("127.0.0.1", 5, config, "model")
    for backend in (SGLangBackend, BuiltinServersBackend, VLLMBackend):
        command = backend.command(launch)
        assert "--enable-return-routed-experts" in command, backend
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in VLLMBackend.command(launch)


def test_vllm_needs_its_prefix_cache_for_them():
    config = PPOConfig()
    config.rollout.routing_replay, config.rollout.backend, config.rollout.prefix_cache = True, "vllm", False
    assert any("prefix_cache" in message for path, message in faults_of(config) if path == ("rollout", "routing_replay"))


# -- serve-model -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(**settings):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=TOP_K, head_dim=8,
        max_position_embeddings=128, mlp_only_layers=[1],
    )  # fmt: skip
    engine = BuiltinEngine(transformers.Qwen3MoeForCausalLM(config).eval(), threads=1, **settings)
    with served(create_application(engine, ServerSettings(model_name="tiny"))) as address:
        yield engine, address


def test_serve_model_returns_them_as_sglang_does():
    gconfig = GenerationHyperparameters(max_new_tokens=6, ignore_eos=True)
    requests = [ModelRequest(input_ids=[5, 6, 7], gconfig=gconfig, seed=seed) for seed in range(2)]
    with serving(routing_replay=True) as (engine, address):
        expected = engine.generate(requests)
        client = SGLangClient(RolloutConfig(setup_timeout=60, routing_replay=True), addresses=[address])
        client.initialize()
        try:
            answers = [asyncio.run(client.agenerate(request)) for request in requests]
        finally:
            client.destroy()
        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 6, "sampling_seed": 0},
            "return_routed_experts": True,
        }
        meta = httpx.post(f"http://{address}/generate", json=body, timeout=60).json()["meta_info"]
        plain = httpx.post(f"http://{address}/generate", json={**body, "return_routed_experts": False}, timeout=60).json()
    for answer, want in zip(answers, expected, strict=True):
        assert answer.output_tokens == want.output_tokens
        assert np.array_equal(answer.routed_experts, want.routed_experts)
    restored = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32).reshape(-1, LAYERS, TOP_K)
    assert len(restored) == meta["prompt_tokens"] + meta["completion_tokens"] - 1
    assert (restored[:, 1] == -1).all()  # a layer without experts
    assert restored[:, [0, 2]].min() >= 0
    assert "routed_experts" not in plain["meta_info"]


def test_serve_model_says_that_it_records_none():
    with serving() as (_, address):
        body = {"input_ids": [5, 6, 7], "return_routed_experts": True}
        answer = httpx.post(f"http://{address}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "start it with --enable-return-routed-experts" in answer.text
