"""What is streamed joins to the answer that is not, whatever is sampled: special tokens, stop strings that came too early, tools."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server_parts import served, tiny_engine

from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelResponse
from rollwright.inference.server.application import create_application
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.openai import OpenAIProtocol
from rollwright.inference.server.settings import ServerSettings

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def server():
    app = create_application(tiny_engine(context_length=256), ServerSettings(), model_path="tiny")
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=60) as client:
        yield client


def streamed(client: httpx.Client, path: str, body: dict) -> list[dict]:
    """The first choice of every chunk."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(("stop", "min_tokens"), [(None, 0), (["a", "ser"], 0), (["a", "b"], 12)])
def test_pieces_of_a_chat_join_to_the_answer(server, tools, stop, min_tokens):
    for seed in range(12):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "seed": seed, "stop": stop}
        body |= {"min_tokens": min_tokens, "return_token_ids": True, "ignore_eos": bool(seed % 2), "tools": tools}
        (whole,) = server.post("/v1/chat/completions", json=body).json()["choices"]
        chunks = streamed(server, "/v1/chat/completions", body)
        assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == (whole["message"]["content"] or "")
        assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == whole["token_ids"]
        assert stop or "<|" not in (whole["message"]["content"] or "")  # special tokens are left out
        if isinstance(whole["stop_reason"], str) and not tools:
            assert len(whole["token_ids"]) >= min_tokens


def test_offsets_of_pieces_go_on(server):
    body = {"prompt": "hello", "max_tokens": 24, "seed": 2, "logprobs": 0, "ignore_eos": True}
    (whole,) = server.post("/v1/completions", json=body).json()["choices"]
    chunks = streamed(server, "/v1/completions", body)
    assert [at for chunk in chunks if chunk["logprobs"] for at in chunk["logprobs"]["text_offset"]] == whole["logprobs"][
        "text_offset"
    ]


class Script(InferenceEngine):
    """Gives a text token by token."""

    get_version = set_version = pause = resume = abort = None  # type: ignore[assignment]

    def __init__(self, tokenizer, text: str) -> None:
        self.tokens = tokenizer.encode(text, add_special_tokens=False)

    async def astream(self, request):
        for count in range(1, len(self.tokens) + 1):
            yield ModelResponse(
                input_tokens=request.input_ids,
                output_tokens=self.tokens[:count],
                output_logprobs=[0.0] * count,
                output_versions=[0] * count,
            )

    async def agenerate(self, request):
        return [response async for response in self.astream(request)][-1]


def test_a_tool_call_whose_mark_is_a_special_token_is_not_streamed_as_text():
    """Mistral's mark is one token, which decoding leaves out."""
    tokenizer = build_character_tokenizer(chat_template="[TOOL_CALLS]{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    app = FastAPI()
    engine: Any = Script(tokenizer, 'so[TOOL_CALLS][{"name": "add", "arguments": {}}]')
    app.include_router(OpenAIProtocol(engine, tokenizer, "tiny", context_length=256).router)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 99}
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=60) as client:
        (whole,) = client.post("/v1/chat/completions", json=body).json()["choices"]
        chunks = streamed(client, "/v1/chat/completions", body)
    assert whole["message"]["content"] == "so"
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "so"
    (call,) = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert call["function"]["name"] == "add"
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_a_call_that_fails_at_its_end_says_so_in_the_stream():
    """``on_call`` sees it before its answer is complete, and its failure is the call's."""
    tokenizer = build_character_tokenizer()
    engine: Any = Script(tokenizer, "abc")

    def refuse(call) -> None:
        raise RequestError("nobody keeps this call", status=409)

    app = FastAPI()
    app.include_router(OpenAIProtocol(engine, tokenizer, "tiny", context_length=256, on_call=refuse).router)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stream": True}
    with served(app) as address, httpx.Client(base_url=f"http://{address}", timeout=60) as client:
        answer = client.post("/v1/chat/completions", json=body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert events[-1]["error"]["message"] == "nobody keeps this call"
