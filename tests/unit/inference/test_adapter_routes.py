"""Adapters and runs of ``rollwright serve-model``, over real HTTP."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time

import httpx
import pytest
import torch
from adapter_models import published, random_adapter
from builtin_models import reference_logprobs
from server_parts import served, tiny_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.errors import ConfigError
from rollwright.inference.backends.sglang import SGLangBackend
from rollwright.inference.remote import RemoteInferenceEngine
from rollwright.inference.request import ModelRequest
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.files import content_digest, read_weights
from rollwright.inference.weights.transfer import WeightUpdateMeta

IDS = list(range(10, 40))


@pytest.fixture(scope="module")
def served_runs(tmp_path_factory):
    """A server with the runs ``a`` and ``a-b``, clients by run (the empty one has the server's key), and four adapters on disk."""
    root = tmp_path_factory.mktemp("weights")
    engine = tiny_engine(max_adapters=3)
    adapted = [random_adapter(engine.model, seed) for seed in range(4)]
    for number, each in enumerate(adapted):
        each.save_pretrained(root / f"adapter{number}")
    settings = ServerSettings(
        model_name="tiny", weights_roots=[str(root)], api_key="own", run_keys={"a": "key of a", "a-b": "key of a-b"}
    )
    keys = {"": "own", **settings.run_keys}
    with served(create_application(engine, settings)) as address:
        clients = {
            run: httpx.Client(base_url=f"http://{address}", timeout=60, headers={"Authorization": f"Bearer {key}"})
            for run, key in keys.items()
        }
        yield clients, engine, adapted, root
        for client in clients.values():
            client.close()


@pytest.fixture
def runs(served_runs):
    yield served_runs
    clients, engine, _, _ = served_runs
    engine.resume()
    for run in ("a", "a-b"):
        clients[run].post("/continue_generation", json={})
    for adapter in list(engine.adapters):
        engine.unload_adapter(adapter.name)


def load(client, name: str, path, **more):
    return client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def generate(client, count: int = 8, **body):
    sampling = {"max_new_tokens": count, "sampling_seed": 3, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": IDS, "sampling_params": sampling, "return_logprob": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def expect(model, answer, version: int) -> None:
    expected = reference_logprobs(model, IDS, answer["output_ids"])
    got = torch.tensor([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]).double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    count = len(answer["output_ids"])
    assert answer["meta_info"]["weight_versions"] == [{"version": str(version), "start": 0, "end": count}]


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_both_forms_load_and_requests_name_the_adapter(runs):
    clients, engine, adapted, root = runs
    client = clients[""]
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": str(root / "adapter0")})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    answer = load(client, "other-v7", root / "adapter1")
    assert answer.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"mine": str(root / "adapter0"), "other-v7": str(root / "adapter1")},
    }
    expect(adapted[0], generate(client, lora_path="mine"), 0)
    expect(adapted[1], generate(client, lora_path="other-v7"), 7)
    expect(engine.model, generate(client), 0)
    batch = generate(client, input_ids=[IDS, IDS, IDS], lora_path=["mine", None, "other-v7"])
    for model, version, each in zip([adapted[0], engine.model, adapted[1]], [0, 0, 7], batch, strict=True):
        expect(model, each, version)
    body = {"model": "other-v7", "prompt": IDS, "max_tokens": 5, "logprobs": 0, "seed": 1, "return_token_ids": True}
    completion = client.post("/v1/completions", json=body).json()
    assert completion["model"] == "other-v7"
    choice = completion["choices"][0]
    expected = reference_logprobs(adapted[1], IDS, choice["token_ids"])
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]).double(), expected, atol=1e-4, rtol=0)
    models = client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in models] == [("tiny", None), ("mine", "tiny"), ("other-v7", "tiny")]
    held = client.get("/server_info").json()["adapters"]
    assert [(each["name"], each["version"], each["rank"], each["requests"]) for each in held] == [
        ("mine", 0, 4, 0),
        ("other-v7", 7, 4, 0),
    ]
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404
    for path, body in (("/generate", {"lora_path": "mine"}), ("/v1/completions", {"model": "mine", "prompt": IDS})):
        answer = client.post(path, json={"input_ids": IDS, **body} if path == "/generate" else body)
        assert answer.status_code == (400 if path == "/generate" else 404)
        assert "no adapter 'mine' here; there are other-v7" in answer.json()["error"]["message"]


def test_names_digests_roots_and_numbers_are_checked(runs, tmp_path):
    clients, _, adapted, root = runs
    client = clients[""]
    digest = content_digest(read_weights(root / "adapter0"))
    assert load(client, "x-v1", root / "adapter0", content_digest=digest, weight_version=5).status_code == 200
    assert load(client, "x-v1", root / "adapter0", weight_version=5).status_code == 200  # sent again
    expect(adapted[0], generate(client, lora_path="x-v1"), 5)
    outside = tmp_path / "adapter"
    shutil.copytree(root / "adapter0", outside)
    (root / "empty").mkdir(exist_ok=True)
    for name, path, more, status, said in (
        ("x-v1", root / "adapter1", {}, 400, "has already been loaded"),
        ("y", root / "adapter0", {"content_digest": "0"}, 400, "changed or damaged"),
        ("y", outside, {}, 403, "not below a weights root"),
        ("y", root / "missing", {}, 400, "not a directory"),
        ("y", root / "empty", {}, 400, "has no adapter_config.json"),
        ("tiny", root / "adapter0", {}, 400, "name of the base"),
    ):
        answer = load(client, name, path, **more)
        assert (answer.status_code, answer.json()["success"]) == (status, False)
        assert said in answer.json()["error_message"]
    assert load(client, "x-v1", root / "adapter1", load_inplace=True).status_code == 200
    expect(adapted[1], generate(client, lora_path="x-v1"), 1)
    for number in (2, 3):
        assert load(client, f"x-v{number}", root / "adapter2").status_code == 200
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "x-v4", "lora_path": str(root / "adapter3")})
    assert answer.status_code == 400
    assert "x-v1, x-v2, x-v3 are held, and max_adapters is 3" in answer.json()["error"]["message"]


def test_a_run_reaches_its_own_adapters_only(runs):
    clients, engine, adapted, root = runs
    own, a, ab = clients[""], clients["a"], clients["a-b"]
    assert load(a, "a-v1", root / "adapter0").status_code == 200
    assert load(ab, "a-b-v9", root / "adapter1").status_code == 200
    for client, name in ((a, "a-b-v2"), (a, "b-v1"), (ab, "a-v2"), (a, "x")):
        answer = load(client, name, root / "adapter2")
        assert answer.status_code == 403
        assert "is not one of them" in answer.json()["error_message"]
    assert a.post("/unload_lora_adapter", json={"lora_name": "a-b-v9"}).status_code == 403
    assert a.post("/generate", json={"input_ids": IDS, "lora_path": "a-b-v9"}).status_code == 400
    expect(adapted[0], generate(a), 1)  # its newest one
    expect(adapted[1], generate(ab), 9)
    expect(engine.model, generate(own), 0)
    assert [client.get("/weight_version").json()["weight_version"] for client in (own, a, ab)] == ["0", "1", "9"]
    assert load(a, "a-v2", root / "adapter2").status_code == 200
    expect(adapted[2], generate(a), 2)
    expect(adapted[0], generate(a, lora_path="a-v1"), 1)
    info = a.get("/server_info").json()
    assert (info["run"], [each["name"] for each in info["adapters"]]) == ("a", ["a-v1", "a-v2"])
    assert [card["id"] for card in ab.get("/v1/models").json()["data"]] == ["tiny", "a-b-v9"]
    assert ab.get("/v1/models/a-b-v9").json()["parent"] == "tiny"
    assert ab.get("/v1/models/a-v1").status_code == 404
    for path in ("/flush_cache", "/update_weights_from_disk", "/begin_weight_update", "/release_memory_occupation"):
        answer = a.post(path, json={"model_path": str(root)})
        assert answer.status_code == 403
        assert "concerns all runs" in answer.json()["error"]["message"]
    assert httpx.get(a.base_url.join("/server_info")).status_code == 401


def test_a_pause_concerns_the_run_that_asks_for_it(runs):
    clients, engine, adapted, root = runs
    a, ab = clients["a"], clients["a-b"]
    assert load(a, "a-v1", root / "adapter0").status_code == 200
    assert load(ab, "a-b-v1", root / "adapter1").status_code == 200
    assert a.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    answers = {}
    threads = [threading.Thread(target=lambda n=n, c=c: answers.update({n: generate(c)})) for n, c in (("a", a), ("a-b", ab))]
    for thread in threads:
        thread.start()
    wait_until(lambda: "a-b" in answers)
    wait_until(lambda: engine.stats()["waiting"] == 1)
    assert (a.get("/server_info").json()["paused"], ab.get("/server_info").json()["paused"]) == (True, False)
    assert load(a, "a-v2", root / "adapter2").status_code == 200
    assert ab.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert "a" not in answers
    assert a.post("/continue_generation", json={}).status_code == 200
    for thread in threads:
        thread.join(timeout=30)
    expect(adapted[0], answers["a"], 1)  # chosen when the request came
    expect(adapted[1], answers["a-b"], 1)


def test_unloading_waits_unless_its_requests_are_paused(runs):
    clients, engine, adapted, root = runs
    a = clients["a"]
    assert load(a, "a-v1", root / "adapter0").status_code == 200
    answers = []
    thread = threading.Thread(target=lambda: answers.append(generate(a, 180)))
    thread.start()
    wait_until(lambda: engine.stats()["running"] == 1)
    assert a.post("/unload_lora_adapter", json={"lora_name": "a-v1"}, timeout=30).json()["success"]
    thread.join(timeout=30)
    expect(adapted[0], answers.pop(), 1)
    assert load(a, "a-v1", root / "adapter0").status_code == 200
    a.post("/pause_generation", json={"mode": "retract"})
    thread = threading.Thread(target=lambda: answers.append(generate(a)))
    thread.start()
    wait_until(lambda: engine.stats()["waiting"] == 1)
    assert a.post("/unload_lora_adapter", json={"lora_name": "a-v1"}, timeout=10).json()["success"]  # would wait for ever
    assert a.post("/continue_generation", json={}).status_code == 200
    thread.join(timeout=30)
    expect(adapted[0], answers.pop(), 1)


def test_two_remote_engines_publish_to_one_server(runs):
    clients, engine, adapted, root = runs
    remotes = []
    for run in ("a", "a-b"):
        key = clients[run].headers["authorization"].removeprefix("Bearer ")
        config = RolloutConfig(setup_timeout=60, request_timeout=60, api_key=key)
        address = f"{clients[run].base_url.host}:{clients[run].base_url.port}"
        remotes.append(RemoteInferenceEngine(SGLangBackend, config, addresses=[address]))
        remotes[-1].initialize()
    try:
        gconfig = GenerationHyperparameters(max_new_tokens=6, ignore_eos=True, temperature=0.7)
        meta = WeightUpdateMeta.from_disk(root / "published")
        for number, remote in enumerate(remotes):
            for version in range(1, 2 + number):
                remote.pause()
                remote.update_weights(meta, version=version, weights=published(adapted[number + version]))
                remote.resume()
        for number, remote in enumerate(remotes):
            (response,) = asyncio.run(remote.agenerate_batch([ModelRequest(IDS, gconfig, seed=1)]))
            expected = reference_logprobs(adapted[1 + 2 * number], IDS, response.output_tokens, 0.7)
            torch.testing.assert_close(torch.tensor(response.output_logprobs).double(), expected, atol=1e-4, rtol=0)
            assert response.output_versions == [1 + number] * 6
            assert remote.get_version() == 1 + number
        assert {adapter.run for adapter in engine.adapters} == {"a", "a-b"}
    finally:
        for remote in remotes:
            remote.destroy()


def test_runs_need_keys_of_their_own_beside_the_servers():
    with pytest.raises(ConfigError, match="no api_key"):
        ServerSettings(run_keys={"a": "x"})
    with pytest.raises(ConfigError, match="key of its own"):
        ServerSettings(api_key="x", run_keys={"a": "x"})
