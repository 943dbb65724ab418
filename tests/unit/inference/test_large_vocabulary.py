"""With a vocabulary of 150,000, neither a prompt nor its scores take memory for all of its tokens' logits."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builtin_models import tiny_model
from test_limits import forget_peak, memory

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest

VOCABULARY, TOKENS, PROMPTS = 150_000, 600, 3
ALL_LOGITS = VOCABULARY * TOKENS * PROMPTS * 4  # 1 GB


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])  # the built-in forward, and a model's own
def engine(request):
    model = tiny_model(request.param, vocab_size=VOCABULARY, max_position_embeddings=1024)
    with BuiltinEngine(model, context_length=1024, max_running_requests=4, prefill_tokens=2048, prefix_cache=False) as engine:
        asyncio.run(asked(engine, 8, 0))  # whatever is made once
        yield engine


async def asked(engine, tokens, start):
    """The responses to prompts of ``tokens`` tokens that are scored from ``start``, and by how many bytes the peak rose meanwhile."""
    gconfig = GenerationHyperparameters(max_new_tokens=2, ignore_eos=True)
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, tokens), generator=torch.Generator().manual_seed(tokens)).tolist()
    forget_peak()
    before = memory("VmHWM")
    requests = [ModelRequest(prompt, gconfig, seed=1, prompt_logprobs_from=start) for prompt in prompts]
    responses = await engine.agenerate_batch(requests)
    return responses, memory("VmHWM") - before


async def test_a_prompts_logits_are_those_of_its_last_token(engine):
    _, rose = await asked(engine, TOKENS, None)
    assert rose < ALL_LOGITS / 8


async def test_scores_of_prompts_take_a_few_tokens_logits_at_a_time(engine):
    responses, rose = await asked(engine, TOKENS, 0)
    assert [len(response.input_logprobs) for response in responses] == [TOKENS] * PROMPTS
    assert rose < ALL_LOGITS / 4
