"""Answers that are not in the protocol's form are errors that show them, never empty completions."""

import asyncio

import pytest
from fake_sglang import FakeSGLang, connected
from fastapi.responses import HTMLResponse
from test_vllm_client import FakeVLLM
from test_vllm_client import ask as ask_vllm
from test_vllm_client import connected as connected_to_vllm

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.request import ModelRequest

WRONG_ANSWERS = {
    "nothing": {},
    "a list": (200, []),
    "a text": (200, "ok"),
    "no meta_info": {"text": "hi", "output_ids": [7]},
    "no finish_reason": {"text": "", "output_ids": [], "meta_info": {}},
    "no log-probabilities": {
        "text": "hi",
        "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 3, "weight_version": "0"},
    },
    "pairs of nothing": {
        "text": "",
        "output_ids": [7],
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[]], "weight_version": "0"},
    },
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_what_is_no_answer_of_sglang_is_an_error(answer):
    fake = FakeSGLang()
    with connected(fake) as client:
        fake.answer = lambda body: WRONG_ANSWERS[answer]
        with pytest.raises(EngineError, match=r"not in the form of sglang's /generate|log-probabilities for 0 other tokens"):
            asyncio.run(client.agenerate(ModelRequest(input_ids=[1, 2])))


def test_a_page_in_the_place_of_an_answer_is_shown():
    """A proxy's page has status 200, too."""
    fake = FakeSGLang()
    fake.app.router.routes[:] = [route for route in fake.app.router.routes if getattr(route, "path", "") != "/generate"]
    fake.app.post("/generate")(lambda: HTMLResponse("<html>welcome</html>"))
    with connected(fake) as client, pytest.raises(EngineError, match="welcome"):
        asyncio.run(client.agenerate(ModelRequest(input_ids=[1, 2])))


@pytest.mark.parametrize("name", ["choices", "logprobs", "token_ids"])
def test_what_is_no_answer_of_vllm_is_an_error(name):
    fake = FakeVLLM()
    fake.change = lambda choice: choice.clear() if name == "choices" else choice.update({name: 5})
    with connected_to_vllm(fake) as client, pytest.raises(EngineError, match="vllm"):
        ask_vllm(client)


def test_a_request_that_failed_in_the_server_has_not_ended_by_itself():
    fake = FakeVLLM()
    fake.change = lambda choice: choice.update(finish_reason="error")
    with connected_to_vllm(fake) as client, pytest.raises(EngineError, match="finish_reason 'error'"):
        ask_vllm(client)


@pytest.mark.parametrize("top_k", [-1, 0, 100_000_000, 1 << 30])
def test_what_other_systems_write_for_all_tokens_shifts_nothing(top_k):
    assert not VLLMBackend.parameters.check(GenerationHyperparameters(top_k=top_k), "here")
