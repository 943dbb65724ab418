"""With a vocabulary of 150,000, neither a prompt nor its scores take memory for all of its tokens' logits."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builtin_models import byte_tokenizer, tiny_model
from test_limits import forget_peak, memory

from rollwright.config.generation import GenerationHyperparameters
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.request import ModelRequest
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor
from rollwright.sequence_processing.batches import BatchedSequences

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


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_sequence_processor_scores_a_part_of_the_tokens_at_a_time(with_grad):
    model = tiny_model("qwen3", vocab_size=VOCABULARY, max_position_embeddings=1024)
    processor = SequenceProcessor(model, byte_tokenizer(), GenerationConfig(tf_batch_size=4), progress=False)
    drawn = torch.randint(0, VOCABULARY, (2, 400), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = BatchedSequences.from_tokens([row[:2] for row in drawn], [[row[2:]] for row in drawn], [[""]] * 2, 0)
    forget_peak()
    before = memory("VmHWM")
    results = processor.teacher_force_logprobs(sequences, with_grad=with_grad)
    if with_grad:
        sum(row[0].sum() for row in results.logprobs).backward()
    assert [len(row[0]) for row in results.logprobs] == [398] * 2
    assert memory("VmHWM") - before < 2 * 398 * VOCABULARY * 4 / 3  # of 478 MB
