"""``/inference/v1/generate``, vLLM's protocol of token ids: what our own client of vLLM and others read, and what is recorded."""

from __future__ import annotations

import httpx
import pytest
from builtin_models import reference_logprobs
from server_parts import served, tiny_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import RolloutConfig
from rollwright.inference.backends.vllm import VLLMClient
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.request import ModelRequest
from rollwright.inference.router import Server
from rollwright.inference.server.application import create_application
from rollwright.inference.server.settings import ServerSettings

PATH = "/inference/v1/generate"
PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine):
    with served(create_application(engine, ServerSettings(model_name="tiny"))) as address:
        yield address


def post(address: str, body: dict, **settings) -> httpx.Response:
    return httpx.post(f"http://{address}{PATH}", json=body, timeout=60, **settings)


def test_our_client_of_vllm_reads_the_answer(engine, address):
    client = VLLMClient(RolloutConfig(backend="vllm"), addresses=[address])
    gconfig = GenerationHyperparameters(max_new_tokens=8, temperature=0.7, top_p=0.9, seed=4, stop=["a"], ignore_eos=True)
    request = ModelRequest(PROMPT, gconfig, top_logprobs=2)
    answer = post(address, client.backend.payload(request, "mine", Server(address)))
    response = client.backend.response(request, answer.json(), 0)
    (expected,) = engine.generate([ModelRequest(PROMPT, gconfig, tokenizer=engine.tokenizer, top_logprobs=3)])
    assert answer.json()["request_id"] == "mine"
    assert response.output_tokens == expected.output_tokens
    assert response.output_versions == expected.output_versions
    assert response.output_logprobs == pytest.approx(
        reference_logprobs(engine.model, PROMPT, response.output_tokens, 0.7).tolist(), abs=1e-4
    )
    tops = [[token for token, _ in top] for top in response.output_top_logprobs]
    assert tops == [[token for token, _ in top[:2]] for top in expected.output_top_logprobs]


def test_what_a_client_that_renders_chats_sends_is_taken(engine, address):
    body = {
        "model": "tiny",
        "token_ids": PROMPT,
        "sampling_params": {
            "max_tokens": 5,
            "n": 2,
            "logprobs": 1,
            "skip_special_tokens": False,
            "stop_token_ids": [engine.tokenizer.eos_token_id],
            "routed_experts_prompt_start": 2,
        },
        "cache_salt": "x",
        "priority": 1,
    }
    answer = post(address, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 5
        assert choice["finish_reason"] in ("stop", "length")
        named = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert named == [f"token_id:{token}" for token in choice["token_ids"]]  # verifiers looks at it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 4000]}, "outside"),
        ({"stream": True}, "stream"),
        ({"features": {"mm_hashes": {}}}, "reads token ids only"),
        ({"sampling_params": {"prompt": "x"}}, "prompt"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_params": {"beams": 2}}, "beams"),
        ({"model": "other"}, "other"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(address, change, said):
    answer = post(address, {"token_ids": PROMPT, **change})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


def test_at_the_front_calls_that_extend_one_another_are_one_row(engine):
    with OpenAIFront(engine.tokenizer, "tiny") as front, front.episode(engine) as episode:
        address, prompt = front.url.removeprefix("http://"), list(PROMPT)
        for added in ([7, 8], [9]):
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 4, "temperature": 0.8, "ignore_eos": True}}
            answer = post(address, body, headers={"Authorization": f"Bearer {episode.api_key}"}).json()
            assert answer["choices"][0]["logprobs"] is None
            prompt = [*prompt, *answer["choices"][0]["token_ids"], *added]
        (row,) = episode.experiences(reward=1.0)
    assert row.tokens.tolist() == prompt[:-1]
    assert int(row.action_mask.sum()) == 8
    assert row.temperature == 0.8
