"""Adapters on servers: a name per version, requests that end with the adapter they began with, and old ones unloaded late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from fake_sglang import FakeSGLang, ask
from peft import PeftConfig
from safetensors.torch import load_file
from server_parts import served, small_adapter

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, WeightUpdateError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.weights.adapter import AdapterRoom, AdapterSpec
from rollwright.inference.weights.stream import WeightStream
from rollwright.inference.weights.transfer import WeightUpdateMeta


@contextlib.contextmanager
def connected(*fakes, **settings):
    config = RolloutConfig(setup_timeout=60, request_timeout=60, max_head_offpolicyness=1)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(fake.app)) for fake in fakes]
        client = RemoteInferenceEngine(SGLangBackend, config, addresses=addresses, **settings)
        client.initialize()
        client.servers.stop_watching()
        stack.callback(client.destroy)
        yield client


def wait_until(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def named(fake, version):
    """The newest adapter of a version that the server holds."""
    return max(name for name in fake.adapters if name.endswith(f"-v{version}"))


def test_each_version_has_a_name_that_new_requests_give(tmp_path):
    fake = FakeSGLang(version="0")
    with connected(fake) as client:
        ask(client)
        assert "lora_path" not in fake.bodies["generate"][-1]  # the base, until something is published
        for version in (1, 2):
            client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=version, weights=small_adapter(version))
            response = ask(client)
            assert fake.bodies["generate"][-1]["lora_path"] == named(fake, version)
            assert response.output_versions == [version] * 3
        assert client.get_version() == 2
        client.set_version(2)
        with pytest.raises(WeightUpdateError, match=r"set_version\(7\)"):
            client.set_version(7)
        loads = fake.bodies["load_lora_adapter"]
        assert [body["lora_name"] for body in loads] == [named(fake, 1), named(fake, 2)]
        assert not set(fake.calls) & {"pause_generation", "continue_generation", "update_weights_from_disk"}


def test_what_is_published_is_a_peft_directory(tmp_path):
    fake = FakeSGLang(version="0")
    with connected(fake) as client:
        client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=3, weights=small_adapter(0.25))
        directory = Path(fake.bodies["load_lora_adapter"][0]["lora_path"])
        config = PeftConfig.from_pretrained(str(directory))
        assert (config.r, config.lora_alpha, set(config.target_modules), config.peft_type) == (2, 4.0, {"q_proj"}, "LORA")
        tensors = load_file(directory / "adapter_model.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 8),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (4, 2),
        }
        assert all(bool((tensor == 0.25).all()) for tensor in tensors.values())


def test_a_request_ends_with_the_adapter_it_began_with_which_is_unloaded_after_it(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    with connected(fake) as client:
        client.update_weights(meta, version=1, weights=small_adapter())
        fake.is_held, answers = True, []
        running = threading.Thread(target=lambda: answers.append(ask(client)))
        running.start()
        wait_until(lambda: "generate" in fake.bodies)
        for version in range(2, 6):
            client.update_weights(meta, version=version, weights=small_adapter(version))
        first = named(fake, 1)
        wait_until(lambda: len(fake.adapters) == 3)  # 1 is in use; of the others, two are kept
        assert set(fake.adapters) == {first, named(fake, 4), named(fake, 5)}
        assert (Path(fake.adapters[first]) / "adapter_config.json").exists()
        fake.is_held = False
        running.join()
        assert answers[0].output_versions == [1, 1, 1]
        assert fake.bodies["generate"][0]["lora_path"] == first
        client.update_weights(meta, version=6, weights=small_adapter(6))
        wait_until(lambda: set(fake.adapters) == {named(fake, 5), named(fake, 6)})
    loads_before = [call for call in fake.calls if re.match("unload .*-v2$|load .*-v4$", call)]
    assert [call.split()[0] for call in loads_before] == ["load", "unload"]  # the next one first


def test_a_publication_does_not_wait_for_a_server_that_unloads_slowly(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    is_over, begun = threading.Event(), threading.Event()
    with connected(fake) as client:
        unload = client.backend.unload_adapter

        def wait(server, name):
            begun.set()
            is_over.wait(60)
            unload(server, name)

        client.backend.unload_adapter = wait
        for version in range(1, 6):
            client.update_weights(meta, version=version, weights=small_adapter())
        assert begun.wait(60)
        assert ask(client).output_versions == [5, 5, 5]
        is_over.set()


def test_the_same_version_published_again_has_another_name(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    with connected(fake) as client:
        for fill in (0.1, 0.2):
            client.update_weights(meta, version=4, weights=small_adapter(fill))
        first, second = (body["lora_name"] for body in fake.bodies["load_lora_adapter"])
        assert first < second
        assert ask(client).output_versions == [4, 4, 4]
        assert fake.bodies["generate"][-1]["lora_path"] == second


def test_a_server_that_was_restarted_is_given_the_adapters_that_requests_may_use(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.shared()
    with connected(fake) as client:
        for version in range(1, 5):
            client.update_weights(meta, version=version, weights=small_adapter(version))
        (server,) = client.servers.router.servers
        client.servers.router.take_out(server, "it was killed")
        fake.adapters.clear()
        fake.version = "default"
        client.weights.bring_back(server)
        assert [name.rpartition("-v")[2] for name in fake.adapters] == ["3", "4"]
        assert ask(client).output_versions == [4, 4, 4]
        directory = Path(fake.adapters[named(fake, 4)])
        assert directory.exists()
    assert not directory.exists()  # shared memory is freed


def test_a_server_without_adapters_leaves_the_publication_to_the_others(tmp_path):
    takes, refuses = FakeSGLang(version="0"), FakeSGLang(version="0")
    with connected(takes, refuses) as client:
        refuses.fails.add("load_lora_adapter")
        client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=1, weights=small_adapter())
        assert client.weight_holders == client.addresses[:1]
        takes.fails.add("load_lora_adapter")
        with pytest.raises(WeightUpdateError, match="on purpose"):
            client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=2, weights=small_adapter())
        assert client.weight_holders == client.addresses[:1]  # nothing has changed on it
        assert client.get_version() == 1
        assert ask(client).output_versions == [1, 1, 1]


def test_a_pause_holds_new_requests_and_no_server(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    with connected(fake, adapters=AdapterRoom()) as client:

        async def scenario():
            client.pause()
            asked = asyncio.create_task(asyncio.to_thread(ask, client))
            await asyncio.sleep(0.2)
            assert "generate" not in fake.bodies
            await asyncio.to_thread(client.update_weights, meta, version=1, weights=small_adapter())
            client.resume()
            return await asked

        assert asyncio.run(scenario()).output_versions == [1, 1, 1]
        assert [call.split()[0] for call in fake.calls] == ["load"]


def test_what_an_earlier_process_left_is_unloaded_and_what_others_loaded_is_not(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    mine, others = "policy-0192f0aa1bc4d5e-v9", ["policy-2-0192f0aa1bc4d5e-v9", "policy-best", "other-0192f0aa1bc4d5e-v9"]
    for name in (mine, *others):
        (tmp_path / name).mkdir()
        fake.adapters[name] = str(tmp_path / name)
    with connected(fake) as client:  # without a name of its own, another loop may have loaded them
        client.update_weights(meta, version=1, weights=small_adapter())
        assert (tmp_path / mine).exists()
    wait_until(lambda: set(fake.adapters) == {mine, *others})
    with connected(fake, adapters=AdapterRoom()) as client:
        client.update_weights(meta, version=1, weights=small_adapter())
        wait_until(lambda: mine not in fake.adapters)
        assert not (tmp_path / mine).exists()
        assert all((tmp_path / name).exists() for name in others)
        held = {*others, named(fake, 1)}
        assert set(fake.adapters) == held
    wait_until(lambda: set(fake.adapters) == set(others))  # an engine that is closed takes its adapters along


def test_a_client_of_another_process_finds_the_name_of_a_version(tmp_path):
    fake, meta = FakeSGLang(version="0"), WeightUpdateMeta.from_disk(tmp_path)
    room = AdapterRoom(run="sums", count=2)
    with connected(fake, adapters=room, servers_are_replaced=True) as publisher:
        asks = RemoteInferenceEngine(
            SGLangBackend, publisher.config, addresses=publisher.addresses, only_asks=True, adapters=room
        )
        asks.initialize()
        try:
            asks.weights.follow(publisher.addresses, 0)
            assert ask(asks).output_versions == [0, 0, 0]
            for version, fill in ((0, 0.1), (1, 0.2), (1, 0.3)):
                publisher.update_weights(meta, version=version, weights=small_adapter(fill))
                asks.weights.follow(publisher.addresses, version)
                assert ask(asks).output_versions == [version] * 3
                assert fake.bodies["generate"][-1]["lora_path"] == named(fake, version)
            asks.weights.follow(publisher.addresses, 2)
            assert not asks.servers.router.in_service()
            assert "was not given version 2" in asks.servers.router.describe()
        finally:
            asks.destroy()


def test_the_name_of_a_run_is_that_of_its_key():
    fakes = [FakeSGLang(version="7"), FakeSGLang(version="0")]  # version 7 is that of an adapter of an earlier process
    for fake in fakes:
        fake.info |= {"server": "rollwright", "run": "sums"}
    with connected(*fakes, adapters=AdapterRoom(run="experiment-trial")) as client:
        client.update_weights(WeightUpdateMeta.shared(), version=1, weights=small_adapter())
        assert all(named(fake, 1).startswith("sums-") for fake in fakes)
    fakes[1].info["run"] = "products"
    with pytest.raises(WeightUpdateError, match="belongs to different runs"), connected(*fakes, adapters=AdapterRoom()):
        pass


def test_publications_that_cannot_be_right_are_refused(tmp_path):
    fake = FakeSGLang(version="0")
    with connected(fake) as client:
        with pytest.raises(WeightUpdateError, match=r"read adapters from files.*rollout.weight_update: shared or disk"):
            client.update_weights(WeightUpdateMeta.from_fsdp_xccl("sglang:d1p1t1"), version=1, weights=small_adapter())
        meta = WeightUpdateMeta.from_disk(tmp_path)
        client.update_weights(meta, version=1, weights=small_adapter())
        with pytest.raises(WeightUpdateError, match="would change the base"):
            client.update_weights(meta, version=2, weights={"model.norm.weight": torch.ones(2)})
        fake.version = "5"  # somebody has loaded other weights
        with pytest.raises(EngineError, match="adapter version 1 on base version 5"):
            ask(client)


def test_a_publication_holds_no_more_than_the_file_and_a_fiftieth_of_the_base(tmp_path):
    """The shapes of a model of 135M: 30 layers of 576, 3 of 9 heads for keys and values, an MLP of 1536, 49152 tokens."""
    sizes = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576), "gate": (1536, 576), "up": (1536, 576)}
    sizes["down"] = (576, 1536)
    base = 49152 * 576 + 30 * (sum(rows * columns for rows, columns in sizes.values()) + 2 * 576) + 576
    tensors = {}
    for layer in range(30):
        for name, (rows, columns) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}_proj"
            tensors |= {f"{module}.lora_A.weight": torch.zeros(8, columns), f"{module}.lora_B.weight": torch.zeros(rows, 8)}
    stream = WeightStream.of(tensors, AdapterSpec(rank=8, alpha=16.0, targets=tuple(f"{name}_proj" for name in sizes)))
    fake = FakeSGLang(version="0")
    with connected(fake) as client:
        client.update_weights(WeightUpdateMeta.from_disk(tmp_path), version=1, weights=stream)
        directory = Path(fake.bodies["load_lora_adapter"][0]["lora_path"])
        files = sum(path.stat().st_size for path in directory.iterdir())
    assert sum(tensor.numel() for tensor in tensors.values()) <= 0.02 * base
    assert stream.nbytes <= files <= 1.01 * stream.nbytes
    assert json.loads((directory / "adapter_config.json").read_text())["r"] == 8
