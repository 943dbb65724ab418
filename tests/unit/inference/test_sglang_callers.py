"""What other systems' clients of SGLang send to its ``/generate`` and control paths, as it stands in their sources."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import transformers
from server_parts import served, tiny_engine

from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.names import as_published
from rollwright.inference.weights.stream import WeightStream


@pytest.fixture(scope="module")
def server():
    with tiny_engine(context_length=256) as engine:
        app = create_application(engine, ServerSettings(), model_path="tiny")
        with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
            yield client


GENERATE = {
    "AReaL": {
        "input_ids": [5, 6],
        "image_data": None,
        "sampling_params": {
            "top_p": 1.0,
            "top_k": 100_000_000,
            "max_new_tokens": 4,
            "temperature": 0.7,
            "stop_token_ids": [],
            "ignore_eos": True,
            "skip_special_tokens": True,
            "frequency_penalty": 0.0,
        },
        "return_logprob": True,
        "stream": False,
    },
    "slime": {
        "input_ids": [5, 6],
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": True,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 3,
            "ignore_eos": True,
        },
        "return_logprob": True,
    },
    "verl": {
        "input_ids": [5, 6],
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 4,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": [],
    },
    "SGLang's benchmark": {
        "input_ids": [5, 6],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        "stream": False,
        "lora_path": None,
        "return_logprob": True,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    },
    "a gateway": {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "data_parallel_rank": 0,
        "routing_key": "a",
        "priority": 1,
        "session_id": "s",
    },
}


@pytest.mark.parametrize("caller", GENERATE)
def test_what_callers_send_is_answered(server, caller):
    answer = server.post("/generate", json=GENERATE[caller])
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer.json()["output_ids"]
    assert len(answer.json()["output_ids"]) == 4
    assert meta["finish_reason"] == {"type": "length", "length": 4}


def test_a_batch_may_say_everything_for_each_prompt(server):
    stop = {"stop": ["b"], "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 4}
    body = {
        "input_ids": [[5], [5]],
        "rid": ["first", "second"],
        "sampling_params": [{**stop, "no_stop_trim": True}, {**stop, "no_stop_trim": False}],
        "return_logprob": [True, False],
        "top_logprobs_num": [0, 0],
        "logprob_start_len": [-1, -1],
        "return_prompt_token_ids": True,
    }
    kept, trimmed = server.post("/generate", json=body).json()
    assert [kept["meta_info"]["id"], trimmed["meta_info"]["id"]] == ["first", "second"]
    assert kept["output_ids"] == trimmed["output_ids"]
    if kept["meta_info"]["finish_reason"]["type"] == "stop":
        assert kept["text"] == trimmed["text"] + "b"
    assert "output_token_logprobs" in kept["meta_info"]
    assert "output_token_logprobs" not in trimmed["meta_info"]
    assert kept["meta_info"]["prompt_token_ids"] == [5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_logprobs_num": [0, 2]}, "top_logprobs_num"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"return_logprob": [True]}, "1 return_logprob for 2 prompts"),
        ({"sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
        ({"rid": ["a"]}, "1 rid for 2 prompts"),
    ],
)
def test_what_cannot_be_honoured_for_each_prompt_is_refused(server, changes, said):
    answer = server.post("/generate", json={"input_ids": [[5], [6]], **changes})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/update_weights_from_tensor", "pickled"),
        ("/update_weights_from_ipc", "/update_weights_from_disk"),
    ],
)
def test_paths_of_sglang_that_are_not_served_say_what_to_use(server, path, said):
    answer = server.post(path, json={})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_older_paths_give_the_version(server):
    assert server.get("/get_weight_version").json() == server.get("/weight_version").json() == {"weight_version": "0"}


class Parts:
    """A weight group whose tensors are at hand."""

    weights: dict

    def __init__(self, *arguments):
        pass

    def receive(self, names, dtypes, shapes, flat=False):
        return [(name, self.weights[name]) for name in names]

    def close(self):
        pass


@pytest.fixture
def send(monkeypatch):
    """A server with a group, and a function that sends it some of its own weights."""
    monkeypatch.setattr("rollwright.inference.server.control.WeightGroup", Parts)
    with tiny_engine() as engine:
        Parts.weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        app = create_application(engine, ServerSettings(), model_path="tiny")
        with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
            group = {"master_address": "127.0.0.1", "master_port": "1", "rank_offset": 1, "world_size": 2, "group_name": "g"}
            assert client.post("/init_weights_update_group", json=group).json()["success"]

            def send(names, **more):
                shapes = [list(Parts.weights[name].shape) for name in names]
                body = {"names": names, "dtypes": ["float32"] * len(names), "shapes": shapes, "group_name": "g", **more}
                answer = client.post("/update_weights_from_distributed", json=body)
                assert answer.json()["success"], answer.text

            yield client, send, list(Parts.weights)


def answers(client, seconds: float = 60) -> bool:
    try:
        return client.post("/generate", json={"input_ids": [7]}, timeout=seconds).status_code == 200
    except httpx.ReadTimeout:
        return False


def test_areal_pauses_sends_parts_without_a_version_and_goes_on(send):
    client, send, names = send
    client.post("/pause_generation", json={"mode": "retract"})
    for part in (names[:2], names[2:]):
        send(part, abort_all_requests=True)
        assert not answers(client, 0.5)
    assert client.post("/continue_generation", json={}).json()["message"] == "Generation continues."
    assert answers(client)


def test_slime_gives_every_part_the_version(send):
    client, send, names = send
    client.post("/pause_generation", json={})
    assert client.get("/flush_cache").status_code == 405  # a page that somebody has open could do that, too
    assert client.post("/flush_cache").status_code == 200
    for part in (names[:2], names[2:]):
        send(part, flush_cache=False, weight_version="3")
    client.post("/continue_generation", json={})
    assert answers(client)
    assert client.get("/model_info").json()["weight_version"] == "3"


def test_who_never_names_a_version_is_told_what_is_waited_for_and_can_end_it(send):
    client, send, names = send
    send(names[:2])
    assert not answers(client, 0.5)
    waiting = client.get("/health_generate")
    assert (waiting.status_code, "/end_weight_update" in waiting.text) == (503, True)
    assert "/end_weight_update" in client.post("/continue_generation", json={}).json()["message"]
    assert client.post("/end_weight_update", json={}).json()["success"]
    assert answers(client)


def test_nothing_is_sampled_between_the_beginning_and_the_end_of_an_update(send):
    client, send, names = send
    assert client.post("/begin_weight_update", json={}).json()["success"]
    for part in (names[:2], names[2:]):
        send(part, weight_version="1")
        client.post("/continue_generation", json={})
        assert not answers(client, 0.5)
    client.post("/end_weight_update", json={})
    assert answers(client)


def test_requests_that_an_update_aborts_return_what_they_have(send):
    client, send, names = send
    client.post("/pause_generation", json={"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/generate", json={"input_ids": [7]})
        while not (stats := client.get("/server_info").json()["stats"])["queued"] + stats["waiting"] and not asked.done():
            time.sleep(0.01)
        send(names, abort_all_requests=True, weight_version="1")
        assert asked.result(60).json()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank_offset": 0}, "rank 0 is the trainer"),
        ({"rank_offset": 2}, "rank_offset=2 of world_size=2"),
        ({"world_size": -1}, "world_size=-1"),
        ({"master_port": 99999}, "master_port=99999"),
        ({"backend": "mpi"}, "no backend 'mpi'"),
    ],
)
def test_a_group_that_cannot_be_is_refused_at_once(server, changes, said):
    group = {"master_address": "127.0.0.1", "master_port": 2, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    answer = server.post("/init_weights_update_group", json={**group, **changes}, timeout=60)
    assert answer.status_code == 400
    assert said in answer.text


@contextlib.contextmanager
def listening(engine, monkeypatch, **settings):
    """A server with a group, and a function that sends it tensors."""
    monkeypatch.setattr("rollwright.inference.server.control.WeightGroup", Parts)
    app = create_application(engine, ServerSettings(**settings), model_path="tiny")
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=60) as client:
        group = {"master_address": "127.0.0.1", "master_port": "1", "rank_offset": 1, "world_size": 2, "group_name": "g"}
        assert client.post("/init_weights_update_group", json=group).json()["success"]

        def send(weights, **more):
            Parts.weights = weights
            shapes = [list(tensor.shape) for tensor in weights.values()]
            body = {"names": list(weights), "dtypes": ["float32"] * len(weights), "shapes": shapes, "group_name": "g", **more}
            return client.post("/update_weights_from_distributed", json=body).json()

        yield client, send


@pytest.mark.parametrize("begins", ["pause_generation", "begin_weight_update", None])
def test_an_update_without_a_call_for_the_limit_is_undone(begins, monkeypatch, caplog):
    with tiny_engine() as engine, listening(engine, monkeypatch, update_seconds=0.5) as (client, send):
        old = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        new = {name: tensor + 1 for name, tensor in old.items()}
        names = list(new)
        if begins:
            client.post(f"/{begins}", json={})
        assert send({name: new[name] for name in names[:3]})["success"]
        assert answers(client)  # it waited until the update was undone
        assert all(torch.equal(tensor, old[name]) for name, tensor in engine.model.state_dict().items())
        assert "undone (3 tensors had arrived), and requests continue with version 0" in caplog.text
        late = send({name: new[name] for name in names[3:]}, weight_version="1")
        assert "was undone" in late["message"]  # the half of an update is not called version 1
        assert client.get("/model_info").json()["weight_version"] == "0"
        client.post("/pause_generation", json={})
        assert send(new, weight_version="1")["success"]
        client.post("/continue_generation", json={})
        assert answers(client)
        assert all(torch.equal(tensor, new[name]) for name, tensor in engine.model.state_dict().items())


def test_a_pause_and_an_update_that_goes_on_are_not_undone(monkeypatch, caplog):
    with tiny_engine() as engine, listening(engine, monkeypatch, update_seconds=0.4) as (client, send):
        new = {name: tensor + 1 for name, tensor in engine.model.state_dict().items()}
        names = list(new)
        client.post("/pause_generation", json={})
        assert not answers(client, 0.8)  # who only pauses may take its time
        for start in range(0, len(names), 8):
            time.sleep(0.1)
            assert send({name: new[name] for name in names[start : start + 8]})["success"]
        client.post("/continue_generation", json={})
        assert answers(client)
        assert "undone" not in caplog.text
        assert all(torch.equal(tensor, new[name]) for name, tensor in engine.model.state_dict().items())


@pytest.mark.parametrize("versions", ["the last", "each", "none"])
def test_experts_come_in_any_parts(versions, monkeypatch):
    """One by one, as a trainer publishes them; the model holds those of a layer in one tensor."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=4, max_position_embeddings=64,
    )  # fmt: skip
    served_model, trained = (transformers.Qwen3MoeForCausalLM(config) for _ in range(2))
    sent = [(name, tensor.clone()) for name, tensor in as_published(trained, WeightStream.of(trained.state_dict()))]
    assert any(".experts.3." in name for name, _ in sent)
    with BuiltinEngine(served_model, kv_cache_bytes=8 << 20) as engine, listening(engine, monkeypatch) as (client, send):
        client.post("/pause_generation", json={})
        for start in range(0, len(sent), 7):
            is_named = versions == "each" or (versions == "the last" and start + 7 >= len(sent))
            assert send(dict(sent[start : start + 7]), **({"weight_version": "5"} if is_named else {}))["success"]
        assert client.get("/model_info").json()["weight_version"] == ("0" if versions == "none" else "5")
        client.post("/continue_generation", json={})
        assert answers(client)
        state = trained.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in engine.model.state_dict().items())
        client.post("/pause_generation", json={})
        assert send({"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(8, 16)})["success"]
        assert "some are missing" in client.post("/continue_generation", json={}).text
        client.post("/continue_generation", json={})
        assert answers(client)
        assert all(torch.equal(tensor, state[name]) for name, tensor in engine.model.state_dict().items())
