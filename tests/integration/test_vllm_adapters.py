"""The real vLLM (its CPU build) with LoRA adapters: several at once, in competition for slots, and after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest
import torch
from real_servers import AdapterTrainer, ask, write_model
from test_vllm_server import generate, generated_tokens, generating, pytestmark, vllm_config  # noqa: F401 - skipped without the environment

from rollwright.config.sections import RolloutConfig
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.weights.adapter import AdapterRoom
from rollwright.inference.weights.transfer import WeightUpdateMeta
from rollwright.placement.local_servers import LocalServers

ROOM = AdapterRoom(count=4, rank=4)


@pytest.fixture(scope="module", autouse=True)
def _long_form(request):
    if request.config.getoption("--seeds") < 2:
        pytest.skip("vLLM starts three times, which takes minutes: this is part of the long form (--seeds 2)")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def adapter_server(model, logs, **extra_args):
    config = RolloutConfig(backend="vllm", setup_timeout=600, max_head_offpolicyness=3)
    section = dataclasses.replace(vllm_config(), extra_args=extra_args)
    with LocalServers(config, model_path=str(model), logs=logs, vllm=section, adapters=ROOM) as servers:
        client = RemoteInferenceEngine(
            VLLMBackend, config, addresses=servers.addresses, servers_are_replaced=True, adapters=ROOM
        )
        client.initialize()
        try:
            yield servers, client
        finally:
            client.destroy()


@pytest.fixture(scope="module")
def few_slots(model_path, tmp_path_factory):
    """A server that computes with two adapters at once, and keeps no more in memory: others are read from their files again."""
    options = {"max-loras": 2, "max-cpu-loras": 2}
    with adapter_server(model_path, tmp_path_factory.mktemp("logs"), **options) as (_, client):
        yield client, AdapterTrainer(model_path)


def of_versions(client, versions, count=2):
    """Requests that name the kept adapters of these versions, in turn."""
    names = {adapter.version: adapter.name for adapter in client.weights.adapters._kept}
    requests = ask(count * len(versions), tokens=12)
    for place, request in enumerate(requests):
        request.lora_name = names[versions[place % len(versions)]]
    return requests


@pytest.mark.parametrize("way", ["shared", "disk"])
def test_every_version_agrees_with_the_trainer(few_slots, tmp_path, way):
    client, trainer = few_slots
    meta = WeightUpdateMeta.from_disk(tmp_path) if way == "disk" else WeightUpdateMeta.shared()
    for _ in range(3):
        before = generate(client, ask(4, tokens=12))
        version = trainer.step()
        assert trainer.publish(client, meta).agreements[0].largest < 1e-4
        after = generate(client, ask(4, tokens=12))
        assert [response.output_tokens for response in before] != [response.output_tokens for response in after]
        assert trainer.check_versions(after, tolerance=1e-4) == {version}


def test_adapters_that_compete_for_slots_keep_their_scale(few_slots, tmp_path):
    """vLLM multiplies B by alpha / rank in place as it loads it: an adapter that is loaded again must not be scaled twice."""
    client, trainer = few_slots
    while len(client.weights.adapters._kept) < ROOM.count:
        trainer.step()
        trainer.publish(client, WeightUpdateMeta.from_disk(tmp_path))
    versions = [adapter.version for adapter in client.weights.adapters._kept]
    for _ in range(3):
        for place, response in enumerate(generate(client, of_versions(client, versions))):
            given = torch.tensor(response.output_logprobs, dtype=torch.float64)
            expected = trainer.expected(response, versions[place % len(versions)])
            assert (given - expected).abs().max() < 1e-4
    trainer.model.load_state_dict(trainer.history[trainer.version])


def test_requests_end_with_the_adapter_that_they_began_with(few_slots, tmp_path):
    client, trainer = few_slots

    def publish():
        trainer.step()
        trainer.publish(client, WeightUpdateMeta.from_disk(tmp_path))

    async def scenario():
        responses, begun = [], await asyncio.to_thread(generated_tokens, client)
        running = [asyncio.ensure_future(client.agenerate(request)) for request in ask(4, tokens=400)]
        await generating(client, begun, *running)
        for wave in range(2):
            await asyncio.to_thread(publish)
            responses += await asyncio.gather(*(client.agenerate(each) for each in ask(2, tokens=6, seed=90 + 10 * wave)))
        return responses + await asyncio.gather(*running)

    first = trainer.version
    responses = asyncio.run(scenario())
    assert [set(response.output_versions) for response in responses[-4:]] == [{first}] * 4
    assert all(len(response.output_tokens) == 400 for response in responses[-4:])
    assert trainer.check_versions(responses, tolerance=1e-4) == {first, first + 1, first + 2}


def test_a_server_that_is_started_again_is_given_the_adapters_again(model_path, tmp_path):
    trainer = AdapterTrainer(model_path)
    with adapter_server(model_path, tmp_path / "logs") as (servers, client):
        for _ in range(3):
            trainer.step()
            trainer.publish(client)
        servers.restart(0, 600)
        client.use_servers([servers.server(0).address])
        deadline = time.monotonic() + 60
        while not client.weight_holders:
            assert time.monotonic() < deadline, client.servers.router.describe()
            time.sleep(0.1)
        assert trainer.check_versions(generate(client, ask(4, tokens=12)), tolerance=1e-4) == {3}
        for place, response in enumerate(generate(client, of_versions(client, [1, 2, 3]))):
            given = torch.tensor(response.output_logprobs, dtype=torch.float64)
            assert (given - trainer.expected(response, [1, 2, 3][place % 3])).abs().max() < 1e-4
