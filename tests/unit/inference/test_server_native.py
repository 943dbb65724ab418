"""SGLang's native protocol as ``rollwright serve-model`` speaks it, over real HTTP."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time

import httpx
import pytest
import torch
from server_parts import served, tiny_engine

from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings
from rollwright.inference.weights.files import content_digest, write_weights


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(root):
    engine = tiny_engine()
    app = create_application(engine, ServerSettings(model_name="tiny", weights_roots=[str(root)], max_body_bytes=4096))
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        client.engine = engine
        yield client


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def generate(server, **body):
    body.setdefault("sampling_params", {"max_new_tokens": 6, "sampling_seed": 3})
    return server.post("/generate", json=body)


def test_ids_in_ids_and_logprobs_out(server):
    answer = generate(server, input_ids=[10, 20, 30], return_logprob=True, rid="r1").json()
    meta = answer["meta_info"]
    assert [pair[1] for pair in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == 3
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert meta["weight_version"] == "0"
    ids = torch.tensor([[10, 20, 30, *answer["output_ids"]]])
    with torch.no_grad():
        expected = torch.log_softmax(server.engine.model(ids).logits.double(), -1)[0, 2:-1]
    expected = expected.gather(-1, ids[0, 3:, None])[:, 0].tolist()
    assert [pair[0] for pair in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-5)


def test_text_in_and_a_seed_repeats(server):
    first, second = (generate(server, text="hello").json() for _ in range(2))
    assert first["text"] == second["text"]
    assert first["output_ids"] == second["output_ids"]


def test_n_and_batches_are_lists(server):
    several = generate(server, text="a", sampling_params={"n": 3, "max_new_tokens": 4, "sampling_seed": 1}).json()
    assert len(several) == 3
    assert len({tuple(answer["output_ids"]) for answer in several}) > 1
    batch = generate(server, input_ids=[[10], [11, 12]], rid=["x", "y"]).json()
    assert [answer["meta_info"]["id"] for answer in batch] == ["x", "y"]


def test_stop_strings_are_kept_in_ids_and_in_text_where_asked(server):
    whole = generate(server, text="hello", sampling_params={"max_new_tokens": 12, "sampling_seed": 3}).json()
    mark = whole["text"][3]
    params = {"max_new_tokens": 12, "sampling_seed": 3, "stop": [mark]}
    trimmed = generate(server, text="hello", sampling_params=params).json()
    kept = generate(server, text="hello", sampling_params={**params, "no_stop_trim": True}).json()
    assert mark not in trimmed["text"]
    assert kept["text"] == trimmed["text"] + mark
    assert trimmed["output_ids"] == kept["output_ids"] == whole["output_ids"][: len(kept["output_ids"])]
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": mark}


def test_a_stream_grows_to_the_answer(server):
    whole = generate(server, text="hello").json()
    with server.stream(
        "POST",
        "/generate",
        json={"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 6, "sampling_seed": 3}},
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either input_ids or text"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [1, "a"]}, "list of token ids"),
        ({"input_ids": [99999]}, "outside 0 to"),
        ({"text": ""}, "text is empty"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0 samples nothing"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens=-1; it has to be at least 0"),
        ({"input_ids": [5], "sampling_params": {"top_p": 1.5}}, "top_p=1.5; it has to be between 0.0 and 1.0"),
        ({"input_ids": [1] * 300}, "context"),
        ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
        ({"input_ids": [1], "lora_path": "x"}, "no adapter 'x'"),
        ({"input_ids": [1], "nonsense": 1}, "nonsense"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"presence_penalty": 3.0}}, "presence_penalty"),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"input_ids": [1], "sampling_params": {"min_p": 1.5}}, "min_p"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"1": 200.0}}}, "logit_bias"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1.0}}}, "logit_bias names 'x'"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"99999": 1.0}}}, "logit_bias names 99999"),
        ({"input_ids": [1], "sampling_params": {"regex": "a["}}, "regex"),
        (
            {"input_ids": [1], "sampling_params": {"regex": "a", "json_schema": "{}"}},
            "json_schema cannot be honoured with regex",
        ),
        ({"input_ids": [1], "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"input_ids": [1], "sampling_params": {"json_schema": '{"type": "x"}'}}, "Invalid type"),
        ({"input_ids": [1], "sampling_params": {"regex": "a", "ignore_eos": True}}, "regex cannot be honoured with ignore_eos"),
        ({"input_ids": [1], "sampling_params": {"regex": "a", "min_new_tokens": 2}}, "with min_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"ebnf": "root ::= a"}}, "ebnf"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"wrong": 1}}, "wrong"),
        ({"input_ids": [1], "sampling_params": {"n": 1000}}, "limit"),
        ({"input_ids": [1], "position_ids": [0, 1]}, "position_ids"),
    ],
)
def test_a_wrong_request_is_a_400_that_says_what_is_wrong(server, body, said):
    answer = server.post("/generate", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_what_is_not_json_and_what_is_too_large(server):
    assert server.post("/generate", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert server.post("/generate", content=b"[1]", headers={"Content-Type": "application/json"}).status_code == 400
    large = server.post("/generate", json={"text": "a" * 5000})
    assert large.status_code == 413
    assert "4096 bytes" in large.json()["error"]["message"]

    def chunks():
        for _ in range(10):
            yield b"a" * 1000

    assert server.post("/generate", content=chunks(), headers={"Content-Type": "application/json"}).status_code == 413


def test_isolated_branches_are_an_extension_of_ours(server):
    body = {"input_ids": [10, 11, 12], "position_ids": [0, 1, 1], "branch_ids": [0, 1, 2]}
    assert generate(server, **body).status_code == 200


def test_pause_holds_requests_and_abort_returns_what_they_have(server):
    answers = []
    params = {"max_new_tokens": 200, "sampling_seed": 1, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: answers.append(generate(server, input_ids=[5], sampling_params=params, rid="held").json())
    )
    assert server.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    thread.start()
    wait_until(lambda: server.engine.stats()["queued"] + server.engine.stats()["waiting"])
    assert not answers
    assert server.get("/health_generate").status_code == 503
    assert server.get("/server_info").json()["paused"] is True
    server.post("/abort_request", json={"rid": "held"})
    thread.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    server.post("/continue_generation", json={})
    assert server.get("/health_generate").status_code == 200
    assert server.post("/pause_generation", json={"mode": "sideways"}).status_code == 400
    assert server.post("/abort_request", json={}).status_code == 400


def leave(server, path, body):
    """Ask a server that is paused, and close the connection as soon as the engine has the request."""
    connection = http.client.HTTPConnection(server.base_url.host, server.base_url.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: server.engine.stats()["queued"] + server.engine.stats()["waiting"])
    connection.close()


def test_a_disconnected_client_frees_its_slot(server):
    params = {"max_new_tokens": 200, "ignore_eos": True}
    before = server.engine.stats()["finished"]
    server.post("/pause_generation", json={"mode": "retract"})
    leave(server, "/generate", {"input_ids": [7, 8], "sampling_params": params})
    server.post("/continue_generation", json={})
    wait_until(lambda: not sum(server.engine.stats()[name] for name in ("running", "waiting", "queued")))
    assert server.engine.stats()["finished"] == before  # it did not run to its end


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_leaves_before_the_first_token_of_its_stream_frees_its_slot(server, path):
    body = {
        "/generate": {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}},
        "/v1/completions": {"prompt": [7, 8], "max_tokens": 200, "ignore_eos": True},
    }[path]
    server.post("/pause_generation", json={"mode": "retract"})
    try:
        leave(server, path, {**body, "stream": True})
        wait_until(lambda: server.engine._cancelled)  # the engine is paused: it takes the request out when it goes on
    finally:
        server.post("/continue_generation", json={})


def test_no_token_is_sampled_while_a_part_of_new_weights_is_missing(server, monkeypatch):
    """A client that pauses nothing, and one that goes on too early."""
    weights = {name: tensor.clone() for name, tensor in server.engine.model.state_dict().items()}
    names = list(weights)

    class Group:
        def __init__(self, *arguments):
            pass

        def receive(self, names, dtypes, shapes, flat=False):
            return [(name, weights[name]) for name in names]

        def close(self):
            pass

    monkeypatch.setattr("rollwright.inference.server.control.WeightGroup", Group)
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "parts"}
    assert server.post("/init_weights_update_group", json=group).json()["success"]

    def send(part, **more):
        described = {"names": part, "dtypes": ["float32"] * len(part), "shapes": [list(weights[name].shape) for name in part]}
        return server.post("/update_weights_from_distributed", json={**described, "group_name": "parts", **more}).json()

    version = server.engine.get_version()
    assert send(names[:2])["success"]
    assert "last part" in server.post("/continue_generation", json={}).json()["message"]
    with pytest.raises(httpx.ReadTimeout):
        server.post("/generate", json={"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 2}}, timeout=0.3)
    assert send(names[2:], weight_version=str(version))["success"]
    assert generate(server, input_ids=[7, 8]).json()["meta_info"]["weight_version"] == str(version)
    assert server.post("/destroy_weights_update_group", json={"group_name": "parts"}).json()["success"]
    again = server.post("/destroy_weights_update_group", json={"group_name": "parts"})
    assert again.status_code == 400


def test_weights_are_loaded_from_below_the_root_alone(server, root, tmp_path):
    refused = server.post("/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "1"})
    assert refused.status_code == 403
    assert "root" in refused.json()["error"]["message"]
    climbing = server.post("/update_weights_from_disk", json={"model_path": f"{root}/../..", "weight_version": "1"})
    assert climbing.status_code == 403
    missing = server.post("/update_weights_from_disk", json={"model_path": str(root / "none"), "weight_version": "1"})
    assert missing.status_code == 400


def test_an_update_from_disk_changes_what_is_sampled_and_confirms_its_digest(server, root):
    state = {name: tensor.clone() for name, tensor in server.engine.model.state_dict().items()}
    before = generate(server, input_ids=[10, 20]).json()
    torch.manual_seed(0)
    changed = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in state.items()}
    digest = write_weights(root / "v1", changed.items(), 1)
    body = {"model_path": str(root / "v1"), "weight_version": "1", "content_digest": digest}
    wrong = server.post("/update_weights_from_disk", json={**body, "content_digest": "0" * 64})
    assert wrong.status_code == 400
    assert wrong.json()["success"] is False
    assert "digest" in wrong.json()["message"]
    assert server.get("/model_info").json()["weight_version"] == "0"
    answer = server.post("/update_weights_from_disk", json=body).json()
    assert answer["success"]
    assert answer["content_digest"] == digest == content_digest(changed.items())
    after = generate(server, input_ids=[10, 20], return_logprob=True).json()
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "1"
    assert server.get("/get_model_info").json()["weight_version"] == "1"
    checksum = server.post("/weights_checker", json={"action": "checksum"}).json()
    assert len(checksum["payload"][0]["per_gpu_checksum"]) == 64
    other_shape = {name: torch.zeros(3) for name in changed}
    write_weights(root / "wrong", other_shape.items(), 2)
    refused = server.post("/update_weights_from_disk", json={"model_path": str(root / "wrong"), "weight_version": "2"})
    assert refused.status_code == 400
    assert "another model" in refused.json()["message"]
    write_weights(root / "v0", state.items(), 0)  # a trainer that began again
    server.post("/update_weights_from_disk", json={"model_path": str(root / "v0"), "weight_version": "0"})
    again = generate(server, input_ids=[10, 20], return_logprob=True).json()
    assert (again["output_ids"], again["meta_info"]["weight_version"]) == (before["output_ids"], "0")


def test_health_metrics_and_memory(server):
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == 200
    text = server.get("/metrics").text
    assert 'rollwright_requests_total{path="/generate",status="200"}' in text
    assert "rollwright_malformed_tool_calls_total 0.0" in text
    assert "# TYPE rollwright_request_seconds histogram" in text
    assert "# TYPE rollwright_running gauge\nrollwright_running 0.0\n" in text
    assert re.search(
        r"# TYPE rollwright_generated_tokens_total counter\nrollwright_generated_tokens_total [1-9][\d.e+]*\n", text
    )
    assert server.post("/flush_cache").json()["success"]
    assert server.post("/release_memory_occupation", json={}).json()["success"]
    assert server.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json()["success"]
    assert server.post("/release_memory_occupation", json={"tags": ["weights"]}).status_code == 400


def test_a_path_or_method_that_nothing_answers_is_told_as_any_other_error(server):
    missing = server.post("/v1/embeddings", json={"input": "a"})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"].startswith("There is no /v1/embeddings here; there are /abort_request")
    wrong = server.get("/generate")
    assert wrong.status_code == 405
    assert "/generate takes " in wrong.json()["error"]["message"]


def test_a_failed_step_is_no_fault_of_the_request(monkeypatch):
    engine = tiny_engine()
    app = create_application(engine, ServerSettings())
    monkeypatch.setattr(engine._stepper, "step", lambda finished: 1 / 0)
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        for path, body in (("/generate", {"input_ids": [5]}), ("/v1/completions", {"prompt": [5]})):
            response = client.post(path, json=body)
            assert response.status_code == 500
            assert "ZeroDivisionError" in response.json()["error"]["message"]


def test_the_key_is_asked_for_everywhere_but_health():
    engine = tiny_engine()
    app = create_application(engine, ServerSettings(api_key="secret"))
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        assert client.get("/health").status_code == 200
        for path in ("/model_info", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_too_many_pending_requests_are_a_429():
    engine = tiny_engine(max_waiting=1, max_running_requests=1)
    app = create_application(engine, ServerSettings(max_pending=3))
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        client.post("/pause_generation", json={"mode": "retract"})
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(client.post("/generate", json=body))) for _ in range(3)]
        for thread in threads[:2]:  # one can run, and one wait
            thread.start()
        wait_until(lambda: engine.stats()["queued"] + engine.stats()["waiting"] == 2)
        threads[2].start()
        wait_until(lambda: answers)
        assert answers[0].status_code == 429
        assert "max_waiting" in answers[0].json()["error"]["message"]
        client.post("/continue_generation", json={})
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers[1:]] == [200, 200]
