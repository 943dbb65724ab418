"""Log-probabilities besides those of the sampled tokens: the most likely tokens, and the prompt's, against float64 forwards."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builtin_models import VOCABULARY, tiny_model

from rollwright.config.generation import GenerationHyperparameters
from rollwright.errors import EngineError
from rollwright.inference.backends.builtin import scheduler
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 30], list(range(3, 60)), [12, 13], [14]]


def plain_logprobs(model, tokens: list[int], temperature: float) -> torch.Tensor:
    """Row ``i`` is the distribution of token ``i + 1``."""
    with torch.no_grad():
        return (model(torch.tensor([tokens])).logits[0].double() / temperature).log_softmax(-1)


def check_scores(model, request: ModelRequest, response) -> None:
    """All that the response says agrees with a plain forward over its tokens."""
    prompt, start = request.input_ids, request.prompt_logprobs_from
    expected = plain_logprobs(model, prompt + response.output_tokens, request.gconfig.effective_temperature)
    given = [
        (len(prompt) + i, p, top)
        for i, (p, top) in enumerate(zip(response.output_logprobs, response.output_top_logprobs, strict=True))
    ]
    if start is not None:
        assert len(response.input_logprobs) == len(response.input_top_logprobs) == len(prompt) - start
        scored = list(zip(range(start, len(prompt)), response.input_logprobs, response.input_top_logprobs, strict=True))
        if start == 0:
            assert scored.pop(0) == (0, None, None)
        given += scored
    tokens = prompt + response.output_tokens
    for place, logprob, top in given:
        row = expected[place - 1]
        assert logprob == pytest.approx(float(row[tokens[place]]), abs=1e-4)
        values, ids = row.topk(request.top_logprobs)
        assert [token for token, _ in top] == ids.tolist()
        torch.testing.assert_close(torch.tensor([p for _, p in top]).double(), values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])  # the built-in forward, and a model's own
def test_prompts_and_alternatives_are_scored_as_a_plain_forward_does(architecture, monkeypatch):
    monkeypatch.setattr(scheduler, "_SCORED_TOKENS", 16)  # the long prompt takes several passes
    model = tiny_model(architecture)
    gconfig = GenerationHyperparameters(max_new_tokens=4, temperature=0.7, ignore_eos=True, top_p=0.9, presence_penalty=1.0)
    requests = [
        ModelRequest(prompt, gconfig, seed=index, top_logprobs=3, prompt_logprobs_from=start)
        for prompt in PROMPTS
        for index, start in enumerate((0, 1, len(prompt) // 2, len(prompt), None))
    ]
    with BuiltinEngine(model, prefill_tokens=40) as engine:
        for _ in range(2):  # the second time, prefixes are in the cache
            for request, response in zip(requests, engine.generate(requests), strict=True):
                check_scores(model, request, response)
        assert engine.stats()["reused_tokens"] > 0


def test_scores_survive_a_preemption_and_a_weight_update():
    model = tiny_model("qwen3")
    gconfig = GenerationHyperparameters(max_new_tokens=120, ignore_eos=True)
    requests = [ModelRequest([5, 6, 7, i], gconfig, seed=i, top_logprobs=2, prompt_logprobs_from=0) for i in range(8)]
    with BuiltinEngine(model, kv_cache_bytes=1 << 16, prefix_cache=False, context_length=200) as engine:
        for request, response in zip(requests, engine.generate(requests), strict=True):
            check_scores(model, request, response)
        assert engine.stats()["preemptions"] > 0


def test_a_stream_carries_the_alternatives_of_what_it_has():
    model = tiny_model("qwen3")

    async def stream():
        with BuiltinEngine(model) as engine:
            request = ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=6, ignore_eos=True), top_logprobs=2)
            async for partial in engine.astream(request):
                assert len(partial.output_top_logprobs) == len(partial.output_tokens)
                check_scores(model, request, partial)

    asyncio.run(stream())


def test_what_is_not_asked_for_is_not_there():
    with BuiltinEngine(tiny_model("qwen3")) as engine:
        (response,) = engine.generate([ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=2), top_logprobs=0)])
        assert response.output_top_logprobs is response.input_logprobs is response.input_top_logprobs is None
        (response,) = engine.generate([ModelRequest([5], GenerationHyperparameters(max_new_tokens=1), top_logprobs=10**6)])
        assert len(response.output_top_logprobs[0]) == VOCABULARY


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"top_logprobs": -1}, "top_logprobs is -1"), ({"prompt_logprobs_from": "x"}, "prompt_logprobs_from is 'x'")],
)
def test_wrong_numbers_are_refused_where_the_request_is_made(wrong, said):
    with pytest.raises(EngineError, match=said):
        ModelRequest([5], **wrong)


def test_an_index_beyond_the_prompt_is_refused():
    with BuiltinEngine(tiny_model("qwen3")) as engine, pytest.raises(EngineError, match="index 3 of 2"):
        engine.generate([ModelRequest([5, 6], prompt_logprobs_from=3)])
