"""What other systems' clients of SGLang send to its ``/generate`` and control paths, as it stands in their sources."""

import httpx
import pytest
from server_parts import served, tiny_engine

from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings


@pytest.fixture(scope="module")
def server():
    with tiny_engine(context_length=256) as engine:
        app = create_application(engine, ServerSettings(), model_path="tiny")
        with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=30) as client:
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
